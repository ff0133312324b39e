import equinox as eqx
import jax
from jaxtyping import Array, Float

from largeprompt.attention import AbstractLayer

from ._abstract import AbstractGaussianRisk, AbstractRisk, Replicates


class WithEmpty(AbstractRisk):
    """A risk over prompts of which some are empty, where no layer can predict more than 0.

    `share` is the probability of an empty prompt, `zero` the risk of predicting 0.
    """

    rest: AbstractGaussianRisk
    share: Float[Array, ""]
    zero: Float[Array, ""]
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return self.rest.method

    def value_and_gradient(self, layer):
        return self._both(self.rest.value_and_gradient(layer))

    def average(self, layer):
        found = self.rest.average(layer)
        return Replicates(found.size, self._risk(found.means))

    def average_with_gradient(self, layer):
        found = self.rest.average_with_gradient(layer)
        return Replicates(found.size, self._both(found.means))

    def estimate(self, layer):
        value, error = self.rest.estimate(layer)
        return self._risk(value), (1 - self.share) * error

    def pieces(self, draws):
        return (eqx.tree_at(lambda f: f.rest, self, piece) for piece in self.rest.pieces(draws))

    @property
    def may_mislead(self) -> bool:
        return self.rest.may_mislead

    @property
    def is_bounded(self) -> bool:
        return self.rest.is_bounded

    def is_outside(self, layer):
        return self.rest.is_outside(layer)

    def is_misled(self, layer):
        return self.rest.is_misled(layer)

    def without_control(self) -> "WithEmpty":
        return eqx.tree_at(lambda f: f.rest, self, self.rest.without_control())

    def _both(self, found: tuple[Array, AbstractLayer]) -> tuple[Array, AbstractLayer]:
        value, gradient = found
        return self._risk(value), jax.tree.map(lambda leaf: (1 - self.share) * leaf, gradient)

    def _risk(self, value: Array) -> Array:
        return self.share * self.zero + (1 - self.share) * value
