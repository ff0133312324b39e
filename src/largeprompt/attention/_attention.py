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


class Jacobian(AbstractShown):
    """Derivatives of the output: `U[i]` is ∂T_i/∂U, `V[i]` is ∂T_i/∂V, `z[i]` is ∂T_i/∂z."""

    U: Float[Array, "p D D"]
    V: Float[Array, "p p D"]
    z: Float[Array, "p D"]


class AbstractAttention(AbstractLayer[Jacobian]):
    r"""Attention in its (U, V) form: $T[\mu](z) = V\,m$, where the layer reads $m$ off the prompt along $u = Uz$.

    With $H = \partial m/\partial u$: $\partial T_i/\partial U = (H^\top V_i)z^\top$, $\partial T_i/\partial V = e_i
    m^\top$, $\partial T/\partial z = V H U$. A kind of your own says what its `reading` and `reading_slope` are;
    whatever works by asking them works for it, and what is known for softmax or linear attention only refuses it.

    Paper: Section 3 (the (U, V) parametrisation), Proposition 3.4 for the gradients in U and V.
    """

    U: eqx.AbstractVar[Float[Array, "D D"]]
    V: eqx.AbstractVar[Float[Array, "p D"]]

    @abc.abstractmethod
    def reading(self, mu: AbstractMeasure, u: Float[Array, " D"]) -> Float[Array, " D"]:
        """What the layer reads off the prompt, m."""

    @abc.abstractmethod
    def reading_slope(self, mu: AbstractMeasure, u: Float[Array, " D"]) -> Float[Array, "D D"]:
        """Its derivative in u, H; symmetric and positive semi-definite for softmax and linear attention."""

    @property
    def dim(self) -> int:
        return self.U.shape[0]

    @property
    def outputs(self) -> int:
        return self.V.shape[0]

    def _output(self, mu, z):
        return self.V @ self.reading(mu, self.U @ z)

    def _jacobian(self, mu, z) -> Jacobian:
        u = self.U @ z
        m, VH = self.reading(mu, u), self.V @ self.reading_slope(mu, u)
        return Jacobian(
            U=jnp.einsum("ij,k->ijk", VH, z),
            V=jnp.einsum("ij,k->ijk", jnp.eye(self.outputs, dtype=m.dtype), m),
            z=VH @ self.U,
        )


def _parameters(U: Numbers, V: Numbers) -> tuple[Array, Array]:
    U = checks.matrix("U", U)
    if U.shape[0] != U.shape[1]:
        raise ValueError(f"U has shape {tuple(U.shape)}; it must be square, of the tokens' dimension")
    return U, checks.matrix("V", V, None, U.shape[0])


class SoftmaxAttention(AbstractAttention):
    r"""Softmax attention on measures, $T[\mu](z) = V\,\mathrm{mean}(\mu_{Uz}) = V\,\nabla\Lambda_\mu(Uz)$.

    On an `Empirical` measure this is the textbook softmax; on a `Gaussian` it is affine (Lemma 2.1).
    Paper: Section 2.
    """

    U: Float[Array, "D D"]
    V: Float[Array, "p D"]

    def __init__(self, U: Numbers, V: Numbers):
        self.U, self.V = _parameters(U, V)

    def reading(self, mu, u):
        return mu._tilt(u)._mean()

    def reading_slope(self, mu, u):
        return mu._tilt(u)._cov()


class LinearAttention(AbstractAttention):
    r"""Normalised linear attention on measures, $T[\mu](z) = V\,E_\mu[zz^\top]\,Uz$.

    On an `Empirical` measure this is $\frac1L\sum_l \langle Uz, z_l\rangle V z_l$. Paper: Appendix B.2.
    """

    U: Float[Array, "D D"]
    V: Float[Array, "p D"]

    def __init__(self, U: Numbers, V: Numbers):
        self.U, self.V = _parameters(U, V)

    def reading(self, mu, u):
        return self.reading_slope(mu, u) @ u

    def reading_slope(self, mu, u):
        m = mu._mean()
        return mu._cov() + jnp.outer(m, m)
