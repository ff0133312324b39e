import itertools
import math
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ._empirical import Empirical
from ._gaussian import Gaussian
from ._measure import AbstractMeasure, as_measure

Tree = TypeVar("Tree")
_COMBINED = 4096  # combinations of atoms that are gone through


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

    def _atoms(self):
        return self._finite_part() if all(not isinstance(mu, Gaussian) for mu in self.factors) else None

    def _finite_part(self) -> Empirical | None:
        """All combinations of atoms and of the means of Gaussian factors; None where they are too many."""
        parts = [Empirical(mu.m[None]) if isinstance(mu, Gaussian) else mu._atoms() for mu in self.factors]
        known = [part for part in parts if isinstance(part, Empirical)]
        if len(known) < len(parts) or math.prod(part.size for part in known) > _COMBINED:
            return None
        which = jnp.meshgrid(*[jnp.arange(part.size) for part in known], indexing="ij")
        points = [part.points[index.ravel()] for part, index in zip(known, which, strict=True)]
        logs = [part.log_masses()[index.ravel()] for part, index in zip(known, which, strict=True)]
        return Empirical.from_log_weights(jnp.concatenate(points, axis=1), jnp.stack(logs).sum(axis=0))

    def _given_atoms(self, average: Callable[[Gaussian], Tree], finite: Empirical) -> Tree:
        """The average of what Gaussians give, one about each combination of atoms, with one covariance for all."""
        spread = [mu.Gamma if isinstance(mu, Gaussian) else jnp.zeros((mu.dim, mu.dim)) for mu in self.factors]
        some = Gaussian(finite.points[0], jax.scipy.linalg.block_diag(*spread))
        parts = jax.vmap(lambda m: average(eqx.tree_at(lambda mu: mu.m, some, m)))(finite.points)
        return jax.tree.map(lambda part: jnp.tensordot(jnp.exp(finite.log_masses()), part, 1), parts)

    def _expectation(self, f, u, breaks):
        if self._atoms() is None and (finite := self._finite_part()) is not None:
            return self._given_atoms(lambda mu: mu._expectation(f, u, breaks), finite)
        return super()._expectation(f, u, breaks)

    def _quartic(self, f, u, breaks, A, B):
        if self._atoms() is None and (finite := self._finite_part()) is not None:
            return self._given_atoms(lambda mu: mu._quartic(f, u, breaks, A, B), finite)
        return super()._quartic(f, u, breaks, A, B)

    def _averages_exactly(self):
        return self._finite_part() is not None

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
