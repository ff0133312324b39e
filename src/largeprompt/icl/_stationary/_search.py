"""Where training can end: the stationary points of the risk of one or more heads, found and certified."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import Kind, LinearAttention, MultiHead, SoftmaxAttention, attention_of

from .._blocks import Blocks, blocks, from_blocks, head_from_blocks
from .._estimate import Estimate
from .._optimal_heads import optimal_heads
from .._optimal_linear import optimal_linear
from .._optimal_softmax import optimal_softmax
from .._regression import LinearRegression, as_regression
from .._risk._closed_form import ClosedForm
from .._risk._estimates import risk
from .._risk._heads import OverHeads
from .._risk._heads_closed_form import HeadsInClosedForm
from .._risk._over_nodes import OverNodes
from .._risk._selector import risk_function
from ._descent import (
    ROUNDING,
    Risk,
    Vector,
    best_scaled,
    controlled,
    derivatives,
    downhill,
    local,
    replicates,
    rough_ends,
    settled,
)
from ._spurious import spurious_starts
from ._starts import random_starts, shared_start, without_labels
from ._symmetries import all_flat, apart, balanced, sizes, tangents
from ._units import Standard, standardised

Layer = LinearAttention | SoftmaxAttention | MultiHead
Verdict = Literal["global minimum", "local minimum", "saddle", "undecided"]
_STATIONARY = 1e-10  # a gradient's norm, in standard units, at a point that is reported
_STATIONARY_FOR_TABLES = 1e-5  # the same for several softmax heads, whose tables meet to within 1e-6
_FAR = 1e4  # times L^{1/4}: where the search has run away
_SIGMAS = 5
_LEAPS = 4  # from saddle to saddle


class StationaryPoint(AbstractShown):
    """A layer at which the gradient of the risk vanishes, and what its Hessian in the blocks of its heads says of it.

    `zero_modes` counts the eigenvalues that are 0 to within rounding, or for softmax attention to within 5 standard
    errors of the nodes; `symmetries` is how many of them the continuous symmetries account for. A minimum has only
    positive curvature across these; where some may be 0 the point is undecided. `excess` is what the risk
    is above that of `optimal_linear`, `optimal_softmax` or, for two softmax heads, `optimal_heads`.
    """

    attention: Layer
    risk: Estimate
    excess: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    hessian_eigenvalues: Float[Array, " n"]
    zero_modes: int = eqx.field(static=True)
    symmetries: int = eqx.field(static=True)
    kind: Verdict = eqx.field(static=True)


def stationary_points(
    task: LinearRegression,
    L: int | float,
    kind: Kind,
    key: PRNGKeyArray | None = None,
    *,
    heads: int = 1,
    starts: int = 64,
    draws: int = 2**11,
) -> list[StationaryPoint]:
    r"""Stationary points of $R_L$ over all (U, V), the lowest risk first, one for each family of symmetric copies.

    The search goes downhill from the optimum, from the points that theory predicts, and from `starts` random layers,
    half of them as PyTorch draws them and half Gaussian of many sizes; from a saddle it goes on along the most negative
    curvature. It may miss points that few random starts lead to. Risk, gradient and Hessian of linear attention are
    exact. Those of softmax attention are averages over `draws` fixed nodes: the point is stationary for these, and its
    risk is that over others. The optimum is always in the list; where its gradient cannot be made to vanish it is
    undecided. At `L = inf` the spurious points have run to infinity: only the global minimum is left. With several
    `heads` all are of one kind and as wide as a token. Two softmax heads are sought with P = C = 0, which a gradient
    flow keeps, and judged in all blocks. It takes float64, in which a flat direction is known from a nearly flat one.
    """
    task, L, heads = as_regression(task), checks.prompt_length(L), checks.count("heads", heads)
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; it must be 'softmax' or 'linear'")
    if kind == "softmax" and heads > 2 and math.inf > L:
        raise ValueError(f"heads is {heads}; the least risk is known for 1 and 2 softmax heads")
    starts = checks.count("starts", starts, at_least=0)
    if task.Sigma.dtype != np.float64:
        raise ValueError(
            f"task is in {task.Sigma.dtype}; stationary points need float64: make it after largeprompt.use_float64()"
        )
    of_nodes, of_check, of_starts = jax.random.split(checks.key_or_default(key), 3)
    standard, aligned = standardised(task), heads > 1 and kind == "softmax" and math.inf > L
    random = random_starts(of_starts, standard, max(1, starts), heads, aligned=aligned)

    def function(of: PRNGKeyArray, draws: int, *, aligned: bool = aligned) -> Risk:
        x = random[0] if aligned else random[0] + 1e-3  # any that is not aligned
        layer = _layer(apart(x, task.d, task.targets), kind)
        found = risk_function(layer, standard.task, L, of, draws=draws)
        assert isinstance(found, ClosedForm | OverNodes | HeadsInClosedForm | OverHeads)
        return found

    least, optimum = _optimum(task, L, kind, heads)
    full = function(of_nodes, draws, aligned=False) if aligned else None
    search = _Search(
        function(of_nodes, draws), function(of_check, 8 * draws), full, kind, standard, float(least.value), L
    )
    found = search.below(all_flat(standard.into(parts) for parts in optimum), is_optimum=True)
    if aligned:
        found += search.below(shared_start(standard, L, heads))
    else:
        for start, subspace in spurious_starts(standard.task, L, heads):
            found += search.below(best_scaled(search.function, start), subspace)
    if starts:
        with _overflow_ignored():
            ends = rough_ends(search.function, random)
        for start in ends:
            found += search.below(start)
    return _distinct(found)


def _optimum(task: LinearRegression, L: int | float, kind: Kind, heads: int) -> tuple[Estimate, list[Blocks]]:
    """The least risk, and heads that have it."""
    if kind == "softmax" and heads > 1 and math.inf > L:
        pair = optimal_heads(task, L, heads)
        return pair.risk, [blocks(head.merged(), task) for head in pair.attention.heads]
    # of linear heads no number is better than one
    one = (optimal_linear if kind == "linear" else optimal_softmax)(task, L)
    parts = blocks(one.attention, task)
    return one.risk, [parts] + (heads - 1) * [jax.tree.map(jnp.zeros_like, parts)]


def _layer(heads: list[Blocks], kind: Kind) -> Layer:
    if len(heads) > 1:
        return MultiHead([head_from_blocks(parts, kind) for parts in heads])
    return from_blocks(jax.tree.map(jnp.asarray, heads[0]), attention_of(kind))


@contextlib.contextmanager
def _overflow_ignored() -> Iterator[None]:
    """A layer may run away to where its risk overflows."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class _Candidate(NamedTuple):
    point: StationaryPoint
    x: Vector
    sizes: Float[np.ndarray, " m"]
    moved: float  # how far the errors of the nodes, and rounding, may have moved the point
    slack: float  # and the risk
    downhill: Vector  # a short way along the most negative curvature

    def same_as(self, other: "_Candidate") -> bool:
        """Whether no number that symmetries leave alone tells the points apart."""
        a, b = self.point, other.point
        if a.kind != b.kind or abs(float(a.risk.value) - float(b.risk.value)) > max(self.slack, other.slack):
            return False
        if max(a.zero_modes - a.symmetries, b.zero_modes - b.symmetries) > 0:
            return True  # in a flat valley sizes vary
        tolerance = _SIGMAS * (self.moved + other.moved) + 1e-3 * np.maximum(1, self.sizes)
        return bool(np.all(np.abs(self.sizes - other.sizes) <= tolerance))


class _Search(NamedTuple):
    """One risk in standard units, averages to check it with, and the least value known, in the task's.

    `full` is the average over nodes of (W, x) where the search is among heads with P = C = 0.
    """

    function: Risk
    check: Risk
    full: Risk | None
    kind: Kind
    standard: Standard
    least: float
    L: int | float

    def below(
        self, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None, *, is_optimum: bool = False
    ) -> list[_Candidate]:
        """What lies downhill of `x`, first within a subspace that the gradient does not leave, then beyond saddles."""
        found: list[_Candidate] = []
        small = _STATIONARY_FOR_TABLES if isinstance(self.function, OverHeads) else _STATIONARY
        far = _FAR * (1 if math.inf == self.L else self.L**0.25)
        with _overflow_ignored():
            for _ in range(_LEAPS):
                for function in controlled(self.function, x):
                    end, gradient_norm = settled(function, downhill(function, x, subspace))
                    if subspace is not None and not gradient_norm <= small:
                        end, gradient_norm = settled(function, downhill(function, end))
                    if gradient_norm <= small and np.linalg.norm(end) <= far:
                        found.append(self._examined(function, end))
                        break
                else:
                    break
                if found[-1].point.kind != "saddle":
                    break
                x, subspace = found[-1].x + found[-1].downhill, None
            if is_optimum and not found:
                given = self._examined(controlled(self.function, x)[0], x)
                found.append(given._replace(point=dataclasses.replace(given.point, kind="undecided")))
        return found

    def _examined(self, function: Risk, x: Vector) -> _Candidate:
        task, (gradient, hessian, errors) = function.task, local(function, self.full, x)
        heads, linear = apart(x, task.d, task.targets), function.exact
        eigenvalues, modes = np.linalg.eigh(hessian)
        slopes, spreads = errors(modes)
        rounding = ROUNDING * float(np.abs(eigenvalues).max())
        tolerance = np.maximum(_SIGMAS * spreads, rounding)
        zero = np.abs(eigenvalues) <= tolerance
        # a slope that is an error moves the point by slope/curvature and the risk by slope²/(2 curvature)
        slopes = np.hypot(slopes, modes.T @ gradient)
        moved = float(np.linalg.norm(slopes[~zero] / eigenvalues[~zero]))
        raised = float(np.sum(slopes[~zero] ** 2 / np.abs(eigenvalues[~zero])) / 2)

        symmetric = tangents(heads, task, linear=linear, error=_SIGMAS * moved, hessian=hessian)
        m = symmetric.shape[1]
        across = np.linalg.svd(symmetric)[0][:, m:] if m else np.eye(len(x))
        curvatures, vectors = np.linalg.eigh(across.T @ hessian @ across)
        directions = np.concatenate([across @ vectors, symmetric], axis=1)
        tolerance = np.maximum(_SIGMAS * errors(directions)[1], rounding)[: len(x) - m]

        value = self._risk(x)
        slack = _SIGMAS * (float(value.stderr) + self.standard.factor * raised) + 1e-8 * abs(float(value.value))
        excess = float(value.value) - self.least
        kind: Verdict = "undecided"
        if np.any(curvatures < -tolerance):
            kind = "saddle"
        elif linear and excess <= slack:
            kind = "global minimum"  # the least risk of linear heads is known: flat directions do not matter
        elif np.all(curvatures > tolerance):
            kind = "global minimum" if excess <= slack else "local minimum"
        given, gradient_norm, spectrum = self._in_given_units(function, x, gradient, hessian)
        point = StationaryPoint(
            _layer(given, self.kind),
            value,
            jnp.asarray(excess),
            jnp.asarray(gradient_norm),
            jnp.asarray(spectrum),
            int(np.count_nonzero(zero)),
            m,
            kind,
        )
        away = 0.01 * float(np.linalg.norm(x)) * directions[:, 0]
        return _Candidate(point, x, sizes(x, task, linear=linear), moved, slack, away)

    def _in_given_units(
        self, function: Risk, x: Vector, gradient: Vector, hessian: Float[np.ndarray, "n n"]
    ) -> tuple[list[Blocks], float, Vector]:
        """The heads in the task's own units, balanced if their scales are free, the gradient's norm, the curvatures."""
        task, standard = function.task, self.standard
        d, k = task.d, task.targets
        given = all_flat(standard.out(parts) for parts in apart(x, d, k))
        way = np.stack([all_flat(standard.into(parts) for parts in apart(e, d, k)) for e in np.eye(x.size)], axis=1)
        if function.exact:
            given = balanced(given, d, k)
            _, gradient, hessian = derivatives(function, way @ given)
        slope, curvatures = way.T @ gradient, np.linalg.eigvalsh(way.T @ hessian @ way)
        return apart(given, d, k), standard.factor * float(np.linalg.norm(slope)), standard.factor * curvatures

    def _risk(self, x: Vector) -> Estimate:
        """The risk in the task's own units."""
        task, standard = self.check.task, self.standard
        heads = apart(x, task.d, task.targets)
        if self.check.exact:
            value, stderr, method = derivatives(self.check, x)[0], 0.0, self.check.method
        elif len(heads) == 1 and max(float(np.abs(block).max()) for block in (heads[0].C, heads[0].P)) < ROUNDING:
            found = risk(_layer([without_labels(heads[0])], self.kind), task, self.L)
            value, stderr, method = float(found.value), float(found.stderr), found.method
        else:
            check = controlled(self.check, x)[0]
            values = np.asarray(replicates(check, x))
            value, stderr, method = values.mean(), values.std(ddof=1) / math.sqrt(len(values)), check.method
        return Estimate(
            jnp.asarray(standard.risk_out(float(value))), jnp.asarray(standard.factor * float(stderr)), method
        )


def _distinct(candidates: list[_Candidate]) -> list[StationaryPoint]:
    """The lowest risk first, points that are the same but for symmetries counted once."""
    kept: list[_Candidate] = []
    for new in sorted(candidates, key=lambda candidate: float(candidate.point.risk.value)):
        if not any(old.same_as(new) for old in kept):
            kept.append(new)
    return [candidate.point for candidate in kept]
