import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike
from largeprompt.measures import FromSampler

from ._attention import AbstractLayer


def output_stderr(layer: AbstractLayer, mu: FromSampler, z: VectorLike) -> Float[Array, " p"]:
    r"""Standard error of $T[\mu](z)$ when $\mu$ is known only by a sample, for any layer (delta method).

    $\big(\sum_l(\partial T_i/\partial\log\pi_l)^2\big)^{1/2}$ over the weights $\pi_l$ of the sample's tokens. For
    softmax attention such a derivative is $a_lV_i\cdot(z_l-m)$, with $a$ the softmax weights and $m$ their mean.
    """
    if not isinstance(mu, FromSampler):
        raise ValueError(f"mu is of type {type(mu).__name__}; only a FromSampler carries a Monte-Carlo error")
    layer._prompt(mu)
    return checks.result("the standard error", _stderr(layer, mu, layer._query(z)))


@eqx.filter_jit
def _stderr(layer: AbstractLayer, mu: FromSampler, z: Float[Array, " D"]) -> Float[Array, " p"]:
    points, given = mu.stand_in.points, mu.stand_in.log_weights

    def output(log_weights):
        weighted = eqx.tree_at(lambda m: m.stand_in.log_weights, mu, log_weights, is_leaf=lambda leaf: leaf is None)
        return layer._output(weighted, z)

    value, pull = jax.vjp(output, jnp.zeros(len(points), points.dtype) if given is None else given)
    # one output after another: together they would hold as many copies of the sample
    return jax.lax.map(lambda unit: jnp.linalg.norm(pull(unit)[0]), jnp.eye(len(value), dtype=value.dtype))
