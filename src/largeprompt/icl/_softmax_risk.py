r"""The risk of softmax attention at finite length on Gaussian regression: no prompt is ever sampled.

Given $(W, x)$ the tokens are Gaussian, so that the first two moments of the output are known functions of
$\nu = u^\top\Gamma_Wu$ and $L$ (`WeightMoments`): with $b = V\Gamma_Wu$, $a = \mathrm{tr}\,V\Gamma_WV^\top$, $t = Wx$,

$$2R_L = E\big[\|b\|^2K_2(\nu) + aQ(\nu) - 2(1-Q(\nu))\,b\cdot t + \|t\|^2\big] + ks^2,$$

and only the average over $(W, x)$ remains. The same with $K_2 = 1$, $Q = 0$ is $R_\infty$, known in closed form: it serves
as a control variate of weight $\theta$, 1 for long prompts, where the nodes then carry only the gap of order $1/L$, and 0
where the heavy tails of $\|b\|^2$ make it harmful.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.attention import WeightMoments

from ._closed_forms import Blocks, gaussian_risk
from ._nodes import Nodes
from ._regression import LinearRegression


def softmax_risk(
    parts: Blocks, task: LinearRegression, moments: WeightMoments, nodes: Nodes, theta: Float[Array, ""]
) -> Float[Array, " r"]:
    """R_L, averaged over each replicate of the nodes."""

    def of_replicate(x, W):
        return (_sampled_part(parts, task, moments, theta, x, W) + _sampled_part(parts, task, moments, theta, x, -W)) / 2

    return jax.vmap(of_replicate)(nodes.x, nodes.W) + exact_part(parts, task, theta)


def aligned_softmax_risk(
    parts: Blocks, task: LinearRegression, moments: WeightMoments, x: Float[Array, "r n d"], theta: Float[Array, ""]
) -> Float[Array, " r"]:
    r"""The same for $P = C = 0$, where $\nu = x^\top A^\top\Sigma Ax$ and the average over $W$ is taken in closed form."""
    A, _, _, R = parts
    a = jnp.sum(R**2) * (task.tau1 + task.noise)

    def of_replicate(x):
        h = x @ (task.Sigma @ A).T
        hO = h @ task.Omega
        square, cross = jnp.sum(R**2) * jnp.sum(hO * h, axis=1), jnp.trace(R) * jnp.sum(hO * x, axis=1)
        return _mean(moments, theta, jnp.sum((x @ A.T) * h, axis=1), a, square, cross)

    return jax.vmap(of_replicate)(x) + exact_part(parts, task, theta)


def exact_part(parts: Blocks, task: LinearRegression, theta: Float[Array, ""]) -> Float[Array, ""]:
    """What the nodes do not carry: the risk of predicting 0, and θ times what R_∞ is off it."""
    base = task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2
    return base + theta * (gaussian_risk(parts, task, jnp.inf) - base)


def _sampled_part(parts: Blocks, task: LinearRegression, moments: WeightMoments, theta, x, W) -> Float[Array, ""]:
    A, C, P, R = parts
    Sigma, s2 = task.Sigma, task.noise
    u, labels = x @ A.T, x @ C.T
    covariates = (u + jnp.einsum("nkd,nk->nd", W, labels)) @ Sigma  # the two blocks of Γ_W u
    outputs = jnp.einsum("nkd,nd->nk", W, covariates) + s2 * labels
    nu = jnp.sum(u * covariates, axis=1) + jnp.sum(labels * outputs, axis=1)
    b = covariates @ P.T + outputs @ R.T
    rows = P + R @ W  # V in the coordinates of (x, η)
    a = jnp.sum((rows @ Sigma) * rows, axis=(1, 2)) + s2 * jnp.sum(R**2)
    t = jnp.einsum("nkd,nd->nk", W, x)
    return _mean(moments, theta, nu, a, jnp.sum(b**2, axis=1), jnp.sum(b * t, axis=1))


def _mean(moments: WeightMoments, theta, nu, a, square, cross) -> Float[Array, ""]:
    Q, rest = moments.losses(nu)
    return jnp.mean(a * Q + square * ((1 - theta) - rest) - 2 * cross * ((1 - theta) - Q)) / 2
