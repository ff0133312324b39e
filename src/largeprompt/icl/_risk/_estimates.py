import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, Lengths, length_or_law, longest
from largeprompt.measures._worth import DoubtWarning

from .._estimate import Estimate, Gradient, norm
from .._stand_in import stand_in_error
from .._task import AbstractTask, as_task
from ._abstract import PIECE, AbstractRisk, pooled
from ._nodes import power_of_two
from ._selector import Method, risk_function


def risk(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float | Lengths,
    key: PRNGKeyArray | None = None,
    *,
    rtol: float = 1e-3,
    query_in_prompt: bool = False,
    method: Method = "auto",
    max_draws: int = 2**22,
) -> Estimate:
    r"""The in-context risk $R_L$ of a layer, $\tfrac12E\|\hat y - y\|^2$ unless the task has another loss.

    Exact, or exact over prompts, wherever a closed form exists (Gaussian regression); otherwise an average over prompts
    drawn until its standard error is at most `rtol` times its value. `method="sampled"` asks for the latter everywhere.
    Without a `key`, `jax.random.key(0)`: the same call gives the same number. With `query_in_prompt` the query is one
    more token of the prompt. For a law of `Lengths` it is the average of their risks. Paper: Equations (2) and (4),
    Remark 3.2.
    """
    found, error, function = _refined(layer, task, L, key, rtol, query_in_prompt, method, max_draws, gradient=False)
    return Estimate(found, error, function.method, function.reason)


def risk_gradient(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float | Lengths,
    key: PRNGKeyArray | None = None,
    *,
    rtol: float = 1e-2,
    query_in_prompt: bool = False,
    method: Method = "auto",
    max_draws: int = 2**20,
) -> Gradient:
    r"""The gradient of $R_L$ in the layer's own parameters, (U, V) or (K, Q, V, O).

    Exact where `risk` is; exact over prompts for softmax attention on Gaussian regression. `rtol` bounds the norm of
    the standard errors by that of the gradient.
    """
    found, error, function = _refined(layer, task, L, key, rtol, query_in_prompt, method, max_draws, gradient=True)
    return Gradient(found, error, function.method, function.reason)


def _refined(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float | Lengths,
    key: PRNGKeyArray | None,
    rtol: float,
    query_in_prompt: bool,
    method: Method,
    max_draws: int,
    gradient: bool,
) -> tuple[Any, Any, AbstractRisk]:
    """The risk or its gradient, and its error, with as many draws as the tolerance needs or as are allowed."""
    rtol, max_draws = float(checks.number("rtol", rtol, at_least=0)), checks.count("max_draws", max_draws, at_least=2)
    name, size_of = ("gradient of the risk", norm) if gradient else ("risk", lambda value: value)
    most = 2 ** int(math.log2(max_draws))
    draws = min(PIECE, most)
    while True:
        function = risk_function(layer, task, L, key, draws=draws, query_in_prompt=query_in_prompt, method=method)
        found, error = pooled(function, layer, "gradient_average") if gradient else function.estimate(layer)
        size = checks.result(f"the {name}", size_of(found))
        spread = checks.result(f"the standard error of the {name}", size_of(error))
        if checks.is_traced(size) or checks.is_traced(spread):  # then there is nothing to judge by
            break
        size, spread = abs(float(size)), float(spread)
        if spread <= rtol * size:
            break
        if draws == most:
            warnings.warn(
                f"the standard error is {spread:.2g} on {size:.4g} after {draws} draws, above rtol = {rtol:g}; "
                "raise max_draws or rtol",
                DoubtWarning,
                stacklevel=3,
            )
            break
        needed = draws * (spread / (rtol * size)) ** 2 if rtol * size > 0 else math.inf
        draws = min(power_of_two(int(min(max(2 * draws, 1.2 * needed), most))), most)
    own = stand_in_error(layer, as_task(task), longest(length_or_law(L)), key, query_in_prompt, gradient=gradient)
    return found, error if own is None else jax.tree.map(jnp.hypot, error, own), function
