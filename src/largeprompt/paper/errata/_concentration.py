"""Errata of Appendix C, fixed query: Lemmas C.1, C.4, C.7 and Corollary C.3, and one bound that replaces them."""

import math

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad
from scipy.special import exp1, lambertw

from largeprompt.concentration.bounds import one_term
from largeprompt.paper.errata._evidence import Evidence

BAD_EVENT_PEAK = 24**1.5 * math.exp(-1.5)
"""sup over L and 0 < x ≤ L of x²e^{−x/16}/√L: at x = L = 24 (past L = 32 the supremum over x is 32²e^{−2}/√L)."""

ONE_TERM_CONSTANT = 16 + 2 * (BAD_EVENT_PEAK + 8 / math.e)
"""The constant of the one-term bound before rounding up to 75."""


def one_term_bound(L: float, s: float, fourth_moment: float) -> float:
    """75 e^{4s} (E‖f‖⁴)^{1/2} / L, with s = σ²‖Uz‖²."""
    return one_term(L, Uz=math.sqrt(s), sigma=1.0, F=math.sqrt(fourth_moment)).value


def lemma_c4(L: float, s: float, C_f: float, fourth_moment: float, power: int) -> float:
    """Lemma C.4's right side for p = 1, d = 1, σ = 1, with C_f raised to `power` (printed: 1; right: 2)."""
    F = math.sqrt(fourth_moment)
    first = 216 * math.exp(4 * s) * F * math.log(L) / L
    decay = math.exp(-(L / 2 - math.exp(2 * s)) * F / (16 * C_f**2))
    return first + 32 * L * C_f**power * math.exp(2) * decay


def two_token_error(beta: float) -> float:
    """E(m − β)², m the softmax mean of two standard Gaussians g₁, g₂ under scores βg₁, βg₂.

    With h, t = (g₁ ± g₂)/√2 the mean is h/√2 + (t/√2) tanh(βt/√2): one Gaussian integral is left.
    """
    t, weights = hermegauss(120)
    shifted = t / math.sqrt(2) * np.tanh(beta * t / math.sqrt(2)) - beta
    return 0.5 + float(weights @ shifted**2) / math.sqrt(2 * math.pi)


def E6() -> Evidence:
    C_f = 300.0
    scale = 16 * C_f**2
    integral, _ = quad(lambda u: math.exp(-u / scale), 0, 50 * scale)
    moment = 3 * C_f**4
    return Evidence.of(
        (
            ("E‖f(z₁)‖²", C_f**2, ">", lemma_c4(1.0, 0.0, C_f, moment, 1), "printed bound, L = 1"),
            ("∫₀^∞ exp(−u/(16 C_f²)) du", integral, ">", 16 * C_f, "printed value 16 C_f"),
            ("left side of Eq. (1), L = 1", 1.0, ">", math.log(1.0), "its right side over c₁σ⁶"),
        ),
        (
            ("E‖f(z₁)‖²", C_f**2, "<", lemma_c4(1.0, 0.0, C_f, moment, 2), "bound with C_f²"),
            ("∫₀^∞ exp(−u/(16 C_f²)) du", integral, "=", 16 * C_f**2, "16 C_f²"),
            ("E‖f(z₁)‖²", C_f**2, "<", one_term_bound(1.0, 0.0, moment), "one-term bound"),
            ("constant of the one-term bound", ONE_TERM_CONSTANT, "<", 216 * math.log(2), "216 ln 2"),
        ),
    )


def G7() -> Evidence:
    L, sigma2, norm2 = 100.0, 4.0, 1.0
    printed = math.exp(-L / 8 * math.exp(-2 * norm2))
    proved = math.exp(-L / 8 * math.exp(-2 * sigma2 * norm2))
    alpha = math.exp(sigma2 * norm2) * math.sqrt(2 * math.log(1 / printed) / L)
    return Evidence.of(
        (
            ("smallest δ of the statement", printed, "<", proved, "smallest δ of the proof"),
            ("α₋ at that δ (capped at 1)", min(alpha, 1.0), ">", 0.5, "largest α₋ the proof allows"),
        ),
        (("constant of the one-term bound over 27", ONE_TERM_CONSTANT / 27, "<", 4.0, "as Markov needs"),),
    )


def G8() -> Evidence:
    x = 2.0
    upper = -2 * float(lambertw(-0.25, -1).real)
    return Evidence.of(
        (
            ("δ₀/4", 1 / (4 * x**2), "<", math.exp(-x), "δ_min"),
            ("27δ₀/64, the value used at t₀ in Lemma C.4", 27 / (64 * x**2), "<", math.exp(-x), "δ_min"),
            ("largest x with δ₀/4 < δ_min", upper, ">", 1.0, "smallest x with δ₀ < 1"),
        ),
        (
            (
                "constant of the one-term bound over 108",
                ONE_TERM_CONSTANT / 108,
                "<",
                1.0,
                "as Markov needs, for every δ",
            ),
        ),
    )


def decay_constant(norm: float) -> float:
    """c̃2 of Eq. (16) for f(z) = r y, y = w·x, Σ = I, ‖w‖ = `norm`: (E‖f‖⁴)^{1/2}/(64 C_f²) = √3 ‖w‖²/64.

    Half of the rate 1/32 that the proof of Lemma C.6 leaves; the other half pays for L^{1/3}.
    """
    return math.sqrt(3) * norm**2 / 64


def inverse_moment(epsilon: float) -> float:
    """E[‖w‖⁻⁴; ‖w‖ > ε] = E₁(ε²/2)/4 for w ~ N(0, I₄)."""
    return float(exp1(epsilon**2 / 2)) / 4


def G9() -> Evidence:
    small, beta = 0.01, 0.5
    return Evidence.of(
        (
            (
                "c̃2^{−2} at ‖w‖ = 0.01",
                decay_constant(small) ** -2,
                ">",
                1e7 * decay_constant(1.0) ** -2,
                "10⁷ × its value at ‖w‖ = 1",
            ),
            (
                "E[‖w‖⁻⁴; ‖w‖ > 10⁻⁸], d = 4",
                inverse_moment(1e-8),
                ">",
                3 * inverse_moment(1e-2),
                "3 × the same above 10⁻²",
            ),
            ("c̃3 at μ = N(0, 9)", 216 * math.sqrt(3) * 9, ">", 216 * math.sqrt(3), "c̃3 at μ = N(0, 1)"),
        ),
        (
            (
                "true error at ‖w‖ = 0.01",
                small**2 * two_token_error(beta),
                "<",
                one_term_bound(2.0, beta**2, 3 * small**4),
                "one-term bound there",
            ),
            (
                "one-term bound at ‖w‖ = 0.01",
                one_term_bound(2.0, beta**2, 3 * small**4),
                "<",
                one_term_bound(2.0, beta**2, 3.0),
                "one-term bound at ‖w‖ = 1",
            ),
        ),
    )


def T13() -> Evidence:
    V, u, t = 2.0, 1.0, 0.5
    output = V * math.tanh(u)
    finite, limit = 1.0, 0.0
    return Evidence.of(
        (
            ("softmax output", output, ">", 1.0, "largest token"),
            ("2‖R_L/S_L‖² + 2‖R/S‖²", 2 * finite**2 + 2 * limit**2, ">", t, "t, said to be the larger"),
        ),
        (
            ("softmax output", output, "<", V, "largest Vz_k"),
            ("2‖R_L/S_L‖² + 2‖R/S‖²", 2 * finite**2 + 2 * limit**2, ">", (finite - limit) ** 2, "‖R_L/S_L − R/S‖² ≥ t"),
        ),
    )
