r"""Appendices C.1, C.2 and C.4: one query, the mean over prompts.

Throughout $s = \sigma^2\|Uz\|^2$, $F = (E\|f\|^4)^{1/2}$, and $\bar F = C_f^2\sigma^{2p}a_p \ge F$ is its bound over
all σ sub-Gaussian tokens: $a_1 = 4D$, $a_2 = \sqrt{768}D^2$, from $E z_i^{2k}\le 2k\,\Gamma(k)(2\sigma^2)^k$.
"""

import math

import numpy as np

from ._bound import Bound, Length, Logs, Number, degree, dimension, log_length, logarithm, probability, real

ONE_TERM = 75.0  # proven with 74.36: docs/errata.md, "One bound in place of Lemmas C.1, C.3 and C.4"
_TOKENS = "tokens centred and σ sub-Gaussian"
_NO_RANGE = (
    "every δ in (0, 1): by the one-term bound and Markov's inequality, without the printed range (errata G7, G8)"
)


def log_a(p: int, D: int) -> float:
    """ln a_p: (E‖Z‖^{4p})^{1/2} ≤ σ^{2p}a_p."""
    return math.log(4 * D) if p == 1 else math.log(768) / 2 + 2 * math.log(D)


def _tilt(sigma: Number, Uz: Number) -> float:
    return (real("sigma", sigma) * real("Uz", Uz)) ** 2


def _first_order(factor: float, L: Length, Uz: Number, sigma: Number, F: Number, delta: Number | None = None) -> float:
    """ln of factor·e^{4s}F/(δL), δ = 1 where none is given."""
    log_delta = 0.0 if delta is None else math.log(probability("delta", delta))
    return math.log(factor) + 4 * _tilt(sigma, Uz) + logarithm(real("F", F)) - log_delta - log_length(L)


def lemma_c1(L: Length, *, delta: Number, Uz: Number, sigma: Number, F: Number) -> Bound:
    r"""Lemma C.1: with probability at least $1-4\delta$ the squared error is at most $27e^{4s}F/(\delta L)$.

    `Uz` is the norm ‖Uz‖ and `F` is $(E\|f\|^4)^{1/2}$.
    """
    return Bound.of("Lemma C.1", {"27 e^{4s} F/(δL)": _first_order(27, L, Uz, sigma, F, delta)}, (_TOKENS, _NO_RANGE))


def lemma_c2(L: Length, *, delta: Number, u: Number) -> Bound:
    r"""Lemma C.2: $\|\sum_l (Q_l - EQ_l)\| \le \sqrt{3uL/\delta}$, $u\ge E\|Q\|^2$, with probability $1-2\delta$."""
    log = (math.log(3) + logarithm(real("u", u)) + log_length(L) - math.log(probability("delta", delta))) / 2
    return Bound.of("Lemma C.2", {"√(3uL/δ)": log}, ("vectors independent, of one law, E‖Q‖² ≤ u",))


def corollary_c3(L: Length, *, delta: Number, Uz: Number, sigma: Number, F: Number) -> Bound:
    r"""Corollary C.3: the squared error exceeds $108e^{4s}F/(\delta L)$ with probability at most $\delta$."""
    return Bound.of("Corollary C.3", {"C/(δL)": _first_order(108, L, Uz, sigma, F, delta)}, (_TOKENS, _NO_RANGE))


def one_term(L: Length, *, Uz: Number, sigma: Number, F: Number) -> Bound:
    r"""$E\|R_L/S_L - R/S\|^2 \le 75e^{4s}F/L$ for every $L\ge1$, in place of Lemmas C.1, C.3 and C.4.

    Not in the paper: proven in the errata.
    """
    return Bound.of("one-term bound", {"75 e^{4s} F/L": _first_order(ONE_TERM, L, Uz, sigma, F)}, (_TOKENS,))


def lemma_c4(L: Length, *, Uz: Number, sigma: Number, C_f: Number, p: int, D: int, F: Number | None = None) -> Bound:
    r"""Lemma C.4: the mean square error of one query, for $\|f(z)\|\le C_f\|z\|^p$.

    $$\frac{216e^{4s}F\ln L}{L} + 2Lp\,16^p\sigma^{2p}C_f^2e^{2D}\Big(1+1_{p=2}\frac{\sqrt{La_p/4}}{16}\Big)
      \exp\Big(-\big[(L/4)^{1/p} - e^{2s/p}\big]\frac{a_p^{1/p}}{16}\Big),\qquad L\ge2.$$
    Corrected: $C_f^2$ for $C_f$ (errata E6), uniform in μ (G9). Without `F` the first term has $\bar F$; the smaller of
    the two serves, because by the one-term bound the first term is an upper bound by itself.
    """
    l, p, D = log_length(L, at_least=2), degree(p), dimension(D)
    s, log_sigma, growth = _tilt(sigma, Uz), logarithm(real("sigma", sigma)), logarithm(real("C_f", C_f))
    terms = {
        "216 e^{4s} F ln L/L": math.log(216) + 4 * s + smaller_F(F, growth, log_sigma, p, D) + math.log(l) - l,
        "large tokens": second_order_tail(l, log_sigma, growth, p, D, 2 * s),
    }
    return Bound.of("Lemma C.4", terms, (_TOKENS, f"‖f(z)‖ ≤ C_f‖z‖^{p}", "L ≥ 2 and C_f² for C_f (errata E6)"))


def lemma_c7(L: Length, *, Uz: Number, sigma: Number, C_f: Number, D: int, F: Number | None = None) -> Bound:
    r"""Lemma C.7: the mean fourth power of the error of one query, for $\|f(z)\|\le C_f\|z\|$.

    $$\frac{216e^{4s}F\bar F}{\sqrt L} + 16^3\sigma^4LC_f^4e^{2D}\Big(1+\frac{\sqrt L\,a_1}{32\sqrt2}\Big)
      \exp\Big(-\Big[\frac{\sqrt L}{2\sqrt2} - e^{2s}\Big]\frac{a_1}{16}\Big).$$
    Uniform in μ (errata G9): the integral is cut at $L\bar F^2$, so one of the two F's must be $\bar F$.
    """
    l, D, s = log_length(L), dimension(D), _tilt(sigma, Uz)
    log_sigma, growth = logarithm(real("sigma", sigma)), logarithm(real("C_f", C_f))
    terms = {
        "216 e^{4s} F F̄/√L": math.log(216) + 4 * s + log_fourth(F, growth, log_sigma, D) - l / 2,
        "large tokens": fourth_order_tail(l, log_sigma, growth, D, 2 * s),
    }
    return Bound.of("Lemma C.7", terms, (_TOKENS, "‖f(z)‖ ≤ C_f‖z‖"))


def smaller_F(F: Number | None, growth: float, log_sigma: Logs, p: int, D: int) -> Logs:
    """ln of F where it is given and below F̄, else of F̄; `growth` is ln C_f."""
    uniform = 2 * growth + 2 * p * log_sigma + log_a(p, D)
    return uniform if F is None else np.minimum(uniform, logarithm(real("F", F)))


def log_fourth(F: Number | None, growth: float, log_sigma: Logs, D: int) -> Logs:
    """ln FF̄, which is at least ln E‖f‖⁴."""
    return smaller_F(F, growth, log_sigma, 1, D) + smaller_F(None, growth, log_sigma, 1, D)


def second_order_tail(l: float, log_sigma: Logs, growth: float, p: int, D: int, reach: Logs) -> Logs:
    """ln of the second term of Lemma C.4, `reach` being ln e^{2s}, or what bounds it."""
    a = log_a(p, D)
    large = np.logaddexp(0, (l + a - math.log(4)) / 2 - math.log(16)) if p == 2 else 0.0
    front = math.log(2 * p) + l + p * math.log(16) + 2 * p * log_sigma + 2 * growth + 2 * D + large
    return front - _difference((l - math.log(4)) / p, np.asarray(reach) / p) * math.exp(a / p) / 16


def fourth_order_tail(l: float, log_sigma: Logs, growth: float, D: int, reach: Logs) -> Logs:
    """ln of the second term of Lemma C.7, `reach` being ln e^{2s}, or what bounds it."""
    a = log_a(1, D)
    large = np.logaddexp(0, l / 2 + a - math.log(32) - math.log(2) / 2)
    front = 3 * math.log(16) + 4 * log_sigma + l + 4 * growth + 2 * D + large
    return front - _difference((l - math.log(8)) / 2, reach) * math.exp(a) / 16


def _difference(one: Logs, other: Logs) -> Logs:
    """e^one - e^other for any size: at most 1e299, which e^{-x} cannot distinguish from more, and -inf below -1e299."""
    cap = 690.0
    fall = np.exp(np.minimum(one, cap)) * -np.expm1(np.minimum(other - one, 0))
    rise = np.exp(np.minimum(other, cap)) * np.expm1(np.minimum(one - other, 0))
    return np.where(np.asarray(one) >= other, fall, np.where(np.asarray(other) > cap, -np.inf, rise))
