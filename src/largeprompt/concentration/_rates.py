r"""The 1/L law at one query: limits of $L\cdot E\|X_L - X\|^2$, of the output's covariance and of its bias.

To first order the error of a reading is the token average of its influence function, for every kind of attention. The
covariance of two heads' errors on one prompt is then the mean of the product of two influences, which each kind knows
(`error_covariance`, `slope_error`, `reading_bias`). Where a kind knows it as an average over tokens only, several
batches of tokens give the average its standard error.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._compiled import optimised_jit
from largeprompt._display import AbstractShown
from largeprompt._typing import VectorLike
from largeprompt.attention import AbstractAttention, AbstractLayer, heads_of
from largeprompt.attention._first_order import first_order
from largeprompt.attention._forms import described
from largeprompt.measures import AbstractMeasure
from largeprompt.measures._from_sampler import warn_of_few

from ._problem import NotPredictedError
from ._squares import HeadsSquare, QuadraticForm, heads_squares

Heads = tuple[AbstractAttention, ...]
Tokens = Float[Array, "t D"] | None
_BATCHES, _TOKENS = 8, 2**10  # of tokens that errors are averaged over, and their size
_LONG = 10**7  # numbers of a law read for all queries, from where on optimising the program pays off


class Rates(AbstractShown):
    r"""The constants $c$ of $E\|\hat X_L - X\|^2 \approx c/L$, for the output and its derivatives in V and U.

    `stderr` are the standard errors of the three, 0 where the kind of attention knows them exactly.
    """

    output: Float[Array, ""]
    V: Float[Array, ""]
    U: Float[Array, ""]
    stderr: Float[Array, " 3"]


def output_covariance(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, "p p"]:
    r"""$\lim_L L\cdot\mathrm{Cov}(T[\hat\mu_L](z))$, the sharp law of large prompts.

    For a softmax head it is $e^{\Lambda(2\theta)-2\Lambda(\theta)}\,V[\mathrm{cov}(\mu_{2\theta}) + bb^\top]V^\top$,
    where $\theta = Uz$ and $b = \mathrm{mean}(\mu_{2\theta}) - \mathrm{mean}(\mu_\theta)$; heads that are added up
    have a covariance between any two of them as well.
    """
    found = first_order(summed_heads(layer), layer._prompt(mu), layer._query(z))
    return checks.result("the limit covariance", found.covariance)


def output_bias(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Float[Array, " p"]:
    r"""$\lim L\cdot(E\,T[\hat\mu_L](z) - T[\mu](z))$, over all heads.

    For a softmax head it is $-e^{\Lambda(2\theta)-2\Lambda(\theta)}\,V b$; linear attention has none.
    """
    found = first_order(summed_heads(layer), layer._prompt(mu), layer._query(z))
    return checks.result("the limit bias", found.bias)


def rates(layer: AbstractLayer, mu: AbstractMeasure, z: VectorLike) -> Rates:
    r"""The limits of $L\,E\|\cdot\|^2$ (Frobenius) for the output and its Jacobians in V and U at a query.

    Of several heads, the Jacobians in all their merged V and U.
    """
    heads, mu, z = summed_heads(layer), layer._prompt(mu), layer._query(z)
    for head in heads:
        if head.exponential:
            warn_of_few(mu._tilt(2 * head.U @ z), 4)
    squares = heads_squares(heads, heads, ("output", "V", "U"))
    exact = errors_are_exact(heads, mu, squares["output"])

    def constants(tokens: Tokens) -> np.ndarray:
        return np.array(_rates(heads, mu, list(squares.values()), z, tokens))

    found = over_batches(constants, mu, exact, jax.random.key(0))
    values, errors = (checks.result("the rate", jnp.asarray(part, z.dtype)) for part in found)
    return Rates(*values, stderr=errors)


@eqx.filter_jit
def _rates(heads: Heads, mu, squares: Sequence[HeadsSquare], z, tokens: Tokens) -> list[Float[Array, ""]]:
    return query_constants(heads, mu, squares, z, tokens)


def summed_heads(layer: AbstractLayer) -> Heads:
    """The heads whose outputs a layer adds up; any other layer is refused."""
    heads = heads_of(layer)
    if heads is None:
        raise NotPredictedError(
            f"the layer is {described(layer)}; deviations are predicted for heads of attention and sums of such heads, "
            "else only measured"
        )
    return heads


def errors_are_exact(heads: Heads, mu: AbstractMeasure, square: HeadsSquare) -> bool:
    """Whether the constants of a square are exact, those that pairs of heads have in common included."""
    return all(one.errors_are_exact(mu, two) for one in heads for two in (heads if square.is_crossed else (one,)))


def over_batches(
    found: Callable[[Tokens], np.ndarray], mu: AbstractMeasure, exact: bool, key: PRNGKeyArray
) -> tuple[np.ndarray, np.ndarray]:
    """What is found exactly, or else its mean over several batches of tokens; and its standard error."""
    if exact:
        value = found(None)
        return value, np.zeros_like(value)
    batches = [found(mu._sample(one, _TOKENS)) for one in jax.random.split(key, _BATCHES)]
    return np.mean(batches, axis=0), np.std(batches, axis=0, ddof=1) / math.sqrt(_BATCHES)


def query_constants(
    heads: Heads, mu: AbstractMeasure, squares: Sequence[HeadsSquare], z: Float[Array, " D"], tokens: Tokens = None
) -> list[Float[Array, ""]]:
    """The limits of L times the means of squares at one query, with nothing checked."""
    along = [(head, head.U @ z) for head in heads]
    covariances = [head.error_covariance(mu, u, head, u, tokens) for head, u in along]

    def of_head(form: QuadraticForm, head: AbstractAttention, u: Array, covariance: Array) -> Float[Array, ""]:
        slopes = [head.slope_error(mu, u, A, B, tokens) * (z @ N @ z) for A, B, N in form.slopes]
        return sum(slopes, start=jnp.sum(form.M * covariance))

    totals = []
    for square in squares:
        own = [of_head(form, *pair, C) for form, pair, C in zip(square.each, along, covariances, strict=True)]
        total = jnp.stack(own).sum()
        totals.append(total + _crossed(heads, mu, z, tokens) if square.is_crossed else total)
    return totals


def _crossed(heads: Heads, mu, z, tokens: Tokens) -> Float[Array, ""]:
    r"""$2\sum_{h<g}\mathrm{tr}\,V_hC_{hg}V_g^\top$: what several heads add to the sum of their own constants."""
    alike: dict[Any, list[AbstractAttention]] = {}
    for head in heads:
        alike.setdefault(jax.tree.structure(head), []).append(head)
    groups, total = list(alike.values()), jnp.zeros((), z.dtype)

    def product(one: AbstractAttention, other: AbstractAttention) -> Float[Array, ""]:
        return jnp.trace(one.V @ one.error_covariance(mu, one.U @ z, other, other.U @ z, tokens) @ other.V.T)

    for k, group in enumerate(groups):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *group)
        i, j = np.triu_indices(len(group), 1)
        pairs = tuple(jax.tree.map(lambda leaf, which=which: leaf[which], stacked) for which in (i, j))
        if len(i):
            # one pair after another: with many heads together they would hold a matrix for each pair and query
            total += jax.lax.map(lambda pair: product(*pair), pairs).sum()
        for one in group:
            for other in (head for before in groups[:k] for head in before):
                total += product(one, other)
    return 2 * total


def constants_at(
    heads: Heads,
    mu: AbstractMeasure,
    square: HeadsSquare,
    z: Float[np.ndarray, "n D"],
    batch: int,
    tokens: Tokens = None,
) -> Float[np.ndarray, " n"]:
    """The constant of the 1/L law at each of many queries, `batch` of them side by side."""
    return np.asarray(_constants(heads, mu, square, jnp.asarray(z), batch, tokens), float)


def _is_short(heads: Heads, mu, square: HeadsSquare, z, batch: int, tokens: Tokens) -> bool:
    return len(z) * sum(map(np.size, jax.tree.leaves((mu, tokens)))) < _LONG


@functools.partial(optimised_jit, unless=_is_short)
def _constants(heads: Heads, mu, square: HeadsSquare, z, batch: int, tokens: Tokens) -> Float[Array, " n"]:
    return jax.lax.map(lambda one: query_constants(heads, mu, [square], one, tokens)[0], z, batch_size=batch)
