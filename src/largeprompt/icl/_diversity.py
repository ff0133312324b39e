r"""Linear attention trained on few tasks and few prompts, tested on its own tasks and on fresh ones.

The layer predicts $\hat sAx_q$ with $\hat s = \frac1L\sum y_lx_l^\top$: a linear regression on the $d^2$ features
$\hat s^\top x_q^\top$, whose second moment is $S\otimes\Sigma_q$ with
$S = (1+\frac1L)\Sigma\Omega_m\Sigma + \frac{\mathrm{tr}\,\Sigma\Omega_m+s^2}{L}\Sigma$. The tasks enter by their second
moment $\Omega_m$ alone.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Float, PRNGKeyArray
from scipy.optimize import brentq

from largeprompt import _checks as checks
from largeprompt.attention import LinearAttention

from ._blocks import aligned_blocks, from_blocks
from ._estimate import Estimate, exactly
from ._finite_tasks import FiniteTasks, as_finite_tasks
from ._optimal_linear import normal_equations
from ._regression import LinearRegression, as_regression, root
from ._risk._closed_form import gaussian_risk
from ._spectrum import refuse_a_traced_task

Matrix = Float[np.ndarray, "d d"]


class TaskRisks(NamedTuple):
    """Risks of one layer: on the tasks it was trained on, and on fresh ones."""

    own: Estimate
    fresh: Estimate


def diversity_risk(
    task: LinearRegression, L: int | float, m: int, key: PRNGKeyArray | None = None, *, draws: int = 64
) -> TaskRisks:
    r"""The risks of the best linear attention for $m$ tasks $w_i\sim\mathcal N(0,\Omega)$, averaged over their draw.

    Training has all the prompts it wants. Given the tasks both risks are closed forms; only $\Omega_m$ is drawn.
    """
    task, L, m = as_regression(task), checks.prompt_length(L), checks.count("m", m)
    rows, n = [], checks.count("draws", draws, at_least=2)
    for one in jax.random.split(checks.key_or_default(key), n):
        own = FiniteTasks.drawn(one, task, m).gaussian
        found = normal_equations(own, L)
        A = jnp.asarray(found.reading, task.Sigma.dtype)
        rows.append((found.risk, float(gaussian_risk(aligned_blocks(A, 1.0, task), task, L))))
    own, fresh = (
        Estimate(jnp.asarray(row.mean()), jnp.asarray(row.std(ddof=1) / math.sqrt(n)), f"mean over {n} draws of tasks")
        for row in np.asarray(rows).T
    )
    return TaskRisks(own, fresh)


def pretraining_risk(task: FiniteTasks, L: int | float, n: int | float, ridge: float = 0.0) -> TaskRisks:
    r"""The risks of linear attention fitted to `n` prompts of these tasks by least squares, for large $d$.

    The fit minimises $\frac1n\sum(\hat sAx_q-y)^2 + \text{ridge}\,\|A\|_F^2$, without ridge the one of least norm. With
    $c_{ij}$ the eigenvalues of $S\otimes\Sigma_q$ and $\xi$ the root of
    $n - \sum\frac{c}{c+\xi} = \frac{n\,\text{ridge}}{\xi}$, the fitted $A$ is $\frac{c}{c+\xi}A^*$ with a variance of
    $\frac vn\frac{c}{(c+\xi)^2}$ in each eigendirection, $v = \frac{2R^* + \sum\xi^2c\,A^{*2}/(c+\xi)^2}{1-\sum
    (c/(c+\xi))^2/n}$ twice the risk on its own tasks. A deterministic equivalent: it takes the features for Gaussian.
    """
    task, L = as_finite_tasks(task), checks.prompt_length(L)
    refuse_a_traced_task(task, "the risk after few prompts")
    n, ridge = _prompts("n", n), float(checks.number("ridge", ridge, at_least=0))
    own, fresh = task.gaussian, task.regression
    S, S_fresh = _feature_covariance(own, L), _feature_covariance(fresh, L)
    best = np.asarray(normal_equations(own, L).reading)
    values, left = np.linalg.eigh(S)
    of_query, right = np.linalg.eigh(np.asarray(own.query_Sigma, float))
    c = np.maximum(values, 0)[:, None] * np.maximum(of_query, 0)
    c = np.where(c > 1e-13 * c.max(), c, 0)
    xi = _effective_ridge(lambda xi: np.sum(c / np.where(c > 0, c + xi, 1)), float(np.sum(c > 0)), n, ridge)
    share = c / np.where(c > 0, c + xi, 1)
    target = left.T @ best @ right
    bias = np.sum(((1 - share) * target) ** 2 * c)
    least = 2 * normal_equations(own, L).risk
    freedom = 1 - np.sum(share**2) / n
    v = (least + bias) / freedom if freedom > 1e-12 else math.inf
    A = left @ (share * target) @ right.T
    spread = np.diag(left.T @ S_fresh @ left)[:, None] * np.maximum(of_query, 0)
    noise = v / n * np.sum(share**2 / np.where(c > 0, c, 1) * spread) if math.inf > n else 0.0
    mean = float(gaussian_risk(aligned_blocks(jnp.asarray(A), 1.0, fresh), fresh, L))
    how = "deterministic equivalent"
    return TaskRisks(exactly(v / 2, how), exactly(mean + noise / 2, how))


def asymptotic_risks(alpha: float, kappa: float, tau: float, noise: float = 0.0, ridge: float = 0.0) -> TaskRisks:
    r"""The limit of `pretraining_risk` for $L = \alpha d$, $m = \kappa d$, $n = \tau d^2$, $d\to\infty$.

    Isotropic covariates, $w\sim\mathcal N(0, I/d)$ and `ridge` $/d$ as penalty. With $x = (1+s^2)/\alpha$,
    $M(z) = \int\frac{\mu_\kappa(dr)}{r+z}$ over the Marchenko-Pastur law, $\nu = x+\xi$ and
    $\tau - 1 + \xi M(\nu) = \tau\,\text{ridge}/\xi$,
    $$2R_{own} = \tau q = \tau\frac{s^2+\nu-\nu^2M-\xi(1-2\nu M-\nu^2M')}{\tau-(1-2\xi M-\xi^2M')},\quad
      2R_{fresh} = (1+x)\big[1-2\nu M-\nu^2M'+q(M+\xi M')\big]-2(1-\nu M)+1+s^2 .$$
    `kappa` and `tau` may be infinite. Lu et al. (2025), arXiv 2405.11751, Result 1 for ridge 0, without the factor ½.
    """
    alpha, kappa, tau = _positive("alpha", alpha), _positive("kappa", kappa), _positive("tau", tau)
    if math.inf == alpha:
        raise ValueError("alpha is inf; it must be finite: prompts as long as d, times alpha")
    s2, ridge = (float(checks.number(name, value, at_least=0)) for name, value in (("noise", noise), ("ridge", ridge)))
    x = (1 + s2) / alpha
    xi = _effective_ridge(lambda xi: 1 - xi * marchenko_pastur(x + xi, kappa)[0], 1.0, tau, ridge)
    nu = x + xi
    M, slope = marchenko_pastur(nu, kappa)
    numerator = s2 + nu - nu**2 * M - xi * (1 - 2 * nu * M - nu**2 * slope)
    freedom = 1 - (1 - 2 * xi * M - xi**2 * slope) / tau
    own = numerator / freedom if freedom > 1e-12 else math.inf
    q = own / tau if math.inf > tau else 0.0
    signal = 1 - 2 * nu * M - nu**2 * slope + q * (M + xi * slope)
    fresh = (1 + x) * signal - 2 * (1 - nu * M) + 1 + s2
    return TaskRisks(exactly(own / 2, "limit d → ∞"), exactly(fresh / 2, "limit d → ∞"))


def marchenko_pastur(z: float, kappa: float) -> tuple[float, float]:
    r"""$M(z) = \lim\frac1d\mathrm{tr}\,(R+z)^{-1}$ and $M'(z)$ for $R = \frac1m\sum w_iw_i^\top$, normal $w_i$.

    $M = 2/(b+\sqrt{b^2+4z/\kappa})$ with $b = z+1-1/\kappa$, $m = \kappa d$: the root of
    $\frac z\kappa M^2 + bM = 1$, so that $M' = -(M^2/\kappa+M)/(2zM/\kappa+b)$.
    """
    b = z + 1 - 1 / kappa
    root = math.sqrt(b * b + 4 * z / kappa)
    M = 2 / (b + root)
    return M, -(M * M / kappa + M) / root


def ridge_pretrained(
    task: FiniteTasks | LinearRegression, L: int, n: int, key: PRNGKeyArray | None = None, *, ridge: float = 0.0
) -> LinearAttention:
    r"""Linear attention with $P = C = 0$ fitted to `n` sampled prompts by least squares, as in `pretraining_risk`.

    Its risks on the tasks and on fresh ones are closed forms (`risk`).
    """
    task = task if type(task) is FiniteTasks else as_regression(task)
    law = task.regression if isinstance(task, FiniteTasks) else task
    if law.targets != 1:
        raise ValueError(f"the task has {law.targets} targets; the fit is for 1")
    L, n, d = checks.count("L", L), checks.count("n", n), law.d
    ridge = float(checks.number("ridge", ridge, at_least=0))
    if n * d * d > 2**28:
        raise ValueError(f"n is {n} and d is {d}; the fit holds n·d² numbers, and at most 2^28 of them")
    rng = np.random.default_rng(np.asarray(jax.random.key_data(checks.key_or_default(key))).ravel())
    half, of_query, s = (np.asarray(root(M), float) for M in (law.Sigma, law.query_Sigma, law.Omega))
    w = (
        np.asarray(task.tasks)[rng.integers(len(task.tasks), size=n)]
        if isinstance(task, FiniteTasks)
        else (rng.normal(size=(n, d)) @ s)
    )
    x, eta = rng.normal(size=(n, d)) @ of_query, math.sqrt(float(law.noise))
    shown = np.empty((n, d))
    for start in range(0, n, rows := max(1, 2**22 // (L * d))):
        X = rng.normal(size=(min(rows, n - start), L, d)) @ half
        Y = np.einsum("bld,bd->bl", X, w[start : start + rows]) + eta * rng.normal(size=X.shape[:2])
        shown[start : start + rows] = np.einsum("bld,bl->bd", X, Y) / L
    y = np.sum(w * x, axis=1) + eta * rng.normal(size=n)
    features = (shown[:, :, None] * x[:, None]).reshape(n, d * d)
    A = _least_squares(features, y, ridge).reshape(d, d)
    return from_blocks(aligned_blocks(jnp.asarray(A, law.Sigma.dtype), 1.0, law), LinearAttention)


def _least_squares(F: Float[np.ndarray, "n p"], y: Float[np.ndarray, " n"], ridge: float) -> np.ndarray:
    """The minimiser of mean (Fa − y)² + ridge ‖a‖², of the least norm where there are many."""
    n, p = F.shape
    if ridge == 0:
        return scipy.linalg.lstsq(F, y, lapack_driver="gelsy")[0]  # pyrefly: ignore[bad-return]
    if n < p:
        return F.T @ np.linalg.solve(F @ F.T + n * ridge * np.eye(n), y)
    return np.linalg.solve(F.T @ F + n * ridge * np.eye(p), F.T @ y)


def _feature_covariance(task: LinearRegression, L: int | float) -> Matrix:
    r"""$E\,\hat s^\top\hat s$."""
    Sigma, Omega = np.asarray(task.Sigma, float), np.asarray(task.Omega, float)
    return (1 + 1 / L) * Sigma @ Omega @ Sigma + (np.sum(Sigma * Omega) + float(task.noise)) / L * Sigma


def _effective_ridge(degrees, rank: float, n: float, ridge: float) -> float:
    """The root ξ of n − degrees(ξ) = n ridge/ξ, where degrees fall from `rank` at 0; 0 where more prompts than rank."""
    if math.inf == n:
        return ridge
    if ridge == 0 and n >= rank:
        return 0.0

    def excess(log_xi: float) -> float:
        xi = math.exp(log_xi)
        return n - degrees(xi) - n * ridge / xi

    low, high = -1.0, 1.0
    while excess(low) > 0:
        low -= 5.0
    while excess(high) < 0:
        high += 5.0
    return math.exp(float(brentq(excess, low, high, xtol=1e-14, rtol=1e-14)))  # pyrefly: ignore[bad-argument-type]


def _positive(name: str, x: float) -> float:
    if math.inf == x:
        return math.inf
    value = float(checks.number(name, x))
    if not value > 0:
        raise ValueError(f"{name} is {value:g}; it must be positive")
    return value


def _prompts(name: str, n: int | float) -> float:
    return math.inf if math.inf == n else float(checks.count(name, n))
