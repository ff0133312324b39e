"""Errata of Remark 3.2, Appendix C.7 and Lemma D.1: what the query adds, and the formulas for gradients."""

import math

import numpy as np
from jaxtyping import Float
from scipy.integrate import trapezoid

from largeprompt.paper.errata._concentration import one_term_bound
from largeprompt.paper.errata._erratum import Comparison, Erratum, Evidence

TOKENS = np.array([[0.3, -0.7], [1.1, 0.4], [-0.5, 0.9]])


def softmax_output(
    tokens: Float[np.ndarray, "L d"],
    U: Float[np.ndarray, "d d"],
    v: Float[np.ndarray, " d"],
    z: Float[np.ndarray, " d"],
) -> float:
    """One output coordinate, Σ_k a_k v·z_k with a = softmax(z_kᵀUz)."""
    scores = tokens @ U @ z
    weights = np.exp(scores - scores.max())
    return float(weights @ tokens @ v / weights.sum())


def _jensen() -> Evidence:
    U, v = 2.0, 4.0
    s = 1 / (1 + 3 * U**2)
    printed = math.sqrt(s) * (3 * U**4 * s**2 + 6 * U**2 * s + 3)
    return Evidence(
        """d = 1, μ = ν = N(0, 1), f = id, U = 2: then μ_z = N(Uz, 1) and both sides are Gaussian moments.
        For the lost factor: U = 0, v = 4.""",
        (
            Comparison("left side of Eq. (20)", 3 * U**4, ">", printed, "printed right side"),
            Comparison("E‖E_{μ_z}[f] g‖⁴ = 3v⁴", 3 * v**4, ">", 3.0 * 105, "σ¹⁶ M_{8,4}, with no ‖v‖"),
        ),
        (
            Comparison(
                "left side of Eq. (20)",
                3 * U**4,
                "<",
                eq20_right(U),
                "right side, denominator to the first power",
            ),
            Comparison("3v⁴", 3 * v**4, "<", v**4 * 3 * 105, "‖v‖⁴ σ¹⁶ M_{8,4}"),
        ),
    )


def eq20_right(U: float) -> float:
    """E_Z E_{μ_Z}‖Z₁‖⁴ for d = 1, μ = ν = N(0, 1): E[u⁴ + 6u² + 3] with u = UZ."""
    return 3 * U**4 + 6 * U**2 + 3


def difference_quotient(
    tokens: Float[np.ndarray, "L d"],
    U: Float[np.ndarray, "d d"],
    v: Float[np.ndarray, " d"],
    z: Float[np.ndarray, " d"],
    step: float = 1e-5,
) -> Float[np.ndarray, "d d"]:
    """∂T/∂U by central differences."""
    result = np.zeros_like(U)
    for index in np.ndindex(*U.shape):
        shift = np.zeros_like(U)
        shift[index] = step
        ahead, behind = softmax_output(tokens, U + shift, v, z), softmax_output(tokens, U - shift, v, z)
        result[index] = (ahead - behind) / (2 * step)
    return result


def outer_product_gradient(
    tokens: Float[np.ndarray, "L d"],
    U: Float[np.ndarray, "d d"],
    v: Float[np.ndarray, " d"],
    z: Float[np.ndarray, " d"],
) -> Float[np.ndarray, "d d"]:
    """∂T/∂U = Σ_k a_k (v·z_k)(z_k zᵀ) − (Σ_k a_k v·z_k)(Σ_k a_k z_k zᵀ)."""
    scores = tokens @ U @ z
    a = np.exp(scores - scores.max())
    a /= a.sum()
    return np.outer((a * (tokens @ v)) @ tokens - (a @ tokens @ v) * (a @ tokens), z)


def _outer_product() -> Evidence:
    U, v, z = np.array([[0.4, -0.2], [0.1, 0.5]]), np.array([0.8, -0.6]), np.array([1.2, 0.7])
    measured, formula = difference_quotient(TOKENS, U, v, z), outer_product_gradient(TOKENS, U, v, z)
    scores = TOKENS @ U @ z
    a = np.exp(scores) / np.exp(scores).sum()
    inner = TOKENS @ z
    printed = float(a @ (TOKENS @ v * inner) - (a @ TOKENS @ v) * (a @ inner))
    return Evidence(
        """Three tokens in the plane, a 2 × 2 matrix U; the gradient by central differences, as a reference.""",
        (Comparison("‖∂T/∂U‖_F", float(np.linalg.norm(measured)), ">", abs(printed), "printed scalar"),),
        (
            Comparison(
                "‖∂T/∂U‖_F by the outer product",
                float(np.linalg.norm(formula)),
                "=",
                float(np.linalg.norm(measured)),
                "‖∂T/∂U‖_F measured",
            ),
            Comparison("tr ∂T/∂U", float(np.trace(measured)), "=", printed, "printed scalar"),
            Comparison(
                "largest entry of their difference", float(np.abs(formula - measured).max()), "=", 0.0, "", 1e-8
            ),
        ),
    )


def _transposed_product() -> Evidence:
    K, Q = np.array([[1.0, 2.0], [0.0, 1.0]]), np.array([[0.5, 0.0], [1.0, -1.0]])
    z, v = np.array([0.6, -0.3]), np.array([1.0, 0.5])

    def through_gradient(u: Float[np.ndarray, " d"]) -> float:
        weights = np.exp(TOKENS @ u)
        return float(v @ (weights @ TOKENS) / weights.sum())

    output = softmax_output(TOKENS, K.T @ Q, v, z)
    return Evidence(
        """The empirical measure of three tokens, K and Q triangular; Ψ is its cumulant generating function.""",
        (Comparison("gap between T and v·∇Ψ(QᵀKz)", abs(output - through_gradient(Q.T @ K @ z)), ">", 0.1, ""),),
        (
            Comparison("T", output, "=", through_gradient(K.T @ Q @ z), "v·∇Ψ(KᵀQz)"),
            Comparison(
                "‖QᵀK‖, all the bound uses",
                float(np.linalg.norm(Q.T @ K, 2)),
                "=",
                float(np.linalg.norm(K.T @ Q, 2)),
                "‖KᵀQ‖",
            ),
        ),
    )


def with_query(L: float, gamma: float, omega: float) -> float:
    """A lower bound of E(T − T_∞)² when the query sits in the prompt: d = 1, μ = N(0, γ), ν = N(0, 1), U = ω, V = 1.

    With probability 5/8 at least, Σ_k e^{ωz z_k} ≤ 4L e^{γω²z²/2} (Markov) and min z_k ≥ −(2γ ln 4L)^{1/2} (union).
    Then the query's weight a is at least 1/(1 + 4L e^{−κz²}), κ = ω − γω²/2, and, for z > 0,
    T − T_∞ ≥ a(z − T_∞) − (1 − a)(T_∞ − min z_k), which increases with a.
    """
    z = np.linspace(0.0, 40.0, 400_001)
    limit = gamma * omega * z
    a = 1 / (1 + 4 * L * np.exp(-(omega - gamma * omega**2 / 2) * z**2))
    below = math.sqrt(2 * gamma * math.log(4 * L))
    gap = np.maximum(a * (z - limit) - (1 - a) * (limit + below), 0.0)
    return float(5 / 8 * 2 * trapezoid(gap**2 * np.exp(-(z**2) / 2), z) / math.sqrt(2 * math.pi))


def without_query(L: float, gamma: float, omega: float) -> float:
    """An upper bound of the same error without the query: E_z of the one-term bound, finite while 8γω² < 1."""
    return one_term_bound(L, 0.0, 3 * gamma**2) / math.sqrt(1 - 8 * gamma * omega**2)


def query_exponent(B: Float[np.ndarray, "d d"]) -> float:
    """κ = λ_max of the symmetric part of B − BᵀB/2, B = Γ^{1/2}UΓ^{1/2}.

    A query z = Γ^{1/2}g has weight at most of order e^{κ‖g‖²}/L in the prompt.
    """
    return float(np.linalg.eigvalsh((B + B.T - B.T @ B) / 2)[-1])


def like_tokens(L: float) -> float:
    """E[z² min(1, 2e^{z²/2}/L)²], z ~ N(0, 1): the query's share at the worst case κ = 1/2, when ν = μ."""
    z = np.linspace(0.0, 40.0, 400_001)
    weight = np.exp(np.minimum(z**2 / 2 + math.log(2 / L), 0.0))
    return float(2 * trapezoid((z * weight) ** 2 * np.exp(-(z**2) / 2), z) / math.sqrt(2 * math.pi))


def _query_in_prompt() -> Evidence:
    gamma, omega = 0.01, math.sqrt(10.0)
    short, long = 1e8, 1e16
    slope = math.log(with_query(short, gamma, omega) / with_query(long, gamma, omega)) / math.log(long / short)
    alike = math.log(like_tokens(short) / like_tokens(long)) / math.log(long / short)
    rotation = np.array([[0.6, -0.8], [0.8, 0.6]])
    return Evidence(
        """d = 1, tokens N(0, 0.01), queries N(0, 1), U = √10, V = 1: a rigorous lower bound with the query
        in the prompt, the one-term bound without. Exponents are local slopes between L = 10⁸ and 10¹⁶.""",
        (
            Comparison(
                "E(T − T_∞)² with the query, L = 10⁸, at least",
                with_query(short, gamma, omega),
                ">",
                1e5 * without_query(short, gamma, omega),
                "10⁵ × the same without it, at most",
            ),
            Comparison("exponent of 1/L with the query", slope, "<", 0.25, "(without it: 1)"),
        ),
        (
            Comparison("exponent of the query's share, ν = μ", alike, ">", 0.95, "(1 up to logarithms)"),
            Comparison("κ at B = I, the worst case when ν = μ", query_exponent(np.eye(2)), "=", 0.5, ""),
            Comparison("κ at B = a rotation", query_exponent(rotation), "<", 0.5, ""),
        ),
    )


ERRATA = (
    Erratum(
        key="E5",
        kind="error",
        place="Eq. (20) in Appendix C.7",
        summary="the denominator must be E[e^s], not its fourth power",
        printed="""The fourth power of a tilted mean is bounded by E[e^s‖f‖⁴]/E[e^s]⁴, with s = Z₁ᵀUZ.""",
        why="""Jensen's inequality acts under the tilted probability μ_z, of density e^s/E[e^s]: ‖E_{μ_z}f‖⁴
        ≤ E_{μ_z}‖f‖⁴, and the normaliser appears once. For centred μ, E[e^s] ≥ 1, so the printed right side
        is too small by the factor E[e^s]³, and it is not what Assumption 3.3 controls. The displays that
        follow use the right form; one of them drops a factor ‖v_i‖⁴ before σ¹⁶M_{8,4}.""",
        correction="""‖E_{μ_z}f‖⁴ ≤ E[e^s‖f‖⁴]/E[e^s] ≤ σ⁸M_{4,0} after averaging over Z; keep ‖v_i‖⁴ in the
        bound by M_{8,4}. Nothing else changes.""",
        evidence=_jensen,
    ),
    Erratum(
        key="T11",
        kind="typo",
        place="Appendix C.7, row gradients",
        summary="(z_kᵀz) should be the outer product z_k zᵀ",
        printed="""The gradient in U of an output coordinate is written with the scalars z_kᵀz, and a limit
        has z_k where the integration variable Z₁ should be.""",
        why="""A derivative with respect to a matrix is a matrix: ∂(z_kᵀUz)/∂U = z_k zᵀ. The printed scalar
        is its trace. The definition of Ŷ, two displays later, has the outer product.""",
        correction="""Read z_k zᵀ (with g(z) = zᵀ, as the application of Lemma C.6 does), and Z₁ for z_k in
        the limit.""",
        evidence=_outer_product,
    ),
    Erratum(
        key="T12",
        kind="typo",
        place="Lemma D.1, last step",
        summary="T = V∇Ψ(KᵀQz), not V∇Ψ(QᵀKz)",
        printed="""The output is identified with V∇Ψ evaluated at QᵀKz.""",
        why="""The score of a token z' is ⟨Qz, Kz'⟩ = z'ᵀKᵀQz, so the tilt is KᵀQz. Since QᵀK is the
        transpose of KᵀQ, the norms agree and the bound of the lemma is unaffected.""",
        correction="""Read T[μ](z) = V∇Ψ(KᵀQz).""",
        evidence=_transposed_product,
    ),
    Erratum(
        key="G17",
        kind="gap",
        place="Remark 3.2",
        summary="putting the query into the prompt can change the rate when queries are wider than tokens",
        printed="""Including the query in the prompt is said to change nothing, both measures approaching μ
        at the same rate.""",
        why="""The query enters with weight e^{zᵀUz} against Σ_k e^{z_kᵀUz} ≈ L e^{‖Γ^{1/2}Uz‖²/2}. For d =
        1, tokens N(0, γ), queries N(0, 1) and U = ω, it dominates once κz² > ln L with κ = ω − γω²/2, an
        event of probability L^{−1/(2κ)} up to logarithms, on which the output is near z instead of γωz. If
        γω² < 1/8, the error without the query is at most a constant over L. Nothing in the hypotheses ties
        ω to γ in a way that prevents κ from being large.""",
        correction="""The remark is right when queries are distributed like tokens: with z = Γ^{1/2}g and B
        = Γ^{1/2}UΓ^{1/2} the exponent is gᵀ(B − BᵀB/2)g = ½(‖g‖² − ‖(I − B)g‖²) ≤ ½‖g‖², so the squared
        weight of the query averages to order 1/L up to logarithms. Otherwise it needs a hypothesis on the
        query's law relative to the tokens'.""",
        evidence=_query_in_prompt,
    ),
)
