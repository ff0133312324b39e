from typing import ClassVar

import jax.numpy as jnp

from largeprompt.measures._measure import fourth_along

from ._attention import AbstractAttention


class LinearAttention(AbstractAttention):
    r"""Normalised linear attention on measures, $T[\mu](z) = V\,E_\mu[zz^\top]\,Uz$.

    On an `Empirical` measure this is $\frac1L\sum_l \langle Uz, z_l\rangle V z_l$. The influence of a token is
    $z'z'^\top u - Su$ with $S = E\,zz^\top$: errors are fourth moments, there is no bias, and the 1/L law is exact at
    every L. Paper: Appendix B.2.
    """

    kind: ClassVar[str] = "linear"

    def reading(self, mu, u):
        return self.reading_slope(mu, u) @ u

    def reading_slope(self, mu, u):
        m = mu._mean()
        return mu._cov() + jnp.outer(m, m)

    def influence(self, mu, u, tokens):
        return (tokens @ u)[:, None] * tokens - self.reading(mu, u)

    def slope_influence(self, mu, u, tokens):
        return tokens[:, :, None] * tokens[:, None, :] - self.reading_slope(mu, u)

    def error_covariance(self, mu, u, other, v, tokens=None):
        if tokens is None and other.kind == "softmax":  # which knows the common form
            return other.error_covariance(mu, v, self, u).T
        if tokens is not None or type(other) is not LinearAttention:
            return super().error_covariance(mu, u, other, v, tokens)
        S = self.reading_slope(mu, u)
        return fourth_along(mu, u, v) - jnp.outer(S @ u, S @ v)

    def slope_error(self, mu, u, A, B, tokens=None):
        if tokens is not None:
            return super().slope_error(mu, u, A, B, tokens)
        S = self.reading_slope(mu, u)
        return mu._fourth(mu._mean(), A, B) - jnp.sum((B @ S) * (S @ A))

    def reading_bias(self, mu, u, tokens=None):
        return jnp.zeros_like(u)

    def errors_are_exact(self, mu, other=None):
        if other is not None and other.kind == "softmax":
            return other.errors_are_exact(mu, self)
        return other is None or type(other) is LinearAttention or super().errors_are_exact(mu, other)
