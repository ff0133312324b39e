r"""The risk of several linear heads at every prompt length, and of any heads at infinite length, in closed form.

Head h of these `Blocks` reads $b_{hg} = V_h\Gamma_Wu_g = (E_{hg} + O_{hg})\,x$ off the scores of head g, an even and an
odd part in $W$: $E_{hg} = P_h\Sigma A_g + R_h(N+s^2)C_g$ with $N = W\Sigma W^\top$, and $O_{hg} = P_h\Sigma W^\top C_g
+ R_hW\Sigma A_g$. Given $(W, x)$ the sum of linear heads is a Wishart form of mean $\sum_hb_{hh}$, so that
$$2R_L = E\Big\|\sum_hb_{hh} - Wx\Big\|^2 + \frac1L\sum_{hg}E\big[b_{hg}\cdot b_{gh} + \rho_{hg}a_{hg}\big] + ks^2$$
with $\rho_{hg} = u_h^\top\Gamma_Wu_g$ and $a_{hg} = \mathrm{tr}\,V_h\Gamma_WV_g^\top$: moments of a Gaussian matrix.
"""

from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.attention import AbstractAttention, AbstractLayer, heads_of, kind_of

from .._blocks import Blocks, blocks
from .._regression import LinearRegression
from ._abstract import AbstractGaussianRisk


def parts_of(layer: AbstractLayer, task: LinearRegression) -> tuple[Blocks, list[bool]]:
    """The blocks of all heads, stacked, and which heads are softmax attention."""
    heads = cast(tuple[AbstractAttention, ...], heads_of(layer))
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *(blocks(head, task) for head in heads))
    return stacked, [kind_of(head) == "softmax" for head in heads]


def over_pairs(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of two heads for all pairs of them: one of them compiled, not as many as there are pairs."""
    return jax.vmap(jax.vmap(function, in_axes=(None, 0)), in_axes=(0, None))


class HeadsInClosedForm(AbstractGaussianRisk):
    """Several linear heads at any length, or any heads on an infinite prompt: a formula."""

    task: LinearRegression
    L: Float[Array, ""]
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return "closed form"

    def of_layer(self, layer):
        return self.of_heads(parts_of(layer, self.task)[0])

    def of_heads(self, heads: Blocks) -> Float[Array, " 1"]:
        """The risk of heads with these blocks, stacked."""
        return (infinite_risk(heads, self.task) + _wishart(heads, self.task) / (2 * self.L))[None]


def of_predicting_zero(task: LinearRegression) -> Float[Array, ""]:
    """The risk of the layer that predicts 0."""
    return task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2


def infinite_risk(heads: Blocks, task: LinearRegression) -> Float[Array, ""]:
    r"""$R_\infty$ of a sum of heads, which predicts $\sum_hb_{hh}$."""
    Sigma, Omega, S = task.Sigma, task.Omega, task.query_Sigma

    def product(one: Blocks, other: Blocks) -> Float[Array, ""]:
        """E b_hh·b_gg."""
        return _product(task, one.P, one.R, one, other.P, other.R, other)

    def met(head: Blocks) -> Float[Array, ""]:
        """E b_hh·Wx."""
        labels = jnp.sum((head.P @ Sigma @ Omega @ S) * head.C)
        return labels + jnp.trace(head.R) * jnp.sum(Omega * (Sigma @ head.A @ S))

    squares, crossed = over_pairs(product)(heads, heads).sum(), jax.vmap(met)(heads).sum()
    return (squares - 2 * crossed) / 2 + of_predicting_zero(task)


def _product(task: LinearRegression, P, R, score: Blocks, P2, R2, score2: Blocks) -> Float[Array, ""]:
    r"""E b·b' of values (P, R) on the scores of one head and values (P', R') on those of another."""
    Sigma, Omega, S, rho2, label = task.Sigma, task.Omega, task.query_Sigma, task.rho2, task.noise + task.tau1
    A, C, A2, C2 = score.A, score.C, score2.A, score2.C
    K, RR = C @ S @ C2.T, R.T @ R2
    mean, mean2 = P @ Sigma @ A + label * R @ C, P2 @ Sigma @ A2 + label * R2 @ C2
    # E[(N − τ₁) B (N − τ₁)] = ρ₂ (Bᵀ + tr B)
    even = jnp.sum((mean @ S) * mean2) + rho2 * (jnp.sum(K * RR.T) + jnp.trace(K) * jnp.trace(RR))
    PSO, PSO2 = P @ Sigma @ Omega, P2 @ Sigma @ Omega
    odd = jnp.trace(K) * jnp.sum(PSO * (P2 @ Sigma)) + jnp.trace(RR) * jnp.sum((Omega @ Sigma @ A @ S) * (Sigma @ A2))
    mixed = jnp.sum((PSO @ Sigma @ A2 @ S) * (R2 @ C)) + jnp.sum((PSO2 @ Sigma @ A @ S) * (R @ C2))
    return even + odd + mixed


def _wishart(heads: Blocks, task: LinearRegression) -> Float[Array, ""]:
    """Σ E[b_hg·b_gh + ρ_hg a_hg]."""
    Sigma, Omega, S, s2, tau1, rho2 = task.Sigma, task.Omega, task.query_Sigma, task.noise, task.tau1, task.rho2

    def pair(one: Blocks, other: Blocks) -> Float[Array, ""]:
        K, RR = one.C @ S @ other.C.T, one.R.T @ other.R
        rho = jnp.sum((Sigma @ one.A @ S) * other.A) + (s2 + tau1) * jnp.trace(K)
        a = jnp.sum((one.P @ Sigma) * other.P) + (s2 + tau1) * jnp.trace(RR)
        # of tr(N B) tr(N B'), and of odd terms tr(WX) tr(WY), which have the mean tr XᵀΩY
        even = rho * a + rho2 * (jnp.sum(K * RR) + jnp.sum(K * RR.T))
        X = Sigma @ (one.A @ S @ other.C.T + other.A @ S @ one.C.T)
        odd = jnp.sum(X * (Omega @ Sigma @ (one.P.T @ other.R + other.P.T @ one.R)))
        return _product(task, one.P, one.R, other, other.P, other.R, one) + even + odd

    return over_pairs(pair)(heads, heads).sum()
