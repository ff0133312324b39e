import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike
from largeprompt.attention import AbstractLayer, SoftmaxAttention, softmax_form
from largeprompt.measures import AbstractMeasure


class Rates(eqx.Module):
    r"""The constants $c$ of $E\|\hat X_L - X\|^2 \approx c/L$, for the output and its derivatives in V and U."""

    output: Float[Array, ""]
    V: Float[Array, ""]
    U: Float[Array, ""]


def output_covariance(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, "p p"]:
    r"""$\lim_L L\cdot\mathrm{Cov}(T[\hat\mu_L](z))$, the sharp law of large prompts.

    It is $e^{\Lambda(2\theta)-2\Lambda(\theta)}\,V[\mathrm{cov}(\mu_{2\theta}) + bb^\top]V^\top$, where $\theta = Uz$
    and $b = \mathrm{mean}(\mu_{2\theta}) - \mathrm{mean}(\mu_\theta)$.
    """
    attention = softmax_form(layer)
    inflation, _, second, _ = _twice_tilted(attention._prompt(mu), attention.U @ attention._query(z))
    return checks.result("the limit covariance", inflation * attention.V @ second @ attention.V.T)


def output_bias(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, " p"]:
    r"""$\lim L\cdot(E\,T[\hat\mu_L](z) - T[\mu](z)) = -e^{\Lambda(2\theta)-2\Lambda(\theta)}\,V b$."""
    attention = softmax_form(layer)
    inflation, b, _, _ = _twice_tilted(attention._prompt(mu), attention.U @ attention._query(z))
    return checks.result("the limit bias", -inflation * attention.V @ b)


def rates(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Rates:
    r"""The limits of $L\,E\|\cdot\|^2$ (Frobenius) for the output and its Jacobians in V and U at a query.

    Delta method: with $\omega = e^{\langle\theta,z'\rangle-\Lambda(\theta)}$, $y = z' - \mathrm{mean}(\mu_\theta)$ and
    $H = \mathrm{cov}(\mu_\theta)$, the error of the mean is the token average of $\omega y$ and that of $HV_i$
    the average of $\omega(y\langle V_i, y\rangle - HV_i)$; and $E\,\omega^2 f = e^{\Lambda(2\theta)-2\Lambda(\theta)}
    E_{\mu_{2\theta}} f$.
    """
    attention = softmax_form(layer)
    constants = _rates(attention, attention._prompt(mu), attention._query(z))
    return jax.tree.map(lambda constant: checks.result("the rate", constant), constants)


@eqx.filter_jit
def _rates(attention: SoftmaxAttention, mu: AbstractMeasure, z: Float[Array, " D"]) -> Rates:
    theta, V = attention.U @ z, attention.V
    inflation, b, second, doubled = _twice_tilted(mu, theta)
    VH = V @ mu._tilt(theta)._cov()
    spread = _fourth(doubled, b, V.T @ V) - 2 * jnp.trace(V @ second @ VH.T) + jnp.sum(VH**2)
    return Rates(
        output=inflation * jnp.trace(V @ second @ V.T),
        V=inflation * attention.outputs * jnp.trace(second),
        U=inflation * (z @ z) * spread,
    )


def _twice_tilted(mu: AbstractMeasure, theta: Float[Array, " D"]):
    """e^{Λ(2θ)-2Λ(θ)}, b, E yyᵀ under μ_{2θ} with y = z' - mean(μ_θ), and μ_{2θ} itself."""
    doubled = mu._tilt(2 * theta)
    b = doubled._mean() - mu._tilt(theta)._mean()
    return jnp.exp(mu._cgf(2 * theta) - 2 * mu._cgf(theta)), b, doubled._cov() + jnp.outer(b, b), doubled


@eqx.filter_jit
def _fourth(mu: AbstractMeasure, b: Float[Array, " D"], W: Float[Array, "D D"]) -> Float[Array, ""]:
    """E‖y‖² yᵀWy for y = z' - mean(μ) + b, from the cumulants of μ: derivatives of its covariance along tilts."""
    C = mu._cov()
    zero = jnp.zeros_like(b)

    def trace(s):
        return jnp.trace(mu._tilt(s)._cov())

    def weighted(s):
        return jnp.sum(W * mu._tilt(s)._cov())

    third, weighted_third = jax.grad(trace)(zero), jax.grad(weighted)(zero)
    fourth = jnp.sum(W * jax.hessian(trace)(zero))
    gaussian = jnp.trace(C) * jnp.sum(W * C) + 2 * jnp.sum((C @ W) * C.T)
    mixed = 2 * third @ W @ b + 2 * weighted_third @ b + 4 * b @ C @ W @ b
    return fourth + gaussian + mixed + jnp.trace(C) * (b @ W @ b) + (b @ b) * jnp.sum(W * C) + (b @ b) * (b @ W @ b)
