r"""Propositions 3.1 and 3.4: how far a layer and its gradients are from their limits, for any laws that qualify.

What a layer's parameters see of a prompt is the tilted mean m and covariance H: every squared deviation is
$\|B(\hat m - m)\|^2$ for a matrix B, or $\|(\hat H - H)v\,z^\top\|^2$ summed over the rows v of V, times a factor.
"""

import math
from dataclasses import dataclass

import numpy as np

from largeprompt.attention import AbstractLayer, Head, softmax_form
from largeprompt.concentration._spectrum import spectrum
from largeprompt.measures import AbstractMeasure, Gaussian, as_measure

from ._bound import Bound, Length, Number, bound_of, log_length, logarithm
from ._fixed_query import ONE_TERM
from ._laws import certified, fourth_moment_root, is_centred
from ._moments import moment_constants
from ._over_queries import Form, length_and_form, second_order, slope_error


@dataclass(frozen=True)
class _Setting:
    """A layer and two laws as Lemmas C.6 and C.9 take them: `scale` is what queries were divided by."""

    layer: AbstractLayer
    mu: AbstractMeasure
    nu: AbstractMeasure
    U: float
    V: np.ndarray
    D: int
    sigma: float
    scale: float
    notes: tuple[str, ...]


def output_bound(
    layer: AbstractLayer,
    mu: AbstractMeasure,
    nu: AbstractMeasure,
    L: Length = None,
    *,
    form: Form = "printed",
    log_L: Number | None = None,
) -> Bound:
    r"""Proposition 3.1: $E\|T[\hat\mu_L]-T[\mu]\|^2_{L^2(\nu)}$ is at most Lemma C.6 with $f(z)=Vz$, $C_f=\|V\|$.

    $c = 4^4\|V\|^4\|U\|^4D^2$ by Lemma D.1. Tokens are centred and queries scaled to constant 1 first: no loss.
    """
    setting = _setting(layer, mu, nu)
    terms = _mean_terms(setting, setting.V, 1.0, *length_and_form(L, log_L, form))
    return bound_of("Proposition 3.1", terms, setting.notes)


def gradient_bounds(
    layer: AbstractLayer,
    mu: AbstractMeasure,
    nu: AbstractMeasure,
    L: Length = None,
    *,
    form: Form = "printed",
    log_L: Number | None = None,
) -> dict[str, Bound]:
    r"""Proposition 3.4 for each of the layer's own parameters: the mean squares of $\nabla T[\hat\mu_L]-\nabla T[\mu]$.

    Frobenius norms over all outputs. V and O see the mean of the tilted tokens (Lemma C.6 with f linear), U their
    covariance (`slope_error`), K and Q the latter by the chain rule, $\|s\,Q\nabla_U^\top\|\le s\|Q\|\|\nabla_U\|$.
    """
    names = ("V", "U") if not isinstance(layer, Head) else ("V", "K", "Q") if layer.O is None else ("V", "K", "Q", "O")
    setting, length = _setting(layer, mu, nu), length_and_form(L, log_L, form)
    terms = {name: _gradient_terms(setting, name, *length) for name in names}
    return {name: bound_of(f"Proposition 3.4, {name}", *of_name) for name, of_name in terms.items()}


def one_term_over_queries(
    layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure, L: Length = None, *, log_L: Number | None = None
) -> Bound:
    r"""$E\|T[\hat\mu_L]-T[\mu]\|^2_{L^2(\nu)} \le 75(E\|Vz\|^4)^{1/2}\,E_\nu e^{4\sigma^2\|Uz\|^2}/L$, the true order.

    Not in the paper. For Gaussian queries the mean over ν is finite where $8\sigma^2S^{1/2}U^\top US^{1/2} < I$, for
    bounded ones it is at most $e^{4\sigma^2\|U\|^2\mathrm{radius}^2}$; otherwise there is no such bound.
    """
    attention, l = softmax_form(layer), log_length(L, log_L)
    mu, nu = as_measure("mu", mu, attention.dim), as_measure("nu", nu, attention.dim)
    sigma = float(certified("mu", mu).subgaussian())
    F = fourth_moment_root(mu, np.asarray(attention.V, float))
    log = math.log(ONE_TERM) + logarithm(F) - l + _log_mean_tilt(sigma * np.asarray(attention.U, float), nu)
    notes = ("tokens centred first: deviations do not change", f"tokens {sigma:.4g} sub-Gaussian")
    return bound_of("one-term bound over queries", {"75 F E e^{4s}/L": log}, notes)


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
    return 4 * (float(np.linalg.norm(U, 2)) * radius) ** 2


def _setting(layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure) -> _Setting:
    attention = softmax_form(layer)
    mu = certified("mu", as_measure("mu", mu, attention.dim))
    nu = certified("nu", as_measure("nu", nu, attention.dim))
    if not is_centred(nu):
        size = float(np.linalg.norm(np.asarray(nu.mean())))
        raise ValueError(f"nu has a mean of norm {size:.4g}; Propositions 3.1 and 3.4 are for centred queries")
    raw, scale = float(mu.subgaussian()), float(nu.subgaussian())
    sigma, scale = max(1.0, raw), scale if scale > 0 else 1.0
    notes = [
        f"tokens {raw:.4g} sub-Gaussian: σ = {sigma:.4g}",
        "tokens are centred" if is_centred(mu) else "tokens centred first: deviations do not change",
        f"queries centred and {scale:.4g} sub-Gaussian: z/{scale:.4g} and {scale:.4g}·U in place of z and U",
    ]
    U, V = np.asarray(attention.U, float), np.asarray(attention.V, float)
    return _Setting(layer, mu, nu, scale * float(np.linalg.norm(U, 2)), V, attention.dim, sigma, scale, tuple(notes))


def _mean_terms(setting: _Setting, B: np.ndarray, factor: float, l: float, form: Form) -> dict[str, float]:
    """The terms that bound factor·E‖B(m̂ - m)‖²."""
    C_f, D, U = float(np.linalg.norm(B, 2)), setting.D, setting.U
    F = fourth_moment_root(setting.mu, B)
    c = (4 * C_f * U) ** 4 * D**2
    terms = second_order(l, setting.sigma, U=U, C_f=C_f, p=1, D=D, c=c, g2=1, g4=1, F=F, form=form)
    return {name: float(term) + logarithm(factor) for name, term in terms.items()}


def _slope_terms(setting: _Setting, l: float, form: Form) -> tuple[dict[str, float], tuple[str, ...]]:
    """The terms that bound the mean square of ∇_U, over all rows of V."""
    moments = moment_constants(setting.layer, setting.mu, setting.nu).rescaled(setting.scale)
    g2 = float(np.trace(np.asarray(setting.nu.cov()))) / setting.scale**2
    terms = slope_error(l, setting.sigma, U=setting.U, D=setting.D, M=moments.M, g2=g2, form=form)
    factor = 2 * logarithm(float(np.linalg.norm(setting.V)) * setting.scale)
    notes = (*setting.notes, f"moments of Assumption 3.3: {moments.kind}")
    return {name: float(term) + factor for name, term in terms.items()}, notes


def _gradient_terms(setting: _Setting, name: str, l: float, form: Form) -> tuple[dict[str, float], tuple[str, ...]]:
    layer, D, outputs = setting.layer, setting.D, setting.layer.outputs
    if name == "V":
        factor = outputs if not isinstance(layer, Head) or layer.O is None else np.sum(np.asarray(layer.O) ** 2)
        return _mean_terms(setting, np.eye(D), float(factor), l, form), setting.notes
    if isinstance(layer, Head) and name == "O":
        return _mean_terms(setting, np.asarray(layer.V, float), float(outputs), l, form), setting.notes
    terms, notes = _slope_terms(setting, l, form)
    if isinstance(layer, Head):
        other = layer.Q if name == "K" else layer.K
        factor = 2 * logarithm(abs(layer.scale) * float(np.linalg.norm(np.asarray(other), 2)))
        terms = {key: term + factor for key, term in terms.items()}
    return terms, notes
