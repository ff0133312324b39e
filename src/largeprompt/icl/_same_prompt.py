r"""How far softmax and linear attention are apart when both read the same prompt, on Gaussian regression.

Given $(W, x)$ the tokens are $\mathcal N(0,\Gamma)$. With $(U, V)$ of softmax and $(U', V')$ of linear attention,
$u = Uz_q$, $u' = U'z_q$, $b = V\Gamma u$, $b' = V'\Gamma u'$, $p = V'\Gamma u$, $c = V\Gamma u'$ and
$q = u'^\top\Gamma u$, Stein's identity gives the mean of the product of the outputs over prompts, free of division by
$\nu$:

$$E\,T\cdot T' = (1-Q)\Big[b\cdot b' + \frac{p\cdot c + q\,\mathrm{tr}\,V\Gamma V'^\top}L\Big]
  - \frac{2Q'(\nu)}L\,q\;b\cdot p .$$

The mean squares are those of the two risks.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, LinearAttention, WeightMoments, merged_form, softmax_form

from ._closed_forms import Blocks, blocks
from ._estimate import Estimate
from ._nodes import LONG, REPLICATES, Nodes, power_of_two, regression_nodes
from ._optima import as_regression
from ._regression import LinearRegression
from ._task import as_predictor


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
    curved, straight = softmax_form(as_predictor(softmax, task)), merged_form(as_predictor(linear, task))
    if not isinstance(straight, LinearAttention):
        raise ValueError("linear is softmax attention; it must be linear attention")
    soft, lin = blocks(curved, task), blocks(straight, task)
    # attention to labels makes ν quartic in (W, x)
    wide = LONG <= L < math.inf and (checks.is_traced(soft.C) or bool(jnp.any(soft.C != 0)))
    nodes = regression_nodes(stream, task, power_of_two(n), REPLICATES, wide=wide)
    length = checks.real_length(L, task.Sigma.dtype)
    means = mean_gaps(soft, lin, task, WeightMoments(L), length, nodes)
    checks.result("the gap", means)
    error = means.std(ddof=1) / jnp.sqrt(means.size)
    return Estimate(means.mean(), error, "exact over prompts, quasi-Monte Carlo over (W, x)")


@eqx.filter_jit
def mean_gaps(
    soft: Blocks, lin: Blocks, task: LinearRegression, moments: WeightMoments, L: Float[Array, ""], nodes: Nodes
) -> Float[Array, " r"]:
    """The gap, averaged over each replicate of the nodes and over ±W."""
    return nodes.means(
        (_given(soft, lin, task, moments, L, nodes, 1) + _given(soft, lin, task, moments, L, nodes, -1)) / 2
    )


def _given(
    soft: Blocks, lin: Blocks, task: LinearRegression, moments, L, nodes: Nodes, sign: int
) -> Float[Array, " n"]:
    """The mean square over prompts given (±W, x)."""
    WS, N = sign * nodes.WS, nodes.N

    def through(parts: Blocks) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """u and Γu, each as covariates and labels."""
        u, labels = parts.A @ nodes.x, parts.C @ nodes.x
        across, up = jnp.sum(WS * labels[:, None], axis=0), jnp.sum(WS * u, axis=1)
        return (u, labels), (task.Sigma @ u + across, up + jnp.sum(N * labels, axis=1) + task.noise * labels)

    def dot(a: tuple[Array, Array], b: tuple[Array, Array]) -> Float[Array, " n"]:
        return jnp.sum(a[0] * b[0], axis=0) + jnp.sum(a[1] * b[1], axis=0)

    def read(parts: Blocks, m: tuple[Array, Array]) -> Float[Array, "k n"]:
        return parts.P @ m[0] + parts.R @ m[1]

    def values(one: Blocks, other: Blocks) -> Float[Array, " n"]:
        """tr VΓV'ᵀ."""
        PP, RR = jnp.sum((one.P @ task.Sigma) * other.P), one.R.T @ other.R
        mixed = jnp.sum(WS * (other.R.T @ one.P + one.R.T @ other.P)[..., None], axis=(0, 1))
        return PP + mixed + jnp.sum(N * RR[..., None], axis=(0, 1)) + task.noise * jnp.trace(RR)

    (u, Gu), (v, Gv) = through(soft), through(lin)
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
