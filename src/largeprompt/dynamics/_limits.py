import itertools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt import _checks as checks
from largeprompt.attention import LinearAttention, Merged, SoftmaxAttention, kind_of, merged_form
from largeprompt.attention._forms import described
from largeprompt.icl import (
    LinearRegression,
    aligned_blocks,
    as_regression,
    blocks,
    from_blocks,
    normal_equations,
    risk,
)

_ROUNDING = 1e-9


def flow_limit(task: LinearRegression, init: Merged, L: int | float = math.inf) -> Merged:
    r"""Where the gradient flow from a start of Assumption 5.1 ends.

    Along it $P = C = 0$, and with $N$ the matrix of the normal equations of `best_reading`,
    $\dot A = kr(\Sigma\Omega - rNA)\Sigma_q$: what the risk does not see of A stays, and so does $kr^2 - \|A\|_F^2$.
    With $\Pi$ and $\Pi_q$ the projections on the ranges of N and $\Sigma_q$, $A \to W^\top/r + A_0 - \Pi A_0\Pi_q$ and
    $kr^2 - \|W\|_F^2/r^2 = kr_0^2 - \|\Pi A_0\Pi_q\|_F^2$. Where that is positive, r keeps its sign; where it is 0, it
    does but for starts of measure 0, whose flow ends at the saddle r = 0. Known for linear attention at every length
    and for softmax at infinite length, whatever the noise. Paper: Remark 5.3 for invertible Σ, where
    $A\to\Sigma^{-1}/r$, $r = \mathrm{tr}(\Sigma^{-2})^{1/4}$; Appendix F.3 for singular Σ.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    if kind_of(init) is None or merged_form(init) is not init:
        raise ValueError(f"init is {described(init)}; it must be a start such as structured_start(task, alpha)")
    if kind_of(init) == "softmax" and math.inf != L:
        raise ValueError(
            f"L is {L}; the limit of the softmax flow is known at L = inf only (follow it with gradient_flow)"
        )
    A, r = _aligned_start(task, init)
    best = normal_equations(task, L)
    seen = best.left @ A @ best.right
    k, size, goal = task.targets, float(np.sum(seen**2)), float(np.linalg.norm(best.reading))
    excess = k * r**2 - size
    if excess < -_ROUNDING * size:
        _refuse_a_start_that_may_turn(task, L, seen, r, goal)
    # r² solves k r⁴ − excess r² − ‖W‖² = 0; the larger of the two terms of its root divides, for the same digits
    root = math.hypot(excess, 2 * math.sqrt(k) * goal)
    square = (root + excess) / (2 * k) if excess > 0 else 2 * goal**2 / (root - excess) if goal > 0 else 0.0
    limit = math.copysign(math.sqrt(square), r)
    end = (best.reading / limit if goal > 0 else 0.0) + A - seen
    return from_blocks(aligned_blocks(jnp.asarray(end, task.Sigma.dtype), limit, task), type(init))


def _refuse_a_start_that_may_turn(
    task: LinearRegression, L: int | float, seen: Float[np.ndarray, "d d"], r: float, goal: float
) -> None:
    r"""Where A outweighs r, as it does not in Assumption 5.1, r may pass through 0 to the other sign.

    Not once the risk is below that of r = 0; nor where the three covariances commute, as then
    $\mathrm{tr}\,A^\top\Sigma\Omega\Sigma_q$, which drives r, stays positive. With nothing to learn the end depends on
    the path.
    """
    matrices = [np.asarray(M, float) for M in (task.Sigma, task.Omega, task.query_Sigma)]
    products = [(X @ Y, np.linalg.norm(X) * np.linalg.norm(Y)) for X, Y in itertools.combinations(matrices, 2)]
    commute = all(np.linalg.norm(XY - XY.T) <= _ROUNDING * scale for XY, scale in products)
    start = from_blocks(aligned_blocks(jnp.asarray(seen, task.Sigma.dtype), r, task), LinearAttention)
    at_zero = task.targets * (np.sum(matrices[1] * matrices[2]) + float(task.noise)) / 2
    if goal > 0 and (commute or float(risk(start, task, L).value) < at_zero):
        return
    raise ValueError(
        f"init has ‖A‖ = {np.linalg.norm(seen):.4g}, above √k|r| = {math.sqrt(task.targets) * abs(r):.4g}, where "
        "r may change its sign; the limit is not known (take a larger r, or follow it with gradient_flow)"
    )


def _aligned_start(
    task: LinearRegression, init: LinearAttention | SoftmaxAttention
) -> tuple[Float[np.ndarray, "d d"], float]:
    parts = blocks(init, task)
    A, R = np.asarray(parts.A, float), np.asarray(parts.R, float)
    r, symmetric = float(R[0, 0]), (A + A.T) / 2
    # the rounding of ΘΘᵀ
    slack = max(1e-9, 10 * task.d * float(jnp.finfo(parts.A.dtype).eps)) * float(np.max(np.abs(A)))
    ok = (
        not np.any(np.asarray(parts.P))
        and not np.any(np.asarray(parts.C))
        and bool(np.all(r * np.eye(task.targets) == R))
        and bool(np.all(np.abs(A - symmetric) <= slack))
        and r != 0
        and float(np.linalg.eigvalsh(math.copysign(1, r) * symmetric)[0]) >= -slack
    )
    if not ok:
        raise ValueError(
            "init is not a start of Assumption 5.1: it must be U = [[A, 0], [0, 0]], V = (0, rI) with rA positive "
            "semi-definite (see structured_start)"
        )
    return A, r
