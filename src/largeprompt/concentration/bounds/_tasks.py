r"""What the bounds need of a regression: its sizes, and means over tasks of functions of $\sigma_w$."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

from largeprompt.icl import LinearRegression, as_regression

from ._moments import norm_moments

_GRID, _PANELS, _NODES, _NEGLIGIBLE = 801, 128, 12, 60.0


@dataclass(frozen=True)
class Sizes:
    r"""Norms and moments of a regression: $\|W\|_F^2 \le$ `tasks` $\chi^2_n$, queries divided by `scale` to constant 1.

    `query[k]` is $E\|x\|^{2k}$ of the scaled query, `target` $= E\|y_q\|^2$, `W2` and `W4` the moments of $\|W\|_F$.
    """

    D: int
    k: int
    n: int
    Sigma: float
    noise: float
    tasks: float
    scale: float
    query: tuple[float, ...]
    target: float
    W2: float
    W4: float

    def sigma(self, chi_squared: np.ndarray) -> np.ndarray:
        r"""$\sigma_w$ with $\sigma_w^2 = \max(1, \|\Sigma\|(1+\|W\|^2)+s^2) \ge \|\Gamma_W\|$ (errata E1)."""
        return np.sqrt(np.maximum(1, self.Sigma * (1 + self.tasks * chi_squared) + self.noise))

    @property
    def G2(self) -> float:
        r"""$E G^2$ for $G = \|\Sigma\|(1+\|W\|^2)+s^2$, which bounds $\|\Gamma_W\|$."""
        constant = self.Sigma + self.noise
        return constant**2 + 2 * constant * self.Sigma * self.W2 + self.Sigma**2 * self.W4

    @property
    def query2(self) -> float:
        r"""$E\|x_q\|^2$, before scaling."""
        return self.query[1] * self.scale**2

    def tilted_moments(self, U: float) -> dict[tuple[int, int], float]:
        r"""$M_{p,p'} \le 2^{p-1}(\|U\|^pE\|x\|^{p+p'} + C_{D,p}E\|x\|^{p'})$ for every task, queries scaled.

        $C_{D,p} = E\|Y\|^p$, $Y\sim\mathcal N(0,I_D)$, and $\max(\|\Gamma_w\|,1)\le\sigma_w^2$. Paper: Lemma F.1 (iii).
        """
        normal = norm_moments(np.zeros(self.D), np.eye(self.D), 4)
        return {
            (p, q): 2.0 ** (p - 1) * (U**p * self.query[(p + q) // 2] + float(normal[p // 2]) * self.query[q // 2])
            for p in (0, 4, 8)
            for q in (0, 4, 8)
        }


def sizes(task: LinearRegression) -> Sizes:
    """The sizes of a regression."""
    task = as_regression(task)
    Sigma, Omega, S = (np.asarray(x, float) for x in (task.Sigma, task.Omega, task.query_Sigma))
    k, noise = task.targets, float(task.noise)
    scale = math.sqrt(np.linalg.norm(S, 2)) or 1.0
    W2 = k * float(np.trace(Omega))
    return Sizes(
        D=task.dim,
        k=k,
        n=k * task.d,
        Sigma=float(np.linalg.norm(Sigma, 2)),
        noise=noise,
        tasks=float(np.linalg.norm(Omega, 2)),
        scale=scale,
        query=tuple(float(m) for m in norm_moments(np.zeros(task.d), S / scale**2, 8)),
        target=k * (float(np.sum(S * Omega)) + noise),
        W2=W2,
        W4=W2**2 + 2 * k * float(np.sum(Omega**2)),
    )


def over_tasks(size: Sizes, log_of_sigma: Callable[[np.ndarray], np.ndarray]) -> float:
    r"""$\ln E_w e^{h(\sigma_w)}$ for an increasing h, with $\|\Omega\|\chi^2_n\ge\|W\|^2$ in place of $\|W\|^2$.

    In $y = \ln\chi^2$, where the integrand is within a factor $e^{-60}$ of its largest: $L^{-c/\sigma_w^2}$ moves the
    mass to $\chi^2\sim\sqrt{\ln L}$, where a rule for the χ² law itself has no nodes.
    """
    if size.tasks * size.Sigma == 0:
        return float(log_of_sigma(size.sigma(np.zeros(1)))[0])
    normaliser = size.n / 2 * math.log(2) + float(gammaln(size.n / 2))

    def log_integrand(y: np.ndarray) -> np.ndarray:
        return log_of_sigma(size.sigma(np.exp(y))) + size.n / 2 * y - np.exp(y) / 2 - normaliser

    low, high = -700.0 / size.n, 40.0  # below, χ² has mass e^{-350}; above, e^{-10¹⁷}
    for _ in range(20):
        grid = np.linspace(low, high, _GRID)
        values = log_integrand(grid)
        if not np.any(values > -np.inf):
            return -math.inf
        held = np.flatnonzero(values >= values.max() - _NEGLIGIBLE)
        narrower = grid[max(held[0] - 1, 0)], grid[min(held[-1] + 1, _GRID - 1)]
        if narrower[1] - narrower[0] > 0.5 * (high - low):
            break
        low, high = map(float, narrower)
    kink = (1 - size.noise - size.Sigma) / (size.Sigma * size.tasks)  # where σ_w leaves 1
    cuts = [low, high] if kink <= 0 or not low < math.log(kink) < high else [low, math.log(kink), high]
    return float(np.logaddexp.reduce([_panels(log_integrand, a, b) for a, b in itertools.pairwise(cuts)]))


def _panels(log_integrand: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """ln ∫e^φ by Gauss-Legendre on equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    width = (high - low) / _PANELS
    points = low + width * (np.arange(_PANELS)[:, None] + (nodes + 1) / 2)
    logs = log_integrand(points.ravel()) + np.tile(np.log(weights * width / 2), _PANELS)
    return float(np.logaddexp.reduce(logs))
