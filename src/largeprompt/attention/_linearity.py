import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import BatchLike, VectorLike
from largeprompt.measures import AbstractMeasure, as_measure

from ._attention import AbstractAttention
from ._forms import heads_of
from ._kinds import attention_of
from ._layer import AbstractLayer, map_queries


def nonlinearity(mu: AbstractMeasure, theta: VectorLike, kind: str = "softmax") -> Float[Array, " D"]:
    r"""How far what attention reads along $\theta$ is from affine, $m(\theta)-m(0)-m'(0)\theta$.

    For softmax $m = \nabla\Lambda$: it is zero at every $\theta$ for every Gaussian, and for no other law.
    Paper: Lemma 2.1 and the remark after it.
    """
    theta = checks.vector("theta", theta, as_measure("mu", mu).dim)
    eye = np.eye(mu.dim, dtype=theta.dtype)
    return checks.result("the nonlinearity", _nonlinearity(attention_of(kind)(eye, eye), mu, theta))


def relative_nonlinearity(layer: AbstractLayer, mu: AbstractMeasure, queries: BatchLike) -> Float[Array, ""]:
    r"""How large the non-affine part of $z\mapsto T[\mu](z)$ is beside the linear part, over given queries.

    $\big(\sum_z\|T(z)-T(0)-T'(0)z\|^2 / \sum_z\|T'(0)z\|^2\big)^{1/2}$, for any layer. For softmax
    attention $T(0) = V\,\mathrm{mean}(\mu)$, $T'(0) = V\,\mathrm{cov}(\mu)\,U$, and what is left is $V\,r(Uz)$
    with $r$ the `nonlinearity`; linear attention has none. The scale has no upper end:

    - 0: the output is affine in the query, as for every Gaussian prompt. Linear attention with the prompt's mean and
      covariance puts out the same. At 0.1 it is right to about a tenth.
    - 1: what the linear part misses is as large as that part. A softmax that has saturated on bounded tokens ends
      here: the linear part goes on growing with the scores, and nearly all of it is missed.
    - x far above 1, such as 60: the output moves between x - 1 and x + 1 times as far as the linear part, which thus
      says nothing about it. A few far tokens take the weight, or V reads what scores move only to second order.
    """
    mu = layer._prompt(mu)
    queries = checks.matrix("queries", queries, None, layer.dim)
    layer._warn_of_few_tokens(mu, queries)
    linear, missed = _linear_and_missed(layer, mu, queries)
    size = jnp.linalg.norm(linear)
    if not checks.is_traced(size) and size == 0:
        raise ValueError("the linear part of the output is 0 for every query; there is nothing to be relative to")
    return checks.result("the nonlinearity", jnp.linalg.norm(missed) / size)


@eqx.filter_jit  # one program, not twenty
def _linear_and_missed(
    layer: AbstractLayer, mu: AbstractMeasure, queries: Float[Array, "n D"]
) -> tuple[Float[Array, "n p"], Float[Array, "n p"]]:
    origin, heads = jnp.zeros(layer.dim, queries.dtype), heads_of(layer)
    slope = jax.jacfwd(lambda z: layer._output(mu, z))(origin)
    linear = queries @ slope.T
    if heads is None:
        return linear, map_queries(layer, mu, queries) - layer._output(mu, origin) - linear
    missed = jnp.zeros_like(linear)
    for head in heads:  # head by head, so that what is 0 on a Gaussian is 0 without rounding
        missed += jax.vmap(lambda u, head=head: _nonlinearity(head, mu, u))(queries @ head.U.T) @ head.V.T
    return linear, missed


def _nonlinearity(head: AbstractAttention, mu: AbstractMeasure, u: Float[Array, " D"]) -> Float[Array, " D"]:
    """What a reading is more than its expansion to first order in u."""
    zero = jnp.zeros_like(u)
    return head.reading(mu, u) - (head.reading(mu, zero) + head.reading_slope(mu, zero) @ u)
