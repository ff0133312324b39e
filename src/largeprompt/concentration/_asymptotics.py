r"""The 1/L law at one query: limits of $L\cdot E\|X_L - X\|^2$, of the output's covariance and of its bias.

Softmax, by the delta method: with $\omega = e^{\langle\theta,z'\rangle-\Lambda(\theta)}$, $y = z' - \mathrm{mean}(\mu_
\theta)$ and $H = \mathrm{cov}(\mu_\theta)$, the error of the mean is the token average of $\omega y$ and that of H the
average of $\omega(yy^\top - H)$; and $E\,\omega^2 f = e^{\Lambda(2\theta)-2\Lambda(\theta)}E_{\mu_{2\theta}}f$. Linear
attention reads $\hat S u$ and $\hat S$, averages of $zz^\top$: there $c/L$ is exact at every L.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import VectorLike
from largeprompt.attention import AbstractAttention, AbstractLayer, kind_of, summed_heads
from largeprompt.measures import AbstractMeasure
from largeprompt.measures._from_sampler import warn_of_few

from ._crossed import crossed_constant, crossed_covariance
from ._quantities import Form, forms


class Rates(AbstractShown):
    r"""The constants $c$ of $E\|\hat X_L - X\|^2 \approx c/L$, for the output and its derivatives in V and U."""

    output: Float[Array, ""]
    V: Float[Array, ""]
    U: Float[Array, ""]


def output_covariance(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, "p p"]:
    r"""$\lim_L L\cdot\mathrm{Cov}(T[\hat\mu_L](z))$, the sharp law of large prompts.

    For a softmax head it is $e^{\Lambda(2\theta)-2\Lambda(\theta)}\,V[\mathrm{cov}(\mu_{2\theta}) + bb^\top]V^\top$,
    where $\theta = Uz$ and $b = \mathrm{mean}(\mu_{2\theta}) - \mathrm{mean}(\mu_\theta)$; heads that are added up
    have a covariance between any two of them as well.
    """
    heads, mu, z = summed_heads(layer), layer._prompt(mu), layer._query(z)
    parts = [one.V @ crossed_covariance(mu, one, other, z) @ other.V.T for one in heads for other in heads]
    return checks.result("the limit covariance", jnp.stack(parts).sum(axis=0))


def output_bias(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, " p"]:
    r"""$\lim L\cdot(E\,T[\hat\mu_L](z) - T[\mu](z)) = -e^{\Lambda(2\theta)-2\Lambda(\theta)}\,V b$, over all heads.

    Linear attention has none.
    """
    heads, mu, z = summed_heads(layer), layer._prompt(mu), layer._query(z)
    total = jnp.zeros(layer.outputs, z.dtype)
    for head in heads:
        if kind_of(head) == "softmax":
            inflation, b, _, _ = _twice_tilted(mu, head.U @ z)
            total -= inflation * head.V @ b
    return checks.result("the limit bias", total)


def rates(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Rates:
    r"""The limits of $L\,E\|\cdot\|^2$ (Frobenius) for the output and its Jacobians in V and U at a query.

    Of several heads, the Jacobians in all their merged V and U.
    """
    heads, mu, z = summed_heads(layer), layer._prompt(mu), layer._query(z)
    for head in heads:
        if kind_of(head) == "softmax":
            warn_of_few(mu._tilt(2 * head.U @ z), 4)
    each = [query_constants(head, mu, list(forms(head, ("output", "V", "U")).values()), z) for head in heads]
    output, V, U = (jnp.stack(parts).sum() for parts in zip(*each, strict=True))
    constants = (output + crossed_constant(heads, mu, z), V, U)
    return Rates(*(checks.result("the rate", constant) for constant in constants))


@eqx.filter_jit
def query_constants(
    attention: AbstractAttention, mu: AbstractMeasure, known: list[Form], z: Float[Array, " D"]
) -> list[Float[Array, ""]]:
    """The same for one softmax or linear head and any forms of Δm and ΔH, with nothing checked."""
    theta = attention.U @ z
    if kind_of(attention) == "linear":
        mean = mu._mean()
        second = mu._cov() + jnp.outer(mean, mean)
        return [_linear_constant(mu, form, second, theta, z) for form in known]
    return [_softmax_constant(mu, form, theta, z) for form in known]


def _softmax_constant(mu, form: Form, theta, z):
    inflation, b, second, doubled = _twice_tilted(mu, theta)
    H = mu._tilt(theta)._cov()
    total = jnp.sum(form.M * second)
    for A, B, N in form.slopes:
        spread = doubled._fourth(b, A, B) - 2 * jnp.sum((B @ H) * (second @ A)) + jnp.sum((B @ H) * (H @ A))
        total = total + spread * (z @ N @ z)
    return inflation * total


def _linear_constant(mu, form: Form, second, theta, z):
    mean, off = mu._mean(), second @ theta
    total = mu._fourth(mean, form.M, jnp.outer(theta, theta)) - off @ form.M @ off
    for A, B, N in form.slopes:
        total = total + (mu._fourth(mean, A, B) - jnp.sum((B @ second) * (second @ A))) * (z @ N @ z)
    return total


def _twice_tilted(mu: AbstractMeasure, theta: Float[Array, " D"]):
    """e^{Λ(2θ)-2Λ(θ)}, b, E yyᵀ under μ_{2θ} with y = z' - mean(μ_θ), and μ_{2θ} itself."""
    doubled = mu._tilt(2 * theta)
    b = doubled._mean() - mu._tilt(theta)._mean()
    return jnp.exp(mu._cgf(2 * theta) - 2 * mu._cgf(theta)), b, doubled._cov() + jnp.outer(b, b), doubled


@eqx.filter_jit
def fourth(
    mu: AbstractMeasure, b: Float[Array, " D"], A: Float[Array, "D D"], B: Float[Array, "D D"]
) -> Float[Array, ""]:
    """E (yᵀAy)(yᵀBy) for y = z' - mean(μ) + b and symmetric A, B."""
    return mu._fourth(b, A, B)
