"""The output of a sum of heads on a long prompt to first order in 1/L."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.measures import AbstractMeasure

from ._attention import AbstractAttention


class FirstOrder(NamedTuple):
    r"""$\lim_L L\,\mathrm{Cov}(T[\hat\mu_L](z))$ and $\lim_L L\,(E\,T[\hat\mu_L](z) - T[\mu](z))$."""

    covariance: Float[Array, "p p"]
    bias: Float[Array, " p"]


def first_order(
    heads: tuple[AbstractAttention, ...],
    mu: AbstractMeasure,
    z: Float[Array, " D"],
    tokens: Float[Array, "n D"] | None = None,
) -> FirstOrder:
    """Both limits, over all heads and pairs of heads; `tokens` to average over where a kind has no closed form."""
    inputs = [(head, head.U @ z) for head in heads]  # kinds may know more of a head with itself, the same object
    products = [
        one.V @ one.error_covariance(mu, u, other, v, tokens) @ other.V.T for one, u in inputs for other, v in inputs
    ]
    biases = [head.V @ head.reading_bias(mu, u, tokens) for head, u in inputs]
    return FirstOrder(jnp.stack(products).sum(axis=0), jnp.stack(biases).sum(axis=0))
