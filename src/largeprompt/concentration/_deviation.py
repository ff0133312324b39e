import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import BatchLike
from largeprompt.attention import AbstractAttention, AbstractLayer, merged_form
from largeprompt.measures import AbstractMeasure, Empirical


class Deviation(eqx.Module):
    """Mean squares of what a finite prompt is off its limit by, and their standard errors over prompts."""

    output: Float[Array, ""]
    V: Float[Array, ""]
    U: Float[Array, ""]
    output_stderr: Float[Array, ""]
    V_stderr: Float[Array, ""]
    U_stderr: Float[Array, ""]


def deviation(
    layer: AbstractLayer,
    mu: AbstractMeasure,
    queries: BatchLike,
    L: int,
    key: PRNGKeyArray,
    replicates: int = 256,
) -> Deviation:
    r"""$E\|T[\hat\mu_L] - T[\mu]\|^2$ averaged over the queries given, and the same for $\nabla_V T$ and $\nabla_U T$.

    Measured on `replicates` fresh prompts of `L` tokens, streamed one after the other. Paper: the left-hand sides of
    Propositions 3.1 and 3.4.
    """
    attention = merged_form(layer)
    queries = checks.matrix("queries", queries, None, attention.dim)
    L, replicates = checks.count("L", L), checks.count("replicates", replicates, at_least=2)
    squares = _squares(attention, attention._prompt(mu), queries, jax.random.split(checks.key(key), replicates), L)
    means = [checks.result("the deviation", s.mean()) for s in squares]
    return Deviation(*means, *[s.std(ddof=1) / jnp.sqrt(replicates) for s in squares])


@eqx.filter_jit
def _squares(attention: AbstractAttention, mu: AbstractMeasure, queries, keys, L: int):
    """The three squared deviations, averaged over queries, of each prompt."""
    thetas = queries @ attention.U.T

    def reading(law, theta):
        return attention.reading(law, theta), attention.V @ attention.reading_slope(law, theta)

    mean, VH = jax.vmap(lambda theta: reading(mu, theta))(thetas)

    def of_one_prompt(key):
        prompt = Empirical(mu._sample(key, L))
        mean_L, VH_L = jax.vmap(lambda theta: reading(prompt, theta))(thetas)
        off, slope_off = mean_L - mean, VH_L - VH
        # ∂T_i/∂V is e_i mᵀ and ∂T_i/∂U is (HV_i)zᵀ: their Frobenius norms need no tensors
        return (
            jnp.sum((off @ attention.V.T) ** 2, axis=1).mean(),
            attention.outputs * jnp.sum(off**2, axis=1).mean(),
            (jnp.sum(slope_off**2, axis=(1, 2)) * jnp.sum(queries**2, axis=1)).mean(),
        )

    return jax.lax.map(of_one_prompt, keys)
