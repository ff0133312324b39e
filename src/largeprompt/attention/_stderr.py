import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike
from largeprompt.measures import AbstractMeasure
from largeprompt.measures._from_sampler import sampled_parts, with_log_weights

from ._layer import AbstractLayer


def output_stderr(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, " p"]:
    r"""Standard error of $T[\mu](z)$ when $\mu$, or a part of it, is known only by a sample, for any layer.

    By the delta method: the root of $\sum_l(\partial T_i/\partial\log w_l)^2$ over the weights $w_l$ of the tokens that
    stand in for it. For softmax attention such a derivative is $a_lV_i\cdot(z_l-m)$, with $a$ the softmax weights and
    $m$ their mean. Warns where too few tokens carry the tilt: there the error is larger than they show.
    """
    mu, z = layer._prompt(mu), layer._query(z)
    if not (parts := sampled_parts(mu)):
        raise ValueError(f"mu is of type {type(mu).__name__}; only a FromSampler carries a Monte-Carlo error")
    layer._output(mu, z)  # which warns
    flat = [jnp.zeros(part.stand_in.size, part.stand_in.points.dtype) for part in parts]
    return checks.result("the standard error", _stderr(layer, mu, z, flat))


@eqx.filter_jit
def _stderr(
    layer: AbstractLayer, mu: AbstractMeasure, z: Float[Array, " D"], flat: list[Float[Array, " n"]]
) -> Float[Array, " p"]:
    value, pull = jax.vjp(lambda logs: layer._output(with_log_weights(mu, logs), z), flat)

    def size(unit: Float[Array, " p"]) -> Float[Array, ""]:
        return jnp.sqrt(jnp.stack([jnp.sum(slope**2) for slope in pull(unit)[0]]).sum())

    # one output after another: together they would hold as many copies of the sample
    return jax.lax.map(size, jnp.eye(len(value), dtype=value.dtype))
