r"""What a head does with its prompt, for some of its queries, from one pass over their scores.

For a query let $a_i$ be the weights of the tokens that it sees (uniform, or $\propto e^{b_i}$ with a bias), $s_i$ their
scores, $w_i\propto a_ie^{s_i}$ and $o = \sum w_iv_i$. A few tokens that take weight from every query, such as the first
one, are there whatever the rest of the prompt says: such *sinks* are kept as atoms. The others, $n_r$ of them, are a
sample. Over redraws of these the variance of the output is, to first order,
$\sum_r w_i^2\|v_i-o\|^2 - \|\sum_r w_i(v_i-o)\|^2/n_r$. On an infinite prompt from the Gaussian law that has their
moments, the output is

$$\frac{\sum_{\rm sinks}a_ie^{s_i}v_i + a_re^{\bar s+\nu/2}(\bar v + \mathrm{cov}(v, s))}
{\sum_{\rm sinks}a_ie^{s_i} + a_re^{\bar s+\nu/2}},$$

with the mean and variance of their scores, $\bar s$ and $\nu$: linear attention with a gate. All of it needs scores and
values alone, so that memory is that of the scores of the queries looked at. All sums are in float64.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ._call import HeadCall

SINK = 0.05  # mean weight over queries from which a token is a sink; and it must be ten times the even share
MOST_SINKS = 8
HEAVIEST = 0.7  # index of the weights' tail up to which the law of large prompts is believed
FEWEST = 25  # tokens from which a tail can be seen
_TAILS = 16  # queries whose tails are looked at
_ROUNDS = 8  # of a fit by position
_SMALL = 2**18  # multiplications up to which OpenBLAS stays on one thread
_NEAR = 16  # lags that stand one by one; beyond, in groups that grow by a fifth


class QueryStatistics(NamedTuple):
    """Numbers of each query, the last axis; the first is the heads'."""

    seen: np.ndarray  # tokens that the query sees
    effective: np.ndarray  # 1/Σw²
    entropy: np.ndarray  # -Σ w ln w
    largest: np.ndarray  # the largest weight
    first: np.ndarray  # the weight of the first token
    sinks: np.ndarray  # the weight of all sinks
    score_variance: np.ndarray  # ν of the tokens that are no sinks
    output: np.ndarray  # ‖o‖
    error: np.ndarray  # root of the variance of o over redraws of the prompt
    residual_output: np.ndarray  # the same two in the residual stream
    residual_error: np.ndarray
    linear: np.ndarray  # distance from the Gaussian limit over ‖o‖, no token set apart
    linear_beside_sinks: np.ndarray  # the same with sinks as atoms


class Attended(NamedTuple):
    """What queries make of tokens: scores ⟨sq, k⟩, weights a before and w after them (0 if hidden), outputs."""

    scores: Float[np.ndarray, "n L"]
    prior: Float[np.ndarray, "n L"]
    weights: Float[np.ndarray, "n L"]
    output: Float[np.ndarray, "n v"]


def attended(head: HeadCall) -> Attended:
    """All scores and weights of the queries of a head."""
    scores = product(head.queries, head.keys.T).astype(float)  # rounded as the model rounds them
    scores *= head.scale
    if head.log_weights is None:
        prior, weights = np.full_like(scores, 1 / scores.shape[1]), scores.copy()
    else:
        logs = head.log_weights.astype(float)
        prior, weights = _softmax(logs.copy()), scores + logs
    weights = _softmax(weights)
    return Attended(scores, prior, weights, product(weights, head.values.astype(float)))


def _softmax(scores: Float[np.ndarray, "n L"]) -> Float[np.ndarray, "n L"]:
    """Of each row, in its place."""
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def product(a: Float[np.ndarray, "n m"], b: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "n p"]:
    """The product of matrices, in tiles that are computed on one thread: a second one costs more than it saves."""
    (n, m), p = a.shape, b.shape[1]
    columns = min(max(math.isqrt(_SMALL // m) // 16 * 16, 16), p)
    rows = _SMALL // (m * columns)
    if rows < 8 or (rows >= n and columns == p):
        return a @ b
    found = np.empty((n, p), np.result_type(a, b))
    for i in range(0, n, rows):
        for j in range(0, p, columns):
            np.matmul(a[i : i + rows], b[:, j : j + columns], out=found[i : i + rows, j : j + columns])
    return found


def sinks_of(weights: Float[np.ndarray, "n L"]) -> Int[np.ndarray, " s"]:
    """The tokens that take a large weight from every query, on average: at most eight."""
    mean = weights.mean(axis=0)
    able = np.flatnonzero(mean > max(SINK, 10 / weights.shape[1]))
    return np.sort(able[np.argsort(-mean[able])[:MOST_SINKS]])


def query_statistics(head: HeadCall, found: Attended, sinks: Int[np.ndarray, " s"]) -> QueryStatistics:
    """Of one head; the sinks are kept as atoms."""
    scores, prior, weights, output = found
    values = head.values.astype(float)
    seen = np.count_nonzero(prior, axis=1)
    drawn = seen - np.count_nonzero(prior[:, sinks], axis=1)
    rest = _without(weights, sinks)
    plain, nu = _gaussian(scores, prior, values, sinks[:0])
    beside, nu = _gaussian(scores, prior, values, sinks) if len(sinks) else (plain, nu)
    of_sinks = weights[:, sinks]
    sizes, errors = _errors(rest, of_sinks, values, values[sinks], output, drawn, head.projection)
    return QueryStatistics(
        seen=seen.astype(float),
        effective=1 / np.vecdot(weights, weights),
        entropy=-np.vecdot(weights, np.log1p(np.maximum(weights, 1e-15) - 1)),  # NumPy's log is slower
        largest=weights.max(axis=1),
        first=weights[:, 0],
        sinks=of_sinks.sum(axis=1),
        score_variance=nu,
        output=sizes[0],
        error=errors[0],
        residual_output=sizes[1],
        residual_error=errors[1],
        linear=_relative(plain - output, sizes[0]),
        linear_beside_sinks=_relative(beside - output, sizes[0]),
    )


def _without(array: Float[np.ndarray, "n L"], columns: Int[np.ndarray, " s"]) -> Float[np.ndarray, "n L"]:
    """An array with 0 in some columns."""
    if not len(columns):
        return array
    array = array.copy()
    array[:, columns] = 0.0
    return array


def _relative(difference: np.ndarray, size: np.ndarray) -> np.ndarray:
    return np.linalg.norm(difference, axis=1) / np.maximum(size, 1e-300)


def _gaussian(scores, prior, values, sinks) -> tuple[np.ndarray, np.ndarray]:
    """The output where all but the sinks are replaced by their Gaussian law, and the variance of their scores."""
    share = _without(prior, sinks)
    total = np.maximum(share.sum(axis=1), 1e-300)
    mean = np.vecdot(share, scores) / total
    centred = scores - mean[:, None]
    slopes = share * centred
    nu = np.vecdot(slopes, centred) / total
    slopes += share
    linear = product(slopes, values) / total[:, None]
    of_sinks = prior[:, sinks]
    logs = np.where(of_sinks > 0, np.log(np.maximum(of_sinks, 1e-300)) + scores[:, sinks], -np.inf)
    gate = np.log(total) + mean + nu / 2
    top = np.maximum(gate, logs.max(axis=1, initial=-np.inf))
    atoms, of_rest = np.exp(logs - top[:, None]), np.exp(gate - top)[:, None]
    return (atoms @ values[sinks] + of_rest * linear) / (atoms.sum(axis=1, keepdims=True) + of_rest), nu


def _errors(rest, of_sinks, values, sinks, output, drawn, projection) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of outputs and the roots of their variances over redraws, as they are and in the residual stream."""
    centre = values.mean(axis=0)  # or a common part of all values would cancel
    v, o = values - centre, output - centre
    sizes_of_values, form = [np.vecdot(v, v)], np.empty((0, 0))
    if projection is not None:
        form = product(projection, projection.T)  # ‖vP‖² = v form vᵀ; in the model's precision: nothing cancels
        sizes_of_values.append(np.vecdot(product(v.astype(form.dtype), form), v))
        form = form.astype(float)
    sums = product(rest**2, np.column_stack([v, np.ones(len(v)), *sizes_of_values]))
    of_values, of_ones, of_sizes = sums[:, : v.shape[1]], sums[:, v.shape[1]], sums[:, v.shape[1] + 1 :].T
    mean = of_sinks @ (sinks - centre) - of_sinks.sum(axis=1, keepdims=True) * o  # Σ w(v - o) of all tokens is 0
    pairs = (output, output), (of_ones[:, None] * o - 2 * of_values, o), (mean, mean)
    sizes, errors = [np.full((2, len(output)), np.nan) for _ in range(2)]
    for i, squares in enumerate(of_sizes):
        size, cross, of_mean = (np.vecdot(product(a, form) if i else a, b) for a, b in pairs)
        sizes[i] = np.sqrt(np.maximum(size, 0.0))
        errors[i] = np.sqrt(np.maximum(squares + cross - of_mean / np.maximum(drawn, 1), 0.0))
    return sizes, errors


def largest_weights(
    found: Attended, sinks: Int[np.ndarray, " s"]
) -> tuple[Float[np.ndarray, "m t"], Int[np.ndarray, " m"]]:
    """At 16 queries or fewer: the largest weights that are no sinks', and of how many; their tails can be seen."""
    n, L = found.weights.shape
    at = np.linspace(0, n - 1, min(n, _TAILS)).round().astype(int)
    rest, drawn = (_without(array[at], sinks) for array in (found.weights, found.prior))
    most = min(3 * math.isqrt(L) + 4, L)
    return np.partition(rest, L - most, axis=1)[:, L - most :], np.count_nonzero(drawn, axis=1)


class Lags(NamedTuple):
    """Tokens by their place before or after a query: of each query, groups of neighbours."""

    starts: Int[np.ndarray, " c"]  # where a group begins, in the scores of all queries one after another
    cells: Int[np.ndarray, " c"]  # its place in a table of queries and groups
    groups: int


def lags(positions: Int[np.ndarray, " n"] | None, tokens: int) -> Lags | None:
    """Groups of tokens for queries at these positions; None where queries have no place among the tokens."""
    if positions is None:
        return None
    lag = positions[:, None] - np.arange(tokens)
    far = np.maximum(np.abs(lag), 1)
    group = np.where(far <= _NEAR, far, _NEAR + np.log(far / _NEAR) / math.log(1.2)).astype(int)
    group = np.sign(lag) * group
    group -= group.min()
    groups = int(group.max()) + 1
    cells = (group + groups * np.arange(len(positions))[:, None]).ravel()
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    return Lags(starts, cells[starts], groups)


def explained_by_position(found: Attended, by_lag: Lags | None) -> float:
    """The share of the variance of a query's scores that a function of the lag explains, the same for all queries."""
    if by_lag is None:
        return math.nan
    seen = (found.prior > 0).astype(float)
    of_query = seen.sum(axis=1)
    within = found.scores - (np.vecdot(seen, found.scores) / of_query)[:, None]
    within *= seen
    counts, sums = (_by_cell(array, by_lag) for array in (seen, within))
    of_group, sums_of_groups = np.maximum(counts.sum(axis=0), 1), sums.sum(axis=0)
    by_query, by_group = np.zeros(len(seen)), np.zeros(len(of_group))
    for _ in range(_ROUNDS):  # means of groups and of queries in turn: queries see different lags
        by_group = (sums_of_groups - by_query @ counts) / of_group
        by_query = -np.vecdot(counts, by_group) / of_query  # scores within a query add up to 0
    fitted = by_query[:, None] + by_group
    explained = np.sum(fitted * (2 * sums - counts * fitted))
    return float(explained / max(np.vecdot(within, within).sum(), 1e-300))


def _by_cell(array: Float[np.ndarray, "n L"], by_lag: Lags) -> Float[np.ndarray, "n g"]:
    """Sums over the groups of each query."""
    table = np.zeros(len(array) * by_lag.groups)
    table[by_lag.cells] = np.add.reduceat(array.ravel(), by_lag.starts)
    return table.reshape(len(array), -1)
