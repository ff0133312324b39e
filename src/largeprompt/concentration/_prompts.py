r"""Prompts drawn from any law and read as they are drawn: memory does not grow with their length.

Of one prompt and the tilts of some queries, with tokens $y = z-c$ about a centre: $S_0 = \sum_l e^{\langle\theta,y_l
\rangle-s}$, $S_1 = \sum_l e^{\langle\theta,y_l\rangle-s}y_l$ and, for slopes, $S_2$ with $y_ly_l^\top$; $s$ follows the
largest score.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from largeprompt._device import DeviceName
from largeprompt.attention import AbstractAttention, kind_of
from largeprompt.measures import AbstractMeasure

_CHUNKS = (64, 512, 4096)  # tokens drawn at once: few sizes, since each is compiled
_LARGEST = 2**25  # numbers held for a chunk
_ROOM = {"cpu": 2**21, "gpu": 2**26}  # numbers held at once for a batch of prompts


class Sums(NamedTuple):
    """Of each query: the shift, Σω, Σωy and, where asked for, Σωyyᵀ."""

    shift: Float[Array, " q"]
    total: Float[Array, " q"]
    first: Float[Array, "q D"]
    second: Float[Array, "q D D"] | None


class Reading(NamedTuple):
    """What a layer reads off a prompt along each query, and the slope of that."""

    mean: Float[Array, "q D"]
    slope: Float[Array, "q D D"] | None


def chunk_for(L: int, queries: int, dim: int, slopes: bool) -> int:
    """How many tokens to draw at once."""
    most = _LARGEST // _held(1, queries, dim, slopes)
    return max((chunk for chunk in _CHUNKS if chunk <= min(L, most)), default=_CHUNKS[0])


def batch_for(chunk: int, queries: int, dim: int, slopes: bool, device: DeviceName) -> int:
    """How many prompts to draw side by side."""
    return side_by_side(_held(chunk, queries, dim, slopes), device)


def side_by_side(held: int, device: DeviceName) -> int:
    """How many prompts to draw at once, a power of two, where each holds so many numbers."""
    return 2 ** int(math.log2(max(1, _ROOM[device] // held)))


def _held(chunk: int, queries: int, dim: int, slopes: bool) -> int:
    """How many numbers a chunk of tokens takes with what is computed from it."""
    return chunk * (3 * dim + 3 * queries + (dim * min(dim, queries) if slopes else 0))


def numbers_held(L: int, queries: int, dim: int, slopes: bool) -> int:
    """How many numbers the least batch takes: one prompt, its sums and differences."""
    chunk = chunk_for(L, queries, dim, slopes)
    return 2 * _held(chunk, queries, dim, slopes) + (4 * queries * dim * dim if slopes else 0)


def prompt_sums(
    mu: AbstractMeasure,
    key: PRNGKeyArray,
    thetas: Float[Array, "q D"],
    L: Int[Array, ""],
    chunk: int,
    slopes: bool,
    centre: Float[Array, " D"],
) -> Sums:
    """Of one prompt of L tokens, `chunk` drawn at a time."""
    q, D = thetas.shape
    dtype = thetas.dtype

    def added(i, sums: Sums) -> Sums:
        y = mu._sample(jax.random.fold_in(key, i), chunk) - centre
        scores = thetas @ y.T
        scores = jnp.where(i * chunk + jnp.arange(chunk) < L, scores, -jnp.inf)
        shift = jnp.maximum(sums.shift, scores.max(axis=1))
        kept, weights = jnp.exp(sums.shift - shift), jnp.exp(scores - shift[:, None])
        second = None
        if sums.second is not None:
            second = kept[:, None, None] * sums.second + _weighted_pairs(weights, y)
        return Sums(shift, kept * sums.total + weights.sum(axis=1), kept[:, None] * sums.first + weights @ y, second)

    lowest = jnp.full(q, jnp.finfo(dtype).min, dtype)  # finite: -inf - (-inf) would be NaN
    empty = jnp.zeros((q, D), dtype)
    start = Sums(lowest, jnp.zeros(q, dtype), empty, jnp.zeros((q, D, D), dtype) if slopes else None)
    return jax.lax.fori_loop(0, (L + chunk - 1) // chunk, added, start)


def _weighted_pairs(weights: Float[Array, "q n"], y: Float[Array, "n D"]) -> Float[Array, "q D D"]:
    """Σ_l ω_l y_ly_lᵀ for each row of weights, through the smaller of the two arrays that lead there."""
    (q, n), D = weights.shape, y.shape[1]
    if q < D:
        return jax.lax.map(lambda row: (row[:, None] * y).T @ y, weights)
    return (weights @ (y[:, :, None] * y[:, None, :]).reshape(n, D * D)).reshape(q, D, D)


def with_own(sums: Sums, thetas: Float[Array, "q D"], y: Float[Array, "q D"]) -> Sums:
    """The sums with each query, about the same centre, as one more token of its own prompt."""
    score = jnp.sum(thetas * y, axis=1)
    shift = jnp.maximum(sums.shift, score)
    kept, weight = jnp.exp(sums.shift - shift), jnp.exp(score - shift)
    second = None
    if sums.second is not None:
        second = kept[:, None, None] * sums.second + weight[:, None, None] * y[:, :, None] * y[:, None, :]
    first = kept[:, None] * sums.first + weight[:, None] * y
    return Sums(shift, kept * sums.total + weight, first, second)


def softmax_reading(sums: Sums, centre: Float[Array, " D"]) -> Reading:
    """The tilted prompt's mean and covariance."""
    mean = sums.first / sums.total[:, None]
    slope = None
    if sums.second is not None:
        slope = sums.second / sums.total[:, None, None] - mean[:, :, None] * mean[:, None, :]
    return Reading(mean + centre, slope)


def reading(
    attention: AbstractAttention,
    mu: AbstractMeasure,
    key: PRNGKeyArray,
    queries: Float[Array, "q D"],
    L: Int[Array, ""],
    chunk: int,
    slopes: bool,
    query_in_prompt: bool,
) -> Reading:
    """What a softmax or linear head reads off one prompt of L tokens along each query."""
    thetas = queries @ attention.U.T
    if kind_of(attention) == "softmax":
        centre = mu._mean()
        sums = prompt_sums(mu, key, thetas, L, chunk, slopes, centre)
        return softmax_reading(with_own(sums, thetas, queries - centre) if query_in_prompt else sums, centre)
    flat = jnp.zeros((1, mu.dim), thetas.dtype)
    sums = prompt_sums(mu, key, flat, L, chunk, True, flat[0])
    assert sums.second is not None  # asked for
    second = jnp.broadcast_to(sums.second[0], (len(queries), mu.dim, mu.dim))
    own = queries[:, :, None] * queries[:, None, :]
    second = (second + own) / (L + 1) if query_in_prompt else second / L
    return Reading(jnp.einsum("qij,qj->qi", second, thetas), second if slopes else None)


def limit(attention: AbstractAttention, mu: AbstractMeasure, queries: Float[Array, "q D"], slopes: bool) -> Reading:
    """The same off the law itself."""

    def one(z):
        u = attention.U @ z
        return attention.reading(mu, u), attention.reading_slope(mu, u) if slopes else None

    return Reading(*jax.vmap(one)(queries))


@eqx.filter_jit
def squares(reader, mu, draws, fixed, known, keys, L, chunk: int, queries: int, query_in_prompt: bool):
    """The squared differences of each prompt at each of its queries, one array a form, and the queries' weights.

    `queries` of `draws` a prompt, or the same `fixed` ones for all.
    """
    at_fixed = None if fixed is None else reader.limit(mu, fixed)

    def of_prompt(key):
        of_queries, of_tokens = jax.random.split(key)
        z, weights = draws.draw(of_queries, queries) if fixed is None else (fixed, jnp.ones(len(fixed), fixed.dtype))
        there = reader.limit(mu, z) if at_fixed is None else at_fixed
        here = reader.finite(mu, of_tokens, z, L, chunk, query_in_prompt)
        off = jax.tree.map(jnp.subtract, here, there)
        return [jax.vmap(form)(off, z) for form in known], weights

    return jax.vmap(of_prompt)(keys)
