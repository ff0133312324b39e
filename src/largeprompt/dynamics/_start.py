import math
import warnings

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.attention import Kind, LinearAttention, SoftmaxAttention, attention_of
from largeprompt.icl import LinearRegression, aligned_blocks, as_regression, from_blocks


def structured_start(
    task: LinearRegression,
    alpha: float,
    Theta: Numbers | None = None,
    kind: Kind = "softmax",
) -> SoftmaxAttention | LinearAttention:
    r"""The start $U = \alpha\,\mathrm{diag}(\Theta\Theta^\top, 0)$, $V = \alpha(0, I)$ of Assumption 5.1.

    $\|\Theta\Theta^\top\|_F = 1$ and $\Sigma\Theta\ne0$ are checked; by default $\Theta = d^{-1/4}I$. Outside the
    range of Theorem 5.2 it warns: as printed it has $\|\Sigma\|_{op}$ where its source has $\|\Sigma\|_{op}^{1/2}$.
    """
    task = as_regression(task)
    attention = attention_of(kind)
    alpha = float(checks.number("alpha", alpha))
    d = task.d
    given = np.eye(d) / d**0.25 if Theta is None else np.asarray(checks.matrix("Theta", Theta, d, None))
    product = given @ given.T
    _refuse_a_wrong_direction(given, product, task)
    _warn_outside_the_range(alpha, task)
    return from_blocks(aligned_blocks(jnp.asarray(alpha * product), alpha, task), attention)


def alpha_range(task: LinearRegression) -> tuple[float, float]:
    r"""The largest $\alpha$ of Theorem 5.2: printed, $\sqrt2/(d^{1/4}\|\Sigma\|)$, and with $\|\Sigma\|^{1/2}$.

    Neither is needed for convergence at infinite length: see the errata.
    """
    largest = float(np.linalg.eigvalsh(np.asarray(as_regression(task).Sigma))[-1])
    scale = math.sqrt(2) / task.d**0.25
    return (scale / largest, scale / math.sqrt(largest)) if largest > 0 else (math.inf, math.inf)


def _refuse_a_wrong_direction(
    Theta: Float[np.ndarray, "d m"], product: Float[np.ndarray, "d d"], task: LinearRegression
) -> None:
    size = float(np.linalg.norm(product))
    if abs(size - 1) > 1e-6:
        raise ValueError(
            f"Theta has ‖ΘΘᵀ‖_F = {size:.6g}; Assumption 5.1 asks for 1 (divide Theta by {math.sqrt(size):.6g})"
        )
    Sigma = np.asarray(task.Sigma)
    rounding = 10 * task.d * float(np.finfo(Sigma.dtype).eps)
    if np.linalg.norm(Sigma @ Theta) <= rounding * float(np.linalg.norm(Sigma) * np.linalg.norm(Theta)):
        raise ValueError("Theta has ΣΘ = 0; Assumption 5.1 asks for a Theta that the covariates reach")


def _warn_outside_the_range(alpha: float, task: LinearRegression) -> None:
    printed, corrected = alpha_range(task)
    if alpha == 0:
        raise ValueError("alpha is 0, a saddle of the risk that no flow leaves; it must be another number")
    if not 0 < alpha < min(printed, corrected):
        warnings.warn(
            f"alpha is {alpha:g}; Theorem 5.2 asks for 0 < alpha < {printed:.4g} as printed, "
            f"{corrected:.4g} as corrected",
            stacklevel=3,
        )
