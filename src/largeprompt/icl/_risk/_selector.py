"""The one place that chooses how a risk is found, and says why."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, JointMoments, MultiHead, WeightMoments, heads_of, kind_of, merged_form
from largeprompt.attention._forms import described
from largeprompt.attention._joint import LONGEST_JOINT
from largeprompt.attention._pair import pair_table

from .._blocks import blocks
from .._prompt import refuse_beyond_memory
from .._regression import LinearRegression
from .._task import AbstractTask, as_predictor, as_task
from ._abstract import AbstractRisk, pooled
from ._closed_form import ClosedForm
from ._heads import HeadsAtInfinity, OverHeads
from ._nodes import LONG, REPLICATES, power_of_two, regression_nodes
from ._over_instances import OverInstances
from ._over_nodes import AbstractOverNodes, OverNodes
from ._quadrature import AlignedQuadrature, PairQuadrature

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

    In this order: a closed form, a quadrature (for P = C = 0, one head or a pair of opposite ones), an average over
    nodes of (W, x), for one head or several, an average over sampled instances. `draws` is how many nodes or instances
    it averages over, where it must; they are fixed, so that the function is smooth. For a layer with P = C = 0,
    or a pair, the function holds of such layers only.
    """
    task, L = as_task(task), checks.prompt_length(L)
    layer = as_predictor(layer, task)
    generator, draws = checks.key_or_default(key), power_of_two(checks.count("draws", draws, at_least=2))
    if method not in ("auto", "sampled"):
        raise ValueError(f"method is {method!r}; it must be 'auto' or 'sampled'")
    obstacle = "sampling was asked for" if method == "sampled" else _obstacle(layer, task, L, query_in_prompt)
    if obstacle is not None or type(task) is not LinearRegression:
        keys = jax.random.split(generator, draws)
        function = OverInstances(task=task, keys=keys, L=L, query_in_prompt=query_in_prompt, reason=str(obstacle))
        refuse_beyond_memory(function.tokens(layer), task.dim)
        return function
    if type(layer) is MultiHead and math.inf == L:
        return HeadsAtInfinity(task=task, reason="heads on an infinite prompt of Gaussian tokens")
    if kind_of(layer) == "linear" or math.inf == L:
        dtype = task.Sigma.dtype
        normaliser = checks.real_length(L + 1.0, dtype) if query_in_prompt and math.inf > L else None
        reason = f"{'linear attention' if kind_of(layer) == 'linear' else 'an infinite prompt'} on Gaussian tokens"
        return ClosedForm(task=task, L=checks.real_length(L, dtype), normaliser=normaliser, reason=reason)
    if type(layer) is MultiHead:
        return _of_heads(layer, task, L, generator, draws)
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
    if type(task) is not LinearRegression:  # a subclass may draw or judge otherwise
        return f"no formula is known for a task of type {type(task).__name__}"
    heads = heads_of(layer) if type(layer) is MultiHead else (layer,)
    if heads is None or any(kind_of(head) is None for head in heads):
        return f"no formula is known for a layer {described(layer)}"
    if query_in_prompt and math.inf > L:
        if type(layer) is MultiHead:
            return "no formula is known for several heads with the query in the prompt"
        if kind_of(layer) == "softmax":
            return "no formula is known for softmax attention with the query in the prompt"
    if type(layer) is MultiHead and LONGEST_JOINT < L < math.inf:
        return f"no formula is known for several heads at L = {L:.4g}, above 1e9"
    return None


def is_aligned(layer: AbstractLayer, task: LinearRegression) -> bool:
    """Whether a (U, V) layer has P = C = 0: then by the symmetry W → −W the gradient has it too."""
    merged = merged_form(layer)
    if merged is not layer:  # K, Q, V, O of such a product need not stay so
        return False
    parts = blocks(merged, task)
    traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves((parts.P, parts.C, task)))
    return not traced and not bool(jnp.any(parts.P != 0) | jnp.any(parts.C != 0))


def _of_heads(layer: MultiHead, task: LinearRegression, L: int | float, key: PRNGKeyArray, draws: int) -> AbstractRisk:
    """The risk of several heads at finite length."""
    aligned = are_aligned(layer, task)
    if aligned and L > 1 and _is_pair(layer, task):
        pair, reason = jnp.asarray(pair_table(L)), "a pair of opposite softmax heads with P = C = 0 on Gaussian tokens"
        return PairQuadrature(task=task, moments=WeightMoments(L), pair=pair, reason=reason)
    nodes = regression_nodes(key, task, max(2, draws // REPLICATES), REPLICATES, wide=L >= LONG)
    reason = f"{len(layer.heads)} heads with {'P = C = 0' if aligned else 'P or C'} on Gaussian tokens"
    joint = JointMoments(L) if sum(head.kind == "softmax" for head in layer.heads) > 1 else None
    length = checks.real_length(L, task.Sigma.dtype)
    function = OverHeads(
        task=task,
        moments=WeightMoments(L),
        joint=joint,
        L=length,
        nodes=nodes,
        control=jnp.ones(()),
        aligned=aligned,
        reason=reason,
    )
    return _with_the_better_control(function, layer)


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


def _with_the_better_control(function: AbstractOverNodes, layer: AbstractLayer) -> AbstractOverNodes:
    """With R_∞ as control variate or without, whichever leaves the smaller error at this layer."""
    _, (with_error, without_error) = pooled(function, layer, "average_of_each_control")
    return function.with_control(jax.lax.stop_gradient(with_error <= without_error))
