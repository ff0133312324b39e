import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._empirical import Empirical
from ._measure import AbstractMeasure


class Perturbed(AbstractMeasure):
    r"""$(1-\varepsilon)\mu + \varepsilon\delta_z$, smooth in $\varepsilon$ at 0: its derivatives there are influences.

    A `Mixture` keeps logarithms of weights, which have no derivative at a weight of 0.
    """

    mu: AbstractMeasure
    token: Float[Array, " D"]
    weight: Float[Array, ""]

    @property
    def dim(self) -> int:
        return self.mu.dim

    def _ratio(self, theta):
        """The mass that a tilt gives to the token, as a multiple of that which it gives to μ, less 1."""
        return jnp.expm1(self.token @ theta - self.mu._cgf(theta))

    def _cgf(self, theta):
        return self.mu._cgf(theta) + jnp.log1p(self.weight * self._ratio(theta))

    def _tilt(self, theta):
        ratio = self._ratio(theta)
        weight = self.weight * (1 + ratio) / (1 + self.weight * ratio)
        return eqx.tree_at(lambda nu: (nu.mu, nu.weight), self, (self.mu._tilt(theta), weight))

    def _mean(self):
        mean = self.mu._mean()
        return mean + self.weight * (self.token - mean)

    def _cov(self):
        away = self.token - self.mu._mean()
        return (1 - self.weight) * (self.mu._cov() + self.weight * jnp.outer(away, away))

    def _expectation(self, f, u, breaks):
        atom = Empirical(self.token[None])._expectation(f, u, breaks)
        return jax.tree.map(lambda x, y: x + self.weight * (y - x), self.mu._expectation(f, u, breaks), atom)

    def _quartic(self, f, u, breaks, A, B):
        atom = Empirical(self.token[None])._quartic(f, u, breaks, A, B)
        return (1 - self.weight) * self.mu._quartic(f, u, breaks, A, B) + self.weight * atom

    def _averages_exactly(self):
        return self.mu._averages_exactly()

    def _sample(self, key: PRNGKeyArray, n: int):
        choice, draw = jax.random.split(key)
        chosen = jax.random.bernoulli(choice, self.weight, (n, 1))
        return jnp.where(chosen, self.token, self.mu._sample(draw, n))

    def _subgaussian(self):
        return jnp.hypot(self.mu._subgaussian(), jnp.linalg.norm(self.token - self.mu._mean()) / 2)
