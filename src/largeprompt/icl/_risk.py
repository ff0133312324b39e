import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, LinearAttention, WeightMoments

from ._aligned_risk import aligned_risk
from ._estimate import Estimate, Gradient, norm
from ._nodes import LONG, REPLICATES, power_of_two, regression_nodes
from ._regression import LinearRegression
from ._risk_functions import AbstractRisk, ClosedForm, OverInstances, OverNodes, gaussian_form, is_aligned
from ._task import AbstractTask, as_predictor, as_task

Method = Literal["auto", "sampled"]
_FIRST_DRAWS = 2**12
_LARGEST_PROMPT = 2**28  # numbers in a prompt that is drawn: a few gigabytes with what is computed of it


def risk(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float,
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
    more token of the prompt. Paper: Equations (2) and (4), Remark 3.2.
    """

    def attempt(draws: int) -> tuple[Array, Array, str]:
        function = risk_function(layer, task, L, key, draws=draws, query_in_prompt=query_in_prompt, method=method)
        if isinstance(function, OverNodes) and function.aligned:
            exact = aligned_risk(function.parts(layer), function.task, function.moments)
            if exact is not None:
                return (
                    checks.result("the risk", exact),
                    jnp.zeros_like(exact),
                    "exact over prompts, one-dimensional quadrature over x",
                )
        value, error = _value_and_error(function, layer)
        checks.result("the standard error of the risk", error)
        return checks.result("the risk", value), error, function.method

    value, error, how = _refined(attempt, lambda v, e: (v, e), rtol, max_draws)
    return Estimate(value, error, how)


def risk_gradient(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float,
    key: PRNGKeyArray | None = None,
    *,
    rtol: float = 1e-2,
    query_in_prompt: bool = False,
    method: Method = "auto",
    max_draws: int = 2**20,
) -> Gradient:
    r"""The gradient of $R_L$ in the layer's own parameters, (U, V) or (K, Q, V, O).

    Exact where `risk` has a closed form; exact over prompts for softmax attention on Gaussian regression. `rtol` bounds
    the norm of the standard errors by that of the gradient.
    """

    def attempt(draws: int) -> tuple[Any, Any, str]:
        function = risk_function(layer, task, L, key, draws=draws, query_in_prompt=query_in_prompt, method=method)
        gradient, error = _gradient_and_error(function, layer)
        checks.result("the gradient of the risk", norm(gradient))
        checks.result("the standard error of the gradient", norm(error))
        return gradient, error, function.method

    return Gradient(*_refined(attempt, lambda g, e: (norm(g), norm(e)), rtol, max_draws))


def risk_function(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float,
    key: PRNGKeyArray | None = None,
    *,
    draws: int = 2**12,
    query_in_prompt: bool = False,
    method: Method = "auto",
) -> AbstractRisk:
    """The risk on a task at one length as a function of layers like this one, by the best way there is.

    `draws` is how many nodes or instances it averages over, where it must; they are fixed, so that the function is
    smooth. For a layer with P = C = 0 the function holds of such layers only.
    """
    task, L = as_task(task), checks.prompt_length(L)
    layer = as_predictor(layer, task)
    generator, draws = checks.key_or_default(key), power_of_two(checks.count("draws", draws, at_least=2))
    if method not in ("auto", "sampled"):
        raise ValueError(f"method is {method!r}; it must be 'auto' or 'sampled'")
    merged = gaussian_form(layer, task)
    if method == "auto" and merged is not None and isinstance(task, LinearRegression):
        aligned, dtype = is_aligned(layer, task), task.Sigma.dtype
        if isinstance(merged, LinearAttention) or math.inf == L:
            normaliser = checks.real_length(L + 1.0, dtype) if query_in_prompt and math.inf > L else None
            return ClosedForm(task, checks.real_length(L, dtype), normaliser, aligned)
        if not query_in_prompt:
            n = max(2, draws // REPLICATES)
            wide = not aligned and L >= LONG
            nodes = regression_nodes(generator, task, n, REPLICATES, of_query_only=aligned, wide=wide)
            return _with_the_better_control(OverNodes(task, WeightMoments(L), nodes, jnp.ones(()), aligned), layer)
    _refuse_prompts_too_long(task, L)
    return OverInstances(task, jax.random.split(generator, draws), L, query_in_prompt)


def _refuse_prompts_too_long(task: AbstractTask, L: int | float) -> None:
    longest = _LARGEST_PROMPT // task.dim
    if longest < L < math.inf:
        raise ValueError(f"L is {L}; without a closed form prompts are drawn whole, here of up to {longest} tokens")


def _with_the_better_control(function: OverNodes, layer: AbstractLayer) -> OverNodes:
    """With R_∞ as control variate or without, whichever leaves the smaller error at this layer."""
    _, with_error = _value_and_error(function, layer)
    _, without_error = _value_and_error(eqx.tree_at(lambda f: f.theta, function, jnp.zeros(())), layer)
    better = jax.lax.stop_gradient(with_error <= without_error)
    # of the type of the ones it replaces: JAX would compile anew for another
    return eqx.tree_at(lambda f: f.theta, function, better.astype(function.theta.dtype))


def _refined(
    attempt: Callable[[int], tuple[Any, Any, str]],
    sizes: Callable[[Any, Any], tuple[Array, Array]],
    rtol: float,
    max_draws: int,
) -> tuple[Any, Any, str]:
    """What `attempt` finds with as many draws as the tolerance needs, or as are allowed; then it says so."""
    rtol, max_draws = float(checks.number("rtol", rtol, at_least=0)), checks.count("max_draws", max_draws, at_least=2)
    most = 2 ** int(math.log2(max_draws))
    draws = min(_FIRST_DRAWS, most)
    while True:
        value, error, how = attempt(draws)
        size, spread = sizes(value, error)
        if checks.is_traced(size) or checks.is_traced(spread):  # then there is nothing to judge by
            return value, error, how
        size, spread = float(size), float(spread)
        if spread <= rtol * abs(size):
            return value, error, how
        if draws == most:
            warnings.warn(
                f"the standard error is {spread:.2g} on {size:.4g} after {draws} draws, above rtol = {rtol:g}; "
                "raise max_draws or rtol",
                stacklevel=3,
            )
            return value, error, how
        needed = draws * (spread / (rtol * abs(size))) ** 2 if rtol * abs(size) > 0 else math.inf
        draws = min(power_of_two(int(min(max(2 * draws, 1.2 * needed), most))), most)


def _value_and_error(function: AbstractRisk, layer: AbstractLayer):
    return _pooled(_terms, function, layer)


def _gradient_and_error(function: AbstractRisk, layer: AbstractLayer):
    return _pooled(_gradient_terms, function, layer)


def _pooled(terms: Callable[[AbstractRisk, AbstractLayer], Any], function: AbstractRisk, layer: AbstractLayer) -> Any:
    """The mean and its standard error piece by piece, all of one shape: JAX would compile anew for every other size."""
    parts = (terms(piece, layer) for piece in function.pieces(_FIRST_DRAWS))
    return _finished(type(function), functools.reduce(functools.partial(_merged, type(function)), parts))


@eqx.filter_jit
def _terms(function: AbstractRisk, layer: AbstractLayer):
    return function.terms(layer)


@eqx.filter_jit
def _gradient_terms(function: AbstractRisk, layer: AbstractLayer):
    return function.gradient_terms(layer)


@eqx.filter_jit
def _merged(kind: type[AbstractRisk], first, second):
    return kind.merged(first, second)


@eqx.filter_jit
def _finished(kind: type[AbstractRisk], total):
    return kind.finished(total)
