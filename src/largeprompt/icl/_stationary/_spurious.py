r"""The spurious minima of linear attention that theory predicts, in standard units ($\Sigma = I$).

Along one direction n the labels of one output a are scored in place of the covariates:
$$C = X\,an^\top,\quad P = Y\,an^\top,\quad R = I,\quad A = I - XY\,nn^\top .$$
With $\beta = 1 - XY$ and $\omega = n^\top\Omega n$, $q = n^\top\Sigma_qn$, $T = \mathrm{tr}\,\Sigma_q$ the output a is
exact at infinite length but for an even part, the k − 1 others lose a share $1-\beta$ of direction n, and twice the
excess risk is
$$q\omega(k-1)(1-\beta)^2 + q\big(Y\beta + (\tau_1+s^2)X\big)^2 + (k+1)\rho_2qX^2 + \frac{(T-q)Y^2}{L} + \dots$$
It is least at $\beta = \gamma X^2$, $\gamma = (k-1)\omega - \tau_1 - s^2$, and at $X^4 = (T-q)/(\kappa qL)$, with
$$\kappa = (k+1)\rho_2 + 2(k-1)\omega(\tau_1+s^2) - (k-1)^2\omega^2 > 0,\qquad
\text{excess} = \tfrac{k-1}{2}q\omega + \sqrt{\kappa q(T-q)/L}.$$
For one output the excess vanishes like $L^{-1/2}$ and P grows like $L^{1/4}$; where $\Sigma_q=\Sigma$ all n then cost
the same to this order, and the next one decides which of them are minima and which are saddles. For several outputs the
others never learn direction n, however long the prompts.

Each further head, $P_h = C_h = a_hn^\top$ with $R_h$ a multiple of $a_ha^\top$, gives direction n back to one more
output $a_h$, and takes away the even part that $RNC$ leaves in it. So H heads lose $\frac{k-H}2q\omega$ however long
the prompts, and H = k heads lose what one head loses with one output. For H > k there is no such minimum: a head that
reads another covariate for the output a makes up for the even part, at any Y.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks

from .._optimal_softmax import common_basis
from .._regression import LinearRegression, as_regression
from ._symmetries import flat
from ._units import standardised

Vector = Float[np.ndarray, " n"]


class _Axis(NamedTuple):
    """A direction and the numbers of the module's formulas."""

    n: Vector
    q: float
    rest: float  # T − q
    omega: float
    gamma: float
    kappa: float

    def excess(self, targets: int, L: int | float) -> float:
        return (targets - 1) / 2 * self.q * self.omega + math.sqrt(self.kappa * self.q * self.rest / L)


def _axis(task: LinearRegression, n: Vector, k: int) -> _Axis:
    """For k outputs."""
    Sq, label = np.asarray(task.query_Sigma), float(task.tau1 + task.noise)
    q, omega, rho2 = float(n @ Sq @ n), float(n @ np.asarray(task.Omega) @ n), float(task.rho2)
    kappa = (k + 1) * rho2 + 2 * (k - 1) * omega * label - (k - 1) ** 2 * omega**2
    rest = max(0.0, float(np.trace(Sq)) - q) if task.d > 1 else 0.0
    return _Axis(n, q, rest, omega, (k - 1) * omega - label, kappa)


def _axes(task: LinearRegression, k: int) -> tuple[list[_Axis], Float[np.ndarray, "d d"] | None]:
    """The principal axes, one of each that are alike for all covariances; the basis, if these have one in common."""
    basis, groups = common_basis(task)
    if basis is not None:
        return [_axis(task, basis[:, group[0]], k) for group in groups], basis
    matrices = [task.query_Sigma] if k == 1 else [task.query_Sigma, task.Omega]
    return [_axis(task, n, k) for m in matrices for n in np.linalg.eigh(np.asarray(m))[1].T], None


def predicted_excess(task: LinearRegression, L: int | float, heads: int = 1) -> Float[Array, ""]:
    r"""What linear attention loses, as $L\to\infty$, at the lowest of its spurious minima.

    For one target $\sqrt{2\rho_2\,q(T-q)/L}$ with $q$ an eigenvalue of $\Sigma^{-1}\Sigma_q$ and $T$ their sum, the $q$
    that makes it least. Where $\Sigma_q = \Sigma$ it is $\sqrt{2(d-1)\,\mathrm{tr}(\Sigma\Omega)^2/L}$; for $\Sigma =
    I$, $\Omega = \lambda I$, $\lambda\sqrt{2d(d-1)/L}$. For d = 1 there are none, and it is 0. For k targets that share
    $\Sigma = \Sigma_q = I$, $\Omega = \lambda I$ it tends to $(k-1)\lambda/2$, and the module has the formula. With
    as many `heads` as targets it is that of one target, and with more it is 0.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    standard = standardised(task)
    if np.linalg.matrix_rank(np.asarray(standard.task.Sigma)) < task.d:
        raise ValueError("Sigma is singular; the excess of spurious minima is known for an invertible Sigma")
    k = task.targets - checks.count("heads", heads) + 1
    if heads > 1 and k > 1:
        raise ValueError(
            f"heads is {heads}; with {task.targets} targets the excess is known for 1 head and for that many or more"
        )
    if k < 1:
        return jnp.zeros(())
    axes, basis = _axes(standard.task, k)
    if k > 1:
        axes = [axis for axis in axes if axis.kappa > 0]
        if basis is None or task.d == 1 or not axes:
            raise ValueError(
                f"task has {task.targets} targets; the excess of spurious minima is then known where Sigma, Omega and "
                "query_Sigma commute, d > 1 and the targets are few"
            )
    return jnp.asarray(standard.factor * min(axis.excess(k, L) for axis in axes))


def spurious_starts(
    task: LinearRegression, L: int | float, heads: int = 1
) -> list[tuple[Vector, Float[np.ndarray, "n m"] | None]]:
    """The points of the module's formula, one for each principal axis.

    Each has the subspace that its reflections leave alone. Of several heads the others read direction n for the other
    outputs, or are idle. The task is in standard units.
    """
    d, k = task.d, task.targets
    full = np.linalg.matrix_rank(np.asarray(task.Sigma)) == d
    if math.inf == L or not full or not np.any(np.asarray(task.Omega)):
        return []
    axes, basis = _axes(task, max(1, k - heads + 1))
    found = []
    for axis in axes:
        # alone among directions with queries: no order of L then sets X, and for one output there is no minimum
        rest = axis.rest if axis.rest > 0 or k == 1 else axis.q
        if not axis.q * rest * axis.kappa > 0:
            continue
        X = (rest / (axis.kappa * axis.q * L)) ** 0.25
        Y = (1 + math.sqrt(max(0.0, 1 - 4 * axis.gamma * X**2))) / (2 * X)
        scored, one = np.zeros((k, d)), np.zeros((k, k))
        scored[0], one[0, 0] = axis.n, 1
        start = [np.eye(d) - X * Y * np.outer(axis.n, axis.n), X * scored, Y * scored, np.eye(k)]
        subspace = None
        if basis is not None:
            still = [np.zeros((d, d)), np.zeros((k, d)), np.zeros((k, d)), np.zeros((k, k))]
            kept = [[np.outer(e, e), *still[1:]] for e in basis.T]
            kept += [[still[0], c * scored, p * scored, still[3]] for c, p in np.eye(2)]
            kept += [[*still[:3], r] for r in ([one] if k == 1 else [one, np.eye(k) - one])]
            subspace = np.stack([flat(move) for move in kept], axis=1)
        others = _others(axis.n, k, heads - 1)
        if subspace is not None and heads > 1:  # idle heads stay so
            subspace = np.pad(subspace, [(0, sum(map(len, others))), (0, 0)]) if k == 1 else None
        found.append((np.concatenate([flat(start), *others]), subspace))
    return found


def _others(n: Float[np.ndarray, " d"], k: int, heads: int) -> list[Vector]:
    """Heads that score the labels of the outputs after the first along n, and idle ones."""
    d, found = len(n), []
    for h in range(1, heads + 1):
        scored = np.outer(np.eye(k)[h], n) if h < k else np.zeros((k, d))
        found.append(flat([np.zeros((d, d)), scored, scored, np.zeros((k, k))]))
    return found
