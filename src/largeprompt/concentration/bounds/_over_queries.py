r"""Appendices C.3, C.5 and C.7: the mean over prompts and queries, for queries that are centred and 1 sub-Gaussian.

Queries with $\sigma^2\|Uz\|^2\le\tau$ are left to the bound of one query, the others to Lemma D.2; τ grows with ln L.
The private functions take σ of any shape, so that a task's mean over σ needs no loop.
"""

import math
from typing import Literal, cast, get_args

import numpy as np

from ._bound import Bound, Length, Logs, Number, degree, dimension, log_length, log_sum, logarithm, real
from ._maxima import log_maximum
from ._one_query import ONE_TERM, fourth_order_tail, log_fourth, second_order_tail, smaller_F

Form = Literal["printed", "short", "balanced"]
_LAWS = ("tokens centred and σ sub-Gaussian", "queries centred and 1 sub-Gaussian")


def lemma_c6(
    L: Length,
    *,
    sigma: Number,
    U: Number,
    C_f: Number,
    p: int,
    D: int,
    c: Number,
    g2: Number = 1.0,
    g4: Number = 1.0,
    F: Number | None = None,
    form: Form = "printed",
) -> Bound:
    r"""Lemma C.6 and Equation (16): the mean square error over queries of $\sum_l a_lf(z_l)g(z)$.

    With `U` the norm ‖U‖, `g2` $= E\|g\|^2$, `g4` $= E\|g\|^4$ and `c` that of Assumption C.5 (ii), three terms:
    $$T_1 = 216\,\frac{F g_2\ln L}{L^{1/3}},\quad T_2 = g_2\cdot[\text{second term of Lemma C.4},\ e^{2s}\to L^{1/3}],$$
    $$T_3 = 2\Big[\sigma^{2p}\big(2g_4C_f^4C_{4p}(D^{2p}+\ln^{2p}L)\big)^{1/2} + \sqrt2\,\sigma^{4p}\sqrt c\Big]
      e^D L^{-1/(192\sigma^2\|U\|^2)},$$
    $T_1$ being Equation (17). `form="short"` is what the one-term bound leaves of it, $75Fg_2L^{-1/3} + T_3$ from $L=1$
    on; `form="balanced"` splits the queries where the two are equal in slope, so that the exponent of $1/L$ is
    $1/(1+128\sigma^2\|U\|^2)$, never below $\min(1/3, 1/(192\sigma^2\|U\|^2))$.
    """
    (l, form), p, D = length_and_form(L, form), degree(p), dimension(D)
    numbers = {name: real(name, x) for name, x in (("U", U), ("C_f", C_f), ("c", c), ("g2", g2), ("g4", g4))}
    sigma = real("sigma", sigma, at_least=1)
    terms = second_order(l, sigma, p=p, D=D, F=F, form=form, **numbers)
    notes = (*_LAWS, f"‖f(z)‖ ≤ C_f‖z‖^{p}", "E‖Rg/S‖⁴ ≤ σ^{8p}c (Assumption C.5)")
    return Bound.of("Lemma C.6" if form == "printed" else f"Lemma C.6, {form} form", terms, notes)


def lemma_c9(
    L: Length,
    *,
    sigma: Number,
    U: Number,
    C_f: Number,
    D: int,
    c: Number,
    g4: Number = 1.0,
    g8: Number = 1.0,
    F: Number | None = None,
    form: Form = "printed",
) -> Bound:
    r"""Lemma C.9 and Equation (18): the mean fourth power of the error over queries, for $\|f(z)\|\le C_f\|z\|$.

    $$T_1 = 216\,\frac{F\bar F g_4}{L^{1/6}},\quad T_2 = g_4[\text{second term of Lemma C.7},\ e^{2s}\to L^{1/6}],$$
    $$T_3 = 8\Big[\sigma^4\big(2g_8C_f^8C_8(D^4+\ln^4L)\big)^{1/2} + \sqrt2\,\sigma^8\sqrt c\Big]
      e^DL^{-1/(384\sigma^2\|U\|^2)},$$
    $T_1$ being Equation (19), `c` that of Assumption C.8 (ii), `g4` $= E\|g\|^4$ and `g8` $= E\|g\|^8$. The balanced
    form has the exponent $1/(2+256\sigma^2\|U\|^2)$; a shorter one is not known.
    """
    l, D = log_length(L), dimension(D)
    numbers = {name: real(name, x) for name, x in (("U", U), ("C_f", C_f), ("c", c), ("g4", g4), ("g8", g8))}
    terms = fourth_order(l, real("sigma", sigma, at_least=1), D=D, F=F, form=as_form(form), **numbers)
    notes = (*_LAWS, "‖f(z)‖ ≤ C_f‖z‖", "E‖Rg/S‖⁸ ≤ σ¹⁶c (Assumption C.8)")
    return Bound.of("Lemma C.9" if form != "balanced" else "Lemma C.9, balanced form", terms, notes)


def product_bound(X: Bound, Y: Bound, *, X4: Number, Y4: float) -> Bound:
    r"""Equation (21): $E\|\hat X\hat Y - XY\|^2 \le 2\{8(EX^4+E_X)E_Y\}^{1/2} + 2\{E\|Y\|^4E_X\}^{1/2}$.

    `X` and `Y` bound the mean fourth powers of the errors, $E_X$ and $E_Y$; `X4` $\ge EX^4$ and `Y4` $\ge E\|Y\|^4$.
    """
    terms = log_product(X.log, Y.log, logarithm(real("X4", X4)), logarithm(real("Y4", Y4)))
    return Bound.of(
        "Equation (21)", terms, (*X.assumptions, *(note for note in Y.assumptions if note not in X.assumptions))
    )


def as_form(form: str) -> Form:
    """`form` itself, once it is one that Lemma C.6 has."""
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(map(repr, get_args(Form)))}")
    return cast(Form, form)


def length_and_form(L: Length, form: str) -> tuple[float, Form]:
    """ln L and the form, once it has that length: where ln L multiplies, L = 1 would make the bound 0 (errata E6)."""
    known = as_form(form)
    return log_length(L, at_least=2 if known == "printed" else 1), known


def second_order(
    l: float,
    sigma: Logs,
    *,
    U: float,
    C_f: float,
    p: int,
    D: int,
    c: float,
    g2: float,
    g4: float,
    F: Number | None,
    form: Form,
) -> dict[str, Logs]:
    """The logarithms of the terms of Lemma C.6."""
    log_sigma, growth = np.log(sigma), logarithm(C_f)
    near = smaller_F(F, growth, log_sigma, p, D) + logarithm(g2)
    maximum = (math.log(2) + logarithm(g4) + 4 * growth + log_maximum(l, sigma, D, 4 * p)) / 2
    far = math.log(2) + D + np.logaddexp(maximum, (math.log(2) + logarithm(c)) / 2 + 4 * p * log_sigma)
    rarity = _rarity(sigma, U)
    if form == "balanced":
        tau = _balance(near + math.log(ONE_TERM) - l, far, rarity)
        return {"T1": near + math.log(ONE_TERM) - l + 4 * tau, "T3": far - _times(rarity, tau)}
    third = far - _times(rarity, l / 6)
    if form == "short":
        return {"T1": near + math.log(ONE_TERM) - l / 3, "T3": third}
    tail = second_order_tail(l, log_sigma, growth, p, D, l / 3) + logarithm(g2)
    return {"T1": near + math.log(216) + math.log(l) - l / 3, "T2": tail, "T3": third}


def fourth_order(
    l: float, sigma: Logs, *, U: float, C_f: float, D: int, c: float, g4: float, g8: float, F: Number | None, form: Form
) -> dict[str, Logs]:
    """The logarithms of the terms of Lemma C.9."""
    log_sigma, growth = np.log(sigma), logarithm(C_f)
    near = math.log(216) + log_fourth(F, growth, log_sigma, D) + logarithm(g4) - l / 2
    maximum = (math.log(2) + logarithm(g8) + 8 * growth + log_maximum(l, sigma, D, 8)) / 2
    far = math.log(8) + D + np.logaddexp(maximum, (math.log(2) + logarithm(c)) / 2 + 8 * log_sigma)
    rarity = _rarity(sigma, U)

    def split_at(tau: Logs) -> dict[str, Logs]:
        tail = fourth_order_tail(l, log_sigma, growth, D, 2 * np.asarray(tau)) + logarithm(g4)
        return {"T1": near + 4 * tau, "T2": tail, "T3": far - _times(rarity, tau)}

    printed = split_at(l / 12)
    if form != "balanced":
        return printed
    balanced = split_at(_balance(near, far, rarity))
    better = log_sum(balanced.values()) < log_sum(printed.values())  # short prompts may make T2 the largest
    return {name: np.where(better, balanced[name], printed[name]) for name in printed}


def log_product(X: Logs, Y: Logs, X4: Logs, Y4: Logs) -> dict[str, Logs]:
    """The logarithms of the two terms of Equation (21), from those of E_X, E_Y, EX⁴ and E‖Y‖⁴."""
    first = math.log(2) + (math.log(8) + np.logaddexp(X4, X) + Y) / 2
    return {"X̂(Ŷ - Y)": first, "Y(X̂ - X)": math.log(2) + (Y4 + X) / 2}


def slope_error(
    l: float, sigma: Logs, *, U: float, D: int, M: dict[tuple[int, int], float], g2: float, form: Form
) -> dict[str, Logs]:
    r"""The logarithms of the terms that bound $E\|(\hat H - H)v\,z^\top\|_F^2$ for a unit v, $H$ the tilted covariance.

    $Hv = E_{\mu_z}[(v\cdot z')z'] - X\,m$ with $X = v\cdot m$: Lemma C.6 with p = 2 for the first, Equation (21) and
    Lemma C.9 for the product, and $\|a+b\|^2\le2\|a\|^2+2\|b\|^2$. All is of degree 2 in v. Paper: Appendix C.7.
    """
    square = second_order(l, sigma, U=U, C_f=1, p=2, D=D, c=M[8, 4], g2=g2, g4=M[0, 4], F=None, form=form)
    X = fourth_order(l, sigma, U=U, C_f=1, D=D, c=M[8, 0], g4=1, g8=1, F=None, form=form)
    Y = fourth_order(l, sigma, U=U, C_f=1, D=D, c=M[8, 8], g4=M[0, 4], g8=M[0, 8], F=None, form=form)
    growth = 8 * np.log(sigma)
    product = log_product(
        log_sum(X.values()), log_sum(Y.values()), growth + logarithm(M[4, 0]), growth + logarithm(M[4, 4])
    )
    terms = {f"second moment, {name}": term for name, term in square.items()}
    terms |= {f"product, {name}": term for name, term in product.items()}
    return {name: math.log(2) + term for name, term in terms.items()}


def _rarity(sigma: Logs, U: float) -> Logs:
    """1/(32σ²‖U‖²): beyond τ lie queries of probability at most e^{2D - 2τ·this}."""
    return np.asarray(np.inf if U == 0 else 1 / (32 * np.asarray(sigma) ** 2 * U**2))


def _times(rarity: Logs, tau: Logs) -> Logs:
    """Their product, where U = 0 leaves no query beyond any τ."""
    return np.where(np.isinf(rarity), np.inf, np.where(np.isinf(rarity), 0, rarity) * tau)


def _balance(near: Logs, far: Logs, rarity: Logs) -> Logs:
    """The τ ≥ 0 that minimises e^{near+4τ} + e^{far-rarity·τ}."""
    none = np.isinf(rarity) | np.isneginf(near) | np.isneginf(far)
    k = np.where(none, 1.0, rarity)
    gap = np.where(none, 0.0, np.where(none, 0.0, far) - np.where(none, 0.0, near))
    return np.where(none, 0.0, np.maximum((gap + np.log(k / 4)) / (4 + k), 0))
