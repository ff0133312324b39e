"""The one place that chooses how a risk is found, and says why."""

import dataclasses
import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import (
    AbstractLayer,
    JointMoments,
    Lengths,
    MultiHead,
    QueryMoments,
    WeightMoments,
    heads_of,
    kind_of,
    length_or_law,
    longest,
    merged_form,
)
from largeprompt.attention._forms import described
from largeprompt.attention._joint import LONGEST_JOINT, WIDEST_JOINT
from largeprompt.attention._pair import pair_table

from .._blocks import blocks
from .._finite_tasks import FiniteTasks
from .._prompt import refuse_beyond_memory
from .._regression import AbstractRegression, LinearRegression, RegressionOn
from .._task import AbstractTask, as_predictor, as_task
from ._abstract import AbstractGaussianRisk, AbstractRisk, pooled
from ._closed_form import ClosedForm
from ._heads import OverHeads
from ._heads_closed_form import HeadsInClosedForm
from ._nodes import LONG, REPLICATES, power_of_two, radial_nodes, regression_nodes
from ._over_counts import OverCounts, is_finite
from ._over_instances import OverInstances
from ._over_nodes import AbstractOverNodes, OverNodes
from ._over_tasks import OverTasks
from ._quadrature import AlignedQuadrature, PairQuadrature
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

    In this order: a closed form, a quadrature (for P = C = 0, one head or a pair of opposite ones), an average over
    nodes of (W, x), for one head or several, an average over sampled instances. `draws` is how many nodes or instances
    it averages over, where it must; they are fixed, so that the function is smooth. For a layer with P = C = 0, or a
    pair, the function holds of such layers only. For a law of `Lengths` it is the average of their risks.
    """
    task, L = as_task(task), length_or_law(L)
    layer = as_predictor(layer, task)
    generator, draws = checks.key_or_default(key), power_of_two(checks.count("draws", draws, at_least=2))
    if method not in ("auto", "sampled"):
        raise ValueError(f"method is {method!r}; it must be 'auto' or 'sampled'")
    if method == "auto" and (known := _on_finite_sets(layer, task, L, query_in_prompt)) is not None:
        return known
    obstacle = "sampling was asked for" if method == "sampled" else _obstacle(layer, task, L, query_in_prompt)
    if obstacle is None and type(layer) is MultiHead and type(task) is LinearRegression:
        if math.inf == L:
            return _heads_in_closed_form(task, math.inf, "heads on an infinite prompt of Gaussian tokens")
        if (function := _of_heads(layer, task, L, generator, draws)) is not None:
            return _with_empty(function, task, L) if isinstance(L, Lengths) else function
        obstacle = f"scores have standard deviations above {WIDEST_JOINT:g}, past the table for several heads"
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


def _heads_in_closed_form(task: LinearRegression, L: int | float, reason: str) -> HeadsInClosedForm:
    return HeadsInClosedForm(task=task, L=checks.real_length(L, task.Sigma.dtype), reason=reason)


def _over_nodes(
    layer: AbstractLayer,
    task: LinearRegression,
    L: int | float | Lengths,
    key: PRNGKeyArray,
    n: int,
    query_in_prompt: bool,
) -> AbstractOverNodes:
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


def _obstacle(layer: AbstractLayer, task: AbstractTask, L: int | float | Lengths, query_in_prompt: bool) -> str | None:
    """Why the moments of the layer's output are not known exactly, in words; None where they are."""
    if type(task) is not LinearRegression:  # a subclass may draw or judge otherwise
        return f"no formula is known for a task of type {type(task).__name__}"
    heads = heads_of(layer) if type(layer) is MultiHead else (layer,)
    if heads is None or any(kind_of(head) is None for head in heads):
        return f"no formula is known for a layer {described(layer)}"
    if type(layer) is MultiHead and math.inf > longest(L):
        if query_in_prompt:
            return "no formula is known for several heads with the query in the prompt"
        if longest(L) > LONGEST_JOINT and any(kind_of(head) == "softmax" for head in heads):
            return f"no formula is known for several heads at L = {longest(L):.4g}, above 1e9"
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


def _of_heads(
    layer: MultiHead, task: LinearRegression, L: int | float | Lengths, key: PRNGKeyArray, draws: int
) -> AbstractGaussianRisk | None:
    """The risk of several heads at finite length; None where their scores are too wide for its table."""
    if all(head.kind == "linear" for head in layer.heads):
        mean = L.harmonic_mean if isinstance(L, Lengths) else L  # the risk is affine in 1/L
        return _heads_in_closed_form(task, mean, "linear heads on Gaussian tokens")
    aligned = are_aligned(layer, task)
    if aligned and not isinstance(L, Lengths) and L > 1 and _is_pair(layer, task):
        pair, reason = jnp.asarray(pair_table(L)), "a pair of opposite softmax heads with P = C = 0 on Gaussian tokens"
        return PairQuadrature(task=task, moments=WeightMoments(L), pair=pair, reason=reason)
    nodes = regression_nodes(key, task, max(2, draws // REPLICATES), REPLICATES, wide=longest(L) >= LONG)
    reason = f"{len(layer.heads)} heads with {'P = C = 0' if aligned else 'P or C'} on Gaussian tokens"
    function = OverHeads(
        task=task,
        moments=WeightMoments(L),
        tilted=WeightMoments(_tilted(L)) if isinstance(L, Lengths) else None,
        joint=None,
        L=checks.real_length(L.harmonic_mean if isinstance(L, Lengths) else L, task.Sigma.dtype),
        nodes=nodes,
        control=jnp.ones(()),
        aligned=aligned,
        reason=reason,
    )
    if sum(head.kind == "softmax" for head in layer.heads) > 1:
        outside = eqx.filter_jit(function.is_outside)(layer)  # before the table, which takes seconds, is made
        if not checks.is_traced(outside) and bool(outside):
            return None
        function = dataclasses.replace(function, joint=JointMoments(L))
    return _with_the_better_control(function, layer)


def _tilted(L: Lengths) -> Lengths:
    """The law of lengths with probabilities in proportion to p_ℓ/ℓ, of the prompts that are not empty."""
    values, shares = (np.array(part) for part in (L.values, L.probabilities))
    kept = values > 0
    return Lengths(values[kept], shares[kept] / values[kept])


def are_aligned(layer: MultiHead, task: LinearRegression) -> bool:
    """Whether no key reads labels and no value reads covariates: then no gradient makes them do so."""
    d = task.d
    ignored = [part for head in layer.heads for part in (head.K[:, d:], head.V[:, :d])]
    traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves((ignored, task)))
    return not traced and not any(bool(jnp.any(part != 0)) for part in ignored)


def _is_pair(layer: MultiHead, task: LinearRegression) -> bool:
    """Whether the layer is two softmax heads that differ by the signs of U and V, and stay so under a gradient flow."""
    if len(layer.heads) != 2 or any(head.kind != "softmax" for head in layer.heads):
        return False
    one, other = (head.parameters for head in layer.heads)
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return False
    if any(checks.is_traced(leaf) for leaf in jax.tree.leaves((one, other))):
        return False

    def opposite(names: str) -> bool:
        """Whether one of these matrices has changed its sign, and the others are the same."""
        signs = [_sign(one[name], other[name]) for name in names if name in one]
        return None not in signs and math.prod(s for s in signs if s is not None) == -1

    return layer.heads[0].scale == layer.heads[1].scale and opposite("KQ") and opposite("VO")


def _sign(one: Array, other: Array) -> int | None:
    """±1 where `other` is ± `one`, else None."""
    return next((sign for sign in (1, -1) if bool(jnp.all(other == sign * one))), None)


def _is_isotropic(layer: AbstractLayer, task: LinearRegression) -> bool:
    """Whether A and all covariances are multiples of the identity: then the gradient in A is one too."""
    matrices = blocks(merged_form(layer), task).A, task.Sigma, task.Omega, task.query_Sigma
    if any(map(checks.is_traced, matrices)):
        return False
    return all(bool(jnp.all(matrix == matrix[0, 0] * jnp.eye(task.d))) for matrix in matrices)


def _with_the_better_control(function: AbstractOverNodes, layer: AbstractLayer) -> AbstractOverNodes:
    """With R_∞ as control variate or without, whichever leaves the smaller error at this layer."""
    _, (with_error, without_error) = pooled(function, layer, "average_of_each_control")
    return function.with_control(jax.lax.stop_gradient(with_error <= without_error))
