r"""Propositions 3.1 and 3.4: how far a layer and its gradients are from their limits, for any laws that qualify.

What a layer's parameters see of a prompt is the tilted mean m and covariance H: every squared deviation is
$\Delta m^\top M\Delta m$ for a matrix M, or $\mathrm{tr}(\Delta H^\top A\,\Delta H\,B)\,z^\top Nz$, which is at most
$\|B\|\|N\|$ times the sum of $\|(\hat H - H)v\,z^\top\|^2$ over the rows v of a root of A.
"""

import math

import numpy as np

from largeprompt.attention import AbstractLayer, softmax_form
from largeprompt.concentration._problem import Problem, Queries, RiskProblem, Tokens, problem_of
from largeprompt.concentration._spectrum import spectrum
from largeprompt.concentration._squares import QuadraticForm
from largeprompt.icl import as_regression
from largeprompt.measures import AbstractMeasure, Gaussian, as_measure

from ._bound import Bound, Length, log_length, logarithm
from ._moments import certified, fourth_moment_root, is_centred, moment_constants
from ._one_query import ONE_TERM
from ._over_queries import Form, length_and_form, second_order, slope_error
from ._risks import operator_norm, risk_bound, risk_gradient_bound


def bound(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    L: Length,
    quantity: str = "output",
    *,
    query_in_prompt: bool = False,
    form: Form = "printed",
) -> Bound:
    r"""The paper's bound on what `deviation` measures and `predict` predicts: Propositions 3.1 and 3.4.

    Of a task in place of `mu`, the bound is on the gap itself and not on its square, $|R_L-R_\infty|$ or
    $\|\nabla R_L-\nabla R_\infty\|$: Lemmas E.2 and E.4.
    """
    problem = problem_of(layer, mu, nu, 1, quantity, query_in_prompt)
    if query_in_prompt:
        raise ValueError("query_in_prompt is True; the paper's bounds are for a query outside of its prompt")
    if isinstance(problem, RiskProblem):
        bound_of = risk_bound if quantity == "risk" else risk_gradient_bound
        return bound_of(layer, as_regression(problem.task), L, form=form)
    if quantity != "gradient":
        return _Setting(problem).bound(quantity, L, form)
    parts = gradient_bounds(layer, problem.mu, problem.nu, L, form=form)
    notes = dict.fromkeys(note for part in parts.values() for note in part.assumptions)
    return Bound.of("Proposition 3.4", {name: part.log for name, part in parts.items()}, notes)


def output_bound(
    layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure, L: Length, *, form: Form = "printed"
) -> Bound:
    r"""Proposition 3.1: $E\|T[\hat\mu_L]-T[\mu]\|^2_{L^2(\nu)}$ is at most Lemma C.6 with $f(z)=Vz$, $C_f=\|V\|$.

    $c = 4^4\|V\|^4\|U\|^4D^2$ by Lemma D.1. Tokens are centred and queries scaled to constant 1 first: no loss.
    """
    return bound(layer, mu, nu, L, form=form)


def gradient_bounds(
    layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure, L: Length, *, form: Form = "printed"
) -> dict[str, Bound]:
    r"""Proposition 3.4 for each of the layer's own parameters: the mean squares of $\nabla T[\hat\mu_L]-\nabla T[\mu]$.

    Frobenius norms over all outputs. V and O see the mean of the tilted tokens (Lemma C.6 with f linear), U their
    covariance (`slope_error`), K and Q the latter by the chain rule, $\|s\,Q\nabla_U^\top\|\le s\|Q\|\|\nabla_U\|$.
    """
    own = [name for name in ("V", "K", "Q", "O") if getattr(layer, name, None) is not None]
    names = own if "K" in own else ["V", "U"]
    setting = _Setting(problem_of(layer, mu, nu, 1, names))
    return {name: setting.bound(name, L, form) for name in names}


class _Setting:
    """A softmax layer and two laws as Lemmas C.6 and C.9 take them: `scale` is what queries were divided by."""

    def __init__(self, problem: Problem | RiskProblem):
        self.attention = softmax_form(problem.layer)
        assert isinstance(problem, Problem)  # of these quantities
        self.mu, self.nu = certified("mu", problem.mu), certified("nu", problem.nu)
        self.forms: dict[str, QuadraticForm] = {name: square.each[0] for name, square in problem.squares.items()}
        if not is_centred(self.nu):
            size = float(np.linalg.norm(np.asarray(self.nu.mean())))
            raise ValueError(f"nu has a mean of norm {size:.4g}; Propositions 3.1 and 3.4 are for centred queries")
        raw, self.scale = float(self.mu.subgaussian()), float(self.nu.subgaussian()) or 1.0
        self.sigma = max(1.0, raw)
        self.U = self.scale * operator_norm(self.attention.U)
        scale = f"{self.scale:.4g}"
        self.notes = (
            f"tokens {raw:.4g} sub-Gaussian: σ = {self.sigma:.4g}",
            "tokens are centred" if is_centred(self.mu) else "tokens centred first: deviations do not change",
            f"queries centred and {scale} sub-Gaussian: z/{scale} and {scale}·U in place of z and U",
        )

    def bound(self, name: str, L: Length, form: Form) -> Bound:
        """That on one quantity, but for all gradients at once."""
        l, form = length_and_form(L, form)
        square = self.forms[name]
        if not square.slopes:
            title = "Proposition 3.1" if name == "output" else f"Proposition 3.4, {name}"
            return Bound.of(title, self._mean_terms(np.asarray(square.M, float), l, form), self.notes)
        moments = moment_constants(self.attention, self.mu, self.nu).rescaled(self.scale)
        g2 = float(np.trace(np.asarray(self.nu.cov()))) / self.scale**2
        terms = slope_error(l, self.sigma, U=self.U, D=self.attention.dim, M=moments.M, g2=g2, form=form)
        ((A, B, N),) = square.slopes
        factor = 2 * logarithm(self.scale) + logarithm(
            float(np.trace(np.asarray(A))) * operator_norm(B) * operator_norm(N)
        )
        notes = (*self.notes, f"moments of Assumption 3.3: {moments.kind}")
        return Bound.of(f"Proposition 3.4, {name}", {part: term + factor for part, term in terms.items()}, notes)

    def _mean_terms(self, M: np.ndarray, l: float, form: Form):
        """The terms that bound E Δmᵀ M Δm."""
        C_f, D = math.sqrt(operator_norm(M)), self.attention.dim
        F, c = fourth_moment_root(self.mu, M), (4 * C_f * self.U) ** 4 * D**2
        return second_order(l, self.sigma, U=self.U, C_f=C_f, p=1, D=D, c=c, g2=1, g4=1, F=F, form=form)


def one_term_over_queries(layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure, L: Length) -> Bound:
    r"""$E\|T[\hat\mu_L]-T[\mu]\|^2_{L^2(\nu)} \le 75(E\|Vz\|^4)^{1/2}\,E_\nu e^{4\sigma^2\|Uz\|^2}/L$, the true order.

    Not in the paper. For Gaussian queries the mean over ν is finite where $8\sigma^2S^{1/2}U^\top US^{1/2} < I$, for
    bounded ones it is at most $e^{4\sigma^2\|U\|^2\mathrm{radius}^2}$; otherwise there is no such bound.
    """
    attention, l = softmax_form(layer), log_length(L)
    mu, nu = as_measure("mu", mu, attention.dim), as_measure("nu", nu, attention.dim)
    sigma = float(certified("mu", mu).subgaussian())
    F = fourth_moment_root(mu, np.asarray(attention.V.T @ attention.V, float))
    log = math.log(ONE_TERM) + logarithm(F) - l + _log_mean_tilt(sigma * np.asarray(attention.U, float), nu)
    notes = ("tokens centred first: deviations do not change", f"tokens {sigma:.4g} sub-Gaussian")
    return Bound.of("one-term bound over queries", {"75 F E e^{4s}/L": log}, notes)


def _log_mean_tilt(U: np.ndarray, nu: AbstractMeasure) -> float:
    """ln E e^{4‖Uz‖²}, or a bound on it."""
    if isinstance(nu, Gaussian):
        mean = U @ np.asarray(nu.mean(), float)
        shares, axes = spectrum(8 * U.T @ U, nu.cov())
        if shares[-1] >= 1:
            raise ValueError(
                f"8σ²‖S^{{1/2}}UᵀUS^{{1/2}}‖ is {shares[-1]:.4g}; below 1 it has a mean over queries, else not"
            )
        along = axes.T @ (8 * U.T @ mean)
        return float(4 * mean @ mean + np.sum(along**2 / (1 - shares)) / 2 - np.sum(np.log1p(-shares)) / 2)
    radius = float(nu.radius())
    if not math.isfinite(radius):
        raise ValueError(
            f"nu is of type {type(nu).__name__}; E e^{{4σ²‖Uz‖²}} is known for Gaussian and bounded queries"
        )
    return 4 * (operator_norm(U) * radius) ** 2
