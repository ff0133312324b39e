r"""Softmax against linear attention on Gaussian regression, over queries and coefficients drawn from a wider law.

At a query both gaps grow like $e^\nu$ up to $\nu\sim\ln L$, so that plain means over $(W, x)$ are made by few rare
draws. Drawn $\kappa$ times as wide and weighed back by $\kappa^n e^{-(\kappa^2-1)|\xi|^2/2}$, $\xi$ the $n$ standard
normal numbers behind a draw, the same accuracy takes a tenth of them.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractLayer, LinearAttention, WeightMoments, merged_form, softmax_form

from ._closed_forms import blocks, gaussian_risk
from ._estimate import Estimate
from ._nodes import REPLICATES, Nodes, gaussian_nodes, placed, power_of_two, widened
from ._optima import as_regression
from ._regression import LinearRegression
from ._same_prompt import mean_gaps
from ._softmax_risk import exact_part, softmax_risk
from ._task import as_predictor


def squared_mean(rows: Numbers) -> tuple[float, float]:
    r"""The squared norm of the mean that independent rows estimate, without bias, and its standard error.

    $|\bar d|^2 - \mathrm{tr}\,C$, with $C$ the covariance of $\bar d$. Its variance at the true $d$ is $4d^\top Cd +
    2\,\mathrm{tr}\,C^2$, and $\bar d^\top C\bar d$ has the mean $d^\top Cd + \mathrm{tr}\,C^2$; where $d$ is lost in
    its error, the error that is told is up to half too large.
    """
    rows = checks.matrix("rows", rows)
    n = rows.shape[0]
    if n < 2:
        raise ValueError(f"rows has {n} row; a standard error takes at least 2")
    rows = np.asarray(rows, float)
    mean = rows.mean(axis=0)
    centred = (rows - mean) / math.sqrt(n * (n - 1))
    # through the smaller of the two Gram matrices: C = AᵀA has the squares of AAᵀ
    gram = centred @ centred.T if n < rows.shape[1] else centred.T @ centred
    along, around = float(np.sum((centred @ mean) ** 2)), float(np.sum(gram**2))
    return float(mean @ mean) - float(np.trace(gram)), math.sqrt(max(4 * along - 2 * around, 2 * around))


def initial_gaps(
    softmax: AbstractLayer,
    linear: AbstractLayer,
    task: LinearRegression,
    L: int | float,
    key: PRNGKeyArray | None = None,
    draws: int = 2**13,
) -> tuple[Estimate, Estimate]:
    r"""$E\|T_\mathrm{softmax}-T_\mathrm{linear}\|^2$ and $\|\nabla R_\mathrm{softmax}-\nabla R_\mathrm{linear}\|^2$.

    On common prompts of length `L`, gradients in the layers' own parameters, of which both have the same kinds. Exact
    over prompts; the second without bias, so that it can fall below 0 where it is lost in its error. Paper: Figures 1
    and 5.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    n = power_of_two(max(2, checks.count("draws", draws, at_least=2) // REPLICATES))
    softmax_form(as_predictor(softmax, task))
    if not isinstance(merged_form(as_predictor(linear, task)), LinearAttention):
        raise ValueError("linear is softmax attention; it must be linear attention")
    if [part.shape for part in _arrays(softmax)] != [part.shape for part in _arrays(linear)]:
        raise ValueError("softmax and linear have parameters of different shapes; their gradients have no difference")
    normal = gaussian_nodes(checks.key_or_default(key), task.d * (1 + task.targets), n, REPLICATES)
    wide, weights = widened(normal)
    dtype = task.Sigma.dtype
    wide, weights = jnp.asarray(np.moveaxis(wide, -1, 1), dtype), jnp.asarray(weights, dtype)
    found = _replicates(softmax, linear, task, WeightMoments(L), checks.real_length(L, dtype), wide, weights)
    outputs, gradients = (checks.result("the gap", part) for part in found)
    how = "exact over prompts, quasi-Monte Carlo over (W, x)"
    error = outputs.std(ddof=1) / math.sqrt(REPLICATES)
    value, spread = squared_mean(np.asarray(gradients))
    return Estimate(outputs.mean(), error, how), Estimate(jnp.asarray(value, dtype), jnp.asarray(spread, dtype), how)


def _arrays(layer: AbstractLayer) -> list[Array]:
    return jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))


@eqx.filter_jit
def _replicates(
    softmax: AbstractLayer,
    linear: AbstractLayer,
    task: LinearRegression,
    moments: WeightMoments,
    L: Float[Array, ""],
    wide: Float[Array, "r m n"],
    weights: Float[Array, "r n"],
) -> tuple[Float[Array, " r"], Float[Array, "r p"]]:
    """Of each replicate of the nodes: the gap of the outputs, and the difference of the gradients, flattened."""

    def parts(layer):
        return blocks(merged_form(layer), task)

    def excess(layer, nodes: Nodes, weights):
        """R_L - R_∞ of softmax attention: the nodes of a replicate are replicates of their own, to be weighed."""
        one = jnp.ones((), weights.dtype)
        found = softmax_risk(parts(layer), task, moments, nodes, one) - exact_part(parts(layer), task, one)
        return jnp.mean(weights * found)

    def of_replicate(normal, weights):
        nodes = placed(normal, task, task.targets, len(weights))
        output = jnp.mean(weights * mean_gaps(parts(softmax), parts(linear), task, moments, L, nodes))
        return output, flat(eqx.filter_grad(excess)(softmax, nodes, weights))

    def flat(layer):
        return jnp.concatenate([part.ravel() for part in _arrays(layer)])

    infinite = eqx.filter_grad(lambda layer: gaussian_risk(parts(layer), task, jnp.inf))(softmax)
    finite = eqx.filter_grad(lambda layer: gaussian_risk(parts(layer), task, L))(linear)
    outputs, gradients = jax.lax.map(lambda both: of_replicate(*both), (wide, weights))
    return outputs, gradients + flat(infinite) - flat(finite)
