import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import is_known
from largeprompt._typing import Numbers

from ._empirical import enclosing_radius
from ._expectation import weighted_sum
from ._measure import AbstractMeasure, as_measure


class Mixture(AbstractMeasure):
    r"""$\sum_k \pi_k\mu_k$ of measures of any kinds: $\Lambda(\theta) = \log\sum_k \pi_k e^{\Lambda_k(\theta)}$.

    Its tilt is a mixture again, of the tilted components, with weights $\pi_k e^{\Lambda_k(\theta)-\Lambda(\theta)}$.
    """

    log_weights: Float[Array, " k"]
    components: tuple[AbstractMeasure, ...]

    def __init__(self, weights: Numbers, components: Sequence[AbstractMeasure]):
        if isinstance(components, AbstractMeasure):
            raise ValueError(f"components is one {type(components).__name__}; it must be a list of measures")
        self.components = tuple(as_measure(f"components[{k}]", mu) for k, mu in enumerate(components))
        dims = [mu.dim for mu in self.components]
        if len(set(dims)) != 1:
            raise ValueError(f"components have dimensions {dims}; there must be at least one, all of one dimension")
        self.log_weights = checks.probabilities("weights", weights, len(dims))

    @property
    def dim(self) -> int:
        return self.components[0].dim

    def _shown(self):
        weights = jnp.exp(self.log_weights) if is_known(self.log_weights) else self.log_weights
        return {"weights": weights, "components": self.components}

    def _held(self):
        """Which components have any weight: one without must not count, whatever its numbers overflow to."""
        return self.log_weights > -jnp.inf

    def _log_masses(self, theta):
        masses = self.log_weights + jnp.stack([mu._cgf(theta) for mu in self.components])
        return jnp.where(self._held(), masses, -jnp.inf)

    def _cgf(self, theta):
        return jax.nn.logsumexp(self._log_masses(theta))

    def _tilt(self, theta):
        log_masses = self._log_masses(theta)
        # Only the largest must be finite: a component of weight zero has the log-mass -inf.
        checks.result("the tilt of a mixture", log_masses.max())
        tilted = tuple(mu._tilt(theta) for mu in self.components)
        return eqx.tree_at(lambda mu: (mu.log_weights, mu.components), self, (jax.nn.log_softmax(log_masses), tilted))

    def _means(self):
        return jnp.where(self._held()[:, None], jnp.stack([mu._mean() for mu in self.components]), 0)

    def _mean(self):
        return jnp.exp(self.log_weights) @ self._means()

    def _cov(self):
        weights, means = jnp.exp(self.log_weights), self._means()
        covs = jnp.where(self._held()[:, None, None], jnp.stack([mu._cov() for mu in self.components]), 0)
        within = jnp.einsum("k,kij->ij", weights, covs)
        # Centred before squaring: a far tilt leaves means of size 1e6 and covariances of size 1.
        between = means - weights @ means
        return within + jnp.einsum("k,ki,kj->ij", weights, between, between)

    def _fourth(self, b, A, B):
        means = self._means()
        shifts = b + means - jnp.exp(self.log_weights) @ means
        parts = jnp.stack([mu._fourth(shift, A, B) for mu, shift in zip(self.components, shifts, strict=True)])
        return jnp.exp(self.log_weights) @ jnp.where(self._held(), parts, 0)

    def _expectation(self, f, u, breaks):
        return weighted_sum(jnp.exp(self.log_weights), [mu._expectation(f, u, breaks) for mu in self.components])

    def _quartic(self, f, u, breaks, A, B):
        parts = jnp.stack([mu._quartic(f, u, breaks, A, B) for mu in self.components])
        return jnp.exp(self.log_weights) @ jnp.where(self._held(), parts, 0)

    def _averages_exactly(self):
        return all(mu._averages_exactly() for mu in self.components)

    def _sample(self, key: PRNGKeyArray, n: int):
        choice, *keys = jax.random.split(key, 1 + len(self.components))
        label = _labels(choice, self.log_weights, n)
        draws = jnp.stack([mu._sample(k, n) for mu, k in zip(self.components, keys, strict=True)])
        return draws[label, jnp.arange(n)]

    def _subgaussian(self):
        """σ² = the largest σ_k² of a component + that of the law of the component means."""
        spread = jnp.where(self._held(), jnp.stack([mu._subgaussian() for mu in self.components]), 0).max()
        return jnp.hypot(spread, enclosing_radius(self._means(), self._held()))

    def _radius(self):
        return jnp.where(self._held(), jnp.stack([mu._radius() for mu in self.components]), 0).max()

    def _tails(self):
        tails = [known for mu in self.components if (known := mu._tails()) is not None]
        if len(tails) < len(self.components):
            return None
        # those of no weight are zeroed, not left out: under tracing nobody knows which they are
        return tuple(
            jnp.where(held, Gamma, 0)
            for held, of_component in zip(self._held(), tails, strict=True)
            for Gamma in of_component
        )


@functools.partial(jax.jit, static_argnums=2)  # one program, not ten
def _labels(key: PRNGKeyArray, log_weights: Float[Array, " k"], n: int) -> Int[Array, " n"]:
    return jax.random.categorical(key, log_weights, shape=(n,))
