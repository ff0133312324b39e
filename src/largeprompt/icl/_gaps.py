r"""Softmax against linear attention on the same prompts of Gaussian regression: their outputs and their gradients.

Given $(W, x)$ the tokens are $\mathcal N(0,\Gamma)$. With $(U, V)$ of softmax and $(U', V')$ of linear attention,
$u = Uz_q$, $u' = U'z_q$, $b = V\Gamma u$, $b' = V'\Gamma u'$, $p = V'\Gamma u$, $c = V\Gamma u'$ and
$q = u'^\top\Gamma u$, Stein's identity gives the mean of the product of the outputs over prompts, free of division by
$\nu$:

$$E\,T\cdot T' = (1-Q)\Big[b\cdot b' + \frac{p\cdot c + q\,\mathrm{tr}\,V\Gamma V'^\top}L\Big]
  - \frac{2Q'(\nu)}L\,q\;b\cdot p .$$

The mean squares are those of the two risks. At a query both gaps grow like $e^\nu$ up to $\nu\sim\ln L$, so that plain
means over $(W, x)$ are made by few rare draws. With `widened` importance sampling the same accuracy takes a tenth of
them.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractLayer, WeightMoments, linear_form, merged_form, softmax_form

from ._blocks import Blocks, blocks
from ._estimate import Estimate
from ._regression import LinearRegression, as_regression
from ._risk._closed_form import gaussian_risk
from ._risk._given import Given, dot, read
from ._risk._nodes import LONG, REPLICATES, Nodes, power_of_two, regression_nodes
from ._risk._over_nodes import exact_part, softmax_risk
from ._task import as_predictor

METHOD = "exact over prompts, quasi-Monte Carlo over (W, x)"


def same_prompt_gap(
    softmax: AbstractLayer,
    linear: AbstractLayer,
    task: LinearRegression,
    L: int | float,
    key: PRNGKeyArray | None = None,
    draws: int = 2**12,
) -> Estimate:
    r"""$E\|T_\mathrm{softmax} - T_\mathrm{linear}\|^2$ over common prompts of length `L` and queries.

    Exact over prompts; `draws` quasi-Monte Carlo nodes carry the average over (W, x). The layers may have parameters of
    their own; with the same ones the gap vanishes at `L = inf`. Paper: Figures 1a and 5a.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    stream = checks.key_or_default(key)
    n = max(2, checks.count("draws", draws, at_least=2) // REPLICATES)
    curved, straight = softmax_form(as_predictor(softmax, task)), linear_form(as_predictor(linear, task))
    soft, lin = blocks(curved, task), blocks(straight, task)
    # attention to labels makes ν quartic in (W, x)
    wide = LONG <= L < math.inf and (checks.is_traced(soft.C) or bool(jnp.any(soft.C != 0)))
    nodes = regression_nodes(stream, task, power_of_two(n), REPLICATES, wide=wide)
    length = checks.real_length(L, task.Sigma.dtype)
    means = _mean_gaps(soft, lin, task, WeightMoments(L), length, nodes)
    checks.result("the gap", means)
    error = means.std(ddof=1) / jnp.sqrt(means.size)
    return Estimate(means.mean(), error, METHOD)


@eqx.filter_jit
def _mean_gaps(
    soft: Blocks, lin: Blocks, task: LinearRegression, moments: WeightMoments, L: Float[Array, ""], nodes: Nodes
) -> Float[Array, " r"]:
    """The gap, averaged over each replicate of the nodes."""
    return jax.vmap(lambda nodes: _mean_gap(soft, lin, task, moments, L, nodes))(nodes)


def _mean_gap(soft: Blocks, lin: Blocks, task: LinearRegression, moments, L, nodes: Nodes) -> Float[Array, ""]:
    """The gap, averaged over one replicate of the nodes and over ±W."""
    ahead, behind = (_given(soft, lin, task, moments, L, nodes, sign) for sign in (1, -1))
    return nodes.mean((ahead + behind) / 2)


def _given(
    soft: Blocks, lin: Blocks, task: LinearRegression, moments, L, nodes: Nodes, sign: int
) -> Float[Array, " n"]:
    """The mean square over prompts given (±W, x)."""
    given = Given.of(nodes, task, sign)
    values = given.values
    (u, Gu), (v, Gv) = given.scores(soft), given.scores(lin)
    nu, q = dot(u, Gu), dot(v, Gu)
    (Q, _, _, rest), (slope, *_) = jax.jvp(moments.shares, (nu,), (jnp.ones_like(nu),))
    b, c, p, b_linear = read(soft, Gu), read(soft, Gv), read(lin, Gu), read(lin, Gv)
    # squares and product together: what is left at L = inf, then what is of order 1/L, so that a small gap is not a
    # difference of large numbers
    limit = jnp.sum((b - b_linear) ** 2, axis=0)
    soft_part = values(soft, soft) * Q - rest * jnp.sum(b**2, axis=0) + 2 * Q * jnp.sum(b * b_linear, axis=0)
    linear_part = jnp.sum(b_linear**2, axis=0) + values(lin, lin) * dot(v, Gv)
    product = (1 - Q) * (jnp.sum(p * c, axis=0) + q * values(soft, lin)) - 2 * slope * q * jnp.sum(b * p, axis=0)
    return limit + soft_part + (linear_part - 2 * product) / L


def squared_mean(rows: Numbers) -> tuple[float, float]:
    r"""The squared norm of the mean that independent rows estimate, without bias, and its standard error.

    $|\bar d|^2 - \mathrm{tr}\,C$, with $C$ the covariance of $\bar d$. Its variance at the true $d$ is $4d^\top Cd +
    2\,\mathrm{tr}\,C^2$, and $\bar d^\top C\bar d$ has the mean $d^\top Cd + \mathrm{tr}\,C^2$; where $d$ is lost in
    its error, this standard error is up to half too large.
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
    linear_form(as_predictor(linear, task))
    if [part.shape for part in _arrays(softmax)] != [part.shape for part in _arrays(linear)]:
        raise ValueError("softmax and linear have parameters of different shapes; their gradients have no difference")
    nodes = regression_nodes(checks.key_or_default(key), task, n, REPLICATES, wide=True)
    dtype = task.Sigma.dtype
    found = _replicates(softmax, linear, task, WeightMoments(L), checks.real_length(L, dtype), nodes)
    outputs, gradients = (checks.result("the gap", part) for part in found)
    error = outputs.std(ddof=1) / math.sqrt(REPLICATES)
    value, spread = squared_mean(np.asarray(gradients))
    found = (outputs.mean(), error), (jnp.asarray(value, dtype), jnp.asarray(spread, dtype))
    return Estimate(*found[0], METHOD), Estimate(*found[1], METHOD)


def _arrays(layer: AbstractLayer) -> list[Array]:
    return jax.tree.leaves(eqx.filter(layer, eqx.is_inexact_array))


@eqx.filter_jit
def _replicates(
    softmax: AbstractLayer,
    linear: AbstractLayer,
    task: LinearRegression,
    moments: WeightMoments,
    L: Float[Array, ""],
    nodes: Nodes,
) -> tuple[Float[Array, " r"], Float[Array, "r p"]]:
    """Of each replicate of the nodes: the gap of the outputs, and the difference of the gradients, flattened."""

    def parts(layer):
        return blocks(merged_form(layer), task)

    def flat(layer):
        return jnp.concatenate([part.ravel() for part in _arrays(layer)])

    def of_replicate(nodes: Nodes):
        def excess(layer):
            """R_L - R_∞ of softmax attention."""
            one = jnp.ones((), L.dtype)
            return softmax_risk(parts(layer), task, moments, nodes, one) - exact_part(parts(layer), task, one)

        output = _mean_gap(parts(softmax), parts(linear), task, moments, L, nodes)
        return output, flat(eqx.filter_grad(excess)(softmax))

    infinite = eqx.filter_grad(lambda layer: gaussian_risk(parts(layer), task, jnp.inf))(softmax)
    finite = eqx.filter_grad(lambda layer: gaussian_risk(parts(layer), task, L))(linear)
    outputs, gradients = jax.lax.map(of_replicate, nodes)
    return outputs, gradients + flat(infinite) - flat(finite)
