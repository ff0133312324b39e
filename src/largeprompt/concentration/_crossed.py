r"""How the errors of two heads on one prompt go together: limits of $L\,E\,\Delta m_h\Delta m_g^\top$ at a query.

To first order the error of a reading is the token average of its influence function: for softmax $\omega(z'-m)$ with
$\omega = e^{\langle\theta,z'\rangle-\Lambda(\theta)}$ and $m = \mathrm{mean}(\mu_\theta)$, for linear attention
$z'z'^\top u - Su$. The limit is the mean of the product of two of these. For two softmax heads,
$$e^{\Lambda(\theta+\eta)-\Lambda(\theta)-\Lambda(\eta)}\big[\mathrm{cov}(\mu_{\theta+\eta})
  + (m_{\theta+\eta}-m_\theta)(m_{\theta+\eta}-m_\eta)^\top\big].$$
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt.attention import LinearAttention, SoftmaxAttention, kind_of
from largeprompt.measures import AbstractMeasure, Gaussian

from ._spectrum import spectrum

KnownHead = SoftmaxAttention | LinearAttention
Heads = tuple[KnownHead, ...]
_BATCH = 256


def crossed_covariance(
    mu: AbstractMeasure, one: KnownHead, other: KnownHead, z: Float[Array, " D"]
) -> Float[Array, "D D"]:
    """The limit of L E Δm Δm'ᵀ, of which the first head reads m and the other m'."""
    u, v = one.U @ z, other.U @ z
    if kind_of(one) == kind_of(other) == "softmax":
        return _softmax_pair(mu, u, v)
    if kind_of(one) == "linear" and kind_of(other) == "softmax":
        return crossed_covariance(mu, other, one, z).T
    zero = jnp.zeros_like(u)
    if kind_of(one) == "softmax":
        tilted = mu._tilt(u)
        third = jax.jvp(lambda s: _second_moment(tilted, s), (zero,), (v,))[1]
        return third - jnp.outer(tilted._mean(), _second_moment(tilted, zero) @ v)
    along = lambda s: jax.jvp(lambda s: _second_moment(mu, s), (s,), (v,))[1]  # noqa: E731
    S = _second_moment(mu, zero)
    return jax.jvp(along, (zero,), (u,))[1] - jnp.outer(S @ u, S @ v)


def _softmax_pair(mu: AbstractMeasure, u: Float[Array, " D"], v: Float[Array, " D"]) -> Float[Array, "D D"]:
    both = mu._tilt(u + v)
    mean = both._mean()
    product = jnp.outer(mean - mu._tilt(u)._mean(), mean - mu._tilt(v)._mean())
    return jnp.exp(mu._cgf(u + v) - mu._cgf(u) - mu._cgf(v)) * (both._cov() + product)


def _second_moment(mu: AbstractMeasure, s: Float[Array, " D"]) -> Float[Array, "D D"]:
    """E zzᵀ e^{⟨s,z⟩}, whose derivatives at 0 are moments of higher order."""
    tilted = mu._tilt(s)
    mean = tilted._mean()
    return jnp.exp(mu._cgf(s)) * (tilted._cov() + jnp.outer(mean, mean))


def crossed_constant(heads: Heads, mu: AbstractMeasure, z: Float[Array, " D"]) -> Float[Array, ""]:
    r"""$2\sum_{h<g}\mathrm{tr}\,V_hC_{hg}V_g^\top$: what several heads add to the sum of their own constants."""

    def product(V, W, C):
        return jnp.sum((V @ C) * W)

    soft = [head for head in heads if kind_of(head) == "softmax"]
    rest = [head for head in heads if kind_of(head) != "softmax"]
    total = jnp.zeros((), z.dtype)
    if len(soft) > 1:
        i, j = np.triu_indices(len(soft), 1)
        u, V = jnp.stack([head.U @ z for head in soft]), jnp.stack([head.V for head in soft])
        # one pair after another: with many heads together they would hold a matrix a pair and query
        pairs = ((u[i], u[j]), (V[i], V[j]))
        total += jax.lax.map(lambda pair: product(pair[1][0], pair[1][1], _softmax_pair(mu, *pair[0])), pairs).sum()
    for k, one in enumerate(rest):
        for other in (*soft, *rest[:k]):
            total += product(one.V, other.V, crossed_covariance(mu, one, other, z))
    return 2 * total


def crossed_constants_at(heads: Heads, mu: AbstractMeasure, z: Float[np.ndarray, "n D"]) -> Float[np.ndarray, " n"]:
    """The same at each of many queries."""
    return np.asarray(_crossed_constants(heads, mu, jnp.asarray(z)), float)


@eqx.filter_jit
def _crossed_constants(heads, mu, z):
    return jax.lax.map(lambda one: crossed_constant(heads, mu, one), z, batch_size=_BATCH)


def gaussian_crossed_constant(heads: Heads, mu: Gaussian, nu: Gaussian) -> float:
    r"""The mean of the same over centred Gaussian queries, for softmax heads on Gaussian tokens, in closed form.

    There $C_{hg} = e^{z^\top Jz}[\Gamma+\Gamma u_gu_h^\top\Gamma]$ with $J = U_h^\top\Gamma U_g$, and $e^{z^\top Jz}$
    turns N(0, S) into $\det(I-2JS)^{-1/2}$ times another Gaussian. Infinite from an eigenvalue of ½ of the form on.
    """
    Gamma, S = np.asarray(mu.Gamma, float), np.asarray(nu.Gamma, float)
    matrices = [(np.asarray(head.U, float), np.asarray(head.V, float)) for head in heads]
    total = 0.0
    for i, (U, V) in enumerate(matrices):
        for W, X in matrices[:i]:
            weights, axes = spectrum(U.T @ Gamma @ W, S)
            if weights[-1] >= 0.5:
                return np.inf
            tilted = (axes / (1 - 2 * weights)) @ axes.T
            value = np.sum((V @ Gamma) * X) + np.sum((X @ Gamma @ U @ tilted) * (V @ Gamma @ W))
            total += 2 * value * np.prod(1 - 2 * weights) ** -0.5
    return float(total)
