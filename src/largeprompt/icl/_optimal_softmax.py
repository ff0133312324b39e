import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize, minimize_scalar

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import Lengths, SoftmaxAttention, WeightMoments, length_or_law

from ._blocks import aligned_blocks, from_blocks
from ._estimate import Estimate, exactly
from ._optimal_linear import best_reading
from ._regression import LinearRegression, as_regression
from ._risk._closed_form import Scalar, gaussian_risk
from ._risk._expansion import rate
from ._risk._quadrature import METHOD, AlignedRisk, Matrix

_STATIONARY = 1e-6  # a slope at which the search ends, as a share of what is gained over predicting 0
_WIDEST = 1e5  # a standard deviation of scores at which they pick one token
_NEGLIGIBLE = 1e-14  # of the largest share of the risk: a direction that the search leaves out


class SoftmaxOptimum(AbstractShown):
    r"""The best aligned softmax layer, its risk, and the task's `rate`: $\lim_L L\,(\min R_L - R_\infty)$."""

    attention: SoftmaxAttention
    risk: Estimate
    rate: Float[Array, ""]


def optimal_softmax(task: LinearRegression, L: int | float | Lengths) -> SoftmaxOptimum:
    r"""The softmax layer of least risk with $P = C = 0$ at length `L`, where $R = rI$ is best.

    The risk is a one-dimensional quadrature with an exact gradient, minimised over A from two starts; where
    $\Sigma$, $\Omega$ and $\Sigma_q$ commute, over A diagonal in their basis. Layers with $P$ or $C$ cannot do better
    at `L = 1` and at `L = inf`; in between that is not proved, but no search over all (U, V) has found one that does.
    As $L\to\infty$, $rA\to W^\top$ of `optimal_linear` while r tends to the minimiser of the 1/L constant: at
    `L = inf` the layer is that limit. For a law of `Lengths` the average of their risks is least.
    """
    task, L = as_regression(task), length_or_law(L)
    scale, constant = limit_scale(task, best_reading(task, math.inf))
    if math.inf == L:
        parts = aligned_blocks(scale * best_reading(task, L), 1 / scale, task)
        value = exactly(gaussian_risk(parts, task, math.inf), "closed form")
        return SoftmaxOptimum(from_blocks(parts, SoftmaxAttention), value, constant)
    aligned = AlignedRisk.of(task, WeightMoments(L))
    length, empty = (L.harmonic_mean, L.empty) if isinstance(L, Lengths) else (L, 0.0)
    A = best_scores(task, aligned, scale * np.asarray(best_reading(task, L), float), float(constant) / length)
    quadratic, linear, still = aligned.coefficients(A)
    r = linear / (2 * quadratic) if quadratic > 0 else 0.0
    attention = from_blocks(aligned_blocks(jnp.asarray(A), r, task), SoftmaxAttention)
    return SoftmaxOptimum(attention, exactly(still - (1 - empty) * task.targets * r * linear / 2, METHOD), constant)


def limit_scale(task: LinearRegression, reading: Float[Array, "d d"]) -> tuple[float, Float[Array, ""]]:
    """ω with A = ωWᵀ, r = 1/ω least in the 1/L constant, and that constant, for a reading Wᵀ."""
    query, Sigma, W = (np.asarray(m) for m in (task.query_Sigma, task.Sigma, reading))
    form = query @ W.T @ Sigma @ W
    largest = float(np.linalg.eigvals(form).real.max()) if np.any(form) else 0.0
    if largest <= 0:
        return 1.0, jnp.zeros(())
    end = 1 / math.sqrt(2 * largest)

    found = minimize_scalar(
        lambda w: float(_log_constant(float(w), reading, task)),
        bounds=(1e-3 * end, end * (1 - 1e-9)),
        method="bounded",
        options={"xatol": 1e-12 * end},
    )
    scale = float(found.x)
    return scale, jnp.asarray(np.exp(_log_constant(scale, reading, task)))


@jax.jit
def _log_constant(omega: Scalar, reading: Float[Array, "d d"], task: LinearRegression) -> Float[Array, ""]:
    """The logarithm of the 1/L constant at A = ωWᵀ, r = 1/ω."""
    return jnp.log(rate(aligned_blocks(omega * reading, 1 / omega, task), task))


def common_basis(task: LinearRegression) -> tuple[Float[np.ndarray, "d d"] | None, list[np.ndarray]]:
    """A basis in which all three covariances are diagonal, and which of its vectors are alike for all of them."""
    matrices = [np.asarray(m) for m in (task.Sigma, task.Omega, task.query_Sigma)]
    sizes = [max(np.abs(m).max(), 1e-300) for m in matrices]
    # a combination without accidental coincidences has the common basis as its own
    weights = (1.0, math.sqrt(0.7), math.sqrt(0.3))
    _, basis = np.linalg.eigh(sum(c * m / s for c, m, s in zip(weights, matrices, sizes, strict=True)))
    rotated = [basis.T @ m @ basis / s for m, s in zip(matrices, sizes, strict=True)]
    if any(np.abs(m - np.diag(np.diag(m))).max() > 1e-10 for m in rotated):
        return None, []
    spectrum = np.stack([np.diag(m) for m in rotated], axis=1)
    groups: list[list[int]] = []
    for i, row in enumerate(spectrum):
        for group in groups:
            if np.abs(spectrum[group[0]] - row).max() < 1e-9:
                group.append(i)
                break
        else:
            groups.append([i])
    return basis, [np.array(group) for group in groups]


class ScoreFamily(NamedTuple):
    r"""Matrices A = `left` B `right`, with B of any entries, or diagonal with one positive entry for each column of
    `groups`. For $A\ne0$ the singular values of B are the standard deviations of the scores.
    """

    left: Matrix
    right: Matrix
    groups: Float[np.ndarray, "d g"] | None

    def matrix(self, parameters: Float[np.ndarray, " p"]) -> Matrix:
        if self.groups is None:
            return self.left @ parameters.reshape(self.right.shape) @ self.right
        return (self.left * (self.groups @ np.exp(parameters))) @ self.right

    def slope(self, parameters: Float[np.ndarray, " p"], slope: Matrix) -> Float[np.ndarray, " p"]:
        """The derivative in the parameters, from that in A."""
        inner = self.left.T @ slope @ self.right.T
        if self.groups is None:
            return inner.ravel()
        return (np.diag(inner) @ self.groups) * np.exp(parameters)

    def on(self, directions: np.ndarray) -> "ScoreFamily":
        """Those that read some directions of the common basis only, each with an entry of its own."""
        return self._replace(groups=np.eye(len(self.right))[:, np.unique(directions)])

    def parameters(self, A: Matrix) -> Float[np.ndarray, " p"]:
        """Those of a matrix of the family."""
        inner = np.linalg.pinv(self.left) @ A @ np.linalg.pinv(self.right)
        if self.groups is None:
            return inner.ravel()
        return np.log(np.maximum(np.diag(inner) @ self.groups / self.groups.sum(axis=0), 1e-300))

    def starts(self, A: Matrix, width: float = 1.0) -> list[Float[np.ndarray, " p"]]:
        """Parameters of scores as uneven as those of A, and of more even ones; no direction is switched off.

        The widest has the standard deviation `width`.
        """
        inner = np.linalg.pinv(self.left) @ A @ np.linalg.pinv(self.right)
        if self.groups is not None:
            widths = np.diag(inner) @ self.groups / self.groups.sum(axis=0)
            shapes = [np.log(width * _clipped(widths, power)) for power in (1.0, 0.0)]
            return shapes if len(widths) > 1 else shapes[:1]
        left, widths, right = np.linalg.svd(inner)
        return [((left * (width * _clipped(widths, power))) @ right).ravel() for power in (1.0, 0.3)]

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which every parameter is searched for."""
        return (-_WIDEST, _WIDEST) if self.groups is None else (-math.log(_WIDEST), math.log(_WIDEST))


def _clipped(widths: Float[np.ndarray, " g"], power: float) -> Float[np.ndarray, " g"]:
    """Their power as a share of the largest: what starts too small is all but flat."""
    return np.maximum(widths / widths.max(), 1e-12) ** power * 0.95 + 0.05


def score_family(task: LinearRegression) -> ScoreFamily:
    """All matrices that matter, up to what no covariate and no query meets."""
    Sigma, Omega, query = (np.asarray(m, float) for m in (task.Sigma, task.Omega, task.query_Sigma))
    basis, groups = common_basis(task)
    if basis is None:
        return ScoreFamily(_inverse_root(Sigma), _inverse_root(query), None)
    spread = np.sqrt(np.sum(basis * (Sigma @ basis), axis=0) * np.maximum(np.sum(basis * (query @ basis), axis=0), 0))
    share = spread**2 * np.sum(basis * (Omega @ basis), axis=0)
    kept = [group for group in groups if share[group[0]] > _NEGLIGIBLE * share.max()]
    membership = np.zeros((task.d, len(kept)))
    for i, group in enumerate(kept):
        membership[group, i] = 1
    alive = membership.any(axis=1)
    return ScoreFamily(basis / np.where(alive, spread, 1.0), basis.T, membership)


def _inverse_root(cov: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(cov)
    kept = values > _NEGLIGIBLE * values[-1]
    return (vectors * np.where(kept, 1 / np.sqrt(np.where(kept, values, 1.0)), 0.0)) @ vectors.T


def best_scores(
    task: LinearRegression,
    aligned: AlignedRisk,
    limit: Matrix,
    excess: float,
    widths: tuple[float, ...] = (1.0,),
    family: ScoreFamily | None = None,
) -> Matrix:
    """The A of least risk; `limit` and `excess` are what A and the risk above the noise tend to for long prompts.

    The search starts from scores of these `widths`, in the family of all scores unless another is given.
    """
    if not np.any(limit) or aligned.coefficients(limit).linear == 0:  # nothing to learn, or one token to learn from
        return limit
    family = score_family(task) if family is None else family
    starts = [start for width in widths for start in family.starts(limit, width)]
    quadratic, linear, _ = aligned.coefficients(family.matrix(starts[0]))
    checks.result("the risk", jnp.asarray(quadratic))
    # what r gains at best: quadratic r² − linear r is least at −linear²/(4 quadratic)
    unit = linear**2 / (4 * quadratic)

    def objective(parameters) -> tuple[float, Float[np.ndarray, " p"]]:
        (quadratic, linear, _), slopes = aligned.with_slopes(family.matrix(parameters))
        r = linear / (2 * quadratic)
        slope = r**2 * slopes.quadratic - r * slopes.linear
        return -r * linear / (2 * unit), family.slope(parameters, slope) / unit

    # the risk of long prompts is flat in the scale of the scores, to order 1/L
    tolerance = _STATIONARY * min(1.0, max(excess / (task.targets * unit), 1e-6))
    options = {"gtol": tolerance, "ftol": 1e-15, "maxcor": 20, "maxiter": 500}
    ends = [
        minimize(objective, start, jac=True, method="L-BFGS-B", bounds=[family.bounds] * len(start), options=options)
        for start in starts
    ]
    return family.matrix(min(ends, key=lambda end: end.fun).x)
