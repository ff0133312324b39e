import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._expectation import Expectation
from ._measure import AbstractMeasure, as_measure


class Affine(AbstractMeasure):
    r"""The law of $A s + b$ for $s\sim\mu$, $A$ tall or wide.

    $\Lambda(\theta) = b\cdot\theta + \Lambda_\mu(A^\top\theta)$.
    """

    A: Float[Array, "D m"]
    b: Float[Array, " D"]
    mu: AbstractMeasure

    def __init__(self, A: Numbers, b: Numbers, mu: AbstractMeasure):
        self.mu = as_measure("mu", mu)
        self.A = checks.matrix("A", A, None, mu.dim)
        self.b = checks.vector("b", b, self.A.shape[0])

    @property
    def dim(self) -> int:
        return self.A.shape[0]

    def _cgf(self, theta):
        return self.b @ theta + self.mu._cgf(self.A.T @ theta)

    def _tilt(self, theta):
        return eqx.tree_at(lambda nu: nu.mu, self, self.mu._tilt(self.A.T @ theta))

    def _mean(self):
        return self.A @ self.mu._mean() + self.b

    def _cov(self):
        return self.A @ self.mu._cov() @ self.A.T

    def _expectation(self, f, u, breaks):
        """⟨u, As + b⟩ is the score of s along Aᵀu, moved by ⟨u, b⟩."""
        shift = u @ self.b
        base = self.mu._expectation(lambda s: f(s + shift), self.A.T @ u, breaks - shift)
        moved = self.A @ base.times_z
        cross = jnp.outer(moved, self.b)
        second = self.A @ base.times_zz @ self.A.T + cross + cross.T + base.value * jnp.outer(self.b, self.b)
        return Expectation(base.value, moved + base.value * self.b, second, base.stderr)

    def _quartic(self, f, u, breaks, A, B):
        shift = u @ self.b
        top = jnp.concatenate([self.A, self.b[:, None]], axis=1)
        onto = jnp.concatenate([top, jnp.zeros_like(top[:1]).at[0, -1].set(1)])
        forms = (onto.T @ form @ onto for form in (A, B))
        return self.mu._quartic(lambda s: f(s + shift), self.A.T @ u, breaks - shift, *forms)

    def _averages_exactly(self):
        return self.mu._averages_exactly()

    def _sample(self, key: PRNGKeyArray, n: int):
        return self.mu._sample(key, n) @ self.A.T + self.b

    def _subgaussian(self):
        return jnp.linalg.norm(self.A, 2) * self.mu._subgaussian()

    def _radius(self):
        radius = self.mu._radius()
        reach = jnp.linalg.norm(self.A, 2)
        return jnp.where(reach == 0, 0.0, reach * radius) + jnp.linalg.norm(self.b)

    def _tails(self):
        tails = self.mu._tails()
        return None if tails is None else tuple(self.A @ Gamma @ self.A.T for Gamma in tails)
