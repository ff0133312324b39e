import math
from typing import Generic

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import Numbers
from largeprompt.attention import LinearAttention, Merged

from ._closed_forms import Blocks, Scalar, gaussian_risk
from ._estimate import Estimate, exactly
from ._regression import LinearRegression


class Optimum(AbstractShown, Generic[Merged]):
    """A layer and its risk."""

    attention: Merged
    risk: Estimate


def aligned_blocks(A: Float[Array, "d d"], r: Float[Array, ""] | float, task: LinearRegression) -> Blocks:
    """The blocks of a layer that scores covariates by covariates and reads labels only: P = C = 0, R = rI."""
    k = task.targets
    zero = jnp.zeros((k, task.d), A.dtype)
    return Blocks(A, zero, zero, r * jnp.eye(k, dtype=A.dtype))


def from_blocks(parts: Blocks, kind: type[Merged]) -> Merged:
    """The layer of these blocks, with zeros where U meets the zeros of the query."""
    d, k = parts.A.shape[0], parts.R.shape[0]
    left = jnp.concatenate([parts.A, parts.C])
    U = jnp.concatenate([left, jnp.zeros((d + k, k), left.dtype)], axis=1)
    return kind(U, jnp.concatenate([parts.P, parts.R], axis=1))


def as_regression(task: object) -> LinearRegression:
    """`task` itself, once it is a Gaussian regression."""
    if type(task) is not LinearRegression:  # a subclass may draw or judge otherwise
        raise ValueError(f"task is of type {type(task).__name__}; this is known for LinearRegression only")
    return task


@jax.jit
def best_reading(task: LinearRegression, L: Scalar) -> Float[Array, "d d"]:
    r"""The matrix $W^\top$ for which $x\mapsto \hat s\,W^\top x$, $\hat s = \frac1L\sum y_lx_l^\top$, predicts best.

    The normal equations $E[\hat s^\top\hat s]\,W^\top = E[\hat s^\top W]$ read
    $\big[(1+\tfrac1L)\Sigma\Omega\Sigma + \tfrac{\tau_1+s^2}{L}\Sigma\big]W^\top = \Sigma\Omega$, whatever the law of
    the queries; of many solutions, the least.
    """
    SO = task.Sigma @ task.Omega
    gram = (1 + 1 / L) * SO @ task.Sigma + (task.tau1 + task.noise) / L * task.Sigma
    return jnp.linalg.pinv((gram + gram.T) / 2, hermitian=True) @ SO


def optimal_linear(task: LinearRegression, L: int | float) -> Optimum[LinearAttention]:
    r"""The global minimiser over all (U, V) of linear attention at length `L`, and the minimal risk.

    Under $(W,\eta)\to-(W,\eta)$ the target is odd, so that the even part of the output only hurts; the odd part is best
    of the form $\hat sW^\top x$. For $\Omega = I$ without noise it is that of Zhang et al. (2024). The scale between U
    and V is free; it is balanced, $\|U\|_F = \|V\|_F$, as gradient flow from Assumption 5.1 leaves it.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    return _with_risk(balanced(best_reading(task, L), task), task, L)


def _with_risk(parts: Blocks, task: LinearRegression, L: int | float) -> Optimum[LinearAttention]:
    value = checks.result("the risk", gaussian_risk(parts, task, L))
    return Optimum(from_blocks(parts, LinearAttention), exactly(value, "closed form"))


def balanced(reading: Float[Array, "d d"], task: LinearRegression) -> Blocks:
    r"""The aligned blocks with $rA$ given and $\|A\|_F^2 = kr^2$."""
    r = jnp.sqrt(jnp.linalg.norm(reading) / math.sqrt(task.targets))
    return aligned_blocks(jnp.where(r > 0, reading / jnp.where(r > 0, r, 1), 0), r, task)


def gradient_descent(
    task: LinearRegression, L: int | float, *, step: float | None = None, preconditioner: Numbers | None = None
) -> Optimum[LinearAttention]:
    r"""One step of gradient descent from 0 on the prompt's squared error: $\hat y = \hat s\,(\text{step}\cdot P)\,x_q$.

    $P$ is the `preconditioner`, by default the identity; without a `step`, the best one. It is a layer of linear
    attention, so that its risk is exact. The best preconditioner of all gives `optimal_linear`.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    P = jnp.eye(task.d) if preconditioner is None else checks.matrix("preconditioner", preconditioner, task.d, task.d)

    def risk_at(step) -> Float[Array, ""]:
        return gaussian_risk(aligned_blocks(step * P, 1.0, task), task, L)

    if step is None:  # the risk is quadratic in the step: three values fix it
        ahead, behind, still = risk_at(1.0), risk_at(-1.0), risk_at(0.0)
        curvature = ahead + behind - 2 * still
        size = jnp.where(curvature > 0, (behind - ahead) / (2 * jnp.where(curvature > 0, curvature, 1)), 0)
    else:
        size = checks.number("step", step)
    return _with_risk(aligned_blocks(checks.finite("step", size * P), 1.0, task), task, L)
