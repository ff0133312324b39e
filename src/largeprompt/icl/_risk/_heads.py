r"""The risk of several softmax and linear heads on one prompt of Gaussian regression: no prompt is ever sampled.

Given $(W, x)$ the output is $T = \sum_hV_hm_h$ and $2R_L = E[\sum_{hg}E\,T_h\cdot T_g - 2\sum_hE\,T_h\cdot t + \|t\|^2]
+ ks^2$. With $b_{hi} = V_h\Gamma u_i$, $\rho_{hg} = u_h^\top\Gamma u_g$ and $a_{hg} = \mathrm{tr}\,V_h\Gamma V_g^\top$
the means over prompts are, for two softmax heads (`JointMoments`), a softmax and a linear head, and two linear heads,
$$q\,a_{hg} + c_{uu}\,b_{hh}\cdot b_{gh} + c_{uv}\,b_{hh}\cdot b_{gg} + c_{vu}\,b_{hg}\cdot b_{gh}
  + c_{vv}\,b_{hg}\cdot b_{gg},$$
$$(1-Q_h)\Big[b_{hh}\cdot b_{gg} + \frac{b_{gh}\cdot b_{hg} + \rho_{hg}a_{hg}}L\Big]
  - \frac{2Q_h'}L\rho_{hg}\,b_{hh}\cdot b_{gh},\qquad
  b_{hh}\cdot b_{gg} + \frac{b_{hg}\cdot b_{gh} + \rho_{hg}a_{hg}}L .$$
Where all heads have P = C = 0 no $\rho_{hg}$ depends on W, and the mean over W is closed too. For a law of lengths
all are averages over it: 1/L is its mean over prompts that are not empty, and so is that of $(1-Q_h)/L$.
"""

import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt.attention import AbstractLayer, JointMoments, WeightMoments
from largeprompt.attention._joint import WIDEST_JOINT

from .._blocks import Blocks
from .._regression import LinearRegression
from ._given import Given, dot, read
from ._heads_closed_form import infinite_risk, of_predicting_zero, over_pairs, parts_of
from ._nodes import Nodes
from ._over_nodes import AbstractOverNodes

_BEYOND = 1e-3  # share of nodes that may lie past the table of joint moments
Values = Float[Array, "*s n"]
Pairs = Float[Array, "h h *s n"]


class Readings(NamedTuple):
    """What means over prompts are made of, at every node: ρ_hg, a_hg, b_hh·b_gh, b_hh·b_gg, b_hg·b_gh and b_hh·t."""

    rho: Pairs
    a: Pairs
    own: Pairs
    straight: Pairs
    crossed: Pairs
    met: Float[Array, "h *s n"]


def _of_tokens(heads: Blocks, given: Given) -> Readings:
    """Given W and x."""
    u, image = jax.vmap(given.scores)(heads)
    b = over_pairs(read)(heads, image)
    diagonal = jnp.einsum("hhkn->hkn", b)
    return Readings(
        over_pairs(dot)(u, image),
        over_pairs(given.values)(heads, heads),
        jnp.einsum("hkn,ghkn->hgn", diagonal, b),
        jnp.einsum("hkn,gkn->hgn", diagonal, diagonal),
        jnp.einsum("hgkn,ghkn->hgn", b, b),
        jnp.einsum("hkn,kn->hn", diagonal, given.t),
    )


def _of_queries(heads: Blocks, nodes: Nodes, task: LinearRegression) -> Readings:
    """Given x, averaged over W, for heads with P = C = 0."""
    u = heads.A @ nodes.x
    image = task.Sigma @ u
    RR = jnp.einsum("hij,gij->hg", heads.R, heads.R)[..., None]
    hOh = jnp.einsum("hin,ij,gjn->hgn", image, task.Omega, image)
    straight, own = RR * hOh, RR * jnp.einsum("hhn->hn", hOh)[:, None]
    met = jnp.trace(heads.R, axis1=1, axis2=2)[:, None] * jnp.einsum("hin,in->hn", image, task.Omega @ nodes.x)
    label = (task.tau1 + task.noise) * RR * jnp.ones_like(hOh)
    return Readings(jnp.einsum("hin,gin->hgn", u, image), label, own, straight, straight, met)


def _excess(
    found: Readings,
    softmax: list[bool],
    moments: WeightMoments,
    tilted: WeightMoments,
    joint: JointMoments | None,
    L: Float[Array, ""],
    theta: Float[Array, ""],
) -> Values:
    """Σ E T_h·T_g − 2 Σ E T_h·t, less θ times the same at infinite length."""
    curved = [h for h, is_softmax in enumerate(softmax) if is_softmax]
    straight = [h for h, is_softmax in enumerate(softmax) if not is_softmax]
    total = (1 - theta) * (found.straight.sum(axis=(0, 1)) - 2 * found.met.sum(axis=0))
    # linear heads: a Wishart form
    for h in straight:
        for g in straight:
            total += (found.crossed[h, g] + found.rho[h, g] * found.a[h, g]) / L
    if not curved:
        return total
    nu = jnp.stack([found.rho[h, h] for h in curved])
    Q, _, _, lost = moments.shares(nu)
    kept, slope = jnp.ones_like(nu), jnp.zeros_like(nu)
    if straight:
        (_, kept, *_), (slope, *_) = jax.jvp(tilted.shares, (nu,), (jnp.ones_like(nu),))
    for i, h in enumerate(curved):
        total += Q[i] * found.a[h, h] - lost[i] * found.straight[h, h] + 2 * Q[i] * found.met[h]
        for g in straight:
            part = kept[i] * (found.crossed[h, g] + found.rho[h, g] * found.a[h, g]) / L
            total += 2 * (part - 2 * slope[i] / L * found.rho[h, g] * found.own[h, g] - Q[i] * found.straight[h, g])
    if joint is not None:  # all pairs in one call
        h, g = np.array(list(itertools.combinations(curved, 2))).T
        q, uu, uv, vu, vv = joint.coefficients(found.rho[h, h], found.rho[g, g], found.rho[h, g])
        product = q * found.a[h, g] + uu * found.own[h, g] + (uv - 1) * found.straight[h, g]
        total += 2 * (product + vu * found.crossed[h, g] + vv * found.own[g, h]).sum(axis=0)
    return total


class OverHeads(AbstractOverNodes):
    """Several softmax and linear heads at finite length; `aligned` says that all have P = C = 0."""

    task: LinearRegression
    moments: WeightMoments
    joint: JointMoments | None  # none where fewer than two heads are softmax attention
    L: Float[Array, ""]
    nodes: Nodes
    control: Float[Array, ""]
    aligned: bool = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    tilted: WeightMoments | None = None  # of a law with p_ℓ/ℓ for p_ℓ: E (1 − Q)/ℓ is 1 − Q of that law, over L

    @property
    def method(self) -> str:
        nodes = " and W, quasi-Monte Carlo over x" if self.aligned else ", quasi-Monte Carlo over (W, x)"
        return f"exact over prompts{nodes}"

    @property
    def is_bounded(self) -> bool:
        return self.joint is not None

    def is_outside(self, layer):
        return self.beyond(layer, WIDEST_JOINT) > _BEYOND

    def beyond(self, layer: AbstractLayer, widest: float) -> Float[Array, ""]:
        """The share of the nodes at which the scores of a softmax head have a larger standard deviation than this."""
        heads, softmax = parts_of(layer, self.task)

        def far(nodes: Nodes) -> Float[Array, ""]:
            if self.aligned:
                rho = _of_queries(heads, nodes, self.task).rho
            else:
                rho = _of_tokens(heads, Given.of(nodes, self.task, 1)).rho
            nu = jnp.einsum("hhn->hn", rho)[np.array(softmax)]
            return nodes.mean((nu > widest**2).any(axis=0).astype(nodes.x.dtype))

        return jax.vmap(far)(self.nodes).mean()

    def over(self, nodes, layer):
        return self._over(nodes, *parts_of(layer, self.task))

    def of_heads(self, heads: Blocks) -> Float[Array, " r"]:
        """The risk of softmax heads with these blocks, stacked, over each replicate."""
        return jax.vmap(lambda nodes: self.over_heads(nodes, heads))(self.nodes)

    def over_heads(self, nodes: Nodes, heads: Blocks) -> Float[Array, ""]:
        """The same over one replicate."""
        return self._over(nodes, heads, len(heads.A) * [True])

    def _over(self, nodes: Nodes, heads: Blocks, softmax: list[bool]) -> Float[Array, ""]:
        def of(found: Readings) -> Values:
            return _excess(found, softmax, self.moments, self.tilted or self.moments, self.joint, self.L, self.control)

        if self.aligned:
            excess = of(_of_queries(heads, nodes, self.task))
        else:  # averaged over ±W, along a last but one axis
            each = jax.vmap(lambda sign: _of_tokens(heads, Given.of(nodes, self.task, sign)), out_axes=-2)
            excess = of(each(jnp.array([1.0, -1.0], nodes.x.dtype))).mean(axis=0)
        zero = of_predicting_zero(self.task)
        return nodes.mean(excess) / 2 + zero + self.control * (infinite_risk(heads, self.task) - zero)
