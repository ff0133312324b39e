"""Errata of Appendix C, fixed query: Lemmas C.1, C.4, C.7 and Corollary C.3, and one bound that replaces them."""

import math

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad
from scipy.special import exp1, lambertw

from largeprompt.concentration.bounds import one_term
from largeprompt.paper.errata._erratum import Comparison, Erratum, Evidence

ONE_TERM_BOUND = """
    Four entries below (E6, G7, G8, G9) concern the same chain, Lemma C.1 → Corollary C.3 → Lemma C.4. All
    four are repaired at once by a statement that is shorter and stronger.

    **Claim.** Let μ be centred and σ sub-Gaussian, E‖f‖⁴ < ∞ and s = σ²‖Uz‖². In the notation of Lemma C.1,
    for every L ≥ 1,

    > E ‖R_L/S_L − R/S‖² ≤ 75 e^{4s} (E‖f‖⁴)^{1/2} / L.

    **Proof.** Write F = (E‖f‖⁴)^{1/2} and ω_k = exp(z_kᵀUz). Then Eω ≥ 1 by Jensen, so S ≥ L; Eω² ≤ e^{2s};
    Eω⁴ ≤ e^{8s}; and ‖R/S‖² ≤ Eω² E‖f‖² ≤ e^{2s}F. On the event S_L ≥ S/2, the error is at most (2/S)(‖R_L
    − R‖ + ‖R/S‖ ‖S_L − S‖), and E‖R_L − R‖² ≤ L E ω²‖f‖² ≤ L e^{4s}F, E(S_L − S)² ≤ L e^{2s}; this event
    contributes at most 16 e^{4s}F/L. Its complement has probability at most e^{−x/8} with x = L e^{−2s} ≤ L
    (the lower tail used in Lemma C.1), and there the squared error is at most 2 max‖f(z_k)‖² + 2‖R/S‖². By
    Cauchy-Schwarz and E max‖f(z_k)‖⁴ ≤ L F² it contributes at most 2F(√L e^{−x/16} + e^{2s}e^{−x/8}),
    which, since e^{2s} = L/x, equals 2 (e^{4s}F/L)(x²e^{−x/16}/√L + x e^{−x/8}). For 0 < x ≤ L the first
    summand in the bracket is at most 24^{3/2}e^{−3/2} and the second at most 8/e. The sum of the constants
    is 16 + 2·26.23 + 2·2.943 = 74.36. ∎

    **Consequences.** By Markov's inequality, Lemma C.1 holds for every δ in (0, 1) (75/27 < 4) and
    Corollary C.3 for every δ (75/108 < 1). Lemma C.4 holds for L ≥ 2 without its second term (216 ln 2 >
    75), hence without C_f, p or e^{2d}. In Eq. (16) the terms with c̃1 and c̃2 disappear, together with the
    factor ln L in the one with c̃3. What is left are two terms, one that grows and one that falls with the
    radius B at which the proof of Lemma C.6 splits the queries; where their slopes balance, the exponent of
    1/L is 1/(1 + 128σ²‖U‖²), never below the paper's min(1/3, 1/(192σ²‖U‖²)).

    **A slip that does no harm.** The proofs of Lemmas C.4 and C.7 start their last integral at the positive
    part of t₀/2 − ‖R/S‖² (t₀/8 − ‖R/S‖⁴). Where that is 0 because the difference is negative, they lose the
    stretch on which the probability is 1, twice (eight times) its length. The stated bounds cover it all the
    same: they drop the positive part in their exponents, and so grow like e^x where the lost stretch grows
    like x or x².
"""

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


def _change_of_variables() -> Evidence:
    C_f = 300.0
    scale = 16 * C_f**2
    integral, _ = quad(lambda u: math.exp(-u / scale), 0, 50 * scale)
    moment = 3 * C_f**4
    return Evidence(
        """μ = N(0, 1), z = 0, f(z) = 300 z (so C_f = 300, p = 1), L = 1; then R_L/S_L = f(z₁) and R/S = 0.
        For Eq. (1): μ = N(0, 1), V = 1, U = 0.""",
        (
            Comparison("E‖f(z₁)‖²", C_f**2, ">", lemma_c4(1.0, 0.0, C_f, moment, 1), "printed bound, L = 1"),
            Comparison("∫₀^∞ exp(−u/(16 C_f²)) du", integral, ">", 16 * C_f, "printed value 16 C_f"),
            Comparison("left side of Eq. (1), L = 1", 1.0, ">", math.log(1.0), "its right side over c₁σ⁶"),
        ),
        (
            Comparison("E‖f(z₁)‖²", C_f**2, "<", lemma_c4(1.0, 0.0, C_f, moment, 2), "bound with C_f²"),
            Comparison("∫₀^∞ exp(−u/(16 C_f²)) du", integral, "=", 16 * C_f**2, "16 C_f²"),
            Comparison("E‖f(z₁)‖²", C_f**2, "<", one_term_bound(1.0, 0.0, moment), "one-term bound"),
            Comparison("constant of the one-term bound", ONE_TERM_CONSTANT, "<", 216 * math.log(2), "216 ln 2"),
        ),
    )


def _range_of_delta() -> Evidence:
    L, sigma2, norm2 = 100.0, 4.0, 1.0
    printed = math.exp(-L / 8 * math.exp(-2 * norm2))
    proved = math.exp(-L / 8 * math.exp(-2 * sigma2 * norm2))
    alpha = math.exp(sigma2 * norm2) * math.sqrt(2 * math.log(1 / printed) / L)
    return Evidence(
        """L = 100, σ² = 4, ‖Uz‖ = 1, at the smallest δ the statement allows.""",
        (
            Comparison("smallest δ of the statement", printed, "<", proved, "smallest δ of the proof"),
            Comparison("α₋ at that δ (capped at 1)", min(alpha, 1.0), ">", 0.5, "largest α₋ the proof allows"),
        ),
        (
            Comparison(
                "constant of the one-term bound over 27",
                ONE_TERM_CONSTANT / 27,
                "<",
                4.0,
                "as Markov needs",
            ),
        ),
    )


def _quarter_of_delta() -> Evidence:
    x = 2.0
    upper = -2 * float(lambertw(-0.25, -1).real)
    return Evidence(
        """x = (L/8) exp(−2σ²‖Uz‖²) = 2, where δ₀ = 1/x² and δ_min = e^{−x}.""",
        (
            Comparison("δ₀/4", 1 / (4 * x**2), "<", math.exp(-x), "δ_min"),
            Comparison("27δ₀/64, the value used at t₀ in Lemma C.4", 27 / (64 * x**2), "<", math.exp(-x), "δ_min"),
            Comparison("largest x with δ₀/4 < δ_min", upper, ">", 1.0, "smallest x with δ₀ < 1"),
        ),
        (
            Comparison(
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


def _degenerate_measures() -> Evidence:
    small, beta = 0.01, 0.5
    return Evidence(
        """Noise-free regression, Σ = I, v = (0, r), f(z) = r y: E‖f‖⁴ = 3r⁴‖w‖⁴ and C_f = |r|. Error at L =
        2, d = 1, r = 1, score β = 1/2.""",
        (
            Comparison(
                "c̃2^{−2} at ‖w‖ = 0.01",
                decay_constant(small) ** -2,
                ">",
                1e7 * decay_constant(1.0) ** -2,
                "10⁷ × its value at ‖w‖ = 1",
            ),
            Comparison(
                "E[‖w‖⁻⁴; ‖w‖ > 10⁻⁸], d = 4",
                inverse_moment(1e-8),
                ">",
                3 * inverse_moment(1e-2),
                "3 × the same above 10⁻²",
            ),
            Comparison("c̃3 at μ = N(0, 9)", 216 * math.sqrt(3) * 9, ">", 216 * math.sqrt(3), "c̃3 at μ = N(0, 1)"),
        ),
        (
            Comparison(
                "true error at ‖w‖ = 0.01",
                small**2 * two_token_error(beta),
                "<",
                one_term_bound(2.0, beta**2, 3 * small**4),
                "one-term bound there",
            ),
            Comparison(
                "one-term bound at ‖w‖ = 0.01",
                one_term_bound(2.0, beta**2, 3 * small**4),
                "<",
                one_term_bound(2.0, beta**2, 3.0),
                "one-term bound at ‖w‖ = 1",
            ),
        ),
    )


def _convex_hull() -> Evidence:
    V, u, t = 2.0, 1.0, 0.5
    output = V * math.tanh(u)
    finite, limit = 1.0, 0.0
    return Evidence(
        """d = 1, tokens −1 and 1, V = 2, score u = 1: the output is 2 tanh 1. For the implication: R_L/S_L
        = 1, R/S = 0, t = 1/2.""",
        (
            Comparison("softmax output", output, ">", 1.0, "largest token"),
            Comparison("2‖R_L/S_L‖² + 2‖R/S‖²", 2 * finite**2 + 2 * limit**2, ">", t, "t, said to be the larger"),
        ),
        (
            Comparison("softmax output", output, "<", V, "largest Vz_k"),
            Comparison(
                "2‖R_L/S_L‖² + 2‖R/S‖²",
                2 * finite**2 + 2 * limit**2,
                ">",
                (finite - limit) ** 2,
                "‖R_L/S_L − R/S‖² ≥ t",
            ),
        ),
    )


ERRATA = (
    Erratum(
        key="E6",
        kind="error",
        place="Lemma C.4 and its use in Eq. (16)",
        summary="C_f where C_f² is needed; at L = 1 the lemma and Eq. (1) are false",
        printed="""The second term of the bound carries the factor 16^p σ^{2p} C_f, and the lemma is stated
        for every prompt length; so is Eq. (1), whose right side is proportional to ln L.""",
        why="""Substituting u = 16σ²C_f^{2/p} v in the last integral of the proof produces (16σ²C_f^{2/p})^p
        = 16^p σ^{2p} C_f², not 16^p σ^{2p} C_f. Homogeneity shows it too: under f → λf the left side scales
        as λ², the printed second term as λ. At L = 1 the first term vanishes with ln L, nothing
        compensates, and the inequality fails; for the same reason Eq. (1) fails at L = 1. From L = 2 on the
        slip is harmless, because the first term alone is then an upper bound (one-term bound).""",
        correction="""Replace C_f by C_f² in the second term (and in c̃1) and ask for L ≥ 2 wherever ln L
        multiplies the bound; or use the one-term bound, valid from L = 1.""",
        evidence=_change_of_variables,
    ),
    Erratum(
        key="G7",
        kind="gap",
        place="Lemma C.1",
        summary="the range of δ lacks σ²",
        printed="""The bound is claimed for δ ≥ exp(−(L/8) exp(−2‖Uz‖²)), with no σ in the exponent. (Two
        slips nearby: an event of probability at least 1 − δ is said to have probability at least δ, and an
        upper bound (1 + α₊)S has lost its S.)""",
        why="""The proof needs α₋ ≤ 1/2, which is δ ≥ δ_min = exp(−(L/8) exp(−2σ²‖Uz‖²)). For σ > 1 this is
        a smaller range than the one claimed; below δ_min the factor 1/(1 − α₋) is not bounded by 2, and
        where α₋ reaches 1 it is infinite.""",
        correction="""Put σ² into the exponent to match the proof. The statement itself is true, and for
        every δ in (0, 1): the one-term bound and Markov's inequality give it.""",
        evidence=_range_of_delta,
    ),
    Erratum(
        key="G8",
        kind="gap",
        place="Corollary C.3 and the choice of t₀ in Lemma C.4",
        summary="after δ → δ/4 one needs δ/4 ≥ δ_min, which is not checked and can fail",
        printed="""Since e^{−x} ≤ 1/x² one has δ₀ ≥ δ_min, and Lemma C.1 is then applied with δ/4 for every
        δ ≥ δ₀.""",
        why="""Lemma C.1 at δ/4 requires δ/4 ≥ δ_min, that is 4x²e^{−x} ≤ 1 when δ = δ₀, with x = (L/8)
        exp(−2σ²‖Uz‖²). This is false for all x between 0.715 and 4.307, and δ₀ < 1 as soon as x > 1, so the
        failure is not confined to vacuous δ. Lemma C.4 uses δ = 27δ₀/16 at its t₀; a quarter of that is
        still below δ_min near x = 2.""",
        correction="""The corollary is true as stated, and without its restriction on δ, by the one-term
        bound and Markov's inequality. To keep the original route, ask for δ ≥ max(δ₀, 4δ_min).""",
        evidence=_quarter_of_delta,
    ),
    Erratum(
        key="G9",
        kind="gap",
        place="Proposition 3.1, Lemmas C.6 and C.9, Corollaries E.3 and E.5",
        summary="the constants depend on μ through E‖f‖⁴ and are not uniform over tasks",
        printed="""The constants c₁, c₂ are said to depend on the dimension and the parameters only, and on
        (U, V) only through norms; their supremum over a ball is then taken to be finite.""",
        why="""In Eq. (16), c̃2 is proportional to (E‖f‖⁴)^{1/(2p)}/C_f^{2/p}, and the second term is
        finally bounded by 5c̃1c̃2^{−2p}σ^{6p}L^{−1/2}: as μ degenerates in the directions f sees, this
        constant explodes, although the true error only gets smaller. In noise-free regression with v = (0,
        r) the ratio is √3‖w‖²_Σ, so c̃2^{−2} is of order ‖w‖⁻⁴_Σ: its supremum over tasks is infinite in
        every dimension, and even its mean over w ~ N(0, I) is infinite for d ≤ 4. Also, c̃3 = 216
        (E‖f‖⁴)^{1/2}E‖g‖² hides a factor of order σ^{2p}.""",
        correction="""With the one-term bound in place of Lemma C.4 the terms with c̃1, c̃2 disappear, and
        (E‖f‖⁴)^{1/2} ≤ C_f²(E‖Z‖^{4p})^{1/2} makes the rest uniform over all σ sub-Gaussian μ. In Lemma
        C.7, replace (E‖f‖⁴)^{1/2} throughout by its upper bound 4dC_f²σ²: the proof uses it only from
        above, and the exponent becomes uniform.""",
        evidence=_degenerate_measures,
    ),
    Erratum(
        key="T13",
        kind="typo",
        place="Sketch of Proposition 3.1; proof of Lemma C.4",
        summary="the output lies in the hull of the f(z_k), not of the tokens; one “≤ t” should read “≥ t”",
        printed="""R_L/S_L is placed in the convex hull of the tokens, and ‖R_L/S_L − R/S‖² ≥ t is said to
        imply 2‖R_L/S_L‖² + 2‖R/S‖² ≤ t.""",
        why="""The weights average f(z_k) (in the sketch, Vz_k), so the hull is that of these images. The
        implication comes from ‖a − b‖² ≤ 2‖a‖² + 2‖b‖² and reverses the printed sign.""",
        correction="""R_L/S_L lies in conv{f(z_k)}, whence ‖R_L/S_L‖ ≤ max‖f(z_k)‖, which is what is used
        afterwards; read “≥ t”.""",
        evidence=_convex_hull,
    ),
)
