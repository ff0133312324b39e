"""The best layer of a family with a few parameters, on any task."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.optimize import minimize

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import VectorLike
from largeprompt.attention import AbstractLayer

from ._estimate import Estimate
from ._risk._abstract import AbstractRisk, pooled
from ._risk._selector import risk_function
from ._task import AbstractTask

_PARTS = 16  # of the draws, whose gradients vary as the optimum does
_STEP = 1e-4  # of finite differences
_LEFT = 1e-6  # gradient of the logarithm of the risk at which a search has converged

Family = Callable[[Float[Array, " k"]], AbstractLayer]


class FamilyOptimum(AbstractShown):
    """The best parameters of a family, their standard errors over draws, the layer and its risk."""

    parameters: Float[Array, " k"]
    stderr: Float[Array, " k"]
    layer: AbstractLayer
    risk: Estimate


def optimal_in_family(
    family: Family,
    start: VectorLike,
    task: AbstractTask,
    L: int | float,
    key: PRNGKeyArray | None = None,
    *,
    draws: int = 2**11,
) -> FamilyOptimum:
    r"""The layers `family(parameters)` minimised over: the local minimum of $R_L$ that a search from `start` finds.

    By BFGS on `risk_function`, so on fixed instances and prompts where the risk is sampled. The optimum's own error is
    that of a root of the mean gradient, $H^{-1}\mathrm{Cov}(g)H^{-1}/n$, and 0 where the risk is exact.
    """
    theta = checks.vector("start", start)
    function = risk_function(family(theta), task, L, key, draws=draws)

    def at(theta: Float[np.ndarray, " k"], part: AbstractRisk = function) -> tuple[float, np.ndarray]:
        value, slope = _value_and_slope(part, family, jnp.asarray(theta))
        return float(checks.result("the risk", value)), np.asarray(checks.result("its gradient", slope))

    scale = max(abs(at(np.asarray(theta))[0]), 1e-300)

    def relative(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = at(theta)
        return value / scale, slope / scale

    found = minimize(relative, np.asarray(theta, float), jac=True, method="BFGS", options={"gtol": _LEFT})
    best = np.asarray(found.x)
    if not found.success and np.abs(found.jac).max() > 100 * _LEFT:
        warnings.warn(f"the search over the family stopped early: {found.message}", stacklevel=2)
    steps = _STEP * np.eye(len(best))
    H = np.stack([(at(best + step)[1] - at(best - step)[1]) / (2 * _STEP) for step in steps])
    slopes = np.stack([at(best, part)[1] for part in function.pieces(max(2, draws // _PARTS))])
    stderr = np.zeros(len(best))
    if len(slopes) > 1:
        cov = np.atleast_2d(np.cov(slopes.T)) / len(slopes)
        inverse = np.linalg.pinv((H + H.T) / 2)
        stderr = np.sqrt(np.diag(inverse @ cov @ inverse))
    layer = family(jnp.asarray(best))
    value, error = pooled(function, layer)
    risk = Estimate(value, error, function.method, function.reason)
    return FamilyOptimum(jnp.asarray(best), jnp.asarray(stderr), layer, risk)


@eqx.filter_jit
def _value_and_slope(function: AbstractRisk, family: Any, theta: Float[Array, " k"]):
    layer, pull = eqx.filter_vjp(family, theta)
    value, gradient = function.value_and_gradient(layer)
    arrays = eqx.filter(layer, eqx.is_inexact_array)
    slopes = jax.tree.map(lambda leaf, slope: jnp.zeros_like(leaf) if slope is None else slope, arrays, gradient)
    return value, pull(slopes)[0]
