r"""Moments of the softmax weights of L Gaussian scores as one-dimensional integrals, for any β and any L.

With $g_1,\dots,g_L$ iid N(0,1), $a = \mathrm{softmax}(\beta g)$ and $\omega = e^{\beta g}$, write
$1/(\sum\omega_l)^k = \int_0^\infty s^{k-1}e^{-s\sum\omega_l}ds/(k-1)!$ and take the expectation inside.
With $s = e^\tau$, $P_k(\tau) = E[(s\omega)^k e^{-s\omega}]$ and $\phi_0 = P_0$,
$$E\sum a^2 = L\int P_2\,\phi_0^{L-1}d\tau,\quad E\sum a^3 = L\int \tfrac12P_3\,\phi_0^{L-1}d\tau,\quad
  E(\sum a^2)^2 = L\int \tfrac16P_4\,\phi_0^{L-1}d\tau + L(L-1)\int \tfrac16P_2^2\,\phi_0^{L-2}d\tau.$$
In $x = \tau + \beta g$ each $P_k$ is a Gaussian average of $e^{kx-e^x}$, analytic for $|\mathrm{Im}\,x| < \pi/2$: the
trapezoid rule converges geometrically in x and in τ. The P's do not depend on L, and are kept for the next one.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

LONGEST = 10**60  # beyond, grids grow long, and in the end P_2, near 1/L² where it counts, underflows
_STEP = 0.2  # an error near e^{-π²/step} for functions analytic in a strip of half-width π/2; 0.24 is too much
_TAIL = 40.0  # e^{-40} is nothing beside 1
_SIGMAS = 9.0  # e^{-9²/2} too


class WeightIntegrals(NamedTuple):
    """Q = E Σa², its complement, W = E[Σa³ - (Σa²)²] and K₂ = 1 - Q - 6W, each to relative accuracy (W to Q's)."""

    Q: np.ndarray
    one_minus_Q: np.ndarray
    W: np.ndarray
    K2: np.ndarray

    @property
    def one_minus_K2(self) -> np.ndarray:
        return np.where(self.K2 < 0.5, 1 - self.K2, self.Q + 6 * self.W)


class Smoothing(NamedTuple):
    """For one or several β, on all their grids in τ one after the other: what the integrals need, whatever L is."""

    beta: np.ndarray  # one a grid
    step: np.ndarray
    start: np.ndarray  # where each grid starts
    log_phi0: np.ndarray
    P1: np.ndarray
    P2: np.ndarray
    P3: np.ndarray
    P4: np.ndarray
    G1: np.ndarray  # E[sωg e^{-sω}]
    G2: np.ndarray  # E[(sωg)² e^{-sω}]


def _longest_log(log_L: float) -> float:
    """Logarithm of the longest prompt that shares its grids with L: 1e18, its square, and so on."""
    log_longest = 18 * math.log(10)
    while log_longest < log_L:
        log_longest *= 2
    return log_longest


def _tau_grid(beta: float, log_longest: float) -> tuple[np.ndarray, float]:
    """Where φ₀^{L-1} P_k is not negligible, for every L from 2 to the longest."""
    # φ₀^{L-1} falls from 1 to 0 over a width of 1, or of β/√(2 ln L) once its tail is Gaussian
    step = _STEP * max(1.0, beta / math.sqrt(2 * log_longest + 2))
    return _steps(beta, log_longest, step), step


def _steps(beta: float, log_longest: float, step: float) -> np.ndarray:
    # Below, the integrands fall like e^τ from s = 1/E[Σω] on, or, when β is large, like P(β max g > -τ).
    lowest = -(log_longest + beta**2 / 2 + _TAIL)
    reach = math.sqrt(4 * log_longest + 2 * _TAIL)
    if 2 * beta > reach:
        lowest = max(lowest, -beta * reach)
    highest = _SIGMAS * beta + math.log(_TAIL) + 0.5
    return step * np.arange(math.floor(lowest / step), math.ceil(highest / step))


def _narrow(beta: float, tau: np.ndarray) -> tuple[np.ndarray, ...]:
    """1-φ₀, φ₀, P₁, …, P₄, G₁ and G₂ for β < 1, on a grid of g common to all τ."""
    g = _STEP * np.arange(-math.ceil(_SIGMAS / _STEP), math.ceil((_SIGMAS + 4 * beta) / _STEP))
    weights = np.exp(-(g**2) / 2) * (_STEP / math.sqrt(2 * math.pi))
    exponential = np.exp(tau[:, None] + beta * g)
    terms = [np.exp(-exponential)]
    for _ in range(4):
        terms.append(terms[-1] * exponential)
    P = [values @ weights for values in terms]
    return -np.expm1(-exponential) @ weights, *P, terms[1] @ (weights * g), terms[2] @ (weights * g**2)


def _wide(beta: float, tau: np.ndarray, step: float, log_longest: float) -> tuple[np.ndarray, ...]:
    """The same for β ≥ 1, on a grid of x common to all τ and no longer for a larger β."""
    # mass at x below this never counts: it sits at τ + kβ² ± 9β, and τ is at least the lower end of its grid
    lowest = -(log_longest + _TAIL + max(5.0, _SIGMAS * beta - beta**2 / 2))
    x = _STEP * np.arange(math.floor(lowest / _STEP), math.ceil(_SIGMAS / _STEP))
    if step == _STEP:  # x - τ takes few values, and the average is a discrete correlation
        g = _STEP * (round((x[0] - tau[-1]) / _STEP) + np.arange(len(x) + len(tau) - 1)) / beta
    else:
        g = (x - tau[:, None]) / beta
    kernel = np.exp(-(g**2) / 2) * (_STEP / (beta * math.sqrt(2 * math.pi)))

    def average(weights, values):
        # einsum, not @: threads of a linear-algebra library only get in each other's way at this size
        return np.correlate(weights, values, "valid")[::-1] if step == _STEP else np.einsum("ij,j", weights, values)

    exponential = np.exp(x)
    survival = np.exp(-exponential)
    # 1-e^{-e^x} does not decay to the right; what it exceeds Φ(x) by does, on both sides, and Φ averages to Φ
    excess = average(kernel, np.where(x < 0, -np.expm1(-exponential) - ndtr(x), ndtr(-x) - survival))
    centre = tau / math.hypot(1.0, beta)
    P = [average(kernel, exponential**k * survival) for k in range(1, 5)]
    kernel *= g
    G1 = average(kernel, exponential * survival)
    kernel *= g
    G2 = average(kernel, exponential**2 * survival)
    return ndtr(centre) + excess, ndtr(-centre) - excess, *P, G1, G2


def _smooth(beta: float, log_longest: float) -> tuple[float, np.ndarray]:
    tau, step = _tau_grid(beta, log_longest)
    return step, _averages(beta, tau, step, log_longest)


def _averages(beta: float, tau: np.ndarray, step: float, log_longest: float) -> np.ndarray:
    """log φ₀, P₁, …, P₄, G₁ and G₂."""
    averages = _narrow(beta, tau) if beta < 1 else _wide(beta, tau, step, log_longest)
    one_minus_phi0, phi0, *rest = averages
    # each half to its own relative accuracy; below 1e-300 φ₀ is rounding, and multiplies something negligible
    log_phi0 = np.where(
        one_minus_phi0 < 0.5, np.log1p(-np.minimum(one_minus_phi0, 0.5)), np.log(np.maximum(phi0, 1e-300))
    )
    return np.stack([log_phi0, *rest])


def smoothing(betas: tuple[float, ...], log_L: float) -> Smoothing:
    """The averages over one score at each β, fine and wide enough for every prompt length up to e^{log L}."""
    # those of one β take little time, and would leave no room for those of a table
    made = _smoothing if len(betas) > 1 else _smoothing.__wrapped__
    return made(betas, _longest_log(log_L))


@functools.lru_cache(maxsize=4)
def _smoothing(betas: tuple[float, ...], log_longest: float) -> Smoothing:
    steps, averages = zip(*(_smooth(beta, log_longest) for beta in betas), strict=True)
    start = np.cumsum([0] + [rows.shape[1] for rows in averages[:-1]])
    return Smoothing(np.asarray(betas), np.asarray(steps), start, *np.concatenate(averages, axis=1))


def _token(smooth: Smoothing, L: float) -> np.ndarray:
    """L φ₀^{L-1}, the weight of what one token contributes."""
    return L * np.exp((L - 1) * smooth.log_phi0)


def _pair(smooth: Smoothing, L: float) -> np.ndarray:
    """L(L-1) φ₀^{L-2}, the weight of what two tokens contribute."""
    return L * (L - 1) * np.exp((L - 2) * smooth.log_phi0)


def integrate(smooth: Smoothing, L: float) -> WeightIntegrals:
    """The integrals at every β of `smooth`, for one L ≥ 2."""

    def total(values):
        return smooth.step * np.add.reduceat(values, smooth.start)

    beta, token, pair = smooth.beta, _token(smooth, L), _pair(smooth, L)
    Q = total(token * smooth.P2)
    W = total(token * (smooth.P3 / 2 - smooth.P4 / 6) - pair * smooth.P2**2 / 6)
    one_minus_Q, K2 = 1 - Q, 1 - Q - 6 * W
    # Once one weight dominates, E m₁ = β(1-Q) and E m₁² = Q + β²K₂ have no small numbers as differences of large ones.
    frozen = (beta > 1) & (Q > 0.5)
    nu = np.where(frozen, beta, 1.0) ** 2
    first, second = total(token * smooth.G1), total(token * smooth.G2 + pair * smooth.G1**2)
    one_minus_Q = np.where(frozen, first / np.sqrt(nu), one_minus_Q)
    K2 = np.where(frozen, (second - Q) / nu, K2)
    return WeightIntegrals(Q, one_minus_Q, W, K2)


def weight_integrals(beta: float, L: float) -> WeightIntegrals:
    """The moments at one β ≥ 0 and one 2 ≤ L ≤ 1e60 by direct quadrature: to 1e-13 or so."""
    return WeightIntegrals(*(moment[0] for moment in integrate(smoothing((float(beta),), math.log(L)), L)))


def mean_score(beta: float, L: float) -> float:
    r"""$E m_1 = E\sum a_lg_l = L\int E[s\omega g e^{-s\omega}]\phi_0^{L-1}d\tau$, β(1-Q) by Stein's identity."""
    smooth = smoothing((float(beta),), math.log(L))
    return float(smooth.step[0] * np.sum(_token(smooth, L) * smooth.G1))
