r"""The risk of several softmax and linear heads on one prompt of Gaussian regression: no prompt is ever sampled.

Given $(W, x)$ the output is $T = \sum_hV_hm_h$ and $2R_L = E[\sum_{hg}E\,T_h\cdot T_g - 2\sum_hE\,T_h\cdot t + \|t\|^2]
+ ks^2$. With $b_{hi} = V_h\Gamma u_i$, $\rho_{hg} = u_h^\top\Gamma u_g$ and $a_{hg} = \mathrm{tr}\,V_h\Gamma V_g^\top$
the means over prompts are, for two softmax heads (`JointMoments`), a softmax and a linear head, and two linear heads,
$$Q_{hg}a_{hg} + c_{uu}\,b_{hh}\cdot b_{gh} + c_{uv}\,b_{hh}\cdot b_{gg} + c_{vu}\,b_{hg}\cdot b_{gh} + c_{vv}\,b_{hg}\cdot b_{gg},$$
$$(1-Q_h)\Big[b_{hh}\cdot b_{gg} + \frac{b_{gh}\cdot b_{hg} + \rho_{hg}a_{hg}}L\Big] - \frac{2Q_h'}L\rho_{hg}\,b_{hh}\cdot b_{gh},\qquad
  b_{hh}\cdot b_{gg} + \frac{b_{hg}\cdot b_{gh} + \rho_{hg}a_{hg}}L .$$
Where all heads have P = C = 0 no $\rho_{hg}$ depends on W, and the mean over W is closed too.
"""

from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.attention import AbstractAttention, AbstractLayer, JointMoments, heads_of, kind_of

from .._blocks import Blocks, blocks
from .._regression import LinearRegression
from ._abstract import AbstractGaussianRisk
from ._given import Given, dot, read
from ._nodes import Nodes
from ._over_nodes import AbstractOverNodes

Values = Float[Array, "*s n"]


class Readings(NamedTuple):
    """What the means over prompts are made of: ρ_hg, a_hg, b_hi·b_gj and b_hh·t, summed over targets."""

    rho: list[list[Values]]
    a: list[list[Values]]
    b: list[list[list[list[Values]]]]
    bt: list[Values]


def _of_tokens(heads: list[Blocks], given: Given) -> Readings:
    """Given W and x."""
    scores = [given.scores(head) for head in heads]
    read_by = [[read(head, image) for _, image in scores] for head in heads]
    return Readings(
        [[dot(u, image) for _, image in scores] for u, _ in scores],
        [[given.values(one, other) for other in heads] for one in heads],
        [[[[jnp.sum(x * y, axis=0) for y in other] for other in read_by] for x in one] for one in read_by],
        [jnp.sum(read_by[i][i] * given.t, axis=0) for i in range(len(heads))],
    )


def _of_queries(heads: list[Blocks], nodes: Nodes, task: LinearRegression) -> Readings:
    """Given x, averaged over W, for heads with P = C = 0."""
    u = [head.A @ nodes.x for head in heads]
    h = [task.Sigma @ part for part in u]
    label, one = task.tau1 + task.noise, jnp.ones_like(nodes.x[0])
    RR = [[jnp.sum(a.R * b.R) for b in heads] for a in heads]
    hOh = [[jnp.sum(a * (task.Omega @ b), axis=0) for b in h] for a in h]
    H = range(len(heads))
    return Readings(
        [[jnp.sum(a * b, axis=0) for b in h] for a in u],
        [[label * RR[i][j] * one for j in H] for i in H],
        [[[[RR[i][k] * hOh[j][m] for m in H] for k in H] for j in H] for i in H],
        [jnp.trace(heads[i].R) * jnp.sum(h[i] * (task.Omega @ nodes.x), axis=0) for i in H],
    )


def _excess(
    found: Readings, softmax: list[bool], joint: JointMoments, L: Float[Array, ""], theta: Float[Array, ""]
) -> Values:
    """Σ E T_h·T_g − 2 Σ E T_h·t, less θ times the same at infinite length."""
    rho, a, b, bt = found
    total = jnp.zeros_like(bt[0])
    alone = {}
    for h, curved in enumerate(softmax):
        rest = 1 - theta
        if curved:
            nu = rho[h][h]
            (Q, _, _, lost), (slope, *_) = jax.jvp(joint.alone.shares, (nu,), (jnp.ones_like(nu),))
            alone[h] = Q, slope
            total += Q * a[h][h] + (rest - lost) * b[h][h][h][h] - 2 * (rest - Q) * bt[h]
        else:
            total += rest * (b[h][h][h][h] - 2 * bt[h]) + (b[h][h][h][h] + rho[h][h] * a[h][h]) / L
    pairs = [(h, g) for h in range(len(softmax)) for g in range(h)]
    both = [(h, g) for h, g in pairs if softmax[h] and softmax[g]]
    if both:  # all pairs in one call: the table is interpolated once
        stacked = (jnp.stack([rho[i][j] for i, j in which]) for which in _indices(both))
        for (h, g), (Q, uu, uv, vu, vv) in zip(both, zip(*joint.coefficients(*stacked), strict=True), strict=True):
            square = Q * a[h][g] + uu * b[h][h][g][h] + (uv - theta) * b[h][h][g][g]
            total += 2 * (square + vu * b[h][g][g][h] + vv * b[h][g][g][g])
    for h, g in pairs:
        if softmax[h] and softmax[g]:
            continue
        part = (b[h][g][g][h] + rho[h][g] * a[h][g]) / L
        if softmax[h] or softmax[g]:
            s, o = (h, g) if softmax[h] else (g, h)
            Q, slope = alone[s]
            part = (1 - Q) * part - 2 * slope / L * rho[s][o] * b[s][s][o][s] - Q * b[s][s][o][o]
        total += 2 * (part + (1 - theta) * b[h][h][g][g])
    return total


def _indices(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    return [[(h, h) for h, _ in pairs], [(g, g) for _, g in pairs], pairs]


def parts_of(layer: AbstractLayer, task: LinearRegression) -> tuple[list[Blocks], list[bool]]:
    """The blocks of every head, and which heads are softmax attention."""
    heads = cast(tuple[AbstractAttention, ...], heads_of(layer))
    return [blocks(head, task) for head in heads], [kind_of(head) == "softmax" for head in heads]


class OverHeads(AbstractOverNodes):
    """Several softmax and linear heads at finite length; `aligned` says that all have P = C = 0."""

    task: LinearRegression
    joint: JointMoments
    L: Float[Array, ""]
    nodes: Nodes
    control: Float[Array, ""]
    aligned: bool = eqx.field(static=True)
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return f"exact over prompts{' and W, quasi-Monte Carlo over x' if self.aligned else ', quasi-Monte Carlo over (W, x)'}"

    def over(self, nodes, layer):
        heads, softmax = parts_of(layer, self.task)

        def of(found: Readings) -> Values:
            return _excess(found, softmax, self.joint, self.L, self.control)

        if self.aligned:
            excess = of(_of_queries(heads, nodes, self.task))
        else:  # averaged over ±W, along a first axis
            each = [_of_tokens(heads, Given.of(nodes, self.task, sign)) for sign in (1, -1)]
            excess = of(jax.tree.map(lambda *parts: jnp.stack(parts), *each)).mean(axis=0)
        zero = _of_predicting_zero(self.task)
        return nodes.mean(excess) / 2 + zero + self.control * (infinite_risk(heads, self.task) - zero)


class HeadsAtInfinity(AbstractGaussianRisk):
    """Several softmax and linear heads on an infinite prompt: a formula."""

    task: LinearRegression
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return "closed form"

    def of_layer(self, layer):
        return infinite_risk(parts_of(layer, self.task)[0], self.task)[None]


def _of_predicting_zero(task: LinearRegression) -> Float[Array, ""]:
    return task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2


def infinite_risk(heads: list[Blocks], task: LinearRegression) -> Float[Array, ""]:
    r"""$R_\infty$ of a sum of heads, whose prediction is $\sum_hG_h(W)\,x$: moments of a Gaussian matrix, head by head."""
    Sigma, Omega, S, rho2 = task.Sigma, task.Omega, task.query_Sigma, task.rho2

    def product(one: Blocks, other: Blocks) -> Float[Array, ""]:
        """E⟨G x, G'x⟩."""
        K, RR = one.C @ S @ other.C.T, one.R.T @ other.R
        even = jnp.sum((mean(one) @ S) * mean(other)) + rho2 * (jnp.sum(K * RR.T) + jnp.trace(K) * jnp.trace(RR))
        odd = jnp.trace(K) * jnp.sum((one.P @ Sigma @ Omega @ Sigma) * other.P)
        odd += jnp.trace(RR) * jnp.sum((Omega @ Sigma @ one.A @ S) * (Sigma @ other.A))
        return even + odd + mixed(one, other) + mixed(other, one)

    def mean(one: Blocks) -> Float[Array, "k d"]:
        return one.P @ Sigma @ one.A + (task.noise + task.tau1) * one.R @ one.C

    def mixed(one: Blocks, other: Blocks) -> Float[Array, ""]:
        return jnp.sum((one.P @ Sigma @ Omega @ Sigma @ other.A @ S) * (other.R @ one.C))

    squares = sum(product(one, other) for one in heads for other in heads)
    met = sum(jnp.sum((h.P @ Sigma @ Omega @ S) * h.C) + jnp.trace(h.R) * jnp.sum(Omega * (Sigma @ h.A @ S)) for h in heads)
    return (squares - 2 * met) / 2 + _of_predicting_zero(task)
