r"""Lemmas E.2 and E.4, Corollaries E.3 and E.5: how far risks and their gradients are from those of infinite prompts.

Only norms of the layer enter: $\Delta^2\ge E\|T_L-T_\infty\|^2$ and $\Delta_J^2\ge E\|\nabla T_L-\nabla T_\infty\|_F^2$
are means over tasks of Propositions 3.1 and 3.4, taken before any root (errata E4).
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import ArrayLike

from largeprompt.attention import AbstractLayer, Head, softmax_form
from largeprompt.icl import LinearRegression, as_predictor, risk

from ._bound import Bound, Length, Number, log_sum, logarithm, real
from ._over_queries import Form, length_and_form, second_order, slope_error
from ._tasks import Sizes, over_tasks, sizes

_NOTES = (
    "quadratic loss, Gaussian regression",
    "σ_w² = max(1, ‖Σ‖(1+‖W‖²) + s²) (errata E1); ‖W‖² ≤ ‖Ω‖χ²",
    "the query alone is rescaled to be 1 sub-Gaussian (errata G18)",
)


def risk_bound(layer: AbstractLayer, task: LinearRegression, L: Length, *, form: Form = "printed") -> Bound:
    r"""Lemma E.2, corrected: $|R_L-R_\infty| \le \tfrac12\Delta^2 + (2R_\infty)^{1/2}\Delta$, without fourth moments.

    Expand the square. $\Delta^2 = E_w$ of Proposition 3.1 at $\sigma_w$. Errata: E2, E3.
    """
    return _of_layer(layer, task).risk_bound("Lemma E.2", L, form)


def risk_gradient_bound(layer: AbstractLayer, task: LinearRegression, L: Length, *, form: Form = "printed") -> Bound:
    r"""Lemma E.4, corrected: $\|\nabla R_L-\nabla R_\infty\| \le \Delta_J((2R_\infty)^{1/2}+\Delta) + J_\infty\Delta$.

    In the layer's own parameters; $J_\infty^2\ge E\|\nabla T_\infty\|_F^2$, $\|\Gamma_W\|\le\|\Sigma\|(1+\|W\|^2)+s^2$.
    """
    return _of_layer(layer, task).gradient_bound("Lemma E.4", L, form)


def g1(task: LinearRegression, L: Length, *, rho: Number, form: Form = "printed") -> Bound:
    r"""Corollary E.3: the supremum of $|R_L-R_\infty|$ over $\|(U,V)\|_F\le2\rho$, by Lemma E.2.

    $(2R_\infty)^{1/2} \le (E\|T_\infty\|^2)^{1/2}+(E\|y_q\|^2)^{1/2}$ and $\|U\|\|V\|\le2\rho^2$ there.
    """
    return _of_ball(task, rho).risk_bound("Corollary E.3", L, form)


def g2(task: LinearRegression, L: Length, *, rho: Number, form: Form = "printed") -> Bound:
    r"""Corollary E.5: the supremum of $\|\nabla R_L-\nabla R_\infty\|$ over $\|(U,V)\|_F\le2\rho$, by Lemma E.4."""
    return _of_ball(task, rho).gradient_bound("Corollary E.5", L, form)


@dataclass(frozen=True)
class _Setting:
    """A regression and norms of a layer: `U` and `V`, and what the errors of m and of H count for in its Jacobian.

    `limit` and `jacobian` are the logarithms of (2R_∞)^{1/2} and of J_∞.
    """

    size: Sizes
    U: float
    V: float
    mean: float
    slope: float
    limit: float
    jacobian: float

    def risk_bound(self, name: str, L: Length, form: Form) -> Bound:
        """The bound on the difference of the risks."""
        delta = self._mean_error(*length_and_form(L, form)) / 2 + logarithm(self.V)
        return Bound.of(name, {"½Δ²": 2 * delta - math.log(2), "(2R_∞)^{1/2}Δ": self.limit + delta}, _NOTES)

    def gradient_bound(self, name: str, L: Length, form: Form) -> Bound:
        """The bound on the difference of their gradients."""
        l, form = length_and_form(L, form)
        mean = self._mean_error(l, form)
        delta, slope = mean / 2 + logarithm(self.V), self._slope_error(l, form) + logarithm(self.slope)
        off = float(np.logaddexp(mean + logarithm(self.mean), slope)) / 2
        terms = {"Δ_J(2R_∞)^{1/2}": off + self.limit, "Δ_JΔ": off + delta, "J_∞Δ": self.jacobian + delta}
        return Bound.of(name, terms, _NOTES)

    def _mean_error(self, l: float, form: Form) -> float:
        """ln of E_w of what bounds E‖B(m̂ - m)‖² for every B of norm 1."""
        U, D = self.U * self.size.scale, self.size.D
        c = (4 * U) ** 4 * D**2

        def terms(sigma):
            return log_sum(second_order(l, sigma, U=U, C_f=1, p=1, D=D, c=c, g2=1, g4=1, F=None, form=form).values())

        return over_tasks(self.size, terms)

    def _slope_error(self, l: float, form: Form) -> float:
        """ln of E_w of what bounds E‖(Ĥ - H)v zᵀ‖² for every unit v."""
        size, U = self.size, self.U * self.size.scale
        M = size.tilted_moments(U)

        def terms(sigma):
            return log_sum(slope_error(l, sigma, U=U, D=size.D, M=M, g2=size.query[1], form=form).values())

        return over_tasks(size, terms) + 2 * math.log(size.scale)


def _of_ball(task: LinearRegression, rho: Number) -> _Setting:
    """All numbers at their largest over the ball of radius 2ρ."""
    size, radius = sizes(task), 2 * real("rho", rho)
    root = math.sqrt(size.G2 * size.query2)
    limit, jacobian = radius**2 / 2 * root + math.sqrt(size.target), math.sqrt(size.k) * radius * root
    return _Setting(size, radius, radius, size.k, radius**2, logarithm(limit), logarithm(jacobian))


def _of_layer(layer: AbstractLayer, task: LinearRegression) -> _Setting:
    """The numbers of the predicted outputs, which are the last."""
    size, layer, k = sizes(task), as_predictor(layer, task), task.targets
    attention = softmax_form(layer)
    V = np.asarray(attention.V, float)[-k:]
    mean, slope, U = float(k), float(np.sum(V**2)), operator_norm(attention.U)
    if isinstance(layer, Head):  # whose parameters are K, Q, V, O
        slope *= layer.scale**2 * (operator_norm(layer.K) ** 2 + operator_norm(layer.Q) ** 2)
        if layer.O is not None:
            mean = float(np.sum(np.asarray(layer.O)[-k:] ** 2)) + k * operator_norm(layer.V) ** 2
    limit = logarithm(2 * float(risk(layer, task, math.inf).value)) / 2
    jacobian = logarithm((mean * U**2 + slope) * size.G2 * size.query2) / 2
    return _Setting(size, U, operator_norm(V), mean, slope, limit, jacobian)


def operator_norm(matrix: ArrayLike) -> float:
    """The operator norm."""
    return float(np.linalg.norm(np.asarray(matrix, float), 2))
