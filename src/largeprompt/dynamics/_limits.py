import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt.attention import Head, LinearAttention, Merged, SoftmaxAttention, kind_of
from largeprompt.icl import LinearRegression, aligned_blocks, as_regression, best_reading, blocks, from_blocks


def flow_limit(task: LinearRegression, init: Merged, L: int | float = math.inf) -> Merged:
    r"""Where the gradient flow from a start of Assumption 5.1 ends.

    Along it $P = C = 0$ and $\|A\|_F^2 - kr^2$ stays, and the part of A that the risk does not see stays: with $\Pi$
    the projection on the range of the normal matrix of `optimal_linear` and $\Pi_q$ that of $\Sigma_q$, $A \to W^\top/r
    + A_0 - \Pi A_0\Pi_q$ and $kr^2 - \|W\|^2/r^2 = kr_0^2 - \|\Pi A_0\Pi_q\|_F^2$. Known for linear attention at every
    length and for softmax at infinite length, whatever the noise. Paper: Remark 5.3 for invertible Σ, where
    $A\to\Sigma^{-1}/r$, $r = \mathrm{tr}(\Sigma^{-2})^{1/4}$; Appendix F.3 for singular Σ.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    if isinstance(init, Head) or kind_of(init) is None:
        raise ValueError(
            f"init is of type {type(init).__name__}; it must be a start such as structured_start(task, alpha)"
        )
    if kind_of(init) == "softmax" and math.inf != L:
        raise ValueError(
            f"L is {L}; the limit of the softmax flow is known at L = inf only (follow it with gradient_flow)"
        )
    A, r = _aligned_start(task, init)
    reading = best_reading(task, L)
    SO = task.Sigma @ task.Omega @ task.Sigma
    left, right = _range(SO if math.inf == L else task.Sigma), _range(task.query_Sigma)
    seen = left @ A @ right
    k, excess = task.targets, task.targets * r**2 - float(jnp.sum(seen**2))
    # r² solves k r⁴ − excess r² − ‖W‖² = 0
    square = (excess + math.sqrt(excess**2 + 4 * k * float(jnp.sum(reading**2)))) / (2 * k)
    if square <= 0:
        raise ValueError("the covariates are 0 wherever tasks are not; the flow has nothing to learn")
    limit = math.copysign(math.sqrt(square), r)
    return from_blocks(aligned_blocks(reading / limit + A - seen, limit, task), type(init))


def _aligned_start(
    task: LinearRegression, init: LinearAttention | SoftmaxAttention
) -> tuple[Float[Array, "d d"], float]:
    parts = blocks(init, task)
    r = float(parts.R[0, 0])
    symmetric = (parts.A + parts.A.T) / 2
    slack = 1e-9 * float(jnp.max(jnp.abs(parts.A)))
    ok = (
        not bool(jnp.any(parts.P != 0))
        and not bool(jnp.any(parts.C != 0))
        and bool(jnp.all(r * jnp.eye(task.targets) == parts.R))
        and bool(jnp.all(jnp.abs(parts.A - symmetric) <= slack))
        and r != 0
        and float(jnp.linalg.eigvalsh(math.copysign(1, r) * symmetric)[0]) >= -slack
    )
    if not ok:
        raise ValueError(
            "init is not a start of Assumption 5.1: it must be U = [[A, 0], [0, 0]], V = (0, rI) with rA positive "
            "semi-definite (see structured_start)"
        )
    return parts.A, r


def _range(M: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The orthogonal projection on the range of a symmetric matrix."""
    return M @ jnp.linalg.pinv(M, hermitian=True)
