r"""What the best layer of one prompt length loses at another: exactly for linear attention, to leading order for both.

Linear attention with $P = C = 0$ predicts $\hat s\,Bx$, $\hat s = \frac1L\sum y_lx_l^\top$, and its risk is quadratic
in $B = rA$: with $M_L = (1+\tfrac1L)\Sigma\Omega\Sigma + \tfrac{\tau_1+s^2}L\Sigma$ and $M_LB_L\Sigma_q =
\Sigma\Omega\Sigma_q$,

$$R_L(B) - \min R_L = \tfrac k2\,\mathrm{tr}\,(B-B_L)^\top M_L\,(B-B_L)\,\Sigma_q .$$

For both attentions $R_L = R_\infty + \rho/L + o(1/L)$, and $R_\infty$ is the same function of B with $M_\infty =
\Sigma\Omega\Sigma$. So the best B moves by $-\tfrac1L$ times the slope $F = \partial\rho/\partial B$ over that Hessian.
"""

import math
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt.attention import Kind

from ._blocks import aligned_blocks
from ._optimal_linear import best_reading
from ._optimal_softmax import limit_scale
from ._regression import LinearRegression, as_regression
from ._risk._closed_form import gaussian_risk
from ._risk._expansion import rate


def linear_mismatch(
    task: LinearRegression,
    trained_at: int | float,
    tested_at: int | float,
    trained_on: LinearRegression | None = None,
) -> Float[Array, ""]:
    r"""The risk of the best linear attention of one length at another, above the least risk there, exactly.

    $\tfrac k2\,\mathrm{tr}\,\Delta^\top M_{L_2}\Delta\,\Sigma_q$ with $\Delta = B_{L_1} - B_{L_2}$. Where the layer is
    `trained_on` another task, $B_{L_1}$ is that task's. On one task whose queries are distributed like covariates, with
    $\lambda$ the eigenvalues of $\Sigma\Omega$ and $D_L = \lambda + (\lambda+\tau_1+s^2)/L$,

    $$\tfrac k2\Big(\tfrac1{L_1}-\tfrac1{L_2}\Big)^2
      \sum_i\frac{\lambda_i^2(\lambda_i+\tau_1+s^2)^2}{D_{L_1,i}^2D_{L_2,i}} .$$
    """
    task = as_regression(task)
    source = task if trained_on is None else as_regression(trained_on)
    if (source.d, source.targets) != (task.d, task.targets):
        raise ValueError(
            f"trained_on has d = {source.d} and {source.targets} targets; "
            f"they must be those of the task, {task.d} and {task.targets}"
        )
    L = checks.prompt_length(tested_at)
    off = best_reading(source, trained_at) - best_reading(task, L)
    share, SO = 1 / checks.real_length(L, off.dtype), task.Sigma @ task.Omega
    M = (1 + share) * SO @ task.Sigma + share * (task.tau1 + task.noise) * task.Sigma
    return checks.result("the mismatch", task.targets * jnp.sum((M @ off @ task.query_Sigma) * off) / 2)


def mismatch_rate(task: LinearRegression, attention: Kind) -> Float[Array, ""]:
    r"""The limit of what the best layer of length $L_1$ loses at $L_2$, over $(1/L_1 - 1/L_2)^2$, as both grow.

    $$\frac1{2k}\,\mathrm{tr}\,F^\top(\Sigma\Omega\Sigma)^+F\,\Sigma_q^+, \qquad F = \partial\rho/\partial B$$

    at the best layer of infinite length. Where queries are distributed like covariates it is
    $\tfrac k2\sum_i(\alpha\lambda_i+\beta)^2/\lambda_i$: for linear attention $\alpha = 1$, $\beta = \tau_1+s^2$; for
    softmax attention, whose scores have the variance $\omega^2\|\xi\|^2$, $\kappa = (1-2\omega^2)^{-d/2}$,
    $\alpha = 2\kappa\omega^2/(1-2\omega^2)^2$ and
    $\beta = \kappa\,\frac{\omega^2}{1-2\omega^2}\big[\frac{\tau_1+s^2}{\omega^2}+\frac{\tau_1}{1-2\omega^2}\big]$.
    """
    task = as_regression(task)
    if attention not in get_args(Kind):
        raise ValueError(f"attention is {attention!r}; it must be {' or '.join(get_args(Kind))}")
    scale = 1.0 if attention == "linear" else limit_scale(task, best_reading(task, math.inf))[0]

    def constant(B: Float[Array, "d d"]) -> Float[Array, ""]:
        parts = aligned_blocks(scale * B, 1 / scale, task)
        if attention == "softmax":
            return rate(parts, task)
        return gaussian_risk(parts, task, 1.0) - gaussian_risk(parts, task, math.inf)  # R_L − R_∞ is ρ/L at every L

    F = jax.grad(constant)(best_reading(task, math.inf))
    Hessian = task.Sigma @ task.Omega @ task.Sigma
    inverse, queries = (jnp.linalg.pinv(form, hermitian=True) for form in (Hessian, task.query_Sigma))
    return checks.result("the rate", jnp.sum((inverse @ F @ queries) * F) / (2 * task.targets))
