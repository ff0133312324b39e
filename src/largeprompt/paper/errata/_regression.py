"""Errata of Lemma F.1 and Appendix F.2: the covariance of a token and the norm of Σ."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt.icl import LinearRegression, blocks, identity, kms, risk_gradient
from largeprompt.paper.errata._evidence import Numbers
from largeprompt.paper.errata._flow_limits import aligned
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
