"""Errata of Section 5 and Appendix F: the covariance of a token, the norm of Σ, and the flow of the infinite prompt."""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt.attention import AbstractLayer, LinearAttention, merged_form
from largeprompt.dynamics import alpha_range, flow_limit, gradient_flow
from largeprompt.icl import LinearRegression, aligned_blocks, blocks, from_blocks, identity, kms, risk, risk_gradient
from largeprompt.paper.errata._evidence import Numbers
from largeprompt.paper.errata._queries import TOKENS, outer_product_gradient, softmax_output


def token_norm(w: Float[np.ndarray, " d"], task: LinearRegression) -> float:
    """λ_max(Γ_w)."""
    return float(np.linalg.eigvalsh(task.token_covariance(jnp.asarray(w)[None]))[-1])


def token_scale(w: Float[np.ndarray, " d"], task: LinearRegression) -> float:
    """σ_w² = max(1, ‖Σ‖(1 + ‖w‖²) + s2) ≥ λ_max(Γ_w)."""
    return max(1.0, float(np.linalg.norm(task.Sigma, 2)) * (1 + float(w @ w)) + float(task.noise))


def E1() -> Numbers:
    isotropic, w = LinearRegression(identity(2)), np.array([1.0, 0.0])
    anisotropic, halves = LinearRegression(kms(5) / np.linalg.norm(kms(5), 2)), np.full(5, 0.5)
    norm, other_norm = token_norm(w, isotropic), token_norm(halves, anisotropic)
    label = float(halves @ anisotropic.Sigma @ halves)
    return [(norm, 1.0), (other_norm, max(1.0, float(halves @ halves))), (float(halves @ halves), label)], [
        (norm, token_scale(w, isotropic)),
        (other_norm, token_scale(halves, anisotropic)),
    ]


def E10() -> Numbers:
    d, copies = 2, 500
    x = math.sqrt(d) * np.tile(np.vstack([np.eye(d), -np.eye(d)]), (copies, 1))
    L, w, query = float(len(x)), np.array([1.0, -2.0]), np.array([0.5, 1.5])
    second = x.T @ x / L
    top = np.hstack([second + np.outer(query, query) / L, (second @ w)[:, None]])
    printed_row = float((x @ w).mean()) * query
    corner = np.array([w @ second @ w])
    printed = np.vstack([top, np.concatenate([printed_row, corner])]) / L
    unscaled = printed * L
    corrected = np.vstack([top, np.concatenate([w @ second, corner])])
    limit = LinearRegression(identity(d)).token_covariance(jnp.asarray(w)[None])
    return [
        (float(np.linalg.norm(printed)), 0.01 * float(np.linalg.norm(limit))),
        (float(np.linalg.norm(unscaled - limit)), 1.0),
    ], [(float(np.linalg.norm(corrected - limit)), float(query @ query) / L)]


def G18() -> Numbers:
    scale = float(np.linalg.norm(kms(5), 2))
    U, v, z = np.array([[0.4, -0.2], [0.1, 0.5]]), np.array([0.8, -0.6]), np.array([1.2, 0.7])
    stretched, shrunk = math.sqrt(scale) * U, z / math.sqrt(scale)
    task, smaller = LinearRegression(kms(5)), LinearRegression(kms(5) / scale)
    slope = blocks(risk_gradient(aligned(0.3 * np.eye(5), 0.4, task), task, 20).layer, task)
    image = aligned(scale * 0.3 * np.eye(5), 0.4, smaller)
    small_slope = blocks(risk_gradient(image, smaller, 20).layer, smaller)
    clock_U = scale * float(slope.A[0, 0] / small_slope.A[0, 0])
    clock_v = float(slope.R[0, 0] / small_slope.R[0, 0])
    return [(scale, 1.0)], [
        (softmax_output(TOKENS, U, v, z), softmax_output(TOKENS, stretched, v, shrunk)),
        (
            float(np.linalg.norm(outer_product_gradient(TOKENS, U, v, z))),
            math.sqrt(scale) * float(np.linalg.norm(outer_product_gradient(TOKENS, stretched, v, shrunk))),
        ),
        (clock_U / clock_v, scale**2),
    ]


follow = partial(gradient_flow, rtol=1e-8, atol=1e-10, solver="explicit")
"""The flow to eight digits, as comparisons of its end with its limit need."""


def aligned(A: Float[np.ndarray, "d d"], r: float, task: LinearRegression) -> LinearAttention:
    """The block structure of Assumption 5.1, p = c = 0, at any scale: `structured_start` warns outside G14's range."""
    return from_blocks(aligned_blocks(jnp.asarray(A), r, task), LinearAttention)


def sizes(layer: AbstractLayer, task: LinearRegression) -> tuple[float, float]:
    """(r, ‖A‖_F)."""
    parts = blocks(merged_form(layer), task)
    return float(parts.R[0, 0]), float(jnp.linalg.norm(parts.A))


def G14() -> Numbers:
    task, alpha = LinearRegression(0.1 * np.diag([1.0, 0.8, 0.6, 0.4, 0.2])), 9.0
    direction = np.full(5, 1 / math.sqrt(5))
    start = aligned(alpha * np.outer(direction, direction), alpha, task)
    flow = follow(start, task, math.inf, [2e5])
    (r, norm), (limit_r, limit_norm) = sizes(flow.last, task), sizes(flow_limit(task, start), task)
    scalar, smaller = LinearRegression([[0.1]]), LinearRegression([[0.001]])
    printed, invariant = alpha_range(task)
    (printed_1, invariant_1), (printed_2, invariant_2) = alpha_range(scalar), alpha_range(smaller)
    return [
        (printed, invariant),
        (float(risk(aligned(np.array([[10.0]]), 10.0, scalar), scalar, math.inf).value), 0.05),
        (printed_2 / printed_1, 10.0),
    ], [(invariant_2 / invariant_1, 10.0), (r, limit_r), (norm, limit_norm), (float(flow.risk[-1]), 0.0)]


def printed_pl(Sigma: Float[np.ndarray, "d d"], alpha: float) -> float:
    """Appendix F.3's constant: α²/(√d ‖Λ‖ tr((Λ†)²) tr Λ†)."""
    inverse = np.linalg.pinv(Sigma)
    norm = float(np.linalg.norm(Sigma, 2))
    return alpha**2 / (math.sqrt(len(Sigma)) * norm * float(np.trace(inverse @ inverse)) * float(np.trace(inverse)))


def corrected_pl(Sigma: Float[np.ndarray, "d d"], P: Float[np.ndarray, "d d"], alpha: float) -> float:
    """2λ₊³α²(tr PΣ² − ½α² tr PΣ²PΣ)/‖Σ²‖_F, λ₊ the smallest non-zero eigenvalue of Σ and P = ΘΘᵀ."""
    eigenvalues = np.linalg.eigvalsh(Sigma)
    smallest = float(eigenvalues[eigenvalues > 1e-12 * eigenvalues[-1]][0])
    square = Sigma @ Sigma
    gain = float(np.trace(P @ square)) - 0.5 * alpha**2 * float(np.trace(P @ square @ P @ Sigma))
    return 2 * smallest**3 * alpha**2 * gain / float(np.linalg.norm(square))


def pl_ratio(layer: AbstractLayer, task: LinearRegression) -> float:
    """‖∇R_∞‖²/(R_∞ − min R_∞) without noise (the minimum is then 0, Σ singular or not)."""
    return float(risk_gradient(layer, task, math.inf).norm() ** 2 / risk(layer, task, math.inf).value)


def E15() -> Numbers:
    Sigma, P, alpha = np.diag([0.1, 0.0]), np.diag([1.0, 0.0]), 0.1
    task, smaller = LinearRegression(Sigma), LinearRegression(Sigma / 100)
    ratio = pl_ratio(aligned(alpha * P, alpha, task), task)
    scaling = printed_pl(Sigma / 100, 10 * alpha) / printed_pl(Sigma, alpha)
    return [(ratio, printed_pl(Sigma, alpha)), (scaling, 1e-3)], [
        (ratio, corrected_pl(Sigma, P, alpha)),
        (corrected_pl(Sigma / 100, P, 10 * alpha) / corrected_pl(Sigma, P, alpha), 1e-4),
        (pl_ratio(aligned(10 * alpha * P, 10 * alpha, smaller), smaller) / ratio, 1e-4),
    ]


def T16() -> Numbers:
    task = LinearRegression.experiment(kms(5))
    start = aligned(0.5 * np.eye(5) / math.sqrt(5), 0.5, task)
    flow = follow(start, task, math.inf, [2000.0])
    end = float(flow.risk[-1])
    noiseless = LinearRegression(task.Sigma, Omega=task.Omega)
    (r, norm), (limit_r, limit_norm) = sizes(flow.last, task), sizes(flow_limit(noiseless, start), task)
    return [(end, 0.1)], [(end, 0.05), (r, limit_r), (norm, limit_norm)]
