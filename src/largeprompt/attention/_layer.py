import abc
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import BatchLike, Numbers, VectorLike
from largeprompt.measures import AbstractMeasure, as_measure
from largeprompt.measures._from_sampler import sampled_parts

Derivatives = TypeVar("Derivatives", bound=eqx.Module)


class AbstractLayer(AbstractShown, Generic[Derivatives]):
    """A map that sends a prompt, as a measure, and a query token to an output vector."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Dimension of a token."""

    @property
    @abc.abstractmethod
    def outputs(self) -> int:
        """Dimension of the output."""

    @abc.abstractmethod
    def _output(self, mu: AbstractMeasure, z: Float[Array, " D"]) -> Float[Array, " p"]: ...

    @abc.abstractmethod
    def _jacobian(self, mu: AbstractMeasure, z: Float[Array, " D"]) -> Derivatives: ...

    def __call__(self, mu: AbstractMeasure, z: VectorLike) -> Float[Array, " p"]:
        """The output T[μ](z)."""
        return checks.result("the output of attention", self._output(self._prompt(mu), self._query(z)))

    def jacobian(self, mu: AbstractMeasure, z: VectorLike) -> Derivatives:
        """The derivatives of the output in the layer's parameters and in the query, in closed form."""
        derivatives = self._jacobian(self._prompt(mu), self._query(z))
        return jax.tree.map(lambda leaf: checks.result("the Jacobian of attention", leaf), derivatives)

    def map(self, mu: AbstractMeasure, queries: BatchLike) -> Float[Array, "n p"]:
        """The outputs of many queries on one prompt, in memory that does not grow with prompt times queries."""
        queries = checks.matrix("queries", queries, None, self.dim)
        mu = self._prompt(mu)
        self._warn_of_few_tokens(mu, queries)
        return checks.result("the output of attention", map_queries(self, mu, queries))

    def _warn_of_few_tokens(self, mu: AbstractMeasure, queries: Float[Array, "n D"]) -> None:
        """Where many queries are taken at once, at the one farthest out: a law known by its sampler warns there."""
        if sampled_parts(mu) and not checks.is_traced(queries):
            self._output(mu, queries[jnp.argmax(jnp.linalg.norm(queries, axis=1))])

    def _prompt(self, mu: AbstractMeasure) -> AbstractMeasure:
        return as_measure("mu", mu, self.dim)

    def _query(self, z: Numbers) -> Float[Array, " D"]:
        if np.ndim(z) == 2:
            raise ValueError(f"z has shape {np.shape(z)}; it must be one query (for many, use map)")
        return checks.vector("z", z, self.dim)


_BATCH = 4096


@eqx.filter_jit
def map_queries(layer: AbstractLayer, mu: AbstractMeasure, queries: Float[Array, "n D"]) -> Float[Array, "n p"]:
    """The outputs of many queries, with nothing checked."""
    # in batches: a measure other than a long prompt holds something for each query of a batch
    return jax.lax.map(lambda z: layer._output(mu, z), queries, batch_size=_BATCH)
