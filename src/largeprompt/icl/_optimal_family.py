"""The best layer of a family with a few parameters, on any task."""

import functools
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
from largeprompt._compiled import optimised_jit
from largeprompt._display import AbstractShown
from largeprompt._typing import VectorLike
from largeprompt.attention import AbstractLayer

from ._estimate import Estimate
from ._risk._abstract import AbstractRisk, pooled
from ._risk._nodes import power_of_two
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
    theta = np.asarray(checks.vector("start", start), float)
    function = risk_function(family(jnp.asarray(theta)), task, L, key, draws=draws)
    # in parts all of one shape: their gradients give the optimum its error, and JAX compiles once
    size = max(2, power_of_two(draws) // _PARTS)
    parts = list(function.pieces(size))

    def slopes_at(theta: Float[np.ndarray, " k"]) -> tuple[float, Float[np.ndarray, "r k"]]:
        found = [_value_and_slope(part, family, jnp.asarray(theta)) for part in parts]
        value = checks.result("the risk", jnp.stack([value for value, _ in found]).mean())
        return float(value), np.stack([checks.result("the gradient of the risk", slope) for _, slope in found])

    scale = max(abs(slopes_at(theta)[0]), 1e-300)

    def relative(theta: Float[np.ndarray, " k"]) -> tuple[float, Float[np.ndarray, " k"]]:
        value, slopes = slopes_at(theta)
        return value / scale, slopes.mean(axis=0) / scale

    found = minimize(relative, theta, jac=True, method="BFGS", options={"gtol": _LEFT})
    best = np.asarray(found.x)
    if np.abs(found.jac).max() > 100 * _LEFT:
        warnings.warn(f"the search over the family stopped early: {found.message}", stacklevel=2)
    layer = family(jnp.asarray(best))
    value, error = pooled(function, layer, draws=size, few=True)
    risk = Estimate(value, error, function.method, function.reason)
    return FamilyOptimum(jnp.asarray(best), jnp.asarray(_error(slopes_at, best)), layer, risk)


def _error(slopes_at: Callable[..., tuple[float, np.ndarray]], best: Float[np.ndarray, " k"]) -> np.ndarray:
    """The standard errors of the parameters at which the mean slope vanishes."""
    slopes = slopes_at(best)[1]
    if len(slopes) == 1:  # exact
        return np.zeros(len(best))
    steps = _STEP * np.eye(len(best))
    differences = [slopes_at(best + step)[1].mean(axis=0) - slopes_at(best - step)[1].mean(axis=0) for step in steps]
    inverse = np.linalg.pinv(np.stack(differences) / (2 * _STEP))
    return np.sqrt(np.diag(inverse @ np.atleast_2d(np.cov(slopes.T)) @ inverse.T) / len(slopes))


@functools.partial(optimised_jit, fusing=False)
def _value_and_slope(function: AbstractRisk, family: Any, theta: Float[Array, " k"]):
    layer, pull = eqx.filter_vjp(family, theta)
    value, gradient = function.value_and_gradient(layer)
    arrays = eqx.filter(layer, eqx.is_inexact_array)
    slopes = jax.tree.map(lambda leaf, slope: jnp.zeros_like(leaf) if slope is None else slope, arrays, gradient)
    return value, pull(slopes)[0]
