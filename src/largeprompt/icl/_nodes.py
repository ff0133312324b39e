import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.special import ndtri
from scipy.stats import qmc

from ._regression import LinearRegression, root


def gaussian_nodes(
    key: PRNGKeyArray, dimension: int, n: int, replicates: int
) -> Float[np.ndarray, "replicates n dimension"]:
    """Independently scrambled Sobol' points, sent to standard normal ones; `n` a power of two."""
    seeds = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint32).ravel()).spawn(replicates)
    points = [qmc.Sobol(dimension, bits=52, rng=seed).random(n) for seed in seeds]
    # half a grid step in, so that no point is at 0 or 1
    return ndtri(np.stack(points) * (1 - 2.0**-52) + 2.0**-53)


class Nodes(eqx.Module):
    """Queries and coefficients of a regression over which a risk is averaged, in independent replicates.

    The average is also taken over W and −W, so that what vanishes by that symmetry vanishes to rounding.
    """

    x: Float[Array, "r n d"]
    W: Float[Array, "r n k d"]


def regression_nodes(
    key: PRNGKeyArray, task: LinearRegression, n: int, replicates: int, *, of_query_only: bool = False
) -> Nodes:
    """Randomised quasi-Monte Carlo nodes for (x_q, W), or for x_q alone."""
    d, k = task.d, 0 if of_query_only else task.targets
    normal = jnp.asarray(gaussian_nodes(key, d + k * d, n, replicates), task.Sigma.dtype)
    W = normal[..., d:].reshape(replicates, n, k, d)
    return Nodes(normal[..., :d] @ root(task.query_Sigma), W @ root(task.Omega))
