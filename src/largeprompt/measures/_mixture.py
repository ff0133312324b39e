from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._empirical import Empirical
from ._measure import AbstractMeasure


class Mixture(AbstractMeasure):
    r"""$\sum_k \pi_k\mu_k$ of measures of any kinds: $\Lambda(\theta) = \log\sum_k \pi_k e^{\Lambda_k(\theta)}$.

    Its tilt is a mixture again, of the tilted components, with weights $\pi_k e^{\Lambda_k(\theta)-\Lambda(\theta)}$.
    """

    log_weights: Float[Array, " k"]
    components: tuple[AbstractMeasure, ...]

    def __init__(self, weights: Numbers, components: Sequence[AbstractMeasure]):
        self.components = tuple(components)
        for k, mu in enumerate(self.components):
            if not isinstance(mu, AbstractMeasure):
                raise ValueError(f"components[{k}] is a {type(mu).__name__}; it must be a measure")
        dims = [mu.dim for mu in self.components]
        if len(set(dims)) != 1:
            raise ValueError(f"components have dimensions {dims}; there must be at least one, all of one dimension")
        self.log_weights = checks.probabilities("weights", weights, len(dims))

    @property
    def dim(self) -> int:
        return self.components[0].dim

    def _log_masses(self, theta):
        return self.log_weights + jnp.stack([mu._cgf(theta) for mu in self.components])

    def _cgf(self, theta):
        return jax.nn.logsumexp(self._log_masses(theta))

    def _tilt(self, theta):
        log_masses = self._log_masses(theta)
        # Only the largest must be finite: a component of weight zero has the log-mass -inf.
        checks.result("the tilt of a mixture", log_masses.max())
        tilted = tuple(mu._tilt(theta) for mu in self.components)
        return eqx.tree_at(lambda mu: (mu.log_weights, mu.components), self, (jax.nn.log_softmax(log_masses), tilted))

    def _means(self):
        return jnp.stack([mu._mean() for mu in self.components])

    def _mean(self):
        return jnp.exp(self.log_weights) @ self._means()

    def _cov(self):
        weights, means = jnp.exp(self.log_weights), self._means()
        within = jnp.einsum("k,kij->ij", weights, jnp.stack([mu._cov() for mu in self.components]))
        # Centred before squaring: a far tilt leaves means of size 1e6 and covariances of size 1.
        between = means - weights @ means
        return within + jnp.einsum("k,ki,kj->ij", weights, between, between)

    def _sample(self, key: PRNGKeyArray, n: int):
        choice, *keys = jax.random.split(key, 1 + len(self.components))
        label = jax.random.categorical(choice, self.log_weights, shape=(n,))
        draws = jnp.stack([mu._sample(k, n) for mu, k in zip(self.components, keys, strict=True)])
        return draws[label, jnp.arange(n)]

    def subgaussian(self):
        """σ² = the largest σ_k² of a component + that of the law of the component means."""
        spread = jnp.stack([mu.subgaussian() for mu in self.components])
        spread = jnp.where(self.log_weights > -jnp.inf, spread, 0).max()
        return jnp.hypot(spread, Empirical(self._means(), jnp.exp(self.log_weights)).subgaussian())
