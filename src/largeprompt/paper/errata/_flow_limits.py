"""Errata of Theorem 5.2, Remark 5.3 and Appendix F.3: where the infinite-prompt flow starts, ends, and how fast."""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt.attention import AbstractLayer, LinearAttention, merged_form
from largeprompt.dynamics import alpha_range, flow_limit, gradient_flow
from largeprompt.icl import LinearRegression, aligned_blocks, blocks, from_blocks, kms, risk, risk_gradient
from largeprompt.paper.errata._evidence import Evidence

follow = partial(gradient_flow, rtol=1e-8, atol=1e-10, solver="explicit")
"""The flow to eight digits, as comparisons of its end with its limit need."""


def aligned(A: Float[np.ndarray, "d d"], r: float, task: LinearRegression) -> LinearAttention:
    """The block structure of Assumption 5.1, p = c = 0, at any scale: `structured_start` warns outside G14's range."""
    return from_blocks(aligned_blocks(jnp.asarray(A), r, task), LinearAttention)


def sizes(layer: AbstractLayer, task: LinearRegression) -> tuple[float, float]:
    """(r, ‖A‖_F)."""
    parts = blocks(merged_form(layer), task)
    return float(parts.R[0, 0]), float(jnp.linalg.norm(parts.A))


def G14() -> Evidence:
    task, alpha = LinearRegression(0.1 * np.diag([1.0, 0.8, 0.6, 0.4, 0.2])), 9.0
    direction = np.full(5, 1 / math.sqrt(5))
    start = aligned(alpha * np.outer(direction, direction), alpha, task)
    flow = follow(start, task, math.inf, [2e5])
    (r, norm), (limit_r, limit_norm) = sizes(flow.last, task), sizes(flow_limit(task, start), task)
    scalar, smaller = LinearRegression([[0.1]]), LinearRegression([[0.001]])
    printed, invariant = alpha_range(task)
    (printed_1, invariant_1), (printed_2, invariant_2) = alpha_range(scalar), alpha_range(smaller)
    return Evidence.of(
        (
            ("printed limit of α, d = 5", printed, ">", invariant, "limit of α²‖Σ‖√d < 2"),
            (
                "R at the start, d = 1",
                float(risk(aligned(np.array([[10.0]]), 10.0, scalar), scalar, math.inf).value),
                ">",
                0.05,
                "R at the origin",
            ),
            ("printed limit, Σ → Σ/100, over itself", printed_2 / printed_1, ">", 10.0, "100^{1/2}"),
        ),
        (
            ("invariant limit, Σ → Σ/100, over itself", invariant_2 / invariant_1, "=", 10.0, "100^{1/2}"),
            ("r at the end of the flow", r, "=", limit_r, "tr(Σ⁻²)^{1/4}"),
            ("‖A‖_F at the end of the flow", norm, "=", limit_norm, "‖Σ⁻¹‖_F/r"),
            ("R at the end of the flow", float(flow.risk[-1]), "=", 0.0, "", 1e-10),
        ),
    )


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


def E15() -> Evidence:
    Sigma, P, alpha = np.diag([0.1, 0.0]), np.diag([1.0, 0.0]), 0.1
    task, smaller = LinearRegression(Sigma), LinearRegression(Sigma / 100)
    ratio = pl_ratio(aligned(alpha * P, alpha, task), task)
    scaling = printed_pl(Sigma / 100, 10 * alpha) / printed_pl(Sigma, alpha)
    return Evidence.of(
        (
            ("‖∇R‖²/(R − R⋆)", ratio, "<", printed_pl(Sigma, alpha), "printed constant"),
            ("printed constant, scaled over itself", scaling, ">", 1e-3, ""),
        ),
        (
            ("‖∇R‖²/(R − R⋆)", ratio, ">", corrected_pl(Sigma, P, alpha), "corrected constant"),
            (
                "corrected constant, scaled over itself",
                corrected_pl(Sigma / 100, P, 10 * alpha) / corrected_pl(Sigma, P, alpha),
                "=",
                1e-4,
                "10⁻⁴",
            ),
            (
                "‖∇R‖²/(R − R⋆), scaled over itself",
                pl_ratio(aligned(10 * alpha * P, 10 * alpha, smaller), smaller) / ratio,
                "=",
                1e-4,
                "10⁻⁴",
            ),
        ),
    )


def T16() -> Evidence:
    task = LinearRegression.experiment(kms(5))
    start = aligned(0.5 * np.eye(5) / math.sqrt(5), 0.5, task)
    flow = follow(start, task, math.inf, [2000.0])
    end = float(flow.risk[-1])
    noiseless = LinearRegression(task.Sigma, Omega=task.Omega)
    (r, norm), (limit_r, limit_norm) = sizes(flow.last, task), sizes(flow_limit(noiseless, start), task)
    return Evidence.of(
        (("limit of the risk, with the loss of Section 4", end, "<", 0.1, "label-noise level"),),
        (
            ("limit of the risk", end, "=", 0.05, "s2/2"),
            ("r at the end of the flow", r, "=", limit_r, "tr(Σ⁻²)^{1/4}, as without noise"),
            ("‖A‖_F at the end of the flow", norm, "=", limit_norm, "‖Σ⁻¹‖_F/r, as without noise"),
        ),
    )
