import abc
import functools
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from largeprompt._compiled import optimised_jit
from largeprompt.attention import AbstractLayer, merged_form

from .._blocks import Blocks, blocks
from .._regression import LinearRegression


class Moments(NamedTuple):
    """The mean of independent terms, trees of arrays, and the sum of their squared deviations from it."""

    size: Array
    mean: Any
    squares: Any

    def merged(self, other: "Moments") -> "Moments":
        """The moments of both sets of terms together."""
        # of the parts' means and squared deviations, so that a large mean does not drown a small spread
        m, n = self.size, other.size
        off = jax.tree.map(jnp.subtract, other.mean, self.mean)
        squares = jax.tree.map(lambda a, b, off: a + b + off**2 * (m * n / (m + n)), self.squares, other.squares, off)
        return Moments(m + n, jax.tree.map(lambda mean, off: mean + off * (n / (m + n)), self.mean, off), squares)

    def finished(self) -> tuple[Any, Any]:
        """The mean and its standard error."""
        n = self.size
        return self.mean, jax.tree.map(lambda total: jnp.sqrt(total / jnp.maximum(n - 1, 1) / n), self.squares)


class Replicates(NamedTuple):
    """Means over independent replicates of a set of nodes, along the first axis; a single one is exact."""

    size: Array
    means: Any

    def merged(self, other: "Replicates") -> "Replicates":
        """The means over the nodes of both."""
        m, n = self.size, other.size
        return Replicates(m + n, jax.tree.map(lambda a, b: (m * a + n * b) / (m + n), self.means, other.means))

    def finished(self) -> tuple[Any, Any]:
        """The mean and its standard error."""
        error = jax.tree.map(lambda x: _spread(x) / math.sqrt(x.shape[0]), self.means)
        return jax.tree.map(lambda x: x.mean(axis=0), self.means), error


def _spread(x: Float[Array, "r *shape"]) -> Float[Array, "*shape"]:
    """The standard deviation along the first axis, of numbers whose squares may overflow; 0 for a single number."""
    if x.shape[0] == 1:
        return jnp.zeros_like(x[0])
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=0), jnp.finfo(x.dtype).tiny)
    return (x / scale).std(axis=0, ddof=1) * scale


class AbstractRisk(eqx.Module):
    """The risk of layers of one sort on one task at one prompt length, set up once to be evaluated again and again.

    `method` says how the average over prompts, queries and coefficients is taken, `reason` why it is taken so.
    """

    reason: eqx.AbstractVar[str]
    exact: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def method(self) -> str:
        """How the average is taken."""

    @property
    def streamed(self) -> bool:
        """Whether an evaluation already fills the memory that it should, so that several go one after another."""
        return False

    @abc.abstractmethod
    def value_and_gradient(self, layer: AbstractLayer) -> tuple[Float[Array, ""], AbstractLayer]:
        """The risk, and its gradient in the shape of the layer."""

    @abc.abstractmethod
    def average(self, layer: AbstractLayer) -> Moments | Replicates:
        """The average that is the risk."""

    @abc.abstractmethod
    def average_with_gradient(self, layer: AbstractLayer) -> Moments | Replicates:
        """The average that is the pair of the risk and its gradient, in the shape of the layer."""

    def gradient_average(self, layer: AbstractLayer) -> Moments | Replicates:
        """The average that is the gradient."""
        both = self.average_with_gradient(layer)
        return type(both)(both.size, *(gradient for _, gradient in both[1:]))

    def value_and_error(self, layer: AbstractLayer) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The risk and its standard error."""
        return self.average(layer).finished()

    def gradient_and_error(self, layer: AbstractLayer) -> tuple[AbstractLayer, AbstractLayer]:
        """The gradient and the standard error of each entry."""
        return self.gradient_average(layer).finished()

    def estimate(self, layer: AbstractLayer) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The risk and its standard error, from pieces."""
        return pooled(self, layer, "average")

    def pieces(self, draws: int) -> "Iterable[AbstractRisk]":
        """Averages over `draws` draws each, a power of two, that make up this one."""
        return [self]

    @property
    def may_mislead(self) -> bool:
        """Whether a control variate may carry the average below the risk, as it has no floor then."""
        return False

    @property
    def is_bounded(self) -> bool:
        """Whether the function holds of some layers only, as it reads a table that ends."""
        return False

    def is_outside(self, layer: AbstractLayer) -> Bool[Array, ""]:
        """Whether a layer lies where the function does not hold."""
        return jnp.zeros((), bool)

    def is_misled(self, layer: AbstractLayer) -> Bool[Array, ""]:
        """Whether a control variate does so at a layer."""
        return jnp.zeros((), bool)

    def without_control(self) -> "AbstractRisk":
        """The same average with no control variate: of mean squares, so that it is never below 0."""
        return self


class AbstractGaussianRisk(AbstractRisk):
    """A risk on Gaussian regression, which sees a layer through the blocks of its heads."""

    task: eqx.AbstractVar[LinearRegression]
    exact: ClassVar[bool] = True

    @abc.abstractmethod
    def of_layer(self, layer: AbstractLayer) -> Float[Array, " r"]:
        """The risk over each replicate of the nodes; a single number where it is exact."""

    def value_and_gradient(self, layer):
        return eqx.filter_value_and_grad(lambda layer: self.of_layer(layer).mean())(layer)

    def average(self, layer) -> Replicates:
        return Replicates(jnp.ones(()), self.of_layer(layer))

    def average_with_gradient(self, layer) -> Replicates:
        return Replicates(jnp.ones(()), jax.tree.map(lambda leaf: leaf[None], self.value_and_gradient(layer)))


class AbstractHeadRisk(AbstractGaussianRisk):
    """The same for layers of one head."""

    @abc.abstractmethod
    def of_blocks(self, parts: Blocks) -> Float[Array, " r"]:
        """The risk of a layer with these blocks."""

    def of_layer(self, layer):
        return self.of_blocks(blocks(merged_form(layer), self.task))


PIECE = 2**12  # draws


def pooled(
    function: AbstractRisk, layer: AbstractLayer, average: str = "average", draws: int = PIECE, *, few: bool = False
) -> tuple[Any, Any]:
    """An average of a risk, named by its method, with standard errors.

    From pieces all of one shape: JAX compiles once for all sizes. An average over `few` draws, asked for once, is
    compiled quickly, as formulas are.
    """
    parts = (_average(piece, layer, average, few) for piece in function.pieces(draws))
    return _finished(functools.reduce(_merged, parts))


def is_formula(function: AbstractRisk, *_: Any) -> bool:
    """Whether a risk is a formula: evaluating it takes less time than optimising a program for it."""
    return function.exact


@functools.partial(optimised_jit, unless=lambda function, layer, average, few: few or is_formula(function))
def _average(function: AbstractRisk, layer: AbstractLayer, average: str, few: bool):
    return getattr(function, average)(layer)


@eqx.filter_jit
def _merged(first, second):
    return first.merged(second)


@eqx.filter_jit
def _finished(total):
    return total.finished()
