r"""Where training can end: the stationary points of the risk of one layer in all of (U, V), found and certified.

Besides its global minimum linear attention has others. With $n^\top\Sigma n = 1$ let
$$C = Xn^\top,\quad P = Yn^\top,\quad R = 1,\quad A = \Sigma^{-1} - XY\,nn^\top,\quad Y = X(Y^2 - \tau_1 - s^2):$$
along n the labels are scored in place of the covariates, exactly as well at infinite length, and the even part of the
output has mean 0 over W. What is left costs $\rho_2qX^2 + (T-q)/(2LX^2)$ with $q = n^\top\Sigma_qn$ and
$T = \mathrm{tr}\,\Sigma^{-1}\Sigma_q$, least at $X^4 = (T-q)/(2\rho_2qL)$. As $L\to\infty$ the excess vanishes like
$L^{-1/2}$ while P grows like $L^{1/4}$. Where $\Sigma_q=\Sigma$ all n cost the same to this order: the next one decides
which of them are minima and which are saddles.
"""

import functools
import math
import warnings
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.optimize import minimize

from largeprompt import _checks as checks
from largeprompt.attention import LinearAttention, SoftmaxAttention

from ._closed_forms import Blocks, blocks, gaussian_risk
from ._estimate import Estimate, exactly
from ._optima import as_regression, from_blocks, optimal_linear
from ._optimal_softmax import common_basis, optimal_softmax
from ._regression import LinearRegression
from ._risk import risk, risk_function
from ._risk_functions import ClosedForm, OverNodes
from ._softmax_risk import softmax_risk
from ._symmetries import flat, from_flat, tangents

Kind = Literal["global minimum", "local minimum", "saddle", "undecided"]
Vector = Float[np.ndarray, " n"]
_ROUNDING = 1e-12  # of the largest curvature: what is zero in float64
_STATIONARY = 1e-10  # a gradient's norm at a point that is reported
_NEARLY_STATIONARY = 1e-9  # where Newton's method takes over
_SIGMAS = 5
_LEAPS, _NEWTON_STEPS = 4, 30


class StationaryPoint(eqx.Module):
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
    kind: Kind = eqx.field(static=True)


def stationary_points(
    task: LinearRegression,
    L: int | float,
    kind: Literal["linear", "softmax"],
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
    if kind not in ("linear", "softmax"):
        raise ValueError(f"kind is {kind!r}; it must be 'linear' or 'softmax'")
    starts = checks.count("starts", starts, at_least=0)
    of_nodes, of_check, of_starts = jax.random.split(jax.random.key(0) if key is None else checks.key(key), 3)
    layer = LinearAttention if kind == "linear" else SoftmaxAttention
    optimum = (optimal_linear if kind == "linear" else optimal_softmax)(task, L)
    full = from_blocks(_random_blocks(of_starts, task), layer)  # any layer that is not aligned
    function = risk_function(full, task, L, of_nodes, draws=draws)
    check = risk_function(full, task, L, of_check, draws=8 * draws)
    assert isinstance(function, ClosedForm | OverNodes)
    assert isinstance(check, ClosedForm | OverNodes)
    search = _Search(function, check, layer, float(optimum.risk.value), L)
    found = search.below(flat(blocks(optimum.attention, task)))
    for start, subspace in _spurious_starts(task, L):
        found += search.below(_best_scaled(function, start), subspace)
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
    if values[0] <= _ROUNDING * values[-1]:
        raise ValueError("Sigma is singular; the excess of spurious minima is known for an invertible Sigma")
    q = np.linalg.eigvals(np.linalg.solve(np.asarray(task.Sigma), np.asarray(task.query_Sigma))).real
    return jnp.sqrt(2 * task.rho2 * float(np.min(q * (q.sum() - q))) / L)


def _spurious_starts(task: LinearRegression, L: int | float) -> list[tuple[Vector, Float[np.ndarray, "n m"] | None]]:
    """The points of the module's formula, one a principal axis, each with the subspace its reflections leave alone."""
    d = task.d
    Sigma, Omega, Sq = (np.asarray(m) for m in (task.Sigma, task.Omega, task.query_Sigma))
    values = np.linalg.eigvalsh(Sigma)
    if math.inf == L or task.targets > 1 or d == 1 or values[0] <= _ROUNDING * values[-1] or not np.any(Omega):
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
    """Those of a head with entries uniform on ±1/√D, PyTorch's default."""
    D, k = task.dim, task.targets
    K, Q, V, O = jax.random.uniform(key, (4, D, D), minval=-1, maxval=1) / math.sqrt(D)
    return blocks(LinearAttention(K.T @ Q, O[-k:] @ V), task)


class _Candidate(NamedTuple):
    point: StationaryPoint
    x: Vector
    slack: float  # how far the errors of the nodes may have moved the risk
    downhill: Vector  # a short way along the most negative curvature


class _Search(NamedTuple):
    """One risk, averages to check it with, and the least value known."""

    function: ClosedForm | OverNodes
    check: ClosedForm | OverNodes
    layer: type[LinearAttention] | type[SoftmaxAttention]
    least: float
    L: int | float

    def below(self, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None) -> list[_Candidate]:
        """What lies downhill of `x`, first within a subspace that the gradient does not leave, then beyond saddles."""
        found: list[_Candidate] = []
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # a layer may run away to where its risk overflows
            for _ in range(_LEAPS):
                for function in _controlled(self.function, x):
                    end = x if subspace is None else _downhill(function, x, subspace)
                    end, gradient_norm = _settled(function, _downhill(function, end))
                    if gradient_norm <= _STATIONARY:
                        found.append(self._examined(function, end, gradient_norm))
                        break
                else:
                    break
                if found[-1].point.kind != "saddle":
                    break
                x, subspace = found[-1].x + found[-1].downhill, None
        return found

    def _examined(self, function: ClosedForm | OverNodes, x: Vector, gradient_norm: float) -> _Candidate:
        task, (_, _, hessian) = function.task, _derivatives(function, x)
        parts = from_flat(x, task.d, task.targets)
        eigenvalues, modes = np.linalg.eigh(hessian)
        slopes, errors = _errors(function, x, modes)
        rounding = _ROUNDING * float(np.abs(eigenvalues).max())
        tolerance = np.maximum(_SIGMAS * errors, rounding)
        zero = np.abs(eigenvalues) <= tolerance
        # a slope that is an error moves the point by slope/curvature and the risk by slope²/(2 curvature)
        moved = float(np.linalg.norm(slopes[~zero] / eigenvalues[~zero]))
        raised = float(np.sum(slopes[~zero] ** 2 / np.abs(eigenvalues[~zero])) / 2)

        symmetric = tangents(parts, task, scale=isinstance(function, ClosedForm), error=_SIGMAS * moved)
        m = symmetric.shape[1]
        across = np.linalg.svd(symmetric)[0][:, m:] if m else np.eye(len(x))
        curvatures, vectors = np.linalg.eigh(across.T @ hessian @ across)
        directions = np.concatenate([across @ vectors, symmetric], axis=1)
        tolerance = np.maximum(_SIGMAS * _errors(function, x, directions)[1], rounding)[: len(x) - m]

        value = self._risk(parts)
        slack = _SIGMAS * (float(value.stderr) + raised) + 1e-8 * abs(float(value.value))
        excess = float(value.value) - self.least
        kind: Kind = "undecided"
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
            return exactly(_derivatives(self.check, flat(parts))[0], self.check.method)
        if max(float(np.abs(parts.C).max()), float(np.abs(parts.P).max())) < _ROUNDING:
            aligned = parts._replace(C=jnp.zeros_like(parts.C), P=jnp.zeros_like(parts.P))
            return risk(from_blocks(aligned, SoftmaxAttention), self.check.task, self.L)
        check = _controlled(self.check, flat(parts))[0]
        replicates = _replicates(check, flat(parts))
        return Estimate(replicates.mean(), replicates.std(ddof=1) / math.sqrt(len(replicates)), check.method)


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


def _downhill(function: ClosedForm | OverNodes, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None) -> Vector:
    """A minimum below `x`, or where the search gave up; within `x` plus the subspace."""
    B = np.eye(len(x)) if subspace is None else subspace

    @functools.lru_cache(maxsize=2)  # value and Hessian are asked for apart
    def derivatives(z: bytes) -> tuple[float, Vector, Float[np.ndarray, "m m"]]:
        value, gradient, hessian = _derivatives(function, x + B @ np.frombuffer(z))
        # a risk below 0 is one that the control variate has carried away from the nodes
        return (value if value >= 0 else math.inf), B.T @ gradient, B.T @ hessian @ B

    found = minimize(
        lambda z: derivatives(z.tobytes())[:2],
        np.zeros(B.shape[1]),
        jac=True,
        hess=lambda z: derivatives(z.tobytes())[2],
        # small trusted steps with the exact curvature follow the narrow valleys of long prompts and stay in their basin
        method="trust-exact",
        options={"gtol": _NEARLY_STATIONARY, "maxiter": 300, "initial_trust_radius": 0.1},
    )
    return x + B @ found.x


def _settled(function: ClosedForm | OverNodes, x: Vector) -> tuple[Vector, float]:
    """The stationary point next to `x` by Newton steps that leave flat directions alone, and the gradient's norm."""
    _, gradient, hessian = _derivatives(function, x)
    for _ in range(_NEWTON_STEPS):
        if not np.isfinite(hessian).all():
            break
        new = x - np.linalg.pinv(hessian, rcond=_ROUNDING, hermitian=True) @ gradient
        _, smaller, hessian = _derivatives(function, new)
        if not np.linalg.norm(smaller) < np.linalg.norm(gradient):
            break
        x, gradient = new, smaller
    if isinstance(function, ClosedForm):
        x = _balanced(x, function.task)
        _, gradient, _ = _derivatives(function, x)
    return x, float(np.linalg.norm(gradient))


def _balanced(x: Vector, task: LinearRegression) -> Vector:
    """The same layer with the norms of U and V equal, as gradient flow from small weights leaves them."""
    split = task.d**2 + task.d * task.targets
    U, V = np.linalg.norm(x[:split]), np.linalg.norm(x[split:])
    if not U * V > 0:
        return x
    s = math.sqrt(V / U)
    return np.concatenate([s * x[:split], x[split:] / s])


def _best_scaled(function: ClosedForm | OverNodes, x: Vector) -> Vector:
    """The layer (sU, V/s) of least risk; linear attention has one risk for all."""
    if isinstance(function, ClosedForm):
        return x
    split = function.task.d**2 + function.task.d * function.task.targets
    layers = [np.concatenate([s * x[:split], x[split:] / s]) for s in np.geomspace(0.05, 3, 30)]
    without = _with_control(function, 0)
    return min(layers, key=lambda x: float(_replicates(without, x).mean()))


def _controlled(function: ClosedForm | OverNodes, x: Vector) -> list[ClosedForm] | list[OverNodes]:
    """The ways to take the average, the one of smaller error at `x` first; without a control it is bounded below."""
    if isinstance(function, ClosedForm):
        return [function]
    ways = [_with_control(function, theta) for theta in (1, 0)]
    spreads = [float(_replicates(way, x).std()) for way in ways]
    return ways if spreads[0] <= spreads[1] else ways[1:]


def _with_control(function: OverNodes, theta: int) -> OverNodes:
    return eqx.tree_at(lambda f: f.theta, function, theta * jnp.ones(()))


def _errors(function: ClosedForm | OverNodes, x: Vector, directions: Float[np.ndarray, "n m"]) -> tuple[Vector, Vector]:
    """The standard errors of the slopes and of the curvatures along the directions."""
    if isinstance(function, ClosedForm):
        return np.zeros(directions.shape[1]), np.zeros(directions.shape[1])
    slopes, curvatures = _directional_derivatives(function, x, directions.T)
    of_mean = math.sqrt(slopes.shape[1])
    return np.asarray(slopes.std(axis=1, ddof=1)) / of_mean, np.asarray(curvatures.std(axis=1, ddof=1)) / of_mean


@eqx.filter_jit
def _replicates(function: ClosedForm | OverNodes, x) -> Float[Array, "*r"]:
    task = function.task
    parts = from_flat(x, task.d, task.targets)
    if isinstance(function, ClosedForm):
        return gaussian_risk(parts, task, function.L)
    return softmax_risk(parts, task, function.moments, function.nodes, function.theta)


def _derivatives(function: ClosedForm | OverNodes, x: Vector) -> tuple[float, Vector, Float[np.ndarray, "n n"]]:
    """The value, the gradient and the Hessian."""
    value, gradient, hessian = _compiled_derivatives(function, x)
    return float(value), np.asarray(gradient), np.asarray(hessian)


@eqx.filter_jit
def _compiled_derivatives(function: ClosedForm | OverNodes, x):
    def gradient_first(x):
        value, gradient = jax.value_and_grad(lambda x: _replicates(function, x).mean())(x)
        return gradient, (value, gradient)

    hessian, (value, gradient) = jax.jacfwd(gradient_first, has_aux=True)(x)
    return value, gradient, hessian


@eqx.filter_jit
def _directional_derivatives(function: OverNodes, x, directions):
    """Of first and second order, in each replicate of the nodes."""

    def along(direction):
        def slope(t):
            return jax.jvp(lambda t: _replicates(function, x + t * direction), (t,), (jnp.ones_like(t),))[1]

        return jax.jvp(slope, (jnp.zeros(()),), (jnp.ones(()),))

    return jax.vmap(along)(directions)
