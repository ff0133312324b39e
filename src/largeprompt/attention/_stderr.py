import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt._typing import VectorLike
from largeprompt.measures import FromSampler

from ._attention import SoftmaxAttention


def output_stderr(attention: SoftmaxAttention, mu: FromSampler, z: VectorLike) -> Float[Array, " p"]:
    r"""Standard error of $T[\mu](z)$ when $\mu$ is known only by a sample: root of the diagonal of $V E V^\top$."""
    if not isinstance(mu, FromSampler):
        raise ValueError(f"mu is a {type(mu).__name__}; only a FromSampler carries a Monte-Carlo error")
    tilted = mu.tilt(attention.U @ attention._query(z))
    assert isinstance(tilted, FromSampler)
    return jnp.sqrt(jnp.einsum("pi,ij,pj->p", attention.V, tilted.mean_error(), attention.V))
