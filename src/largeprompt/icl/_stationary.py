r"""Where training can end: the stationary points of the risk of one layer in all of (U, V), found and certified.

Besides its global minimum linear attention has others. With $n^\top\Sigma n = 1$ let
$$C = Xn^\top,\quad P = Yn^\top,\quad R = 1,\quad A = \Sigma^{-1} - XY\,nn^\top,\quad Y = X(Y^2 - \tau_1 - s^2):$$
along n the labels are scored in place of the covariates, exactly as well at infinite length, and the even part of the
output has mean 0 over W. What is left costs $\rho_2qX^2 + (T-q)/(2LX^2)$ with $q = n^\top\Sigma_qn$ and
$T = \mathrm{tr}\,\Sigma^{-1}\Sigma_q$, least at $X^4 = (T-q)/(2\rho_2qL)$. As $L\to\infty$ the excess vanishes like
$L^{-1/2}$ while P grows like $L^{1/4}$. Where $\Sigma_q=\Sigma$ all n cost the same to this order: the next one decides
which of them are minima and which are saddles.
"""

import math
import warnings
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import Head, Kind, LinearAttention, SoftmaxAttention, attention_of

from ._closed_forms import Blocks, blocks
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
    settled,
)
from ._estimate import Estimate, exactly
from ._optima import as_regression, from_blocks, optimal_linear
from ._optimal_softmax import common_basis, optimal_softmax
from ._regression import LinearRegression
from ._risk import risk, risk_function
from ._risk_functions import ClosedForm, OverNodes
from ._symmetries import flat, from_flat, tangents

Verdict = Literal["global minimum", "local minimum", "saddle", "undecided"]
_STATIONARY = 1e-10  # a gradient's norm at a point that is reported
_SIGMAS = 5
_LEAPS = 4  # from saddle to saddle


class StationaryPoint(AbstractShown):
    """A layer at which the gradient of the risk vanishes, and what its Hessian in the blocks (A, C, P, R) says of it.

    `zero_modes` counts the eigenvalues that are 0 to within rounding, or for softmax attention to within 5 standard
    errors of the nodes; `symmetries` is how many of them the continuous symmetries account for. A minimum has only
    positive curvature across these; where some cannot be told from 0 the point is undecided. `excess` is what the risk
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
    starts: int = 8,
    draws: int = 2**11,
) -> list[StationaryPoint]:
    r"""Stationary points of $R_L$ over all (U, V), the lowest risk first, one for each family of symmetric copies.

    The search goes downhill from the optimum, from the spurious points that theory predicts (one target), and from
    `starts` random layers as PyTorch draws them; from a saddle it goes on along the most negative curvature. It may
    miss points. Risk, gradient and Hessian of linear attention are exact. Those of softmax attention are averages over
    `draws` fixed nodes: the point is stationary for these, and its risk is that over others. At `L = inf` the spurious
    points have run to infinity, and for d = 1 there are none: only the global minimum is left.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    layer = attention_of(kind)
    starts = checks.count("starts", starts, at_least=0)
    of_nodes, of_check, of_starts = jax.random.split(checks.key_or_default(key), 3)
    optimum = (optimal_linear if kind == "linear" else optimal_softmax)(task, L)
    full = from_blocks(_random_blocks(of_starts, task), layer)  # any layer that is not aligned
    function = risk_function(full, task, L, of_nodes, draws=draws)
    check = risk_function(full, task, L, of_check, draws=8 * draws)
    assert isinstance(function, ClosedForm | OverNodes)
    assert isinstance(check, ClosedForm | OverNodes)
    search = _Search(function, check, layer, float(optimum.risk.value), L)
    found = search.below(flat(blocks(optimum.attention, task)))
    for start, subspace in _spurious_starts(task, L):
        found += search.below(best_scaled(function, start), subspace)
    for of_start in jax.random.split(of_starts, starts):
        found += search.below(flat(_random_blocks(of_start, task)))
    return _distinct(found)


def predicted_excess(task: LinearRegression, L: int | float) -> Float[Array, ""]:
    r"""What linear attention loses, as $L\to\infty$, at the lowest of its spurious minima.

    $\sqrt{2\rho_2\,q(T-q)/L}$ with $q$ an eigenvalue of $\Sigma^{-1}\Sigma_q$ and $T$ their sum, the $q$ that makes it
    least. Where $\Sigma_q = \Sigma$ it is $\sqrt{2(d-1)\,\mathrm{tr}(\Sigma\Omega)^2/L}$; for $\Sigma = I$,
    $\Omega = \lambda I$, $\lambda\sqrt{2d(d-1)/L}$. For d = 1 there are none, and it is 0.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    if task.targets > 1:
        raise ValueError(f"task has {task.targets} targets; the excess of spurious minima is known for one target")
    values = np.linalg.eigvalsh(np.asarray(task.Sigma))
    if values[0] <= ROUNDING * values[-1]:
        raise ValueError("Sigma is singular; the excess of spurious minima is known for an invertible Sigma")
    q = np.linalg.eigvals(np.linalg.solve(np.asarray(task.Sigma), np.asarray(task.query_Sigma))).real
    return jnp.sqrt(2 * task.rho2 * float(np.min(q * (q.sum() - q))) / L)


def _spurious_starts(task: LinearRegression, L: int | float) -> list[tuple[Vector, Float[np.ndarray, "n m"] | None]]:
    """The points of the module's formula, one a principal axis, each with the subspace its reflections leave alone."""
    d = task.d
    Sigma, Omega, Sq = (np.asarray(m) for m in (task.Sigma, task.Omega, task.query_Sigma))
    values = np.linalg.eigvalsh(Sigma)
    if math.inf == L or task.targets > 1 or d == 1 or values[0] <= ROUNDING * values[-1] or not np.any(Omega):
        return []
    inverse = np.linalg.inv(Sigma)
    basis, groups = common_basis(task)
    axes = np.linalg.eigh(Sigma)[1].T if basis is None else basis.T[[group[0] for group in groups]]
    total, label = float(np.sum(inverse * Sq)), float(task.tau1 + task.noise)
    found = []
    for axis in axes:
        n = axis / math.sqrt(axis @ Sigma @ axis)
        q = float(n @ Sq @ n)
        if not 0 < q < total:
            continue
        X = ((total - q) / (2 * float(task.rho2) * q * L)) ** 0.25
        Y = (1 + math.sqrt(1 + 4 * X**2 * label)) / (2 * X)
        start = [inverse - X * Y * np.outer(n, n), X * n, Y * n, np.ones(1)]
        subspace = None
        if basis is not None:
            still = [np.zeros((d, d)), np.zeros(d), np.zeros(d), np.zeros(1)]
            kept = [[np.outer(e, e), *still[1:]] for e in basis.T]
            kept += [[still[0], c * axis, p * axis, np.full(1, r)] for c, p, r in np.eye(3)]
            subspace = np.stack([flat(move) for move in kept], axis=1)
        found.append((flat(start), subspace))
    return found


def _random_blocks(key: PRNGKeyArray, task: LinearRegression) -> Blocks:
    return blocks(Head.pytorch_default(key, task.dim, outputs=task.targets).merged(), task)


class _Candidate(NamedTuple):
    point: StationaryPoint
    x: Vector
    slack: float  # how far the errors of the nodes may have moved the risk
    downhill: Vector  # a short way along the most negative curvature


class _Search(NamedTuple):
    """One risk, averages to check it with, and the least value known."""

    function: Risk
    check: Risk
    layer: type[LinearAttention] | type[SoftmaxAttention]
    least: float
    L: int | float

    def below(self, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None) -> list[_Candidate]:
        """What lies downhill of `x`, first within a subspace that the gradient does not leave, then beyond saddles."""
        found: list[_Candidate] = []
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # a layer may run away to where its risk overflows
            for _ in range(_LEAPS):
                for function in controlled(self.function, x):
                    end = x if subspace is None else downhill(function, x, subspace)
                    end, gradient_norm = settled(function, downhill(function, end))
                    if gradient_norm <= _STATIONARY:
                        found.append(self._examined(function, end, gradient_norm))
                        break
                else:
                    break
                if found[-1].point.kind != "saddle":
                    break
                x, subspace = found[-1].x + found[-1].downhill, None
        return found

    def _examined(self, function: Risk, x: Vector, gradient_norm: float) -> _Candidate:
        task, (_, _, hessian) = function.task, derivatives(function, x)
        parts = from_flat(x, task.d, task.targets)
        eigenvalues, modes = np.linalg.eigh(hessian)
        slopes, spreads = errors(function, x, modes)
        rounding = ROUNDING * float(np.abs(eigenvalues).max())
        tolerance = np.maximum(_SIGMAS * spreads, rounding)
        zero = np.abs(eigenvalues) <= tolerance
        # a slope that is an error moves the point by slope/curvature and the risk by slope²/(2 curvature)
        moved = float(np.linalg.norm(slopes[~zero] / eigenvalues[~zero]))
        raised = float(np.sum(slopes[~zero] ** 2 / np.abs(eigenvalues[~zero])) / 2)

        symmetric = tangents(parts, task, scale=isinstance(function, ClosedForm), error=_SIGMAS * moved)
        m = symmetric.shape[1]
        across = np.linalg.svd(symmetric)[0][:, m:] if m else np.eye(len(x))
        curvatures, vectors = np.linalg.eigh(across.T @ hessian @ across)
        directions = np.concatenate([across @ vectors, symmetric], axis=1)
        tolerance = np.maximum(_SIGMAS * errors(function, x, directions)[1], rounding)[: len(x) - m]

        value = self._risk(parts)
        slack = _SIGMAS * (float(value.stderr) + raised) + 1e-8 * abs(float(value.value))
        excess = float(value.value) - self.least
        kind: Verdict = "undecided"
        if np.any(curvatures < -tolerance):
            kind = "saddle"
        elif np.all(curvatures > tolerance):
            kind = "global minimum" if excess <= slack else "local minimum"
        point = StationaryPoint(
            from_blocks(parts, self.layer),
            value,
            jnp.asarray(excess),
            jnp.asarray(gradient_norm),
            jnp.asarray(eigenvalues),
            int(np.count_nonzero(zero)),
            m,
            kind,
        )
        return _Candidate(point, x, slack, 0.01 * float(np.linalg.norm(x)) * directions[:, 0])

    def _risk(self, parts: Blocks) -> Estimate:
        if isinstance(self.check, ClosedForm):
            return exactly(derivatives(self.check, flat(parts))[0], self.check.method)
        if max(float(np.abs(parts.C).max()), float(np.abs(parts.P).max())) < ROUNDING:
            aligned = parts._replace(C=jnp.zeros_like(parts.C), P=jnp.zeros_like(parts.P))
            return risk(from_blocks(aligned, SoftmaxAttention), self.check.task, self.L)
        check = controlled(self.check, flat(parts))[0]
        values = replicates(check, flat(parts))
        return Estimate(values.mean(), values.std(ddof=1) / math.sqrt(len(values)), check.method)


def _distinct(candidates: list[_Candidate]) -> list[StationaryPoint]:
    """The lowest risk first, points of one kind whose risks cannot be told apart counted once."""
    kept: list[_Candidate] = []
    for new in sorted(candidates, key=lambda candidate: float(candidate.point.risk.value)):
        if not any(
            old.point.kind == new.point.kind
            and abs(float(old.point.risk.value) - float(new.point.risk.value)) <= max(old.slack, new.slack)
            for old in kept
        ):
            kept.append(new)
    return [candidate.point for candidate in kept]
