import math

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

NODES, DEPTH = 16, 42.0  # Gauss-Legendre nodes a panel; what lies e^-42 below the top of an integrand is left out


def resolvent_trace(H: Float[np.ndarray, " n"], D: Float[np.ndarray, " n"], L: int) -> float:
    r"""$E\,\mathrm{tr}\,H(G+D)^{-1}$ for $G\sim\mathrm{Wishart}_n(I, L)$ and diagonal $H\ge0$, $D>0$: exact.

    It is the derivative in $D'$ along $H$, at $D'=D$, of $E\det(G+D')/\det(G+D)$. Writing $1/\det(G+D)$ as a Gaussian
    integral over an $n\times2$ matrix tilts the Wishart law, under which the mean of a determinant is known, and leaves

    $$E_{Y\sim\mathrm{Wishart}_2(I, L+2)}\Big[\prod_i\det(D_i+Y)^{-1/2}\;
      \mathcal L_t\Big\{\prod_i(D'_i+t)\Big(1+\sum_i c_i(\gamma_{i1}+\gamma_{i2})+\sum_{i\ne j}c_ic_j\gamma_{i1}
      \gamma_{j2}\Big)\Big\}\Big],$$

    $\gamma_{ia} = 1/(D_i+y_a)$ at the eigenvalues of $Y$, $c_i = D'_i/(D'_i+t)$, $\mathcal L_t\{t^k\} = L!/(L-k)!$.
    Every term is positive: nothing cancels at any $n$, $L\ge1$ or $D$, and a smooth integral in the plane is left.
    """
    n, tau = len(D), effective_length(D, L)
    J = _kernel(D, L)
    # factors are divided by D_l + τ: their products are then laws of sums of independent coins, and never overflow
    stay, move, slope = D / (D + tau), tau / (D + tau), H / (D + tau)
    chosen, chosen_slope = np.append(1.0, stay), np.append(0.0, slope)
    index = np.arange(n + 1)
    value, derivative = np.zeros((2, n + 1, n + 1, n + 1))
    value[..., 0] = 1
    for l in range(n):  # the coefficients of ∏(D_l + t) over the l that are neither i nor j, and their derivative
        kept = ~((index[:, None] == l + 1) | (index == l + 1))[..., None]
        derivative = np.where(kept, stay[l] * derivative + move[l] * _shift(derivative) + slope[l] * value, derivative)
        value = np.where(kept, stay[l] * value + move[l] * _shift(value), value)
    falling = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(L - np.arange(n, dtype=float), 1e-300) / tau))])
    falling = np.where(index <= L, np.exp(falling - falling[: L + 1].max()), 0.0)
    value, derivative = value @ falling, derivative @ falling
    pairs = chosen[:, None] * chosen
    change = chosen_slope[:, None] * chosen + chosen[:, None] * chosen_slope
    return float(np.sum(J * (change * value + pairs * derivative)) / np.sum(J * pairs * value))


def _shift(polynomials: np.ndarray) -> np.ndarray:
    """The same polynomials times t."""
    return np.concatenate([np.zeros_like(polynomials[..., :1]), polynomials[..., :-1]], -1)


def effective_length(D: Float[np.ndarray, " n"], L: float) -> float:
    r"""The root of $t + \sum_i t/(D_i+t) = L$: $(t+D)^{-1}$ is the deterministic equivalent of $(G+D)^{-1}$."""
    low, high = math.log(L) - math.log1p(np.sum(1 / D)), math.log(L)
    for _ in range(60):
        middle = (low + high) / 2
        t = math.exp(middle)
        low, high = (middle, high) if t + np.sum(t / (D + t)) < L else (low, middle)
    return math.exp((low + high) / 2)


def _kernel(D: Float[np.ndarray, " n"], L: int) -> Float[np.ndarray, "m m"]:
    r"""$\iint|y_1-y_2|\,w(y_1)w(y_2)\varphi_i(y_1)\varphi_j(y_2)$ up to a factor, and 0 for $i=j>0$.

    $w(y) = y^{(L-1)/2}e^{-y/2}\prod_i(D_i+y)^{-1/2}$, $\varphi_0 = 1$, $\varphi_i = 1/(D_i+y)$; in $x = \log(y/y_0)$
    every integrand is log-concave, and $y_0$ is where $y\,w(y)$ is largest.
    """
    n, y0 = len(D), effective_length(D, L + 1)

    def log_weight(x):
        # grouped so that with L = 1e12 the difference of two large numbers is taken before x multiplies it
        linear = ((L + 1 - y0) * x - y0 * (np.expm1(x) - x)) / 2
        return linear - np.sum(np.logaddexp(np.log(D), math.log(y0) + x[..., None]) - np.log(D + y0), -1) / 2

    # the entry that reaches lowest has φ of the least D, the one that reaches highest has |y1-y2| ~ y1
    least = D.min()
    bottom = math.log(effective_length(np.append(D, [least, least]), L + 1) / y0)
    top = math.log(effective_length(D, L + 3) / y0)
    low = _fall(lambda x: log_weight(x) - np.logaddexp(math.log(least), math.log(y0) + x), bottom, -1 / math.sqrt(L))
    high = _fall(lambda x: log_weight(x) + x, top, 1 / math.sqrt(L))
    width = high - low
    panels = max(8, math.ceil(width * math.sqrt(n + 16) / 8))
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    s = ((np.arange(panels)[:, None] + (1 + nodes) / 2) / panels).ravel()
    weights = np.tile(weights, panels)
    J = np.zeros((n + 1, n + 1))
    for rows in np.split(np.arange(len(s)), panels):  # in strips, to bound the memory
        # the triangle x2 < x1 as a square: the kink of |y1-y2| becomes an edge
        s1 = s[rows][:, None]
        x1, x2, gap = low + width * s1, low + width * s1 * s, width * s1 * (1 - s)
        density = np.exp(log_weight(x1) + log_weight(x2) + x1) * -np.expm1(-gap) * s1 * weights[rows, None] * weights
        phi1, phi2 = (
            np.concatenate([np.ones((*x.shape, 1)), 1 / (D + y0 * np.exp(x)[..., None])], -1) for x in (x1, x2)
        )
        J += phi1[:, 0].T @ np.einsum("ab,abj->aj", density, phi2)
    J = J + J.T
    J[np.arange(1, n + 1), np.arange(1, n + 1)] = 0
    return J


def _fall(concave, start: float, step: float) -> float:
    """Where a concave function has fallen by `DEPTH` from its top at `start`, on the side of `step`."""
    level = concave(np.array(start)) - DEPTH
    near = 0.0
    while concave(np.array(start + step)) > level:
        near, step = step, 2 * step
    for _ in range(20):
        middle = (near + step) / 2
        near, step = (middle, step) if concave(np.array(start + middle)) > level else (near, middle)
    return start + step


def bartlett(key: PRNGKeyArray, n: int, L: int, draws: int) -> Float[np.ndarray, "draws n m"]:
    r"""Factors $T$ with $TT^\top\sim\mathrm{Wishart}_n(I, L)$, of $\min(n, L)$ columns: the cost is free of $L$."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    m = min(n, L)
    T = np.tril(rng.normal(size=(draws, n, m)), -1)
    T[:, range(m), range(m)] = np.sqrt(rng.chisquare(L - np.arange(m), size=(draws, m)))
    return T
