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

    def _average(self, parts):
        """Of one array for each component, their mean."""
        return _average(self.log_weights, list(parts))

    def _cgf(self, theta):
        return jax.nn.logsumexp(_log_masses(self.log_weights, [mu._cgf(theta) for mu in self.components]))

    def _tilt(self, theta):
        log_weights, largest = _normalised(self.log_weights, [mu._cgf(theta) for mu in self.components])
        # Only the largest must be finite: a component of weight zero has the log-mass -inf.
        checks.result("the tilt of a mixture", largest)
        tilted = tuple(mu._tilt(theta) for mu in self.components)
        return eqx.tree_at(lambda mu: (mu.log_weights, mu.components), self, (log_weights, tilted))

    def _means(self):
        return _of_held(self.log_weights, [mu._mean() for mu in self.components])

    def _mean(self):
        return self._average(mu._mean() for mu in self.components)

    def _cov(self):
        means, covs = zip(*((mu._mean(), mu._cov()) for mu in self.components), strict=True)
        return _covariance(self.log_weights, means, covs)

    def _fourth(self, b, A, B):
        means = self._means()
        shifts = b + means - jnp.exp(self.log_weights) @ means
        return self._average(mu._fourth(shift, A, B) for mu, shift in zip(self.components, shifts, strict=True))

    def _expectation(self, f, u, breaks):
        return weighted_sum(jnp.exp(self.log_weights), [mu._expectation(f, u, breaks) for mu in self.components])

    def _quartic(self, f, u, breaks, A, B):
        return self._average(mu._quartic(f, u, breaks, A, B) for mu in self.components)

    def _averages_exactly(self):
        return all(mu._averages_exactly() for mu in self.components)

    def _sample(self, key: PRNGKeyArray, n: int):
        label, *keys = _labels_and_keys(key, self.log_weights, n)
        return _chosen(label, [mu._sample(k, n) for mu, k in zip(self.components, keys, strict=True)])

    def _subgaussian(self):
        """σ² = the largest σ_k² of a component + that of the law of the component means."""
        spread = _of_held(self.log_weights, [mu._subgaussian() for mu in self.components]).max()
        return jnp.hypot(spread, enclosing_radius(self._means(), self._held()))

    def _radius(self):
        return _of_held(self.log_weights, [mu._radius() for mu in self.components]).max()

    def _tails(self):
        tails = [known for mu in self.components if (known := mu._tails()) is not None]
        if len(tails) < len(self.components):
            return None
        # those of no weight are zeroed, not left out: under tracing nobody knows which they are
        return _held_tails(self.log_weights, tails)


# Each of these is one program, not ten.
Parts = Sequence[Float[Array, "..."]]


@jax.jit
def _log_masses(log_weights: Float[Array, " k"], cgfs: Parts) -> Float[Array, " k"]:
    return jnp.where(log_weights > -jnp.inf, log_weights + jnp.stack(cgfs), -jnp.inf)


@jax.jit
def _normalised(log_weights: Float[Array, " k"], cgfs: Parts) -> tuple[Float[Array, " k"], Float[Array, ""]]:
    """The log-weights of the tilted components, and the largest of their log-masses."""
    log_masses = _log_masses(log_weights, cgfs)
    return jax.nn.log_softmax(log_masses), log_masses.max()


@jax.jit
def _of_held(log_weights: Float[Array, " k"], parts: Parts) -> Float[Array, "k ..."]:
    """What each component gives, 0 where it has no weight."""
    stacked = jnp.stack(parts)
    return jnp.where((log_weights > -jnp.inf).reshape(-1, *[1] * (stacked.ndim - 1)), stacked, 0)


@jax.jit
def _average(log_weights: Float[Array, " k"], parts: Parts) -> Float[Array, "..."]:
    return jnp.tensordot(jnp.exp(log_weights), _of_held(log_weights, parts), 1)


@jax.jit
def _covariance(log_weights: Float[Array, " k"], means: Parts, covs: Parts) -> Float[Array, "D D"]:
    weights, m = jnp.exp(log_weights), _of_held(log_weights, means)
    # Centred before squaring: a far tilt leaves means of size 1e6 and covariances of size 1.
    between = m - weights @ m
    return _average(log_weights, covs) + jnp.einsum("k,ki,kj->ij", weights, between, between)


@jax.jit
def _held_tails(log_weights: Float[Array, " k"], tails: Sequence[Parts]) -> tuple[Float[Array, "D D"], ...]:
    held = log_weights > -jnp.inf
    return tuple(jnp.where(held[k], Gamma, 0) for k, of_component in enumerate(tails) for Gamma in of_component)


@functools.partial(jax.jit, static_argnums=2)
def _labels_and_keys(key: PRNGKeyArray, log_weights: Float[Array, " k"], n: int) -> tuple[Array, ...]:
    """Which component each of n tokens is of, and a key for each component."""
    choice, *keys = jax.random.split(key, 1 + len(log_weights))
    return jax.random.categorical(choice, log_weights, shape=(n,)), *keys


@jax.jit
def _chosen(label: Int[Array, " n"], draws: Parts) -> Float[Array, "n D"]:
    return jnp.stack(draws)[label, jnp.arange(len(label))]
