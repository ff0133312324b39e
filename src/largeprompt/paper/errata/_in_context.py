"""Errata of Appendix E: the risk and the gradient at finite L against their limits, and the trajectories."""

import math
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad, solve_ivp
from scipy.special import gamma, gammainc

from largeprompt.paper.errata._evidence import Numbers


def labelless_risks(A: float, p: float) -> tuple[float, float, float]:
    """(R_2, R_∞, Δ) for tokens (x, 0), x ~ N(0, 1), labels 0: half mean squares of pm and pAx, Δ² = E(T_2 − T_∞)².

    Given the query, m = h/√2 + (t/√2) tanh(Axt/√2), h and t standard Gaussian.
    """
    nodes, weights = hermegauss(120)
    weights = weights / weights.sum()
    x, t = nodes[:, None], nodes[None, :]
    driven = t / math.sqrt(2) * np.tanh(A * x * t / math.sqrt(2))
    finite = 0.5 * p**2 * (0.5 + float(weights @ driven**2 @ weights))
    deviation = abs(p) * math.sqrt(0.5 + float(weights @ (driven - A * x) ** 2 @ weights))
    return finite, 0.5 * (p * A) ** 2, deviation


def E2() -> Numbers:
    finite, infinite, deviation = labelless_risks(0.5, 1.0)
    change = abs(finite - infinite)
    T, y = 1.0, -1.0
    return [(change, 0.0), (abs(T - y), math.hypot(T, y)), (8 * 2.0**4 + 8, 8 + 16.0)], [
        (change, 0.5 * deviation**2 + math.sqrt(2 * infinite) * deviation)
    ]


def label_attention(norm: float) -> tuple[float, float, float, float]:
    """(σ², E‖T‖⁴^{1/4}, E‖T‖²^{1/2}, E‖∇T‖²^{1/2}) for d = 1, w = `norm`, x ~ N(0, 1), U(x, 0) = (0, x), V = I.

    T = x·(w, w²); the Jacobian in (U, V) has squared norm ‖T‖² + ‖x‖²‖Γ_w‖².
    """
    sigma2 = 1 + norm**2
    size = norm * math.sqrt(sigma2)
    return sigma2, 3**0.25 * size, size, math.hypot(size, sigma2)


def E3() -> Numbers:
    sigma2, fourth, second, jacobian = label_attention(5.0)
    sigma, root = math.sqrt(sigma2), 2 * math.sqrt(2.0)
    return [(fourth, root * sigma), (second, root * sigma), (jacobian, 2 * root * sigma)], [
        (fourth, root * sigma2),
        (second, root * sigma2),
        (jacobian, 2 * root * sigma2),
    ]


def regression_mean(power: float, log_power: float, rate: float, log_L: float, d: int = 5) -> float:
    """E[σ^{2·power} (ln L)^{log_power} L^{−rate/σ²}] for σ² = 1 + χ²_d: noise-free regression with Σ = I."""

    def integrand(s: float) -> float:
        log_density = (d / 2 - 1) * math.log(s) - s / 2 - d / 2 * math.log(2) - math.lgamma(d / 2)
        return (1 + s) ** power * math.exp(log_density - rate * log_L / (1 + s))

    peak = math.sqrt(2 * rate * log_L) + 2 * power + d
    pieces = (0.0, peak / 4, peak, 4 * peak, 40 * peak)
    total = sum(quad(integrand, low, high, limit=200)[0] for low, high in pairwise(pieces))
    return log_L**log_power * total


def pareto_mean(power: float, log_power: float, rate: float, log_L: float, tail: float = 7.0) -> float:
    """The same for P(σ² > s) = s^{−tail}, s ≥ 1.

    Substituting x/s, x = rate ln L, it is tail (ln L)^{log_power} x^{power − tail} γ(tail − power, x).
    """
    x, index = rate * log_L, tail - power
    return tail * log_L**log_power * x**-index * float(gammainc(index, x) * gamma(index))


def E4() -> Numbers:
    log_L, rate = math.log(1e4), 0.3
    return [
        (math.sqrt(regression_mean(6, 2, rate, log_L)), regression_mean(3, 1, rate / 2, log_L)),
        (math.sqrt(regression_mean(3, 1, rate, log_L)), math.sqrt(regression_mean(1.5, 0.5, rate / 2, log_L))),
        (pareto_mean(6, 2, 1.0, 1000.0), 9 * pareto_mean(6, 2, 1.0, 100.0)),
        (pareto_mean(0, 4, 1.0, 1000.0), 0.01 * pareto_mean(0, 4, 1.0, 100.0)),
    ], [
        (
            regression_mean(6, 2, rate, 1e5),
            math.sqrt(regression_mean(12, 0, 0.0, 1.0) * regression_mean(0, 4, 2 * rate, 1e5)),
        ),
        (math.sqrt(regression_mean(12, 0, 0.0, 1.0) * regression_mean(0, 4, 2 * rate, 1e5)), 1e-50),
    ]


def hessian_norms(radius: float) -> tuple[float, float]:
    """(β_1, β_∞) on a ball, for d = 1, Σ = 1, w ~ N(0, 1), p = c = 0: R_1 = ½(r² + 1) and R_∞ = ½(rA − 1)²."""
    angles = np.linspace(0.0, 2 * math.pi, 3601)
    A, r = radius * np.cos(angles), radius * np.sin(angles)
    # The top eigenvalue of [[r², 2rA − 1], [2rA − 1, A²]]; its largest value over the ball is on the sphere.
    top = (A**2 + r**2) / 2 + np.hypot((A**2 - r**2) / 2, 2 * r * A - 1)
    return 1.0, float(top.max())


def trajectory_gap(t: float, start: float, radius: float) -> tuple[float, float]:
    """(‖θ_1(t) − θ_∞(t)‖, g t e^{β_∞ t}) for the same model, A(0) = r(0) = `start`.

    Here g is the supremum of ‖∇R_1 − ∇R_∞‖ on the ball, taken over a grid.
    """

    def velocity(_: float, theta: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        A, r = theta
        return np.array([(1 - r * A) * r, (1 - r * A) * A])

    infinite = solve_ivp(velocity, (0.0, t), [start, start], rtol=1e-10, atol=1e-12).y[:, -1]
    finite = np.array([start, start * math.exp(-t)])
    axis = np.linspace(-radius, radius, 401)
    A, r = np.meshgrid(axis, axis)
    gap = np.hypot((r * A - 1) * r, (r * A - 1) * A - r)[A**2 + r**2 <= radius**2].max()
    beta = hessian_norms(radius)[1]
    return float(np.linalg.norm(finite - infinite)), float(gap) * t * math.exp(beta * t)


def T19() -> Numbers:
    finite, infinite = hessian_norms(2.0)
    distance, bound = trajectory_gap(0.5, 0.5, 2.0)
    return [(infinite, 2 * finite)], [(distance, bound)]
