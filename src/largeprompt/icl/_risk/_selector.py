"""The one place that chooses how a risk is found, and says why."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, WeightMoments, kind_of, merged_form
from largeprompt.attention._forms import described

from .._blocks import blocks
from .._finite_tasks import FiniteTasks
from .._prompt import refuse_beyond_memory
from .._regression import AbstractRegression, LinearRegression, RegressionOn
from .._task import AbstractTask, as_predictor, as_task
from ._abstract import AbstractRisk, pooled
from ._closed_form import ClosedForm
from ._nodes import LONG, REPLICATES, power_of_two, regression_nodes
from ._over_counts import OverCounts, is_finite
from ._over_instances import OverInstances
from ._over_nodes import OverNodes
from ._over_tasks import OverTasks
from ._quadrature import AlignedQuadrature

Method = Literal["auto", "sampled"]


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

    In this order: a closed form, a quadrature (for P = C = 0), an average over nodes of (W, x), an average over
    sampled instances. `draws` is how many nodes or instances it averages over, where it must; they are fixed, so that
    the function is smooth. For a layer with P = C = 0 the function holds of such layers only.
    """
    task, L = as_task(task), checks.prompt_length(L)
    layer = as_predictor(layer, task)
    generator, draws = checks.key_or_default(key), power_of_two(checks.count("draws", draws, at_least=2))
    if method not in ("auto", "sampled"):
        raise ValueError(f"method is {method!r}; it must be 'auto' or 'sampled'")
    obstacle = "sampling was asked for" if method == "sampled" else _obstacle(layer, task, L, query_in_prompt)
    known = None if obstacle is not None else _on_finite_sets(layer, task, L)
    if known is not None:
        return known
    if obstacle is not None or type(task) is not LinearRegression:
        keys = jax.random.split(generator, draws)
        function = OverInstances(task=task, keys=keys, L=L, query_in_prompt=query_in_prompt, reason=str(obstacle))
        refuse_beyond_memory(function.tokens(layer), task.dim)
        return function
    if kind_of(layer) == "linear" or math.inf == L:
        dtype = task.Sigma.dtype
        normaliser = checks.real_length(L + 1.0, dtype) if query_in_prompt and math.inf > L else None
        reason = f"{'linear attention' if kind_of(layer) == 'linear' else 'an infinite prompt'} on Gaussian tokens"
        return ClosedForm(task=task, L=checks.real_length(L, dtype), normaliser=normaliser, reason=reason)
    moments = WeightMoments(L)
    if is_aligned(layer, task):
        reason = "softmax attention with P = C = 0 on Gaussian tokens"
        return AlignedQuadrature(task=task, moments=moments, reason=reason)
    nodes = regression_nodes(generator, task, max(2, draws // REPLICATES), REPLICATES, wide=L >= LONG)
    reason = "softmax attention with P or C on Gaussian tokens"
    function = OverNodes(task=task, moments=moments, nodes=nodes, control=jnp.ones(()), reason=reason)
    return _with_the_better_control(function, layer)


def _obstacle(layer: AbstractLayer, task: AbstractTask, L: int | float, query_in_prompt: bool) -> str | None:
    """Why the moments of the layer's output are not known exactly, in words; None where they are."""
    kind, waits = kind_of(layer), query_in_prompt and math.inf > L
    if type(task) is FiniteTasks and ((kind == "linear" and not waits) or (kind == "softmax" and math.inf == L)):
        return None
    if type(task) is RegressionOn and kind == "softmax" and not waits and is_finite(task) and is_aligned(layer, task):
        return None
    if type(task) is not LinearRegression:  # a subclass may draw or judge otherwise
        return f"no formula is known for a task of type {type(task).__name__}"
    if kind is None:
        return f"no formula is known for a layer {described(layer)}"
    if kind_of(layer) == "softmax" and query_in_prompt and math.inf > L:
        return "no formula is known for softmax attention with the query in the prompt"
    return None


def _on_finite_sets(layer: AbstractLayer, task: AbstractTask, L: int | float) -> AbstractRisk | None:
    """The exact risk where tasks or covariates are finitely many; None elsewhere."""
    if type(task) is FiniteTasks:
        reason = f"{'linear attention' if kind_of(layer) == 'linear' else 'an infinite prompt'} on finitely many tasks"
        length = checks.real_length(L, task.tasks.dtype)
        return OverTasks(task=task.regression, tasks=task.tasks, L=length, reason=reason)
    if type(task) is RegressionOn:
        return OverCounts(task=task, L=L, reason="softmax attention with P = C = 0 on finitely many covariates")
    return None


def is_aligned(layer: AbstractLayer, task: AbstractRegression) -> bool:
    """Whether a (U, V) layer has P = C = 0: then by the symmetry W → −W the gradient has it too."""
    merged = merged_form(layer)
    if merged is not layer:  # K, Q, V, O of such a product need not stay so
        return False
    parts = blocks(merged, task)
    traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves((parts.P, parts.C, task)))
    return not traced and not bool(jnp.any(parts.P != 0) | jnp.any(parts.C != 0))


def _with_the_better_control(function: OverNodes, layer: AbstractLayer) -> OverNodes:
    """With R_∞ as control variate or without, whichever leaves the smaller error at this layer."""
    _, (with_error, without_error) = pooled(function, layer, "average_of_each_control")
    return function.with_control(jax.lax.stop_gradient(with_error <= without_error))
