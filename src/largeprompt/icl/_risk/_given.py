"""What heads read off a Gaussian prompt whose coefficients W and query x are given, one of each per node."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._blocks import Blocks
from .._regression import LinearRegression
from ._nodes import Nodes

Token = tuple[Float[Array, "d n"], Float[Array, "k n"]]


class Given(NamedTuple):
    """Tokens N(0, Γ) with the coefficients ±W of the nodes."""

    WS: Float[Array, "k d n"]
    N: Float[Array, "k k n"]
    x: Float[Array, "d n"]
    t: Float[Array, "k n"]
    task: LinearRegression

    @classmethod
    def of(cls, nodes: Nodes, task: LinearRegression, sign: int | Float[Array, ""]) -> "Given":
        """Those of one replicate."""
        return cls(sign * nodes.WS, nodes.N, nodes.x, sign * jnp.sum(nodes.W * nodes.x, axis=1), task)

    def scores(self, parts: Blocks) -> tuple[Token, Token]:
        """u and Γu of a head, each as covariates and labels."""
        u, labels = parts.A @ self.x, parts.C @ self.x
        across, up = jnp.sum(self.WS * labels[:, None], axis=0), jnp.sum(self.WS * u, axis=1)
        noise = self.task.noise * labels
        return (u, labels), (self.task.Sigma @ u + across, up + jnp.sum(self.N * labels, axis=1) + noise)

    def values(self, one: Blocks, other: Blocks) -> Float[Array, " n"]:
        """tr VΓV'ᵀ."""
        PP, RR = jnp.sum((one.P @ self.task.Sigma) * other.P), one.R.T @ other.R
        mixed = jnp.sum(self.WS * (other.R.T @ one.P + one.R.T @ other.P)[..., None], axis=(0, 1))
        return PP + mixed + jnp.sum(self.N * RR[..., None], axis=(0, 1)) + self.task.noise * jnp.trace(RR)


def dot(a: Token, b: Token) -> Float[Array, " n"]:
    """The inner product of two tokens."""
    return jnp.sum(a[0] * b[0], axis=0) + jnp.sum(a[1] * b[1], axis=0)


def read(parts: Blocks, m: Token) -> Float[Array, "k n"]:
    """V m."""
    return parts.P @ m[0] + parts.R @ m[1]
