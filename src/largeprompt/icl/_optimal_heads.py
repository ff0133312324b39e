import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import MultiHead, WeightMoments
from largeprompt.attention._pair import pair_table

from ._blocks import aligned_blocks, head_from_blocks
from ._estimate import Estimate, exactly
from ._optimal_linear import best_reading, best_reading_of_rank
from ._optimal_softmax import ScoreFamily, best_scores, limit_scale, optimal_softmax, score_family
from ._regression import LinearRegression, as_regression
from ._risk._closed_form import gaussian_risk
from ._risk._quadrature import METHOD, AlignedRisk, Matrix
from ._several_heads import Forms, Found, Plan, Solved, forms_at, searched, solved

_LONGEST = 1000  # prompts: beyond, tables are too coarse for what more than two heads gain, less than 1e-4 of the risk
_WIDTHS = (0.1, 0.3, 0.6, 1.0, 1.6)  # standard deviations of scores in their widest direction, to start from


class HeadsOptimum(AbstractShown):
    r"""The best softmax heads, their risk, and the task's `rate` for that many: $\lim_L L\,(\min R_L - R_\infty)$."""

    attention: MultiHead
    risk: Estimate
    rate: Float[Array, ""]


def optimal_heads(task: LinearRegression, L: int | float, heads: int, *, head_dim: int | None = None) -> HeadsOptimum:
    r"""That many softmax heads of least risk with $P = C = 0$ at length `L`, with scores of rank `head_dim` at most.

    One wide head is that of `optimal_softmax`, two are the best pair $(A, R/2)$, $(-A, -R/2)$. Of more heads the scores
    are searched, with the best values for each: pairs for an even number, pairs and one head more for an odd one.
    Searched are multiples of the identity where all covariances are isotropic, with an integral over $|x|$; matrices
    that are diagonal in the common basis where covariances commute; else all matrices. Narrow heads read `head_dim`
    directions of that basis each, the best ones first, in turn, with values of both signs, or as pairs. Proved: no
    heads are better than the same number of pairs, and pairs tend to linear attention at length L − 1 as their scores
    tend to 0; a finite scale is better. That other heads are not better, and that the search ends in the lowest
    minimum, is not proved. Above L = 1000 more than two wide heads gain less than 1e-4 of the risk and stay idle. The
    `rate` of two heads or more is that of linear attention of the same rank.
    """
    task, L, heads = as_regression(task), checks.prompt_length(L), checks.count("heads", heads)
    width = task.d if head_dim is None else checks.count("head_dim", head_dim)
    limit = best_reading_of_rank(task, math.inf, min(task.d, heads * width))
    width = min(width, limit.needed) if limit.needed else task.d
    if heads == 1 and width >= limit.needed:
        single = optimal_softmax(task, L)
        A, r = np.asarray(single.attention.U, float)[: task.d, : task.d], float(single.attention.V[-1, -1])
        return HeadsOptimum(aligned_heads([(A, r)], task, head_dim), single.risk, single.rate)
    reading = jnp.asarray(limit.reading)
    (scale, rate), parts = limit_scale(task, reading), aligned_blocks(reading, 1.0, task)
    if heads > 1:
        rate = gaussian_risk(parts, task, 1.0) - gaussian_risk(parts, task, math.inf)
    if L in (1, math.inf) or limit.needed == 0:
        r = 1 / scale if math.inf == L else 0.0
        value = limit.risk if math.inf == L else task.targets * _zero(task)
        pieces = _shared(limit.reading, heads, width)
        return HeadsOptimum(
            aligned_heads([(scale * A, s * r) for A, s in pieces], task, head_dim), exactly(value, "closed form"), rate
        )
    if width >= limit.needed and (heads == 2 or L > _LONGEST):
        A, r, value = _pair(task, L, float(rate) / L)
        idle = [(np.zeros_like(A), 0.0)] * (heads - 2)
        pair = aligned_heads([(A, r / 2), (-A, -r / 2), *idle], task, head_dim)
        return HeadsOptimum(pair, exactly(value, METHOD), rate)
    if heads > 1 and L > _LONGEST:
        raise ValueError(f"L is {L:.4g}; several narrow heads are searched for L up to {_LONGEST}")
    found = _searched(task, L, heads, width, limit.needed, float(rate) / L)
    value = jnp.asarray(task.targets * (_zero(task) - found.gain))
    method = METHOD if found.stderr == 0 else "exact over prompts and W, quasi-Monte Carlo over x"
    estimate = Estimate(value, jnp.asarray(task.targets * found.stderr), method, "scores found by a search")
    return HeadsOptimum(aligned_heads(found.parts, task, head_dim), estimate, rate)


def _zero(task: LinearRegression) -> float:
    """The risk of predicting 0, for one target."""
    return (float(jnp.sum(task.query_Sigma * task.Omega)) + float(task.noise)) / 2


def _pair(task: LinearRegression, L: int | float, excess: float) -> tuple[Matrix, float, float]:
    """Scores and values of the best pair of wide heads, and its risk."""
    pair = AlignedRisk.of(task, WeightMoments(L), pair_table(L))
    reading = np.asarray(best_reading(task, L - 1), float)
    A = best_scores(task, pair, reading, excess, (0.4, _small_width(task.d, L)))
    quadratic, linear, still = pair.coefficients(A)
    r = linear / (2 * quadratic) if quadratic > 0 else 0.0
    return A, r, float(still - task.targets * r * linear / 2)


def _searched(task: LinearRegression, L: int | float, heads: int, width: int, needed: int, excess: float) -> Solved:
    """Heads that no formula is known for."""
    family, line = score_family(task), False
    if width < needed and family.groups is None:
        raise ValueError(f"head_dim is {width}, below {needed}; narrow heads need covariances with a common basis")
    plans, reading = _narrow(task, L, family, heads, width), np.asarray(best_reading(task, max(L - 1, 1)), float)
    if heads == 1:
        aligned = AlignedRisk.of(task, WeightMoments(L))
        A = best_scores(task, aligned, reading, excess, family=plans[0].families[0])
        quadratic, linear, _ = aligned.coefficients(A)
        r = linear / (2 * quadratic) if quadratic > 0 else 0.0
        return Solved([(A, r)], r * linear / 2, 0.0)
    wide = width >= needed
    line = wide and family.groups is not None and family.groups.shape == (task.d, 1) and bool(family.groups.all())
    search, final = (forms_at(task, L, line=line, final=final) for final in (False, not line))
    if wide:
        A, _, _ = _pair(task, L, excess)
        return solved(final, _wide(search, family, heads, family.parameters(A), reading), float(L))
    starts = [[np.concatenate([f.starts(reading, w)[0] for f in plan.families]) for w in _WIDTHS] for plan in plans]
    ends = [solved(final, searched(search, *each), float(L)) for each in zip(plans, starts, strict=True)]
    return max(ends, key=lambda end: end.gain)


def _wide(search: Forms, family: ScoreFamily, heads: int, pair: np.ndarray, reading: Matrix) -> Found:
    """The best pairs, one after another, and for an odd number one head more."""
    more, found = [start for width in _WIDTHS for start in family.starts(reading, width)], None
    parameters = pair
    for pairs in range(2, heads // 2 + 1):
        plan = Plan([family] * pairs, (1,) * pairs, True)
        found = searched(search, plan, [np.concatenate([parameters, start]) for start in more])
        parameters = found.parameters
    if heads % 2 == 1:
        size = len(more[0])
        both = np.concatenate([part for part in np.split(parameters, len(parameters) // size) for _ in range(2)])
        plan = Plan([family] * heads, (1, -1) * (heads // 2) + (1,), False)
        found = searched(search, plan, [np.concatenate([both, start]) for start in more])
    assert found is not None
    return found


def _narrow(task: LinearRegression, L: int | float, family: ScoreFamily, heads: int, width: int) -> list[Plan]:
    """Heads that take directions in turn, those that help most first, with both signs, and for an even number pairs."""
    if family.groups is None:
        return []
    basis, alive = family.right.T, np.flatnonzero(family.groups.any(axis=1))
    sigma, omega, query = (
        np.sum(basis * (np.asarray(part, float) @ basis), axis=0) for part in (task.Sigma, task.Omega, task.query_Sigma)
    )
    spread = (1 + 1 / L) * sigma * omega + float(task.tau1 + task.noise) / L
    order = alive[np.argsort(-(sigma * omega**2 * query / spread)[alive], kind="stable")]

    def in_turn(blocks: int) -> list[ScoreFamily]:
        return [family.on(np.take(order, np.arange(h * width, (h + 1) * width), mode="wrap")) for h in range(blocks)]

    plans = [Plan(in_turn(heads), tuple(1 - 2 * (h % 2) for h in range(heads)), False)]
    return plans + [Plan(in_turn(heads // 2), (1,) * (heads // 2), True)] * (heads % 2 == 0)


def _shared(reading: Matrix, heads: int, width: int) -> list[tuple[Matrix, float]]:
    """A reading as a sum of heads of that rank, their signs in turn, with the share of each in it."""
    left, values, right = np.linalg.svd(reading)
    rank = len(values)
    blocks = [np.arange(h * width, (h + 1) * width) % rank for h in range(heads)]
    times = np.bincount(np.concatenate([np.unique(block) for block in blocks]), minlength=rank)
    pieces = []
    for h, block in enumerate(blocks):
        kept, sign = np.unique(block), 1 - 2 * (h % 2)
        # what several heads read is divided among them
        piece = (left[:, kept] * (values[kept] / times[kept])) @ right[kept]
        pieces.append((sign * piece, float(sign)))
    return pieces


def _small_width(d: int, L: int | float) -> float:
    """The standard deviation of scores that is best for long prompts, where covariances are isotropic."""
    return math.sqrt(12 / ((d + 4) * (d + 3) * L))


def aligned_heads(parts: list[tuple[Matrix, float]], task: LinearRegression, head_dim: int | None = None) -> MultiHead:
    """Softmax heads with P = C = 0, R = rI and scores A, given as pairs (A, r), with balanced keys and queries."""
    return MultiHead([head_from_blocks(aligned_blocks(jnp.asarray(A), r, task), head_dim=head_dim) for A, r in parts])
