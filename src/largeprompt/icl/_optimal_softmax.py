import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize, minimize_scalar

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import SoftmaxAttention, WeightMoments

from ._aligned_risk import Coefficients, aligned_coefficients
from ._closed_forms import Scalar, gaussian_risk
from ._estimate import Estimate, exactly
from ._expansion import rate
from ._nodes import Nodes, regression_nodes
from ._optima import aligned_blocks, as_regression, best_reading, from_blocks
from ._regression import LinearRegression
from ._risk import risk
from ._softmax_risk import aligned_softmax_risk


class SoftmaxOptimum(AbstractShown):
    r"""The best aligned softmax layer, its risk, and the task's `rate`: $\lim_L L\,(\min R_L - R_\infty)$."""

    attention: SoftmaxAttention
    risk: Estimate
    rate: Float[Array, ""]


def optimal_softmax(task: LinearRegression, L: int | float) -> SoftmaxOptimum:
    r"""The best softmax layer of block structure ($P = C = 0$, $R = rI$) at length `L`.

    Where $\Sigma$, $\Omega$ and $\Sigma_q$ commute, A is diagonal in their basis and every risk is a one-dimensional
    quadrature; otherwise A is any matrix, found over quasi-Monte Carlo nodes, and only its risk is by quadrature. As
    $L\to\infty$, $rA\to W^\top$ of `optimal_linear` while r tends to the minimiser of the 1/L constant: at `L = inf`
    the layer is that limit.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    scale, constant = _limit_scale(task)
    reading = np.asarray(best_reading(task, L))
    if math.inf == L:
        parts = aligned_blocks(scale * jnp.asarray(reading), 1 / scale, task)
        value = exactly(gaussian_risk(parts, task, math.inf), "closed form")
        return SoftmaxOptimum(from_blocks(parts, SoftmaxAttention), value, constant)
    moments = WeightMoments(L)
    basis, groups = common_basis(task)
    A = scale * reading
    if np.any(A):
        A = _best_scale(task, moments, A) * A
        if basis is None:
            A = _search(task, moments, _Full(task.d), A.ravel())
        elif len(groups) > 1:
            A = _best_diagonal(task, moments, basis, groups, A)
    found = _coefficients(A, task, moments)
    r = found.linear / (2 * found.quadratic) if found.quadratic > 0 else 0.0
    attention = from_blocks(aligned_blocks(jnp.asarray(A), r, task), SoftmaxAttention)
    return SoftmaxOptimum(attention, risk(attention, task, L), constant)


def _limit_scale(task: LinearRegression) -> tuple[float, Float[Array, ""]]:
    """ω with A = ωWᵀ, r = 1/ω least in the 1/L constant, and that constant."""
    reading = best_reading(task, math.inf)
    form = task.query_Sigma @ reading.T @ task.Sigma @ reading
    largest = float(jnp.max(jnp.linalg.eigvals(form).real)) if bool(jnp.any(form != 0)) else 0.0
    if largest <= 0:
        return 1.0, jnp.zeros(())
    end = 1 / math.sqrt(2 * largest)

    found = minimize_scalar(
        lambda w: float(_log_constant(w, reading, task)),
        bounds=(1e-3 * end, end * (1 - 1e-9)),
        method="bounded",
        options={"xatol": 1e-12 * end},
    )
    scale = float(found.x)  # pyright: ignore[reportAttributeAccessIssue]
    return scale, jnp.exp(_log_constant(scale, reading, task))


@jax.jit
def _log_constant(omega: Scalar, reading: Float[Array, "d d"], task: LinearRegression) -> Float[Array, ""]:
    """The logarithm of the 1/L constant at A = ωWᵀ, r = 1/ω."""
    return jnp.log(rate(aligned_blocks(omega * reading, 1 / omega, task), task))


def common_basis(task: LinearRegression) -> tuple[Float[np.ndarray, "d d"] | None, list[np.ndarray]]:
    """A basis in which all three covariances are diagonal, and which of its vectors they cannot tell apart."""
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


class _Diagonal(eqx.Module):
    """Matrices diagonal in a basis, by the logarithm of what each group of equal directions is multiplied with."""

    basis: Float[Array, "d d"]
    start: Float[Array, " d"]
    membership: Float[Array, "d g"]

    def __call__(self, parameters: Float[Array, " g"]) -> Float[Array, "d d"]:
        return (self.basis * (self.start * jnp.exp(self.membership @ parameters))) @ self.basis.T


class _Full(eqx.Module):
    """All square matrices."""

    d: int = eqx.field(static=True)

    def __call__(self, parameters: Float[Array, " n"]) -> Float[Array, "d d"]:
        return parameters.reshape(self.d, self.d)


@eqx.filter_jit
def _profile(parameters, matrix: _Diagonal | _Full, task: LinearRegression, moments: WeightMoments, nodes: Nodes):
    """The risk of A = matrix(parameters) with the best r, and its gradient."""

    def value(parameters):
        A = matrix(parameters)

        def risk_at(r: float) -> Float[Array, ""]:
            return aligned_softmax_risk(aligned_blocks(A, r, task), task, moments, nodes, jnp.ones(())).mean()

        ahead, behind, still = risk_at(1.0), risk_at(-1.0), risk_at(0.0)  # quadratic in r: three values fix it
        return still - (ahead - behind) ** 2 / (16 * jnp.maximum((ahead + behind) / 2 - still, 1e-300))

    return jax.value_and_grad(value)(parameters)


def _search(task: LinearRegression, moments: WeightMoments, matrix: _Diagonal | _Full, start: Float[np.ndarray, " p"]):
    """The matrix with the least risk over nodes of the query."""
    nodes = regression_nodes(jax.random.key(0), task, 2**10, 16, of_query_only=True)

    def objective(parameters):
        value, gradient = _profile(jnp.asarray(parameters), matrix, task, moments, nodes)
        return float(value), np.asarray(gradient, float)

    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-8})
    return np.asarray(matrix(jnp.asarray(found.x)))


def _best_scale(task: LinearRegression, moments: WeightMoments, A: Float[np.ndarray, "d d"]) -> float:
    """The multiple of A with the least risk."""

    def value(log: float) -> float:
        found = _coefficients(math.exp(log) * A, task, moments)
        if found.quadratic <= 0:
            return found.constant
        return found.constant - task.targets * found.linear**2 / (4 * found.quadratic)

    found = minimize_scalar(value, bracket=(0.0, 0.5), tol=1e-9)
    return math.exp(float(found.x))  # pyright: ignore[reportAttributeAccessIssue]


def _coefficients(A: Float[np.ndarray, "d d"], task: LinearRegression, moments: WeightMoments) -> Coefficients:
    found = aligned_coefficients(jnp.asarray(A), task, moments)
    return _coefficients_over_nodes(jnp.asarray(A), task, moments) if found is None else found


def _coefficients_over_nodes(A: Float[Array, "d d"], task: LinearRegression, moments: WeightMoments) -> Coefficients:
    """Where the scores are too uneven for the quadrature."""
    nodes = regression_nodes(jax.random.key(0), task, 2**10, 16, of_query_only=True)
    ahead, behind, still = (
        float(aligned_softmax_risk(aligned_blocks(A, r, task), task, moments, nodes, jnp.ones(())).mean())
        for r in (1.0, -1.0, 0.0)
    )
    k = task.targets
    return Coefficients((ahead + behind - 2 * still) / (2 * k), (behind - ahead) / (2 * k), still)


def _best_diagonal(
    task: LinearRegression, moments: WeightMoments, basis, groups: list[np.ndarray], start: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "d d"]:
    membership = np.zeros((task.d, len(groups)))
    for i, group in enumerate(groups):
        membership[group, i] = 1
    diagonal = np.diag(basis.T @ start @ basis)
    matrix = _Diagonal(jnp.asarray(basis), jnp.asarray(diagonal), jnp.asarray(membership))
    return _search(task, moments, matrix, np.zeros(len(groups)))
