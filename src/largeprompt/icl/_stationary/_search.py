"""Where training can end: the stationary points of the risk of one layer in all of (U, V), found and certified."""

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
from largeprompt.attention import Head, Kind, LinearAttention, SoftmaxAttention, attention_of

from .._blocks import Blocks, blocks, from_blocks
from .._estimate import Estimate
from .._optimal_linear import optimal_linear
from .._optimal_softmax import optimal_softmax
from .._regression import LinearRegression, as_regression
from .._risk._closed_form import ClosedForm
from .._risk._estimates import risk
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
    errors,
    replicates,
    rough_ends,
    settled,
)
from ._spurious import spurious_starts
from ._symmetries import balanced, flat, from_flat, sizes, tangents
from ._units import Standard, standardised

Verdict = Literal["global minimum", "local minimum", "saddle", "undecided"]
_STATIONARY = 1e-10  # a gradient's norm, in standard units, at a point that is reported
_FAR = 1e4  # times L^{1/4}: where the search has run away
_SIGMAS = 5
_LEAPS = 4  # from saddle to saddle


class StationaryPoint(AbstractShown):
    """A layer at which the gradient of the risk vanishes, and what its Hessian in the blocks (A, C, P, R) says of it.

    `zero_modes` counts the eigenvalues that are 0 to within rounding, or for softmax attention to within 5 standard
    errors of the nodes; `symmetries` is how many of them the continuous symmetries account for. A minimum has only
    positive curvature across these; where some may be 0 the point is undecided. `excess` is what the risk
    is above that of `optimal_linear` or `optimal_softmax`.
    """

    attention: LinearAttention | SoftmaxAttention
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
    starts: int = 64,
    draws: int = 2**11,
) -> list[StationaryPoint]:
    r"""Stationary points of $R_L$ over all (U, V), the lowest risk first, one for each family of symmetric copies.

    The search goes downhill from the optimum, from the spurious points that theory predicts, and from `starts` random
    layers, half of them as PyTorch draws them and half Gaussian of many sizes; from a saddle it goes on along the most
    negative curvature. It may miss points that few random starts lead to. Risk, gradient and Hessian of linear
    attention are exact. Those of softmax attention are averages over `draws` fixed nodes: the point is stationary for
    these, and its risk is that over others. The optimum is always in the list; where its gradient cannot be made to
    vanish it is undecided. At `L = inf` the spurious points have run to infinity: only the global minimum is left.
    It takes float64, in which a flat direction is known from a nearly flat one.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; it must be 'softmax' or 'linear'")
    layer = attention_of(kind)
    starts = checks.count("starts", starts, at_least=0)
    if task.Sigma.dtype != np.float64:
        raise ValueError(
            f"task is in {task.Sigma.dtype}; stationary points need float64: make it after largeprompt.use_float64()"
        )
    of_nodes, of_check, of_starts = jax.random.split(checks.key_or_default(key), 3)
    optimum = (optimal_linear if kind == "linear" else optimal_softmax)(task, L)
    standard = standardised(task)
    random = _random_starts(of_starts, standard, max(1, starts))
    full = from_blocks(from_flat(jnp.asarray(random[0]), task.d, task.targets), layer)  # any that is not aligned
    function = risk_function(full, standard.task, L, of_nodes, draws=draws)
    check = risk_function(full, standard.task, L, of_check, draws=8 * draws)
    assert isinstance(function, ClosedForm | OverNodes)
    assert isinstance(check, ClosedForm | OverNodes)
    search = _Search(function, check, layer, standard, float(optimum.risk.value), L)
    found = search.below(flat(standard.into(blocks(optimum.attention, task))), is_optimum=True)
    for start, subspace in spurious_starts(standard.task, L):
        found += search.below(best_scaled(function, start), subspace)
    if starts:
        with _overflow_ignored():
            ends = rough_ends(function, random)
        for start in ends:
            found += search.below(start)
    return _distinct(found)


def _random_starts(key: PRNGKeyArray, standard: Standard, starts: int) -> Float[np.ndarray, "s n"]:
    task, (of_layers, of_others) = standard.given, jax.random.split(key)

    def drawn(key: PRNGKeyArray) -> Blocks:
        return blocks(Head.pytorch_default(key, task.dim, outputs=task.targets).merged(), task)

    layers = jax.vmap(drawn)(jax.random.split(of_layers, (starts + 1) // 2))
    first = [flat(standard.into(Blocks(*parts))) for parts in zip(*layers, strict=True)]
    rng = np.random.default_rng(np.asarray(jax.random.key_data(of_others)).ravel())
    scale = 10 ** rng.uniform(-1, 0.5, (starts // 2, 1))
    return np.concatenate([np.stack(first), scale * rng.normal(size=(starts // 2, first[0].size))])


@contextlib.contextmanager
def _overflow_ignored() -> Iterator[None]:
    """A layer may run away to where its risk overflows."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class _Candidate(NamedTuple):
    point: StationaryPoint
    x: Vector
    sizes: Float[np.ndarray, " 4"]
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
    """One risk in standard units, averages to check it with, and the least value known, in the task's."""

    function: Risk
    check: Risk
    layer: type[LinearAttention] | type[SoftmaxAttention]
    standard: Standard
    least: float
    L: int | float

    def below(
        self, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None, *, is_optimum: bool = False
    ) -> list[_Candidate]:
        """What lies downhill of `x`, first within a subspace that the gradient does not leave, then beyond saddles."""
        found: list[_Candidate] = []
        far = _FAR * (1 if math.inf == self.L else self.L**0.25)
        with _overflow_ignored():
            for _ in range(_LEAPS):
                for function in controlled(self.function, x):
                    end, gradient_norm = settled(function, downhill(function, x, subspace))
                    if subspace is not None and not gradient_norm <= _STATIONARY:
                        end, gradient_norm = settled(function, downhill(function, end))
                    if gradient_norm <= _STATIONARY and np.linalg.norm(end) <= far:
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
        task, (_, gradient, hessian) = function.task, derivatives(function, x)
        parts, has_scale = from_flat(x, task.d, task.targets), function.exact
        eigenvalues, modes = np.linalg.eigh(hessian)
        slopes, spreads = errors(function, x, modes)
        rounding = ROUNDING * float(np.abs(eigenvalues).max())
        tolerance = np.maximum(_SIGMAS * spreads, rounding)
        zero = np.abs(eigenvalues) <= tolerance
        # a slope that is an error moves the point by slope/curvature and the risk by slope²/(2 curvature)
        slopes = np.hypot(slopes, modes.T @ gradient)
        moved = float(np.linalg.norm(slopes[~zero] / eigenvalues[~zero]))
        raised = float(np.sum(slopes[~zero] ** 2 / np.abs(eigenvalues[~zero])) / 2)

        symmetric = tangents(parts, task, scale=has_scale, error=_SIGMAS * moved)
        m = symmetric.shape[1]
        across = np.linalg.svd(symmetric)[0][:, m:] if m else np.eye(len(x))
        curvatures, vectors = np.linalg.eigh(across.T @ hessian @ across)
        directions = np.concatenate([across @ vectors, symmetric], axis=1)
        tolerance = np.maximum(_SIGMAS * errors(function, x, directions)[1], rounding)[: len(x) - m]

        value = self._risk(parts)
        slack = _SIGMAS * (float(value.stderr) + self.standard.factor * raised) + 1e-8 * abs(float(value.value))
        excess = float(value.value) - self.least
        kind: Verdict = "undecided"
        if np.any(curvatures < -tolerance):
            kind = "saddle"
        elif np.all(curvatures > tolerance):
            kind = "global minimum" if excess <= slack else "local minimum"
        given, gradient_norm, spectrum = self._in_given_units(function, parts)
        point = StationaryPoint(
            from_blocks(given, self.layer),
            value,
            jnp.asarray(excess),
            jnp.asarray(gradient_norm),
            jnp.asarray(spectrum),
            int(np.count_nonzero(zero)),
            m,
            kind,
        )
        away = 0.01 * float(np.linalg.norm(x)) * directions[:, 0]
        return _Candidate(point, x, sizes(x, task, scale=has_scale), moved, slack, away)

    def _in_given_units(self, function: Risk, parts: Blocks) -> tuple[Blocks, float, Vector]:
        """The layer in the task's own units, balanced if its scale is free, the gradient's norm and the curvatures."""
        task, standard = function.task, self.standard
        x = flat(standard.out(parts))
        if function.exact:
            x = balanced(x, task.d, task.targets)
        given = from_flat(x, task.d, task.targets)
        way = np.stack([flat(standard.into(from_flat(e, task.d, task.targets))) for e in np.eye(x.size)], axis=1)
        _, gradient, hessian = derivatives(function, way @ x)
        slope, curvatures = way.T @ gradient, np.linalg.eigvalsh(way.T @ hessian @ way)
        as_arrays = Blocks(*(jnp.asarray(block) for block in given))
        return as_arrays, standard.factor * float(np.linalg.norm(slope)), standard.factor * curvatures

    def _risk(self, parts: Blocks) -> Estimate:
        """The risk in the task's own units."""
        task, standard = self.check.task, self.standard
        if self.check.exact:
            value, stderr, method = derivatives(self.check, flat(parts))[0], 0.0, self.check.method
        elif max(float(np.abs(parts.C).max()), float(np.abs(parts.P).max())) < ROUNDING:
            aligned = parts._replace(C=jnp.zeros_like(parts.C), P=jnp.zeros_like(parts.P))
            found = risk(from_blocks(aligned, SoftmaxAttention), task, self.L)
            value, stderr, method = float(found.value), float(found.stderr), found.method
        else:
            check = controlled(self.check, flat(parts))[0]
            values = np.asarray(replicates(check, flat(parts)))
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
