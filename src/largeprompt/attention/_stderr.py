import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt._typing import VectorLike
from largeprompt.measures import FromSampler

from ._attention import AbstractLayer
from ._heads import softmax_form


def output_stderr(layer: AbstractLayer, mu: FromSampler, z: VectorLike) -> Float[Array, " p"]:
    r"""Standard error of $T[\mu](z)$ when $\mu$ is known only by a sample: root of the diagonal of $V E V^\top$."""
    attention = softmax_form(layer)
    if not isinstance(mu, FromSampler):
        raise ValueError(f"mu is of type {type(mu).__name__}; only a FromSampler carries a Monte-Carlo error")
    attention._prompt(mu)
    tilted = mu.tilt(attention.U @ attention._query(z))
    return jnp.sqrt(jnp.einsum("pi,ij,pj->p", attention.V, tilted.mean_error(), attention.V))
