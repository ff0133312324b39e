"""Errata of Remark 3.2, Appendix C.7 and Lemma D.1: what the query adds, and the formulas for gradients."""

import math

import numpy as np
from jaxtyping import Float
from scipy.integrate import trapezoid

from largeprompt.paper.errata._concentration import one_term_bound
from largeprompt.paper.errata._evidence import Numbers

Tokens = Float[np.ndarray, "L d"]
Matrix = Float[np.ndarray, "d d"]
Vector = Float[np.ndarray, " d"]
TOKENS = np.array([[0.3, -0.7], [1.1, 0.4], [-0.5, 0.9]])


def softmax_output(tokens: Tokens, U: Matrix, v: Vector, z: Vector) -> float:
    """One output coordinate, Σ_k a_k v·z_k with a = softmax(z_kᵀUz)."""
    scores = tokens @ U @ z
    weights = np.exp(scores - scores.max())
    return float(weights @ tokens @ v / weights.sum())


def E5() -> Numbers:
    U, v = 2.0, 4.0
    s = 1 / (1 + 3 * U**2)
    printed = math.sqrt(s) * (3 * U**4 * s**2 + 6 * U**2 * s + 3)
    return [(3 * U**4, printed), (3 * v**4, 3.0 * 105)], [(3 * U**4, eq20_right(U)), (3 * v**4, v**4 * 3 * 105)]


def eq20_right(U: float) -> float:
    """E_Z E_{μ_Z}‖Z₁‖⁴ for d = 1, μ = ν = N(0, 1): E[u⁴ + 6u² + 3] with u = UZ."""
    return 3 * U**4 + 6 * U**2 + 3


def difference_quotient(tokens: Tokens, U: Matrix, v: Vector, z: Vector, step: float = 1e-5) -> Matrix:
    """∂T/∂U by central differences."""
    result = np.zeros_like(U)
    for index in np.ndindex(*U.shape):
        shift = np.zeros_like(U)
        shift[index] = step
        ahead, behind = softmax_output(tokens, U + shift, v, z), softmax_output(tokens, U - shift, v, z)
        result[index] = (ahead - behind) / (2 * step)
    return result


def outer_product_gradient(tokens: Tokens, U: Matrix, v: Vector, z: Vector) -> Matrix:
    """∂T/∂U = Σ_k a_k (v·z_k)(z_k zᵀ) − (Σ_k a_k v·z_k)(Σ_k a_k z_k zᵀ)."""
    scores = tokens @ U @ z
    a = np.exp(scores - scores.max())
    a /= a.sum()
    return np.outer((a * (tokens @ v)) @ tokens - (a @ tokens @ v) * (a @ tokens), z)


def T11() -> Numbers:
    U, v, z = np.array([[0.4, -0.2], [0.1, 0.5]]), np.array([0.8, -0.6]), np.array([1.2, 0.7])
    measured, formula = difference_quotient(TOKENS, U, v, z), outer_product_gradient(TOKENS, U, v, z)
    scores = TOKENS @ U @ z
    a = np.exp(scores) / np.exp(scores).sum()
    inner = TOKENS @ z
    printed = float(a @ (TOKENS @ v * inner) - (a @ TOKENS @ v) * (a @ inner))
    return [(float(np.linalg.norm(measured)), abs(printed))], [
        (float(np.linalg.norm(formula)), float(np.linalg.norm(measured))),
        (float(np.trace(measured)), printed),
        (float(np.abs(formula - measured).max()), 0.0),
    ]


def T12() -> Numbers:
    K, Q = np.array([[1.0, 2.0], [0.0, 1.0]]), np.array([[0.5, 0.0], [1.0, -1.0]])
    z, v = np.array([0.6, -0.3]), np.array([1.0, 0.5])

    def through_gradient(u: Vector) -> float:
        weights = np.exp(TOKENS @ u)
        return float(v @ (weights @ TOKENS) / weights.sum())

    output = softmax_output(TOKENS, K.T @ Q, v, z)
    return [(abs(output - through_gradient(Q.T @ K @ z)), 0.1)], [
        (output, through_gradient(K.T @ Q @ z)),
        (float(np.linalg.norm(Q.T @ K, 2)), float(np.linalg.norm(K.T @ Q, 2))),
    ]


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


def query_exponent(B: Matrix) -> float:
    """κ = λ_max of the symmetric part of B − BᵀB/2, B = Γ^{1/2}UΓ^{1/2}.

    A query z = Γ^{1/2}g has weight at most of order e^{κ‖g‖²}/L in the prompt.
    """
    return float(np.linalg.eigvalsh((B + B.T - B.T @ B) / 2)[-1])


def like_tokens(L: float) -> float:
    """E[z² min(1, 2e^{z²/2}/L)²], z ~ N(0, 1): the query's share at the worst case κ = 1/2, when ν = μ."""
    z = np.linspace(0.0, 40.0, 400_001)
    weight = np.exp(np.minimum(z**2 / 2 + math.log(2 / L), 0.0))
    return float(2 * trapezoid((z * weight) ** 2 * np.exp(-(z**2) / 2), z) / math.sqrt(2 * math.pi))


def G17() -> Numbers:
    gamma, omega = 0.01, math.sqrt(10.0)
    short, long = 1e8, 1e16
    slope = math.log(with_query(short, gamma, omega) / with_query(long, gamma, omega)) / math.log(long / short)
    alike = math.log(like_tokens(short) / like_tokens(long)) / math.log(long / short)
    rotation = np.array([[0.6, -0.8], [0.8, 0.6]])
    return [(with_query(short, gamma, omega), 1e5 * without_query(short, gamma, omega)), (slope, 0.25)], [
        (alike, 0.95),
        (query_exponent(np.eye(2)), 0.5),
        (query_exponent(rotation), 0.5),
    ]
