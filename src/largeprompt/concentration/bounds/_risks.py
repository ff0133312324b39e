r"""Lemmas E.2 and E.4, Corollaries E.3 and E.5: how far risks and their gradients are from those of infinite prompts.

Only norms of the layer enter: $\Delta^2\ge E\|T_L-T_\infty\|^2$ and $\Delta_J^2\ge E\|\nabla T_L-\nabla T_\infty\|_F^2$
are means over tasks of Propositions 3.1 and 3.4, taken before any root (errata E4).
"""

import math
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class _Norms:
    """‖U‖ and ‖V‖ (operator norms), and what the errors of m and of H count for in the Jacobian."""

    U: float
    V: float
    mean: float
    slope: float


def risk_bound(layer: AbstractLayer, task: LinearRegression, L: Length, *, form: Form = "printed") -> Bound:
    r"""Lemma E.2, corrected: $|R_L-R_\infty| \le \tfrac12\Delta^2 + (2R_\infty)^{1/2}\Delta$, without fourth moments.

    Expand the square. $\Delta^2 = E_w$ of Proposition 3.1 at $\sigma_w$. Errata: E2, E3.
    """
    size, norms = sizes(task), _norms(layer, task)
    l, form = length_and_form(L, form)
    limit = logarithm(2 * float(risk(layer, task, math.inf).value)) / 2
    return Bound.of("Lemma E.2", _risk_terms(_output_error(size, norms, l, form), limit), _NOTES)


def risk_gradient_bound(layer: AbstractLayer, task: LinearRegression, L: Length, *, form: Form = "printed") -> Bound:
    r"""Lemma E.4, corrected: $\|\nabla R_L-\nabla R_\infty\| \le \Delta_J((2R_\infty)^{1/2}+\Delta) + J_\infty\Delta$.

    In the layer's own parameters; $J_\infty^2\ge E\|\nabla T_\infty\|_F^2$, $\|\Gamma_W\|\le\|\Sigma\|(1+\|W\|^2)+s^2$.
    """
    size, norms = sizes(task), _norms(layer, task)
    l, form = length_and_form(L, form)
    limit = logarithm(2 * float(risk(layer, task, math.inf).value)) / 2
    size_of_limit = logarithm((norms.mean * norms.U**2 + norms.slope) * size.G2 * size.query2) / 2
    return Bound.of("Lemma E.4", _gradient_terms(size, norms, l, form, limit, size_of_limit), _NOTES)


def g1(task: LinearRegression, L: Length, *, rho: Number, form: Form = "printed") -> Bound:
    r"""Corollary E.3: the supremum of $|R_L-R_\infty|$ over $\|(U,V)\|_F\le2\rho$, by Lemma E.2.

    $(2R_\infty)^{1/2} \le (E\|T_\infty\|^2)^{1/2}+(E\|y_q\|^2)^{1/2}$ and $\|U\|\|V\|\le2\rho^2$ there.
    """
    size, norms, limit, _ = _ball(task, rho)
    l, form = length_and_form(L, form)
    return Bound.of("Corollary E.3", _risk_terms(_output_error(size, norms, l, form), limit), _NOTES)


def g2(task: LinearRegression, L: Length, *, rho: Number, form: Form = "printed") -> Bound:
    r"""Corollary E.5: the supremum of $\|\nabla R_L-\nabla R_\infty\|$ over $\|(U,V)\|_F\le2\rho$, by Lemma E.4."""
    size, norms, limit, size_of_limit = _ball(task, rho)
    l, form = length_and_form(L, form)
    return Bound.of("Corollary E.5", _gradient_terms(size, norms, l, form, limit, size_of_limit), _NOTES)


def _ball(task: LinearRegression, rho: Number) -> tuple[Sizes, _Norms, float, float]:
    """Sizes, norms, and the logarithms of (2R_∞)^{1/2} and of J_∞, all at their largest over the ball."""
    size, radius = sizes(task), 2 * real("rho", rho)
    root = math.sqrt(size.G2 * size.query2)
    limit = logarithm(radius**2 / 2 * root + math.sqrt(size.target))
    return size, _Norms(radius, radius, size.k, radius**2), limit, logarithm(math.sqrt(size.k) * radius * root)


def _norms(layer: AbstractLayer, task: LinearRegression) -> _Norms:
    """Those of the predicted outputs, which are the last."""
    layer, k = as_predictor(layer, task), task.targets
    attention = softmax_form(layer)
    U, V = np.asarray(attention.U, float), np.asarray(attention.V, float)[-k:]
    mean, slope = float(k), float(np.sum(V**2))
    if isinstance(layer, Head):
        K, Q = (float(np.linalg.norm(np.asarray(M), 2)) for M in (layer.K, layer.Q))
        slope *= layer.scale**2 * (K**2 + Q**2)
        if layer.O is not None:
            mean = float(np.sum(np.asarray(layer.O)[-k:] ** 2)) + k * float(np.linalg.norm(np.asarray(layer.V), 2)) ** 2
    return _Norms(float(np.linalg.norm(U, 2)), float(np.linalg.norm(V, 2)), mean, slope)


def _mean_error(size: Sizes, U: float, l: float, form: Form) -> float:
    """ln of E_w of what bounds E‖B(m̂ - m)‖² for every B of norm 1."""
    U, D = U * size.scale, size.D
    c = (4 * U) ** 4 * D**2

    def terms(sigma):
        return log_sum(second_order(l, sigma, U=U, C_f=1, p=1, D=D, c=c, g2=1, g4=1, F=None, form=form).values())

    return over_tasks(size, terms)


def _slope_error(size: Sizes, U: float, l: float, form: Form) -> float:
    """ln of E_w of what bounds E‖(Ĥ - H)v zᵀ‖² for every unit v."""
    U = U * size.scale
    M = size.tilted_moments(U)

    def terms(sigma):
        return log_sum(slope_error(l, sigma, U=U, D=size.D, M=M, g2=size.query[1], form=form).values())

    return over_tasks(size, terms) + 2 * math.log(size.scale)


def _output_error(size: Sizes, norms: _Norms, l: float, form: Form) -> float:
    """ln Δ."""
    return _mean_error(size, norms.U, l, form) / 2 + logarithm(norms.V)


def _risk_terms(delta: float, limit: float) -> dict[str, float]:
    return {"½Δ²": 2 * delta - math.log(2), "(2R_∞)^{1/2}Δ": limit + delta}


def _gradient_terms(
    size: Sizes, norms: _Norms, l: float, form: Form, limit: float, size_of_limit: float
) -> dict[str, float]:
    mean = _mean_error(size, norms.U, l, form)
    delta = mean / 2 + logarithm(norms.V)
    slope = _slope_error(size, norms.U, l, form) + logarithm(norms.slope)
    jacobian = float(np.logaddexp(mean + logarithm(norms.mean), slope)) / 2
    return {"Δ_J(2R_∞)^{1/2}": jacobian + limit, "Δ_JΔ": jacobian + delta, "J_∞Δ": size_of_limit + delta}
