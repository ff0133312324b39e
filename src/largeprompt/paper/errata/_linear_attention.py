"""Closed-form in-context risk of one linear attention head, at any prompt length, and its gradient flow.

Tokens (x, y) with x ~ N(0, Σ), y = w·x + η, w ~ N(0, Ω), η ~ N(0, s2); the query is (x_q, 0) and not in the prompt.
Only four blocks of the parameters reach the prediction: U = [[A, *], [cᵀ, *]] and the value row v = (p, r).
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp


@dataclass(frozen=True)
class Task:
    """In-context linear regression: covariates N(0, Σ), tasks N(0, Ω), label noise of variance s2."""

    Sigma: Float[np.ndarray, "d d"]
    Omega: Float[np.ndarray, "d d"]
    s2: float = 0.0

    @property
    def tau1(self) -> float:
        """E‖w‖²_Σ = tr ΣΩ."""
        return float(np.trace(self.Sigma @ self.Omega))

    @property
    def tau2(self) -> float:
        """E‖w‖⁴_Σ = (tr ΣΩ)² + 2 tr (ΣΩ)²."""
        product = self.Sigma @ self.Omega
        return self.tau1**2 + 2 * float(np.trace(product @ product))


@dataclass(frozen=True)
class Head:
    """The blocks A, c of U and p, r of v; the other blocks meet the zero of the query or do not exist."""

    A: Float[np.ndarray, "d d"]
    c: Float[np.ndarray, " d"]
    p: Float[np.ndarray, " d"]
    r: float

    def flat(self) -> Float[np.ndarray, " n"]:
        """All d² + 2d + 1 numbers in one vector."""
        return np.concatenate([self.A.ravel(), self.c, self.p, [self.r]])

    @staticmethod
    def from_flat(theta: Float[np.ndarray, " n"], d: int) -> "Head":
        """The inverse of `flat`."""
        A, c, p, r = np.split(theta, [d * d, d * d + d, d * d + 2 * d])
        return Head(A.reshape(d, d), c, p, float(r[0]))


def aligned(A: Float[np.ndarray, "d d"], r: float) -> Head:
    """The block structure of Assumption 5.1: p = c = 0."""
    zero = np.zeros(len(A))
    return Head(A, zero, zero, r)


def risk(head: Head, task: Task, L: float) -> float:
    """R_L = ½ E(T − y_q)² = ½ E[(b − w·x)² + (aν + b²)/L] + s2/2, with a = vᵀΓ_w v, b = vᵀΓ_w u, ν = uᵀΓ_w u.

    Given (w, x_q) the output vᵀŜu is a Wishart form: mean b, variance (aν + b²)/L.
    """
    A, c, p, r, Sigma, Omega, s2 = head.A, head.c, head.p, head.r, task.Sigma, task.Omega, task.s2
    a0 = A.T @ Sigma @ p + r * s2 * c
    M = r * A.T @ Sigma + np.outer(c, Sigma @ p)
    k = c @ Sigma @ c
    mean_square = a0 @ Sigma @ a0 + 2 * r * task.tau1 * (a0 @ Sigma @ c) + r**2 * task.tau2 * k
    mean_square += np.sum(M @ Omega * (Sigma @ M))
    cross = np.sum(M @ Omega * Sigma)
    alpha, gamma = p @ Sigma @ p + r**2 * s2, np.sum(Sigma @ A * (A @ Sigma)) + k * s2
    spread = alpha * (gamma + k * task.tau1) + r**2 * (gamma * task.tau1 + k * task.tau2)
    spread += 4 * r * (Sigma @ p) @ Omega @ Sigma @ A @ Sigma @ c
    return float(0.5 * (s2 + task.tau1 + (1 + 1 / L) * mean_square + spread / L) - cross)


def gradient(head: Head, task: Task, L: float) -> Head:
    """∇R_L block by block: the chain rule through a0 = AᵀΣp + r s2 c and M = rAᵀΣ + c pᵀΣ, term by term of `risk`."""
    A, c, p, r, Sigma, Omega, s2 = head.A, head.c, head.p, head.r, task.Sigma, task.Omega, task.s2
    tau1, tau2, kappa = task.tau1, task.tau2, 1 + 1 / L
    Sp, Sc, SA = Sigma @ p, Sigma @ c, Sigma @ A
    a0 = A.T @ Sp + r * s2 * c
    k = c @ Sc
    h = kappa * Sigma @ (a0 + r * tau1 * c)
    H = Sigma @ (kappa * (r * SA.T + np.outer(c, Sp)) - np.eye(len(p))) @ Omega
    alpha, gamma = p @ Sp + r**2 * s2, np.sum(SA * (A @ Sigma)) + k * s2
    by_alpha, by_gamma = (gamma + k * tau1) / L, (alpha + r**2 * tau1) / L
    by_k = (alpha * tau1 + r**2 * tau2) / L + s2 * by_gamma
    w = Sigma @ Omega @ Sp
    return Head(
        np.outer(Sp, h) + r * Sigma @ H.T + by_gamma * SA @ Sigma + (2 * r / L) * np.outer(w, Sc),
        r * s2 * h
        + H @ Sp
        + kappa * r * Sigma @ (tau1 * a0 + r * tau2 * c)
        + by_k * Sc
        + (2 * r / L) * Sigma @ A.T @ w,
        SA @ h + Sigma @ H.T @ c + by_alpha * Sp + (2 * r / L) * Sigma @ Omega @ SA @ Sc,
        float(
            s2 * c @ h
            + np.sum(H * SA.T)
            + kappa * (tau1 * a0 @ Sc + r * tau2 * k)
            + r * (s2 * by_alpha + (gamma * tau1 + k * tau2) / L)
            + (2 / L) * Sp @ Omega @ SA @ Sc
        ),
    )


def minimal_risk(task: Task, L: float) -> float:
    """min R_L = ½ [s2 + Σ_i λ_i(λ_i + τ)/((L+1)λ_i + τ)], λ = eig(ΣΩ), τ = tr ΣΩ + s2 (L finite).

    Flipping the sign of (w, η) splits the output into an odd and an even part; the target is odd, so the even part
    can only hurt, and the odd one is (mean of y x)ᵀ(rA + pcᵀ)x: a least-squares problem in one matrix.
    """
    eigenvalues = np.linalg.eigvals(task.Sigma @ task.Omega).real
    tau = task.tau1 + task.s2
    return 0.5 * (task.s2 + float(np.sum(eigenvalues * (eigenvalues + tau) / ((L + 1) * eigenvalues + tau))))


def flow(head: Head, task: Task, L: float, t: float) -> Head:
    """The gradient flow of R_L in (A, c, p, r), at time t."""
    d = len(head.p)

    def velocity(_: float, theta: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        return -gradient(Head.from_flat(theta, d), task, L).flat()

    solution = solve_ivp(velocity, (0.0, t), head.flat(), method="BDF", rtol=1e-9, atol=1e-12)
    return Head.from_flat(solution.y[:, -1], d)


def fixed_point(Sigma: Float[np.ndarray, "d d"]) -> Head:
    """Remark 5.3's limit: r = tr(Σ⁻²)^{1/4}, A = Σ⁻¹/r."""
    inverse = np.linalg.inv(Sigma)
    r = math.sqrt(float(np.linalg.norm(inverse)))
    return aligned(inverse / r, r)


def kms(d: int, rho: float = 0.5) -> Float[np.ndarray, "d d"]:
    """The Kac-Murdock-Szegö matrix Σ_ij = ρ^|i−j| of Appendix A.2.2."""
    i = np.arange(d)
    return rho ** np.abs(i[:, None] - i).astype(float)
