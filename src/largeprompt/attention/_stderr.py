import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike
from largeprompt.measures import AbstractMeasure
from largeprompt.measures._from_sampler import sampled_parts, with_log_weights

from ._attention import AbstractLayer


def output_stderr(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, " p"]:
    r"""Standard error of $T[\mu](z)$ when $\mu$, or a part of it, is known only by a sample (delta method).

    The root of $\sum_l(\partial T_i/\partial\log w_l)^2$ over the weights $w_l$ of the tokens that stand in for it.
    Warns where too few of them carry the tilt: there the error is larger than they tell.
    """
    mu, z = layer._prompt(mu), layer._query(z)
    if not (parts := sampled_parts(mu)):
        raise ValueError(f"mu is of type {type(mu).__name__}; only a FromSampler carries a Monte-Carlo error")
    layer._output(mu, z)  # which warns
    flat = [jnp.zeros(part.stand_in.size, part.stand_in.points.dtype) for part in parts]
    slopes = jax.jacrev(lambda logs: layer._output(with_log_weights(mu, logs), z))(flat)
    variance = jnp.stack([jnp.sum(slope**2, axis=1) for slope in slopes]).sum(axis=0)
    return checks.result("the standard error", jnp.sqrt(variance))
