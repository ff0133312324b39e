from typing import ClassVar

import jax.numpy as jnp

from largeprompt.measures._measure import moments_along

from ._attention import AbstractAttention
from ._linear import LinearAttention


class SoftmaxAttention(AbstractAttention):
    r"""Softmax attention on measures, $T[\mu](z) = V\,\mathrm{mean}(\mu_{Uz}) = V\,\nabla\Lambda_\mu(Uz)$.

    On an `Empirical` measure this is the textbook softmax; on a `Gaussian` it is affine (Lemma 2.1). The influence of
    a token is $\omega(z'-m)$ with $\omega = e^{\langle u,z'\rangle-\Lambda(u)}$, and products of such weights are tilts
    again, $E\,\omega^2f = e^{\Lambda(2u)-2\Lambda(u)}E_{\mu_{2u}}f$: every error is in closed form.
    Paper: Section 2.
    """

    kind: ClassVar[str] = "softmax"
    exponential: ClassVar[bool] = True

    def reading(self, mu, u):
        return mu._tilt(u)._mean()

    def reading_slope(self, mu, u):
        return mu._tilt(u)._cov()

    def influence(self, mu, u, tokens):
        return jnp.exp(tokens @ u - mu._cgf(u))[:, None] * (tokens - self.reading(mu, u))

    def slope_influence(self, mu, u, tokens):
        y = tokens - self.reading(mu, u)
        squares = y[:, :, None] * y[:, None, :]
        return jnp.exp(tokens @ u - mu._cgf(u))[:, None, None] * (squares - self.reading_slope(mu, u))

    def error_covariance(self, mu, u, other, v, tokens=None):
        r"""For two softmax heads $e^{\Lambda(u+v)-\Lambda(u)-\Lambda(v)}[\mathrm{cov}(\mu_{u+v})
        + (m_{u+v}-m_u)(m_{u+v}-m_v)^\top]$, for softmax and linear attention a third moment of $\mu_u$.
        """
        if tokens is None and type(other) is SoftmaxAttention:
            both = mu._tilt(u + v)
            mean = both._mean()
            product = jnp.outer(mean - mu._tilt(u)._mean(), mean - mu._tilt(v)._mean())
            return jnp.exp(mu._cgf(u + v) - mu._cgf(u) - mu._cgf(v)) * (both._cov() + product)
        if tokens is None and type(other) is LinearAttention:
            mean, second, third = moments_along(mu._tilt(u), v)
            return third - jnp.outer(mean, second @ v)
        return super().error_covariance(mu, u, other, v, tokens)

    def slope_error(self, mu, u, A, B, tokens=None):
        if tokens is not None:
            return super().slope_error(mu, u, A, B, tokens)
        inflation, b, doubled = _twice_tilted(mu, u)
        H, second = mu._tilt(u)._cov(), doubled._cov() + jnp.outer(b, b)
        crossed = -2 * jnp.sum((B @ H) * (second @ A)) + jnp.sum((B @ H) * (H @ A))
        return inflation * (doubled._fourth(b, A, B) + crossed)

    def reading_bias(self, mu, u, tokens=None):
        r"""$-e^{\Lambda(2u)-2\Lambda(u)}(m_{2u}-m_u)$."""
        if tokens is not None:
            return super().reading_bias(mu, u, tokens)
        inflation, b, _ = _twice_tilted(mu, u)
        return -inflation * b

    def errors_are_exact(self, mu, other=None):
        closed = other is None or type(other) in (SoftmaxAttention, LinearAttention)
        return closed or super().errors_are_exact(mu, other)


def _twice_tilted(mu, u):
    """e^{Λ(2u)-2Λ(u)}, mean(μ_{2u}) - mean(μ_u) and μ_{2u} itself."""
    doubled = mu._tilt(2 * u)
    return jnp.exp(mu._cgf(2 * u) - 2 * mu._cgf(u)), doubled._mean() - mu._tilt(u)._mean(), doubled
