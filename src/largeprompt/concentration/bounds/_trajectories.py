"""Lemma E.1 and Theorem 4.3: the flow at length L against the flow at infinite length."""

import math
from dataclasses import dataclass

import numpy as np

from largeprompt.attention import LinearAttention, SoftmaxAttention, softmax_form
from largeprompt.dynamics import flow_limit, gradient_flow
from largeprompt.icl import LinearRegression, norm, risk

from ._bound import Bound, Length, LogLength, Number, length_for, logarithm, real
from ._over_queries import Form
from ._risks import g1, g2
from ._tasks import sizes

_TIMES, _LONGEST, _FARTHEST = 400, 2**20, 1e18


@dataclass(frozen=True)
class Smoothness:
    """Lipschitz constants on the ball of radius 2ρ: `beta` that of ∇R_∞, `kappa` that of R_∞."""

    beta: float
    kappa: float


def smoothness(task: LinearRegression, rho: Number) -> Smoothness:
    r"""$\beta_\infty$ and $\kappa_\infty$ of Lemma E.1 for $\|(U,V)\|_F\le2\rho$, explicit for Gaussian regression.

    The limit predicts $g\cdot x$ with $\|g\|\le G\|U\|\|V\|$, $G = \|\Sigma\|(1+\|W\|^2)+s^2$, so that $\beta_\infty\le
    \|\Sigma_q\|E[\tfrac32G^2(2\rho)^2+G\|W\|]$ and $\kappa_\infty\le\|\Sigma_q\|E[2\rho G(\tfrac12G(2\rho)^2+\|W\|)]$.
    """
    size, radius = sizes(task), 2 * real("rho", rho)
    # E G‖W‖ from above, by E‖W‖ ≤ (E‖W‖²)^{1/2} and E‖W‖³ ≤ (E‖W‖² E‖W‖⁴)^{1/2}
    mixed = (size.Sigma + size.noise) * math.sqrt(size.W2) + size.Sigma * math.sqrt(size.W2 * size.W4)
    beta = size.scale**2 * (1.5 * size.G2 * radius**2 + mixed)
    return Smoothness(beta, size.scale**2 * radius * (0.5 * size.G2 * radius**2 + mixed))


def trajectory_bound(task: LinearRegression, L: Length, *, t: Number, rho: Number, form: Form = "printed") -> Bound:
    r"""Lemma E.1: $\|\theta_L-\theta_\infty\| \le g_2(e^{\beta t}-1)/\beta \le g_2te^{\beta t}$, $\beta=\beta_\infty$.

    Both flows start at one point, the infinite one stays in the ball of radius ρ, and the bound is proved while it is
    below ρ, Equation (27): the finite flow is then still in the ball of $2\rho$ on which $g_2$ and $\beta_\infty$ hold.
    Where it is not, nothing is proved and the bound is infinite; `terms` show both sides of (26) all the same.
    """
    t, rho = real("t", t), real("rho", rho)
    beta = smoothness(task, rho).beta
    gap = g2(task, L, rho=rho, form=form)
    terms = {"g₂(e^{βt} - 1)/β": gap.log + _log_growth(beta, t), "g₂ t e^{βt}": gap.log + logarithm(t) + beta * t}
    sharp = terms["g₂(e^{βt} - 1)/β"]
    inside = sharp < logarithm(rho)
    notes = (
        *gap.assumptions,
        f"the infinite flow stays in the ball of radius {rho:g} up to t",
        "Equation (27) holds: the bound is below ρ"
        if inside
        else "Equation (27) fails at this length: nothing is proved",
    )
    return Bound("Lemma E.1", sharp if inside else math.inf, terms, notes)


def _log_growth(beta: float, t: float) -> float:
    """ln (e^{βt} - 1)/β."""
    if t == 0:
        return -math.inf
    x = beta * t
    if x == 0:
        return math.log(t)
    return (x if x > 40 else math.log(math.expm1(x))) - math.log(beta)


@dataclass(frozen=True)
class Guarantee:
    r"""Theorem 4.3 in numbers: from ln L = `log_L` on, the flow's final risk is at most `limit` + 2`epsilon`.

    `T` is a time at which the infinite flow is within `epsilon` of its limit, `rho` the radius of a ball that holds it
    until then, `beta` and `kappa` the Lipschitz constants on twice that ball; `log_L` is infinite where no L was found.
    """

    epsilon: float
    limit: float
    T: float
    rho: float
    beta: float
    kappa: float
    log_L: float


def theorem_4_3(
    task: LinearRegression, start: SoftmaxAttention | LinearAttention, epsilon: Number, *, form: Form = "printed"
) -> Guarantee:
    r"""A prompt length $L(\varepsilon)$ for which Theorem 4.3 holds, from a start of Assumption 5.1.

    The least L with $g_2Te^{\beta_\infty T}\le\rho$ and $g_1+\kappa_\infty g_2Te^{\beta_\infty T}\le\varepsilon$, where
    $R_\infty(\theta_\infty(T))\le\lim R_\infty+\varepsilon$. Between recorded times the infinite flow moves by at most
    $(\Delta t\,\Delta R)^{1/2}$, which makes ρ a bound and not a sample.
    """
    epsilon, start = real("epsilon", epsilon), softmax_form(start)
    if epsilon == 0:
        raise ValueError("epsilon is 0; the theorem is for every epsilon above 0")
    limit = float(risk(flow_limit(task, start), task, math.inf).value)
    T, rho = _time_and_radius(task, start, limit + epsilon)
    lipschitz = smoothness(task, rho)

    def conditions(L: LogLength) -> Bound:
        """The larger of the two sides over their right-hand sides, to be below 1."""
        gap = g2(task, L, rho=rho, form=form).log + logarithm(T) + lipschitz.beta * T
        off = float(np.logaddexp(g1(task, L, rho=rho, form=form).log, math.log(lipschitz.kappa) + gap))
        return Bound("Theorem 4.3", max(gap - math.log(rho), off - math.log(epsilon)), {})

    log_L = length_for(conditions, 1.0, largest=_FARTHEST)
    return Guarantee(epsilon, limit, T, rho, lipschitz.beta, lipschitz.kappa, log_L)


def _time_and_radius(task: LinearRegression, start: SoftmaxAttention, goal: float) -> tuple[float, float]:
    """A time by which the infinite flow's risk is below the goal, and a radius it stays within until then."""
    horizon = 1.0
    while horizon < _LONGEST:
        times = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, _TIMES)]) * horizon
        flow = gradient_flow(start, task, math.inf, times)
        risks = np.asarray(flow.risk, float)
        below = np.flatnonzero(risks <= goal)
        if len(below):
            last = int(below[0])
            sizes_ = np.array([float(norm(flow.layer(i))) for i in range(last + 1)])
            moved = np.sqrt(np.diff(times[: last + 1]) * np.maximum(-np.diff(risks[: last + 1]), 0))
            return float(times[last]), float(np.max(sizes_ + np.append(moved, 0.0)))
        horizon *= 4
    raise ValueError(f"the infinite flow is not within epsilon of its limit by t = {_LONGEST}; take a larger epsilon")
