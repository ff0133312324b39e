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
values alone, so that memory is that of the scores of the queries looked at.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from largeprompt.measures._worth import tail_index

from ._call import HeadCall

SINK = 0.05  # mean weight over queries from which a token is a sink; and it must be ten times the even share
MOST_SINKS = 8
HEAVIEST = 0.7  # index of the weights' tail up to which the law of large prompts is believed
FEWEST = 25  # tokens from which a tail can be seen
_TAILS = 16  # queries whose tails are looked at
_ROUNDS = 8  # of a fit by position
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
    tail: np.ndarray  # index k̂ of the tail of the weights that are no sinks' (NaN where not looked at)


class Attended(NamedTuple):
    """What queries make of tokens: scores ⟨sq, k⟩, weights a before and w after them (0 if hidden), outputs."""

    scores: Float[np.ndarray, "n L"]
    prior: Float[np.ndarray, "n L"]
    weights: Float[np.ndarray, "n L"]
    output: Float[np.ndarray, "n v"]


def attended(head: HeadCall) -> Attended:
    """All scores and weights of the queries of a head."""
    scores = (head.queries @ head.keys.T).astype(float) * head.scale
    logs = np.zeros(scores.shape[1]) if head.log_weights is None else head.log_weights.astype(float)
    total = scores + logs
    weights = np.exp(total - total.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    prior = np.exp(logs - logs.max(axis=-1, keepdims=True))
    prior = np.broadcast_to(prior / prior.sum(axis=-1, keepdims=True), scores.shape)
    return Attended(scores, prior, weights, weights @ head.values)


def sinks_of(weights: Float[np.ndarray, "n L"]) -> Int[np.ndarray, " s"]:
    """The tokens that take a large weight from every query, on average: at most eight."""
    mean = weights.mean(axis=0)
    able = np.flatnonzero(mean > max(SINK, 10 / weights.shape[1]))
    return np.sort(able[np.argsort(-mean[able])[:MOST_SINKS]])


def query_statistics(head: HeadCall, found: Attended, sinks: Int[np.ndarray, " s"]) -> QueryStatistics:
    """Of one head; the sinks are kept as atoms."""
    scores, prior, weights, output = found
    values = head.values.astype(float)
    rest = np.ones(head.keys.shape[0], bool)
    rest[sinks] = False
    seen = prior > 0
    entropy = -np.sum(weights * np.log(np.maximum(weights, 1e-300)), axis=1)
    plain, nu = _gaussian(scores, prior, values, np.ones_like(rest))
    beside, nu = _gaussian(scores, prior, values, rest) if len(sinks) else (plain, nu)
    size, error = np.linalg.norm(output, axis=1), _error(weights, values, output, rest & seen)
    residual = residual_error = np.full_like(size, np.nan)
    if head.projection is not None:
        root = np.linalg.qr(head.projection.T).R.T  # with the norms of the projection: ‖vP‖ = ‖v root‖
        residual = np.linalg.norm(output @ root, axis=1)
        residual_error = _error(weights, values @ root, output @ root, rest & seen)
    return QueryStatistics(
        seen=seen.sum(axis=1).astype(float),
        effective=1 / np.sum(weights**2, axis=1),
        entropy=entropy,
        largest=weights.max(axis=1),
        first=weights[:, 0],
        sinks=weights[:, sinks].sum(axis=1),
        score_variance=nu,
        output=size,
        error=error,
        residual_output=residual,
        residual_error=residual_error,
        linear=_relative(plain - output, size),
        linear_beside_sinks=_relative(beside - output, size),
        tail=_tails(weights, rest & seen),
    )


def _relative(difference: np.ndarray, size: np.ndarray) -> np.ndarray:
    return np.linalg.norm(difference, axis=1) / np.maximum(size, 1e-300)


def _gaussian(scores, prior, values, rest) -> tuple[np.ndarray, np.ndarray]:
    """The output where the rest is replaced by its Gaussian law, and the variance of the rest's scores."""
    share = np.where(rest, prior, 0.0)
    total = share.sum(axis=1, keepdims=True)
    share = share / np.maximum(total, 1e-300)
    mean = np.sum(share * scores, axis=1, keepdims=True)
    centred = scores - mean
    nu = np.sum(share * centred**2, axis=1)
    linear = (share * (1 + centred)) @ values
    atoms = ~rest
    logs = np.where(prior[:, atoms] > 0, np.log(np.maximum(prior[:, atoms], 1e-300)) + scores[:, atoms], -np.inf)
    gate = np.log(np.maximum(total[:, 0], 1e-300)) + mean[:, 0] + nu / 2
    top = np.maximum(gate, logs.max(axis=1, initial=-np.inf))
    of_atoms, of_rest = np.exp(logs - top[:, None]), np.exp(gate - top)[:, None]
    found = (of_atoms @ values[atoms] + of_rest * linear) / (of_atoms.sum(axis=1, keepdims=True) + of_rest)
    return found, nu


def _error(weights, values, output, drawn: Bool[np.ndarray, "n L"]) -> Float[np.ndarray, " n"]:
    """The root of the variance of the output over redraws of the tokens that are drawn."""
    w = np.where(drawn, weights, 0.0)
    centre = values.mean(axis=0)  # or a common part of all values would cancel
    v, o = values - centre, output - centre
    squares = w**2
    sizes = squares @ np.sum(v**2, axis=1) - 2 * np.sum((squares @ v) * o, axis=1) + squares.sum(1) * np.sum(o**2, 1)
    mean = w @ v - w.sum(axis=1, keepdims=True) * o
    of_mean = np.sum(mean**2, axis=1) / np.maximum(drawn.sum(axis=1), 1)
    return np.sqrt(np.maximum(sizes - of_mean, 0.0))


def _tails(weights, drawn) -> Float[np.ndarray, " n"]:
    n = len(weights)
    at = np.unique(np.linspace(0, n - 1, min(n, _TAILS)).round().astype(int))
    found = np.full(n, np.nan)
    found[at] = [tail_index(weights[i, drawn[i]]) for i in at]
    return found


def lags(positions: Int[np.ndarray, " n"] | None, tokens: int) -> Int[np.ndarray, "n L"] | None:
    """Groups of tokens by their place before or after a query; None where queries have no place among the tokens."""
    if positions is None:
        return None
    lag = positions[:, None] - np.arange(tokens)
    far = np.maximum(np.abs(lag), 1)
    group = np.where(far <= _NEAR, far, _NEAR + np.log(far / _NEAR) / math.log(1.2)).astype(int)
    group = np.sign(lag) * group
    return group - group.min()


def explained_by_position(found: Attended, groups: Int[np.ndarray, "n L"] | None) -> float:
    """The share of the variance of a query's scores that a function of the lag explains, the same for all queries."""
    if groups is None:
        return math.nan
    seen = found.prior > 0
    query, group, scores = np.nonzero(seen)[0], groups[seen], found.scores[seen]
    of_query, of_group = np.bincount(query), np.maximum(np.bincount(group), 1)
    within = scores - (np.bincount(query, scores) / of_query)[query]
    left = within
    for _ in range(_ROUNDS):  # means of groups and of queries in turn: queries see different lags
        left = left - (np.bincount(group, left) / of_group)[group]
        left = left - (np.bincount(query, left) / of_query)[query]
    return 1 - float(np.sum(left**2)) / max(float(np.sum(within**2)), 1e-300)
