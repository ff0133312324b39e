import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import BatchLike, VectorLike
from largeprompt.measures import AbstractMeasure, as_measure

from ._attention import AbstractLayer
from ._heads import softmax_form


def nonlinearity(mu: AbstractMeasure, theta: VectorLike) -> Float[Array, " D"]:
    r"""How far $\nabla\Lambda$ is from linear, $\nabla\Lambda(\theta)-\nabla\Lambda(0)-\nabla^2\Lambda(0)\theta$.

    Zero at every $\theta$ for every Gaussian, and for no other law. Paper: Lemma 2.1 and the remark after it.
    """
    theta = checks.vector("theta", theta, as_measure("mu", mu).dim)
    return checks.result("the nonlinearity", _nonlinearity(mu, theta))


def _nonlinearity(mu, theta):
    return mu._tilt(theta)._mean() - (mu._mean() + mu._cov() @ theta)


def relative_nonlinearity(layer: AbstractLayer, mu: AbstractMeasure, queries: BatchLike) -> Float[Array, ""]:
    r"""Root mean square over queries of the non-affine part of $T[\mu](z)$, relative to its linear part.

    $\big(\sum_z\|V\,r(Uz)\|^2 / \sum_z\|V\,\mathrm{cov}(\mu)\,Uz\|^2\big)^{1/2}$ with $r$ the `nonlinearity`:
    0 where softmax attention is affine in the query, 1 where the linear part is as large as what it misses.
    """
    attention = softmax_form(layer)
    mu = attention._prompt(mu)
    queries = checks.matrix("queries", queries, None, attention.dim)
    attention._warn_of_few_tokens(mu, queries)
    thetas = queries @ attention.U.T
    missed = jax.vmap(lambda theta: _nonlinearity(mu, theta))(thetas) @ attention.V.T
    linear = thetas @ mu.cov() @ attention.V.T
    size = jnp.linalg.norm(linear)
    if not checks.is_traced(size) and size == 0:
        raise ValueError("the linear part V cov(mu) U z is 0 for every query; there is nothing to be relative to")
    return checks.result("the nonlinearity", jnp.linalg.norm(missed) / size)
