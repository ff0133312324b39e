"""Errata of Lemma F.1 and Appendix F.2: the covariance of a token and the norm of Σ."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt.icl import LinearRegression, blocks, identity, kms, risk_gradient
from largeprompt.paper.errata._erratum import Comparison, Erratum, Evidence
from largeprompt.paper.errata._flow_limits import aligned
from largeprompt.paper.errata._queries import TOKENS, outer_product_gradient, softmax_output


def token_norm(w: Float[np.ndarray, " d"], task: LinearRegression) -> float:
    """λ_max(Γ_w)."""
    return float(np.linalg.eigvalsh(task.token_covariance(jnp.asarray(w)[None]))[-1])


def token_scale(w: Float[np.ndarray, " d"], task: LinearRegression) -> float:
    """σ_w² = max(1, ‖Σ‖(1 + ‖w‖²) + s2) ≥ λ_max(Γ_w)."""
    return max(1.0, float(np.linalg.norm(task.Sigma, 2)) * (1 + float(w @ w)) + float(task.noise))


def _sub_gaussian_constant() -> Evidence:
    isotropic, w = LinearRegression(identity(2)), np.array([1.0, 0.0])
    anisotropic, halves = LinearRegression(kms(5) / np.linalg.norm(kms(5), 2)), np.full(5, 0.5)
    norm, other_norm = token_norm(w, isotropic), token_norm(halves, anisotropic)
    label = float(halves @ anisotropic.Sigma @ halves)
    return Evidence(
        """Σ = I₂, w = (1, 0), no noise; then Σ = KMS(½)/‖KMS(½)‖, d = 5, w = (½, …, ½).""",
        (
            Comparison("λ_max(Γ_w), Σ = I", norm, ">", 1.0, "max(‖Σ‖, ‖w‖²)"),
            Comparison("λ_max(Γ_w), scaled KMS", other_norm, ">", max(1.0, float(halves @ halves)), "max(‖Σ‖, ‖w‖²)"),
            Comparison("printed corner ‖w‖²", float(halves @ halves), ">", label, "E y² = ‖w‖²_Σ"),
        ),
        (
            Comparison("λ_max(Γ_w), Σ = I", norm, "=", token_scale(w, isotropic), "‖Σ‖(1 + ‖w‖²)"),
            Comparison("λ_max(Γ_w), scaled KMS", other_norm, "<", token_scale(halves, anisotropic), "‖Σ‖(1 + ‖w‖²)"),
        ),
    )


def _empirical_covariance() -> Evidence:
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
    return Evidence(
        """d = 2, Σ = I, w = (1, −2), L = 2000 design points ±√2 e_i, whose second moment is exactly I,
        query (½, 3/2).""",
        (
            Comparison(
                "‖printed matrix‖_F",
                float(np.linalg.norm(printed)),
                "<",
                0.01 * float(np.linalg.norm(limit)),
                "‖Γ_w‖_F/100",
            ),
            Comparison(
                "‖printed matrix without its 1/L − Γ_w‖_F",
                float(np.linalg.norm(unscaled - limit)),
                ">",
                1.0,
                "",
            ),
        ),
        (
            Comparison(
                "‖corrected matrix − Γ_w‖_F",
                float(np.linalg.norm(corrected - limit)),
                "=",
                float(query @ query) / L,
                "‖x_q‖²/L, the query's block",
            ),
        ),
    )


def _norm_of_sigma() -> Evidence:
    scale = float(np.linalg.norm(kms(5), 2))
    U, v, z = np.array([[0.4, -0.2], [0.1, 0.5]]), np.array([0.8, -0.6]), np.array([1.2, 0.7])
    stretched, shrunk = math.sqrt(scale) * U, z / math.sqrt(scale)
    task, smaller = LinearRegression(kms(5)), LinearRegression(kms(5) / scale)
    slope = blocks(risk_gradient(aligned(0.3 * np.eye(5), 0.4, task), task, 20).layer, task)
    image = aligned(scale * 0.3 * np.eye(5), 0.4, smaller)
    small_slope = blocks(risk_gradient(image, smaller, 20).layer, smaller)
    clock_U = scale * float(slope.A[0, 0] / small_slope.A[0, 0])
    clock_v = float(slope.R[0, 0] / small_slope.R[0, 0])
    return Evidence(
        """Σ = KMS(½), d = 5, the covariance of Appendix A.2.2, with k = ‖Σ‖. The identity: three tokens in
        the plane. The clocks: linear attention, L = 20, U ↦ kU, tokens divided by √k.""",
        (Comparison("‖Σ‖ of the anisotropic experiment", scale, ">", 1.0, "largest ‖Σ‖ in Lemma F.1"),),
        (
            Comparison(
                "T^{U,V}[μ](z)",
                softmax_output(TOKENS, U, v, z),
                "=",
                softmax_output(TOKENS, stretched, v, shrunk),
                "T^{√k U,V}[μ](z/√k)",
            ),
            Comparison(
                "‖∇_U T^{U,V}[μ](z)‖_F",
                float(np.linalg.norm(outer_product_gradient(TOKENS, U, v, z))),
                "=",
                math.sqrt(scale) * float(np.linalg.norm(outer_product_gradient(TOKENS, stretched, v, shrunk))),
                "√k ‖∇_U T^{√k U,V}[μ](z/√k)‖_F",
            ),
            Comparison("speed-up of U over V if tokens are rescaled", clock_U / clock_v, "=", scale**2, "k²"),
        ),
    )


ERRATA = (
    Erratum(
        key="E1",
        kind="error",
        place="Lemma F.1",
        summary="the sub-Gaussian constant of a task is ‖Σ‖(1 + ‖w‖²), not max(‖Σ‖, ‖w‖²)",
        printed="""μ = N(0, Γ_w) is said to be sub-Gaussian with σ_μ² = max(‖Σ‖, ‖w‖²); Γ_w is written with
        ‖w‖₂² in its corner.""",
        why="""N(0, Γ) is σ sub-Gaussian exactly when λ_max(Γ) ≤ σ². Without noise, Γ_w = [I w]ᵀ Σ [I w], so
        λ_max(Γ_w) ≤ ‖Σ‖(1 + ‖w‖²), with equality for Σ = I: the off-diagonal blocks cannot be ignored. The
        corner is ‖w‖_Σ², as in Eq. (12).""",
        correction="""σ_μ² = max(1, ‖Σ‖(1 + ‖w‖²) + s2), s2 the noise variance (0 in Eq. (11)). All moments
        of σ_μ are still finite and the Laplace argument for (ii) is unchanged, so the lemma survives.""",
        evidence=_sub_gaussian_constant,
    ),
    Erratum(
        key="E10",
        kind="error",
        place="Appendix F.2, definition of Γ̂_{L,w,x}",
        summary="an extra factor 1/L, and a wrong block: the printed matrix tends to 0",
        printed="""Γ̂ is 1/L times a block matrix whose blocks already carry 1/L, and its lower left block
        is the mean of x_kᵀw xᵀ, with the query x.""",
        why="""With the outer factor the matrix tends to 0, not to Γ_w. Without it, the lower left block is
        (mean of x_k)ᵀw xᵀ, which tends to 0 because tokens are centred; it should be the transpose of the
        upper right block.""",
        correction="""Remove the outer 1/L and read wᵀx_kx_kᵀ in the lower left block. The query's block
        xxᵀ/L is right and vanishes as L grows.""",
        evidence=_empirical_covariance,
    ),
    Erratum(
        key="G18",
        kind="gap",
        place="Theorem 5.2, Lemma F.1",
        summary="‖Σ‖ ≤ 1 is used and not assumed; the paper's own anisotropic Σ has norm 2.26",
        printed="""Theorem 5.2 asks only that Σ be invertible, and its proof invokes Lemma F.1, stated for
        ‖Σ‖ ≤ 1.""",
        why="""Assumption 4.2 (i) wants x_q 1-sub-Gaussian, that is ‖Σ‖ ≤ 1. Dividing all tokens by √k, k =
        ‖Σ‖, does restore it, with U ↦ kU, but not the gradient flow: U then moves k² times faster relative
        to V, so the two flows follow different curves.""",
        correction="""Rescale the query alone, inside the concentration bounds: T^{U,V}[μ](z) = T^{√k
        U,V}[μ](z/√k), and gradients in U gain a factor √k. Propositions 3.1 and 3.4 then hold for √k
        sub-Gaussian queries with √k‖U‖ in place of ‖U‖, and Theorem 5.2 for every invertible Σ.""",
        evidence=_norm_of_sigma,
    ),
)
