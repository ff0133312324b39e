"""The predicted gap of risks on finite and infinite prompts, and of their gradients: Gaussian regression, one head."""

import math
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from largeprompt.attention import AbstractAttention, kind_of, merged_form
from largeprompt.attention._forms import described
from largeprompt.icl import LinearRegression, blocks, norm, risk, risk_gradient, risk_rate

from ._problem import NotPredictedError, RiskProblem
from ._query_averages import Average
from ._regime import Law, Regime, breakdown_exponent
from ._spectrum import spectrum

_DRAWS = 2**16  # nodes for the gradient of a risk, at most
_LATE = 1e13  # of lengths


def risk_law(problem: RiskProblem, name: str, key: PRNGKeyArray) -> Law:
    """The gap of the risks, or of their gradients, exactly or exactly over prompts."""
    layer, task = problem.layer, problem.task
    if kind_of(layer) is None:
        raise NotPredictedError(
            f"the layer is {described(layer)}; a risk is predicted for one head of softmax or linear attention, else "
            "only measured"
        )
    if type(task) is not LinearRegression:
        raise NotPredictedError(
            f"mu is of type {type(task).__name__}; a risk is predicted for LinearRegression, else only measured"
        )
    merged = merged_form(layer)
    linear = kind_of(merged) == "linear"
    if problem.query_in_prompt and not linear:
        raise NotPredictedError("query_in_prompt is True; with softmax attention a risk is then only measured")
    rate = math.nan
    if name == "risk":
        rate = _gap(layer, task, 1, name, key, False).value if linear else float(risk_rate(layer, task))

    def at(L: int) -> Average:
        gap = _gap(layer, task, L, name, key, problem.query_in_prompt)
        # so late the difference of the risks is lost to rounding, and all but its first order in 1/L is gone
        return gap._replace(value=rate / L) if L > _LATE and math.isfinite(rate) else gap

    method = "exact" if linear else "exact over prompts"
    return Law(at, rate**2, 0.0, _regime(merged, task, linear), method, None)


def _gap(layer, task, L: int, name: str, key, query_in_prompt: bool) -> Average:
    options: Any = {"query_in_prompt": query_in_prompt}
    if name == "risk":
        finite, infinite = risk(layer, task, L, key, **options), risk(layer, task, math.inf, key)
        return Average(float(finite.value - infinite.value), float(finite.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # near an optimum a gradient is small beside its error: the error is returned
        finite = risk_gradient(layer, task, L, key, max_draws=_DRAWS, **options)
    infinite = risk_gradient(layer, task, math.inf, key)
    finite_part, infinite_part = (eqx.filter(g.layer, eqx.is_inexact_array) for g in (finite, infinite))
    return Average(float(norm(jax.tree.map(jnp.subtract, finite_part, infinite_part))), float(norm(finite.stderr)))


def _regime(merged: AbstractAttention, task: LinearRegression, linear: bool) -> Regime:
    if linear:
        return Regime("1/L", 2.0, 0.0, 1.0, 1.0, 2.0)
    parts = blocks(merged, task)
    if bool(jnp.any(parts.C != 0)):
        return Regime("slower than any power", 0.0, math.nan, math.nan, math.nan, 2.0)
    A = np.asarray(parts.A, float)
    spread = float(spectrum(A.T @ np.asarray(task.Sigma, float) @ A, task.query_Sigma)[0][-1])
    power = breakdown_exponent(spread)
    name = "1/L" if spread < 0.5 else "slower than 1/L"
    return Regime(name, 2 * power, spread, math.nan, math.nan, 2.0)
