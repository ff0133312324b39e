"""Errata of Appendix C, fixed query: Lemmas C.1, C.4, C.7 and Corollary C.3, and one bound that replaces them."""

import math

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad
from scipy.special import exp1, lambertw

from largeprompt.concentration.bounds import one_term
from largeprompt.paper.errata._evidence import Numbers

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


def E6() -> Numbers:
    C_f = 300.0
    scale = 16 * C_f**2
    integral, _ = quad(lambda u: math.exp(-u / scale), 0, 50 * scale)
    moment = 3 * C_f**4
    return [(C_f**2, lemma_c4(1.0, 0.0, C_f, moment, 1)), (integral, 16 * C_f), (1.0, math.log(1.0))], [
        (C_f**2, lemma_c4(1.0, 0.0, C_f, moment, 2)),
        (integral, 16 * C_f**2),
        (C_f**2, one_term_bound(1.0, 0.0, moment)),
        (ONE_TERM_CONSTANT, 216 * math.log(2)),
    ]


def G7() -> Numbers:
    L, sigma2, norm2 = 100.0, 4.0, 1.0
    printed = math.exp(-L / 8 * math.exp(-2 * norm2))
    proved = math.exp(-L / 8 * math.exp(-2 * sigma2 * norm2))
    alpha = math.exp(sigma2 * norm2) * math.sqrt(2 * math.log(1 / printed) / L)
    return [(printed, proved), (min(alpha, 1.0), 0.5)], [(ONE_TERM_CONSTANT / 27, 4.0)]


def G8() -> Numbers:
    x = 2.0
    upper = -2 * float(lambertw(-0.25, -1).real)
    return [(1 / (4 * x**2), math.exp(-x)), (27 / (64 * x**2), math.exp(-x)), (upper, 1.0)], [
        (ONE_TERM_CONSTANT / 108, 1.0)
    ]


def decay_constant(norm: float) -> float:
    """c̃2 of Eq. (16) for f(z) = r y, y = w·x, Σ = I, ‖w‖ = `norm`: (E‖f‖⁴)^{1/2}/(64 C_f²) = √3 ‖w‖²/64.

    Half of the rate 1/32 that the proof of Lemma C.6 leaves; the other half pays for L^{1/3}.
    """
    return math.sqrt(3) * norm**2 / 64


def inverse_moment(epsilon: float) -> float:
    """E[‖w‖⁻⁴; ‖w‖ > ε] = E₁(ε²/2)/4 for w ~ N(0, I₄)."""
    return float(exp1(epsilon**2 / 2)) / 4


def G9() -> Numbers:
    small, beta = 0.01, 0.5
    return [
        (decay_constant(small) ** -2, 1e7 * decay_constant(1.0) ** -2),
        (inverse_moment(1e-8), 3 * inverse_moment(1e-2)),
        (216 * math.sqrt(3) * 9, 216 * math.sqrt(3)),
    ], [
        (small**2 * two_token_error(beta), one_term_bound(2.0, beta**2, 3 * small**4)),
        (one_term_bound(2.0, beta**2, 3 * small**4), one_term_bound(2.0, beta**2, 3.0)),
    ]


def T13() -> Numbers:
    V, u, t = 2.0, 1.0, 0.5
    output = V * math.tanh(u)
    finite, limit = 1.0, 0.0
    return [(output, 1.0), (2 * finite**2 + 2 * limit**2, t)], [
        (output, V),
        (2 * finite**2 + 2 * limit**2, (finite - limit) ** 2),
    ]
