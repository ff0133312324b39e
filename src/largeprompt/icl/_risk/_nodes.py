import functools
import math
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy.special import ndtri

from largeprompt._checks import is_traced

from .._regression import LinearRegression, root

REPLICATES = 16  # enough for a standard error good to a fifth
LONG = 10**5  # from here on, with attention to labels, queries too rare for plain nodes make what is left beside R_∞
_FARTHEST = 9.5  # standard deviations
_KEPT = 2**20  # numbers of nodes up to which they are kept for the next that asks
_WIDER = 2.2  # κ² = 1 + 2.2/√n: the mean square of the weights is then about 2.5, whatever n


def power_of_two(n: int) -> int:
    """The least that is not below `n`."""
    return 1 << (n - 1).bit_length()


def gaussian_nodes(
    key: PRNGKeyArray, dimension: int, n: int, replicates: int
) -> Float[np.ndarray, "replicates n dimension"]:
    """Independently scrambled Sobol' points, sent to standard normal ones; `n` a power of two."""
    if is_traced(key):
        raise ValueError("key is traced; nodes are drawn before compilation, so leave the key out or close over it")
    with jax.ensure_compile_time_eval():
        entropy = tuple(np.asarray(jax.random.key_data(key)).astype(np.uint32).ravel().tolist())
    few = dimension * n * replicates <= _KEPT
    return (_drawn if few else _drawn.__wrapped__)(entropy, dimension, n, replicates)


@functools.lru_cache(maxsize=4)  # risks of many layers, or at many lengths, are averaged over the same nodes
def _drawn(
    entropy: tuple[int, ...], dimension: int, n: int, replicates: int
) -> Float[np.ndarray, "replicates n dimension"]:
    from scipy.stats import qmc  # takes long to import

    seeds = np.random.default_rng(np.asarray(entropy, np.uint32)).spawn(replicates)
    points = [qmc.Sobol(dimension, bits=52, rng=seed).random(n) for seed in seeds]
    # half a grid step in, so that no point is at 0 or 1
    found = ndtri(np.stack(points) * (1 - 2.0**-52) + 2.0**-53)
    found.setflags(write=False)  # others read it too
    return found


def widened(
    normal: Float[np.ndarray, "*b n"],
) -> tuple[Float[np.ndarray, "*b n"], Float[np.ndarray, "*b"]]:
    """Standard normal numbers made wider, and the weights of mean 1 that make up for it."""
    n = normal.shape[-1]
    square = 1 + _WIDER / math.sqrt(n)
    log_weights = n * math.log(square) / 2 - (square - 1) * np.sum(normal**2, axis=-1) / 2
    return math.sqrt(square) * normal, np.exp(log_weights)


class Nodes(eqx.Module):
    r"""Queries and coefficients of a regression over which a risk is averaged, in independent replicates (first axis).

    Kept with them: $W\Sigma$ and $N = W\Sigma W^\top$. The nodes are the last axis, which the processor's vectors run
    along.
    """

    x: Float[Array, "*r d n"]
    W: Float[Array, "*r k d n"]
    WS: Float[Array, "*r k d n"]
    N: Float[Array, "*r k k n"]
    weights: Float[Array, "*r n"] | None = None

    def mean(self, values: Float[Array, " n"]) -> Float[Array, ""]:
        """The mean over the nodes of one replicate, importance-weighted where there are weights."""
        return jnp.mean(values if self.weights is None else self.weights * values)

    def pieces(self, n: int) -> "Iterator[Nodes]":
        """Parts of every replicate, `n` nodes in each piece where there are as many."""
        each = min(self.x.shape[-1], max(1, n // self.x.shape[0]))
        return (_piece(self, each, jnp.asarray(start)) for start in range(0, self.x.shape[-1], each))


@eqx.filter_jit
def _piece(nodes: Nodes, each: int, start: Int[Array, ""]) -> Nodes:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, each, axis=-1), nodes)


def regression_nodes(
    key: PRNGKeyArray, task: LinearRegression, n: int, replicates: int, *, wide: bool = False
) -> Nodes:
    """Randomised quasi-Monte Carlo nodes for (x_q, W), `n` of them in each replicate.

    From a `wide` law, with importance weights, rare queries are among them.
    """
    normal, weights = gaussian_nodes(key, task.d * (1 + task.targets), n, replicates), None
    if wide:
        normal, weights = widened(normal)
        weights = jnp.asarray(weights, task.Sigma.dtype)
    return _placed(jnp.asarray(np.ascontiguousarray(np.moveaxis(normal, -1, 1)), task.Sigma.dtype), weights, task)


def radial_nodes(task: LinearRegression) -> Nodes:
    """A quadrature over x for risks that see |x| and squares of its entries alone, with all covariances isotropic.

    Gauss-Legendre panels in |x|, ever narrower towards 0, where a steep score is resolved; along each axis alike.
    """
    from scipy.stats import chi  # takes long to import

    d, k, dtype = task.d, task.targets, task.Sigma.dtype
    edges = np.concatenate([[0.0], 0.5 ** np.arange(14, 1, -1), np.arange(0.5, math.sqrt(d) + _FARTHEST, 0.5)])
    at, share = np.polynomial.legendre.leggauss(16)
    half = np.diff(edges)[:, None] / 2
    radius, weights = (edges[:-1, None] + half * (at + 1)).ravel(), (half * share).ravel()
    weights = weights * chi.pdf(radius, d)
    x = (radius * math.sqrt(float(task.query_Sigma[0, 0])) * np.eye(d)[..., None]).swapaxes(0, 1).reshape(d, -1)
    n = x.shape[-1]
    none = jnp.zeros((1, k, d, n), dtype)
    return Nodes(
        jnp.asarray(x[None], dtype), none, none, jnp.zeros((1, k, k, n), dtype),
        jnp.asarray(np.tile(weights * (n / d), d)[None], dtype),
    )  # fmt: skip


@eqx.filter_jit
def _placed(normal: Float[Array, "r m n"], weights: Float[Array, "r n"] | None, task: LinearRegression) -> Nodes:
    """Standard normal numbers as queries and coefficients of the task."""
    r, _, n = normal.shape
    d, k = task.d, task.targets
    W = jnp.einsum("rkdn,de->rken", normal[:, d:].reshape(r, k, d, n), root(task.Omega))
    WS = jnp.einsum("rkdn,de->rken", W, task.Sigma)
    x = jnp.einsum("de,ren->rdn", root(task.query_Sigma), normal[:, :d])
    return Nodes(x, W, WS, jnp.einsum("rkdn,rjdn->rkjn", WS, W), weights)
