r"""The risk of softmax attention at finite length on Gaussian regression: no prompt is ever sampled.

Given $(W, x)$ the tokens are Gaussian, so that the first two moments of the output are known functions of
$\nu = u^\top\Gamma_Wu$ and $L$ (`WeightMoments`): with $b = V\Gamma_Wu$, $a = \mathrm{tr}\,V\Gamma_WV^\top$, $t = Wx$,

$$2R_L = E\big[\|b\|^2K_2(\nu) + aQ(\nu) - 2(1-Q(\nu))\,b\cdot t + \|t\|^2\big] + ks^2,$$

and only the average over $(W, x)$ remains. The same with $K_2 = 1$, $Q = 0$ is $R_\infty$, known in closed form: it
serves as a control variate of weight $\theta$, 1 for long prompts, where the nodes then carry only the gap of order
$1/L$, and 0 where the heavy tails of $\|b\|^2$ make it harmful.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.attention import WeightMoments

from ._closed_forms import Blocks, gaussian_risk
from ._nodes import Nodes
from ._regression import LinearRegression


def softmax_risk(
    parts: Blocks, task: LinearRegression, moments: WeightMoments, nodes: Nodes, theta: Float[Array, ""]
) -> Float[Array, " r"]:
    """R_L, averaged over each replicate of the nodes and over ±W."""
    A, C, P, R = parts
    Sigma, s2, W, WS, N = task.Sigma, task.noise, nodes.W, nodes.WS, nodes.N
    u, labels = A @ nodes.x, C @ nodes.x
    h = Sigma @ u
    WSu, Nl = jnp.sum(WS * u, axis=1), jnp.sum(N * labels, axis=1) + s2 * labels
    # every quantity is an even part in W, plus or minus an odd one
    nu = jnp.sum(u * h, axis=0) + jnp.sum(labels * Nl, axis=0), 2 * jnp.sum(labels * WSu, axis=0)
    b = P @ h + R @ Nl, P @ jnp.sum(WS * labels[:, None], axis=0) + R @ WSu
    a = (
        jnp.sum((P @ Sigma) * P) + s2 * jnp.sum(R**2) + jnp.sum(N * (R.T @ R)[..., None], axis=(0, 1)),
        2 * jnp.sum(WS * (R.T @ P)[..., None], axis=(0, 1)),
    )
    t = jnp.sum(W * nodes.x, axis=1)

    # both signs along one axis: half the code to compile of two calls
    sign = jnp.array([[1.0], [-1.0]], t.dtype)
    signed = b[0][:, None] + sign * b[1][:, None]
    square, cross = jnp.sum(signed**2, axis=0), sign * jnp.sum(signed * t[:, None], axis=0)
    integrand = _integrand(moments, theta, nu[0] + sign * nu[1], a[0] + sign * a[1], square, cross)
    return nodes.means(integrand.mean(axis=0)) + exact_part(parts, task, theta)


def aligned_softmax_risk(
    parts: Blocks, task: LinearRegression, moments: WeightMoments, nodes: Nodes, theta: Float[Array, ""]
) -> Float[Array, " r"]:
    r"""The same for $P = C = 0$, where $\nu = x^\top A^\top\Sigma Ax$ and the average over $W$ is closed."""
    A, _, _, R = parts
    u = A @ nodes.x
    h = task.Sigma @ u
    Oh = task.Omega @ h
    square, cross = jnp.sum(R**2) * jnp.sum(Oh * h, axis=0), jnp.trace(R) * jnp.sum(Oh * nodes.x, axis=0)
    a = jnp.sum(R**2) * (task.tau1 + task.noise)
    integrand = _integrand(moments, theta, jnp.sum(u * h, axis=0), a, square, cross)
    return nodes.means(integrand) + exact_part(parts, task, theta)


def exact_part(parts: Blocks, task: LinearRegression, theta: Float[Array, ""]) -> Float[Array, ""]:
    """What the nodes do not carry: the risk of predicting 0, and θ times what R_∞ is off it."""
    base = task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2
    return base + theta * (gaussian_risk(parts, task, jnp.inf) - base)


def _integrand(moments: WeightMoments, theta, nu, a, square, cross) -> Float[Array, "*signs n"]:
    Q, unheld, K2, lost = moments.shares(nu)
    # (1−θ) − lost and (1−θ) − Q, without cancellation at either θ
    return (a * Q + square * ((1 - theta) * K2 - theta * lost) - 2 * cross * ((1 - theta) * unheld - theta * Q)) / 2
