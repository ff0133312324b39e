"""Errata of Theorem 5.2, Remark 5.3 and Appendix F.3: where the infinite-prompt flow starts, ends, and how fast."""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt.attention import AbstractLayer, LinearAttention, merged_form
from largeprompt.dynamics import alpha_range, flow_limit, gradient_flow
from largeprompt.icl import LinearRegression, aligned_blocks, blocks, from_blocks, kms, risk, risk_gradient
from largeprompt.paper.errata._erratum import Comparison, Erratum, Evidence

follow = partial(gradient_flow, rtol=1e-8, atol=1e-10, solver="explicit")
"""The flow to eight digits, as comparisons of its end with its limit need."""


def aligned(A: Float[np.ndarray, "d d"], r: float, task: LinearRegression) -> LinearAttention:
    """The block structure of Assumption 5.1, p = c = 0, at any scale: `structured_start` warns outside G14's range."""
    return from_blocks(aligned_blocks(jnp.asarray(A), r, task), LinearAttention)


def sizes(layer: AbstractLayer, task: LinearRegression) -> tuple[float, float]:
    """(r, ‖A‖_F)."""
    parts = blocks(merged_form(layer), task)
    return float(parts.R[0, 0]), float(jnp.linalg.norm(parts.A))


def _initial_scale() -> Evidence:
    task, alpha = LinearRegression(0.1 * np.diag([1.0, 0.8, 0.6, 0.4, 0.2])), 9.0
    direction = np.full(5, 1 / math.sqrt(5))
    start = aligned(alpha * np.outer(direction, direction), alpha, task)
    flow = follow(start, task, math.inf, [2e5])
    (r, norm), (limit_r, limit_norm) = sizes(flow.last, task), sizes(flow_limit(task, start), task)
    scalar, smaller = LinearRegression([[0.1]]), LinearRegression([[0.001]])
    printed, invariant = alpha_range(task)
    (printed_1, invariant_1), (printed_2, invariant_2) = alpha_range(scalar), alpha_range(smaller)
    return Evidence(
        """d = 1, Σ = 0.1, α = 10, inside the printed range. Then d = 5, Σ = diag(0.1, 0.08, 0.06, 0.04,
        0.02), α = 9, ΘΘᵀ the projection on (1, …, 1): the flow at L = ∞ up to t = 2·10⁵.""",
        (
            Comparison("printed limit of α, d = 5", printed, ">", invariant, "limit of α²‖Σ‖√d < 2"),
            Comparison(
                "R at the start, d = 1",
                float(risk(aligned(np.array([[10.0]]), 10.0, scalar), scalar, math.inf).value),
                ">",
                0.05,
                "R at the origin",
            ),
            Comparison("printed limit, Σ → Σ/100, over itself", printed_2 / printed_1, ">", 10.0, "100^{1/2}"),
        ),
        (
            Comparison("invariant limit, Σ → Σ/100, over itself", invariant_2 / invariant_1, "=", 10.0, "100^{1/2}"),
            Comparison("r at the end of the flow", r, "=", limit_r, "tr(Σ⁻²)^{1/4}"),
            Comparison("‖A‖_F at the end of the flow", norm, "=", limit_norm, "‖Σ⁻¹‖_F/r"),
            Comparison("R at the end of the flow", float(flow.risk[-1]), "=", 0.0, "", 1e-10),
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


def _pl_constant() -> Evidence:
    Sigma, P, alpha = np.diag([0.1, 0.0]), np.diag([1.0, 0.0]), 0.1
    task, smaller = LinearRegression(Sigma), LinearRegression(Sigma / 100)
    ratio = pl_ratio(aligned(alpha * P, alpha, task), task)
    scaling = printed_pl(Sigma / 100, 10 * alpha) / printed_pl(Sigma, alpha)
    return Evidence(
        """Σ = diag(0.1, 0), ΘΘᵀ = diag(1, 0), α = 0.1, at the start. For scaling: Σ → Σ/100, α → 10α, under
        which ‖∇R‖²/(R − R⋆) is multiplied by 10⁻⁴.""",
        (
            Comparison("‖∇R‖²/(R − R⋆)", ratio, "<", printed_pl(Sigma, alpha), "printed constant"),
            Comparison("printed constant, scaled over itself", scaling, ">", 1e-3, ""),
        ),
        (
            Comparison("‖∇R‖²/(R − R⋆)", ratio, ">", corrected_pl(Sigma, P, alpha), "corrected constant"),
            Comparison(
                "corrected constant, scaled over itself",
                corrected_pl(Sigma / 100, P, 10 * alpha) / corrected_pl(Sigma, P, alpha),
                "=",
                1e-4,
                "10⁻⁴",
            ),
            Comparison(
                "‖∇R‖²/(R − R⋆), scaled over itself",
                pl_ratio(aligned(10 * alpha * P, 10 * alpha, smaller), smaller) / ratio,
                "=",
                1e-4,
                "10⁻⁴",
            ),
        ),
    )


def _label_noise() -> Evidence:
    task = LinearRegression.experiment(kms(5))
    start = aligned(0.5 * np.eye(5) / math.sqrt(5), 0.5, task)
    flow = follow(start, task, math.inf, [2000.0])
    end = float(flow.risk[-1])
    noiseless = LinearRegression(task.Sigma, Omega=task.Omega)
    (r, norm), (limit_r, limit_norm) = sizes(flow.last, task), sizes(flow_limit(noiseless, start), task)
    return Evidence(
        """d = 5, Σ = KMS(½), w ~ N(0, I/5), noise variance 0.1; the flow at L = ∞ from ΘΘᵀ = I/√5, α = ½,
        up to t = 2000.""",
        (Comparison("limit of the risk, with the loss of Section 4", end, "<", 0.1, "label-noise level"),),
        (
            Comparison("limit of the risk", end, "=", 0.05, "s2/2"),
            Comparison("r at the end of the flow", r, "=", limit_r, "tr(Σ⁻²)^{1/4}, as without noise"),
            Comparison("‖A‖_F at the end of the flow", norm, "=", limit_norm, "‖Σ⁻¹‖_F/r, as without noise"),
        ),
    )


ERRATA = (
    Erratum(
        key="G14",
        kind="gap",
        place="Theorem 5.2",
        summary="for ‖Σ‖ < 1 the range of α exceeds that of the theorem it rests on; at L = ∞ none is needed",
        printed="""The initial scale is restricted to α < √2/(d^{1/4}‖Σ‖), and the limit of the flow is taken from
        Zhang et al. (2024, Theorem 4.1).""",
        why="""That theorem asks for α²‖Σ‖√d < 2 at L = ∞, that is α < √2/(d^{1/4}‖Σ‖^{1/2}). For ‖Σ‖ < 1, the case
        that Lemma F.1 treats, the printed range is wider, so that a step is missing; for ‖Σ‖ > 1 it is narrower than
        need be. Scaling shows which is meant: if Σ is replaced by Σ/k, the parameters √k A, √k r give the same
        predictor rAΣ, so that a threshold on α scales as ‖Σ‖^{−1/2}. Such a condition serves to start below the
        level of the saddle at 0: R_∞ = ½[trΣ − 2α² tr(PΣ²) + α⁴ tr(PΣ²PΣ)] with P = ΘΘᵀ, and tr(PΣ²PΣ) ≤ ‖Σ‖
        tr(PΣ²), so α²‖Σ‖ < 2 is enough. The printed range contains starts above the saddle as soon as √d‖Σ‖ < 1.

        Theorem 5.2 is true there all the same. At L = ∞ and in the eigenbasis of Σ, Ȧ_ij = rσ_i²(δ_ij −
        rσ_jA_ij). Since A_ii(0) ≥ 0 and r(0) > 0, A_ii ≥ 0 for all time; and (d/dt) tr(Σ²A) = r Σ_i σ_i⁴(1
        − rσ_iA_ii) is positive near 0, so tr(Σ²A) > 0 cannot tend to 0 and the saddle is never approached.
        Balance, ‖A‖_F = r, bounds the trajectory; as the risk is a polynomial, it converges, and the only
        other critical points with p = c = 0 are minima.""",
        correction="""Read α < √2/(d^{1/4}‖Σ‖^{1/2}), or drop the restriction and add the argument above: every
        α > 0 leads to the limit of Remark 5.3 at L = ∞.""",
        evidence=_initial_scale,
    ),
    Erratum(
        key="E15",
        kind="error",
        place="Appendix F.3, point 3",
        summary="the Polyak-Łojasiewicz constant is too large and does not scale",
        printed="""The inequality is claimed with μ = σ²/(√d ‖Λ‖ tr((Λ†)²) tr(Λ†)), where σ is the initial
        scale and Λ the covariance.""",
        why="""Under Λ → Λ/k, σ → √k σ the predictor is unchanged and ‖∇R‖²/(R − R⋆) is multiplied by k⁻²,
        the printed μ by k⁻¹. It is violated at the start already. The set that contains U₁₁(t), the
        projection P, the balance equation for γ and the limits of F.3 are right.""",
        correction="""Put N = rΣAΣ − Σ. Then R = ½‖N(Σ†)^{1/2}‖_F² ≤ ‖N‖_F²/(2λ₊) and ‖∇R‖² ≥ ‖∇_A R‖² =
        r²‖ΣN‖_F² ≥ r²λ₊²‖N‖_F², with λ₊ the smallest non-zero eigenvalue of Σ; so ‖∇R‖² ≥ 2r²λ₊³R. Balance,
        ‖A‖_F = r, and R(t) ≤ R(0) give 2r²‖Σ²‖_F ≥ 2r tr(Σ²A) ≥ trΣ − 2R(0). Hence the inequality holds
        along the flow with 2λ₊³α²(tr(PΣ²) − ½α² tr(PΣ²PΣ))/‖Σ²‖_F, P = ΘΘᵀ, positive when α²‖Σ‖ < 2 and PΣ
        ≠ 0.""",
        evidence=_pl_constant,
    ),
    Erratum(
        key="T16",
        kind="typo",
        place="Remark 5.3; Section 6, Figure 2",
        summary="with the paper's loss the limiting risk is half the label-noise level",
        printed="""The risk tends to the label-noise level, and the results are said to extend to label
        noise with one more variance term in Γ_w.""",
        why="""The loss of Section 4 carries a factor ½, so the limit is s2/2 = 0.05 for s2 = 0.1; a curve
        that tends to 0.1 shows the mean squared error 2R. Remark 5.3 is right without noise, and noise does
        not move the limit parameters: at p = c = 0 and L = ∞ the variance s2 meets c only, so it adds the
        constant s2/2 to the risk.""",
        correction="""Say R → s2/2, or label the figure as mean squared error. The limits of U and V are
        those of Remark 5.3, for every s2 and every covariance of w.""",
        evidence=_label_noise,
    ),
)
