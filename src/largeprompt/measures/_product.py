import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ._measure import AbstractMeasure, as_measure


class Product(AbstractMeasure):
    r"""$\mu\otimes\nu\otimes\cdots$, tokens made of independent blocks.

    $\Lambda(\theta) = \sum_i \Lambda_i(\theta_i)$.
    """

    factors: tuple[AbstractMeasure, ...]

    def __init__(self, *factors: AbstractMeasure):
        if not factors:
            raise ValueError("Product() has no factors; it needs at least one measure")
        self.factors = tuple(as_measure(f"factor {i}", mu) for i, mu in enumerate(factors))

    @property
    def dim(self) -> int:
        return sum(mu.dim for mu in self.factors)

    def _blocks(self, theta):
        ends = [sum(mu.dim for mu in self.factors[: i + 1]) for i in range(len(self.factors))]
        return jnp.split(theta, ends[:-1])

    def _cgf(self, theta):
        return sum(
            (mu._cgf(block) for mu, block in zip(self.factors, self._blocks(theta), strict=True)),
            start=jnp.zeros((), theta.dtype),
        )

    def _tilt(self, theta):
        tilted = tuple(mu._tilt(block) for mu, block in zip(self.factors, self._blocks(theta), strict=True))
        return eqx.tree_at(lambda mu: mu.factors, self, tilted)

    def _mean(self):
        return jnp.concatenate([mu._mean() for mu in self.factors])

    def _cov(self):
        return jax.scipy.linalg.block_diag(*[mu._cov() for mu in self.factors])

    def _sample(self, key: PRNGKeyArray, n: int):
        keys = jax.random.split(key, len(self.factors))
        return jnp.concatenate([mu._sample(k, n) for mu, k in zip(self.factors, keys, strict=True)], axis=1)

    def _subgaussian(self):
        return jnp.stack([mu._subgaussian() for mu in self.factors]).max()

    def _radius(self):
        return jnp.linalg.norm(jnp.stack([mu._radius() for mu in self.factors]))

    def _tails(self):
        tails = [known for mu in self.factors if (known := mu._tails()) is not None]
        if len(tails) < len(self.factors):
            return None
        return tuple(jax.scipy.linalg.block_diag(*blocks) for blocks in itertools.product(*tails))
