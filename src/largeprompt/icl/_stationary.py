r"""Where training can end: the stationary points of the risk of one-layer attention in all of (U, V), found and certified.

Besides its global minimum linear attention has others. With $n^\top\Sigma n = 1$ let
$$C = Xn^\top,\quad P = Yn^\top,\quad R = 1,\quad A = \Sigma^{-1} - XY\,nn^\top,\quad Y = X(Y^2 - \tau_1 - s^2):$$
the label scores replace the covariates along n, exactly so at infinite length, and the mean over W of the even part of the
output vanishes. What is left costs $\rho_2qX^2 + (T-q)/(2LX^2)$ with $q = n^\top\Sigma_qn$, $T = \mathrm{tr}\,\Sigma^{-1}
\Sigma_q$, least at $X^4 = (T-q)/(2\rho_2qL)$. As $L\to\infty$ the excess vanishes like $L^{-1/2}$ and $\|P\|$ grows like
$L^{1/4}$. Where $\Sigma_q=\Sigma$, all n cost the same to this order; the next one decides which n are minima.
"""

import math
import warnings
from typing import Any, Literal, NamedTuple

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
from ._optimal_softmax import _common_basis, optimal_softmax
from ._regression import LinearRegression
from ._risk import risk, risk_function
from ._risk_functions import ClosedForm, OverNodes
from ._softmax_risk import softmax_risk
from ._symmetries import flat, from_flat, tangents

Kind = Literal["global minimum", "local minimum", "saddle", "undecided"]
Vector = Float[np.ndarray, " n"]
_ROUNDING = 1e-12  # of the largest curvature: what is zero in float64
_STATIONARY = 1e-10  # a gradient's norm at a point that is reported
_SIGMAS = 5


class StationaryPoint(eqx.Module):
    """A layer at which the gradient of the risk vanishes, and what its Hessian in the blocks (A, C, P, R) says of it.

    `zero_modes` counts the eigenvalues that are 0 to within rounding, or for softmax attention to within 5 standard errors
    of the nodes; `symmetries` is how many of them the continuous symmetries account for. A minimum has only positive
    curvature besides; a point with curvature that cannot be told from 0 is undecided. `excess` is over the optimum.
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

    The search goes downhill from the optimum, from the spurious points that theory predicts (one target), and from random
    layers as PyTorch draws them, `starts` of them; from a saddle it goes on along the most negative curvature. It may miss
    points. Linear attention has an exact risk, gradient and Hessian. Those of softmax attention are averages over `draws`
    fixed nodes: the point reported is stationary for these, and its risk is that over others. At `L = inf` the spurious
    points have run to infinity, as they do for d = 1 at every length: only the global minimum is left.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    if kind not in ("linear", "softmax"):
        raise ValueError(f"kind is {kind!r}; it must be 'linear' or 'softmax'")
    starts = checks.count("starts", starts, at_least=0)
    of_nodes, of_check, of_starts = jax.random.split(jax.random.key(0) if key is None else checks.key(key), 3)
    layer = LinearAttention if kind == "linear" else SoftmaxAttention
    optimum = (optimal_linear if kind == "linear" else optimal_softmax)(task, L)
    full = from_blocks(from_flat(np.ones(task.d**2 + 2 * task.d * task.targets + task.targets**2), task.d, task.targets), layer)
    function = risk_function(full, task, L, of_nodes, draws=draws)
    check = risk_function(full, task, L, of_check, draws=8 * draws)
    assert isinstance(function, ClosedForm | OverNodes)
    search = _Search(function, check, layer, float(optimum.risk.value))

    search.descend_from(flat(blocks(optimum.attention, task)))
    for start, directions in _spurious_starts(task, L):
        search.descend_from(start, directions)
    for of_start in jax.random.split(of_starts, starts):
        search.descend_from(flat(_random_blocks(of_start, task)))
    return search.distinct()


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
    basis, groups = _common_basis(task)
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
        start = flat(Blocks(*map(jnp.asarray, (inverse - X * Y * np.outer(n, n), [X * n], [Y * n], [[1.0]]))))
        if basis is None:
            found.append((start, None))
            continue
        none, zero = np.zeros((1, d)), np.zeros((1, 1))
        kept = [Blocks(*map(jnp.asarray, (np.outer(e, e), none, none, zero))) for e in basis.T]
        A = np.zeros((d, d))
        kept += [Blocks(*map(jnp.asarray, (A, c * axis[None], p * axis[None], r * np.ones((1, 1))))) for c, p, r in np.eye(3)]
        found.append((start, np.stack([flat(move) for move in kept], axis=1)))
    return found


def _random_blocks(key: PRNGKeyArray, task: LinearRegression) -> Blocks:
    """Those of a head with entries uniform on ±1/√D, PyTorch's default."""
    D, k = task.dim, task.targets
    K, Q, V, O = jax.random.uniform(key, (4, D, D), minval=-1, maxval=1) / math.sqrt(D)
    return blocks(LinearAttention(K.T @ Q, O[-k:] @ V), task)


class _Candidate(NamedTuple):
    point: StationaryPoint
    x: Vector
    slack: float  # how far the risk may be off that of an exact stationary point
    downhill: Vector | None


class _Search:
    """The stationary points met so far of one risk, and how to find more."""

    def __init__(self, function: ClosedForm | OverNodes, check: Any, layer: type, least: float):
        self.function, self.check, self.layer, self.least = function, check, layer, least
        self.task, self.exact = function.task, isinstance(function, ClosedForm)
        self.found: list[_Candidate] = []

    def descend_from(self, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None, leaps: int = 3) -> None:
        """Add what lies downhill of a start, first within a subspace the gradient does not leave, and from saddles on."""
        x, function = self._rescaled(x)
        if subspace is not None:
            x = _downhill(function, x, subspace)
        for _ in range(leaps):
            x = _downhill(function, x, None if self.found or subspace is None else None) if False else self._settle(function, x, subspace)
            subspace = None
            candidate = self._examine(function, x)
            if candidate is None:
                return
            self.found.append(candidate)
            if candidate.downhill is None:
                return
            x = candidate.x + candidate.downhill

    def _settle(self, function, x, subspace):
        raise NotImplementedError
