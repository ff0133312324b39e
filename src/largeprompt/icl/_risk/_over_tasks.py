r"""Risks on finitely many tasks: given $W$ the tokens are Gaussian, so that a mean over the tasks is all that is left.

With $G = V\Gamma_WU$ on the query's covariates, $a = \mathrm{tr}\,V\Gamma_WV^\top$ and $\nu = E\,u^\top\Gamma_Wu$,
$2R_L(W) = \mathrm{tr}\,(G-W)\Sigma_q(G-W)^\top + s^2 + (a\nu + \mathrm{tr}\,G\Sigma_qG^\top)/L$.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._blocks import Blocks
from .._regression import LinearRegression
from ._abstract import AbstractHeadRisk


class OverTasks(AbstractHeadRisk):
    """Linear attention at any length and softmax attention at infinite length, averaged over a list of tasks."""

    task: LinearRegression
    tasks: Float[Array, "m d"]
    L: Float[Array, ""]
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return "closed form"

    def of_blocks(self, parts):
        return jax.lax.map(lambda w: _risk(parts, self.task, w[None], self.L), self.tasks, batch_size=256).mean()[None]


def _risk(parts: Blocks, task: LinearRegression, W: Float[Array, "1 d"], L: Float[Array, ""]) -> Float[Array, ""]:
    Gamma, S = task.token_covariance(W), task.query_Sigma
    V, U = jnp.concatenate([parts.P, parts.R], axis=1), jnp.concatenate([parts.A, parts.C])
    G = V @ Gamma @ U
    a, nu = jnp.sum((V @ Gamma) * V), jnp.sum((Gamma @ U @ S) * U)
    off = G - W
    return (jnp.sum((off @ S) * off) + task.noise + (a * nu + jnp.sum((G @ S) * G)) / L) / 2
