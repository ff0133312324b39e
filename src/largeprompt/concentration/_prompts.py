r"""Prompts drawn from any law, and what a layer reads off them.

Softmax and linear heads read tokens as they are drawn: memory does not grow with the prompt. Of one prompt and the
tilts of some queries, with tokens $y = z-c$ about a centre, they need $S_0 = \sum_l e^{\langle\theta,y_l\rangle-s}$,
$S_1 = \sum_l e^{\langle\theta,y_l\rangle-s}y_l$ and, for slopes, $S_2$ with $y_ly_l^\top$; $s$ follows the largest
score. Heads of any other kind, and any other layer, read prompts that are held whole.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from largeprompt._compiled import optimised_jit
from largeprompt._device import DeviceName
from largeprompt.attention import AbstractAttention, AbstractLayer, kind_of
from largeprompt.attention._forms import described
from largeprompt.measures import AbstractMeasure, Empirical

from ._memory import chunk_for, chunk_numbers, side_by_side
from ._squares import Reading

_WHOLE = 2**26  # numbers of one prompt that is held whole


class Sums(NamedTuple):
    """Of each query: the shift, Σω, Σωy and, where asked for, Σωyyᵀ."""

    shift: Float[Array, " q"]
    total: Float[Array, " q"]
    first: Float[Array, "q D"]
    second: Float[Array, "q D D"] | None

    def with_own(self, thetas: Float[Array, "q D"], y: Float[Array, "q D"]) -> "Sums":
        """The sums with each query, about the same centre, as one more token of its own prompt."""
        score = jnp.sum(thetas * y, axis=1)
        shift = jnp.maximum(self.shift, score)
        kept, weight = jnp.exp(self.shift - shift), jnp.exp(score - shift)
        second = None
        if self.second is not None:
            second = kept[:, None, None] * self.second + weight[:, None, None] * y[:, :, None] * y[:, None, :]
        first = kept[:, None] * self.first + weight[:, None] * y
        return Sums(shift, kept * self.total + weight, first, second)

    def softmax_reading(self, centre: Float[Array, " D"]) -> Reading:
        """The tilted prompt's mean and covariance."""
        mean = self.first / self.total[:, None]
        slope = None
        if self.second is not None:
            slope = self.second / self.total[:, None, None] - mean[:, :, None] * mean[:, None, :]
        return Reading(mean + centre, slope)


def prompt_sums(
    mu: AbstractMeasure,
    key: PRNGKeyArray,
    thetas: Float[Array, "q D"],
    L: Int[Array, ""],
    chunk: int,
    slopes: bool,
    centre: Float[Array, " D"],
) -> Sums:
    """The sums over one prompt of L tokens, of which `chunk` are drawn at a time."""
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


def second_moment_sum(
    mu: AbstractMeasure, key: PRNGKeyArray, L: Int[Array, ""], chunk: int, dtype: Any
) -> Float[Array, "D D"]:
    """Σzzᵀ over one prompt: all that linear attention sees of it."""
    flat = jnp.zeros((1, mu.dim), dtype)
    sums = prompt_sums(mu, key, flat, L, chunk, True, flat[0])
    assert sums.second is not None  # asked for
    return sums.second[0]


def _weighted_pairs(weights: Float[Array, "q n"], y: Float[Array, "n D"]) -> Float[Array, "q D D"]:
    """Σ_l ω_l y_ly_lᵀ for each row of weights, through the smaller of the two arrays that lead there."""
    (q, n), D = weights.shape, y.shape[1]
    if q < D:
        return jax.lax.map(lambda row: (row[:, None] * y).T @ y, weights)
    return (weights @ (y[:, :, None] * y[:, None, :]).reshape(n, D * D)).reshape(q, D, D)


class StreamedHeads(eqx.Module):
    """Softmax and linear heads whose outputs add up, all on the same tokens as they are drawn."""

    heads: tuple[AbstractAttention, ...]
    slopes: bool = eqx.field(static=True)

    def finite(
        self,
        mu: AbstractMeasure,
        key: PRNGKeyArray,
        queries: Float[Array, "q D"],
        L: Int[Array, ""],
        chunk: int,
        query_in_prompt: bool,
    ) -> tuple[Reading, ...]:
        """What each head reads off one prompt of L tokens along each query."""

        def reading(head: AbstractAttention) -> Reading:  # the same key draws the same tokens for all heads
            thetas = queries @ head.U.T
            if kind_of(head) == "softmax":
                centre = mu._mean()
                sums = prompt_sums(mu, key, thetas, L, chunk, self.slopes, centre)
                return (sums.with_own(thetas, queries - centre) if query_in_prompt else sums).softmax_reading(centre)
            total = second_moment_sum(mu, key, L, chunk, thetas.dtype)
            second = jnp.broadcast_to(total, (len(queries), mu.dim, mu.dim))
            own = queries[:, :, None] * queries[:, None, :]
            second = (second + own) / (L + 1) if query_in_prompt else second / L
            return Reading(jnp.einsum("qij,qj->qi", second, thetas), second if self.slopes else None)

        return tuple(reading(head) for head in self.heads)

    def limit(self, mu: AbstractMeasure, queries: Float[Array, "q D"]) -> tuple[Reading, ...]:
        """The same readings for the infinite prompt."""
        return jax.vmap(lambda z: _readings(self.heads, mu, z, self.slopes))(queries)

    def chunk(self, L: int, queries: int, dim: int) -> int:
        """How many tokens of a prompt are drawn at once."""
        return chunk_for(L, queries * len(self.heads), dim, self.slopes)

    def numbers(self, L: int, queries: int, dim: int) -> tuple[int, int]:
        """How many numbers one prompt takes while it is drawn, and how many the least batch takes in all."""
        together = queries * len(self.heads)
        held = chunk_numbers(self.chunk(L, queries, dim), together, dim, self.slopes)
        return held, 2 * held + (4 * together * dim * dim if self.slopes else 0)


class WholePrompts(eqx.Module):
    """Heads of any kind, or a layer that is no sum of heads, on prompts that are held whole."""

    layer: AbstractLayer
    heads: tuple[AbstractAttention, ...] | None
    slopes: bool = eqx.field(static=True)

    def finite(self, mu, key, queries, L, chunk: int, query_in_prompt: bool):
        """What is read off one prompt of `chunk` = L tokens along each query."""
        tokens = mu._sample(key, chunk)

        def one(z):
            return self._read(Empirical(jnp.concatenate([tokens, z[None]]) if query_in_prompt else tokens), z)

        return jax.vmap(one)(queries)

    def limit(self, mu, queries):
        """The same for the infinite prompt."""
        return jax.vmap(lambda z: self._read(mu, z))(queries)

    def _read(self, mu: AbstractMeasure, z: Float[Array, " D"]):
        if self.heads is not None:
            return _readings(self.heads, mu, z, self.slopes)
        return self.layer._output(mu, z), self.layer._jacobian(mu, z) if self.slopes else None

    def chunk(self, L: int, queries: int, dim: int) -> int:
        """How many tokens of a prompt are drawn at once: all of them, and prompts that are too long are refused."""
        if L * dim > _WHOLE:
            raise ValueError(
                f"L is {L}; prompts of a layer {described(self.layer)} are held whole, which goes up to "
                f"L = {_WHOLE // dim} in dimension {dim}"
            )
        return L

    def numbers(self, L: int, queries: int, dim: int) -> tuple[int, int]:
        """How many numbers one prompt takes with what is computed from it, twice as for `StreamedHeads`."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(self.layer, eqx.is_inexact_array)))
        held = L * (3 * dim + 3 * queries) + (queries * self.layer.outputs * parameters if self.slopes else 0)
        return held, held


Reader = StreamedHeads | WholePrompts


def sizes(reader: Reader, L: int, queries: int, dim: int, device: DeviceName) -> tuple[int, int]:
    """How many tokens of a prompt are drawn at once, and how many prompts side by side."""
    return reader.chunk(L, queries, dim), side_by_side(reader.numbers(L, queries, dim)[0], device)


def reader_of(layer: AbstractLayer, heads: tuple[AbstractAttention, ...] | None, slopes: bool) -> Reader:
    """How a layer reads prompts: as they are drawn where its heads can, and else whole."""
    if heads is not None and all(map(kind_of, heads)):
        return StreamedHeads(heads, slopes)
    return WholePrompts(layer, heads, slopes)


def _readings(heads, mu: AbstractMeasure, z: Float[Array, " D"], slopes: bool) -> tuple[Reading, ...]:
    inputs = [(head, head.U @ z) for head in heads]
    return tuple(Reading(head.reading(mu, u), head.reading_slope(mu, u) if slopes else None) for head, u in inputs)


@functools.partial(optimised_jit, fusing=False)
def squares(reader: Reader, mu, draws, fixed, known, keys, L, chunk: int, queries: int, query_in_prompt: bool):
    """The squared differences of each prompt at each of its queries, one array for each square, and their weights.

    `queries` of `draws` for each prompt, or the same `fixed` ones for all.
    """
    at_fixed = None if fixed is None else reader.limit(mu, fixed)

    def of_prompt(key):
        of_queries, of_tokens = jax.random.split(key)
        z, weights = draws.draw(of_queries, queries) if fixed is None else (fixed, jnp.ones(len(fixed), fixed.dtype))
        there = reader.limit(mu, z) if at_fixed is None else at_fixed
        here = reader.finite(mu, of_tokens, z, L, chunk, query_in_prompt)
        off = jax.tree.map(jnp.subtract, here, there)
        return [jax.vmap(square)(off, z) for square in known], weights

    return jax.vmap(of_prompt)(keys)
