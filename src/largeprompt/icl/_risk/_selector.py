"""The one place that chooses how a risk is found, and says why."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import (
    AbstractLayer,
    Lengths,
    QueryMoments,
    WeightMoments,
    kind_of,
    length_or_law,
    longest,
    merged_form,
)
from largeprompt.attention._forms import described

from .._blocks import blocks
from .._finite_tasks import FiniteTasks
from .._prompt import refuse_beyond_memory
from .._regression import AbstractRegression, LinearRegression, RegressionOn
from .._task import AbstractTask, as_predictor, as_task
from ._abstract import AbstractGaussianRisk, AbstractRisk, pooled
from ._closed_form import ClosedForm
from ._nodes import LONG, REPLICATES, power_of_two, radial_nodes, regression_nodes
from ._over_counts import OverCounts, is_finite
from ._over_instances import OverInstances
from ._over_nodes import OverNodes
from ._over_tasks import OverTasks
from ._quadrature import AlignedQuadrature
from ._with_empty import WithEmpty

Method = Literal["auto", "sampled"]


def risk_function(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float | Lengths,
    key: PRNGKeyArray | None = None,
    *,
    draws: int = 2**12,
    query_in_prompt: bool = False,
    method: Method = "auto",
) -> AbstractRisk:
    """The risk on a task at one length as a function of layers like this one, by the best way there is.

    In this order: a closed form, a quadrature (for P = C = 0), an average over nodes of (W, x), an average over
    sampled instances. `draws` is how many nodes or instances it averages over, where it must; they are fixed, so that
    the function is smooth. For a layer with P = C = 0 the function holds of such layers only. For a law of `Lengths` it
    is the average of their risks.
    """
    task, L = as_task(task), length_or_law(L)
    layer = as_predictor(layer, task)
    generator, draws = checks.key_or_default(key), power_of_two(checks.count("draws", draws, at_least=2))
    if method not in ("auto", "sampled"):
        raise ValueError(f"method is {method!r}; it must be 'auto' or 'sampled'")
    if method == "auto" and (known := _on_finite_sets(layer, task, L, query_in_prompt)) is not None:
        return known
    obstacle = "sampling was asked for" if method == "sampled" else _obstacle(layer, task)
    if obstacle is not None or type(task) is not LinearRegression:
        keys = jax.random.split(generator, draws)
        function = OverInstances(task=task, keys=keys, L=L, query_in_prompt=query_in_prompt, reason=str(obstacle))
        refuse_beyond_memory(function.tokens(layer), task.dim)
        return function
    if kind_of(layer) == "linear" or math.inf == L:
        reason = f"{'linear attention' if kind_of(layer) == 'linear' else 'an infinite prompt'} on Gaussian tokens"
        function = _closed_form(task, L, query_in_prompt, reason)
    elif is_aligned(layer, task) and not query_in_prompt:
        reason = "softmax attention with P = C = 0 on Gaussian tokens"
        function = AlignedQuadrature(task=task, moments=WeightMoments(L), reason=reason)
    else:
        function = _over_nodes(layer, task, L, generator, max(2, draws // REPLICATES), query_in_prompt)
    # the query alone answers an empty prompt that it is in
    return function if query_in_prompt or not isinstance(L, Lengths) else _with_empty(function, task, L)


def _closed_form(task: LinearRegression, L: int | float | Lengths, query_in_prompt: bool, reason: str) -> ClosedForm:
    dtype = task.Sigma.dtype
    lengths, shares = np.array([float(L.harmonic_mean if isinstance(L, Lengths) else L)]), np.ones(1)
    inside = query_in_prompt and math.inf > longest(L)
    if inside and isinstance(L, Lengths):
        lengths, shares = L.rule()
    with np.errstate(over="ignore"):  # a length that the type cannot hold counts as infinite
        # one of 0 is a limit: it is divided by, and multiplied by before
        L_real, normalisers = np.maximum(lengths, 1e-30).astype(dtype), (lengths + 1).astype(dtype)
    return ClosedForm(
        task=task,
        L=jnp.asarray(L_real),
        normalisers=jnp.asarray(normalisers) if inside else None,
        shares=jnp.asarray(shares, dtype),
        reason=reason,
    )


def _over_nodes(
    layer: AbstractLayer,
    task: LinearRegression,
    L: int | float | Lengths,
    key: PRNGKeyArray,
    n: int,
    query_in_prompt: bool,
) -> OverNodes:
    moments = QueryMoments(L) if query_in_prompt else WeightMoments(L)
    aligned = query_in_prompt and is_aligned(layer, task)
    if aligned and _is_isotropic(layer, task):
        nodes = radial_nodes(task)
    else:
        nodes = regression_nodes(key, task, n, REPLICATES, wide=longest(L) >= LONG)
    where = "P = C = 0" if aligned else "P or C"
    reason = f"softmax attention with {where} on Gaussian tokens" + ", the query among them" * query_in_prompt
    function = OverNodes(task=task, moments=moments, nodes=nodes, control=jnp.ones(()), reason=reason, aligned=aligned)
    return _with_the_better_control(function, layer)


def _with_empty(function: AbstractGaussianRisk, task: LinearRegression, L: Lengths) -> AbstractRisk:
    if L.empty == 0:
        return function
    zero = task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2
    return WithEmpty(rest=function, share=jnp.asarray(L.empty, zero.dtype), zero=zero, reason=function.reason)


def _obstacle(layer: AbstractLayer, task: AbstractTask) -> str | None:
    """Why the moments of the layer's output are not known exactly, in words; None where they are."""
    if type(task) is not LinearRegression:  # a subclass may draw or judge otherwise
        return f"no formula is known for a task of type {type(task).__name__}"
    if kind_of(layer) is None:
        return f"no formula is known for a layer {described(layer)}"
    return None


def _on_finite_sets(
    layer: AbstractLayer, task: AbstractTask, L: int | float | Lengths, query_in_prompt: bool
) -> AbstractRisk | None:
    """The exact risk where tasks or covariates are finitely many; None where it is not known."""
    if isinstance(L, Lengths) or (query_in_prompt and math.inf > L):
        return None
    kind = kind_of(layer)
    if type(task) is FiniteTasks and (kind == "linear" or (kind == "softmax" and math.inf == L)):
        reason = f"{'linear attention' if kind == 'linear' else 'an infinite prompt'} on finitely many tasks"
        length = checks.real_length(L, task.tasks.dtype)
        return OverTasks(task=task.regression, tasks=task.tasks, L=length, reason=reason)
    if type(task) is RegressionOn and kind == "softmax" and is_finite(task) and is_aligned(layer, task):
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


def _is_isotropic(layer: AbstractLayer, task: LinearRegression) -> bool:
    """Whether A and all covariances are multiples of the identity: then the gradient in A is one too."""
    matrices = blocks(merged_form(layer), task).A, task.Sigma, task.Omega, task.query_Sigma
    if any(map(checks.is_traced, matrices)):
        return False
    return all(bool(jnp.all(matrix == matrix[0, 0] * jnp.eye(task.d))) for matrix in matrices)


def _with_the_better_control(function: OverNodes, layer: AbstractLayer) -> OverNodes:
    """With R_∞ as control variate or without, whichever leaves the smaller error at this layer."""
    _, (with_error, without_error) = pooled(function, layer, "average_of_each_control")
    return function.with_control(jax.lax.stop_gradient(with_error <= without_error))
