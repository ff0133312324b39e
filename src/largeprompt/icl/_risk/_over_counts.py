r"""Softmax attention on finitely many covariates: a prompt is a vector of counts $N\sim$ multinomial$(L, p)$.

Given a query the weight of covariate $i$ is $a_i = N_ie^{S_i}/Z$, $Z = \sum_jN_je^{S_j}$. As $1/Z^2 = \int_0^\infty
t\,e^{-tZ}dt$ and $E\,e^{-tZ} = \varphi(t)^L$ with $\varphi = \sum_ip_iq_i$, $q_i = e^{-te^{S_i}}$, every average over
counts that a risk takes is one integral over $t$, for every number of covariates:

$$E\,a_i = \int L\varphi^{L-1}p_ie^{S_i}q_i\,dt, \qquad
  E\,a_i^2/N_i = \int tL\varphi^{L-1}p_ie^{2S_i}q_i\,dt, \qquad
  E\,a_ia_j = \delta_{ij}E\,a_i^2/N_i + \int tL(L-1)\varphi^{L-2}p_ip_je^{S_i+S_j}q_iq_j\,dt .$$

In $\log t$ the integrands are analytic in a strip and fall at least as $t$ on the left and doubly exponentially on the
right, so that the trapezoidal rule is exact to rounding.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.attention import AbstractLayer, merged_form
from largeprompt.measures import Empirical

from .._blocks import blocks
from .._regression import RegressionOn
from ._abstract import AbstractRisk, Replicates

NODES = 512
_LEFT, _RIGHT = 38.0, math.log(45.0)  # what lies e^-38 below the rest, and past e^-45, is left out


class OverCounts(AbstractRisk):
    """Softmax attention with P = C = 0 on a regression whose covariates and queries are finitely many."""

    task: RegressionOn
    L: int | float = eqx.field(static=True)
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return "exact over counts, one-dimensional quadrature"

    def attention(self, layer: AbstractLayer) -> Float[Array, "n q"]:
        r"""$E\,a_i$, the mean weight of each covariate at each query."""
        X, log_p = _atoms(self.task.covariates)
        scores = X @ blocks(merged_form(layer), self.task).A @ _atoms(self.task.queries)[0].T
        unit = jnp.eye(len(X), dtype=X.dtype)
        return _each(lambda s: count_moments(s, log_p, self.L, unit, unit)[0], scores.T).T

    def by_query(self, layer: AbstractLayer) -> Float[Array, " q"]:
        r"""The risk at each query: $\tfrac12E\|RWX^\top a - Wx_q\|^2$ and what noise adds."""
        task, parts = self.task, blocks(merged_form(layer), self.task)
        (X, log_p), (Z, _) = _atoms(task.covariates), _atoms(task.queries)
        k, Omega, scores = task.targets, task.Omega, X @ parts.A @ Z.T
        size, trace = jnp.sum(parts.R**2), jnp.trace(parts.R)

        def of_query(of):
            s, z = of
            mean, square, noise = count_moments(s, log_p, self.L, X, Omega)
            label = z @ Omega @ z
            error = size * square - 2 * trace * (mean @ Omega @ z) + k * label
            return (error + size * task.noise * noise + k * task.noise) / 2

        return _each(of_query, (scores.T, Z))

    def of_layer(self, layer: AbstractLayer) -> Float[Array, ""]:
        """The mean over queries."""
        return jnp.exp(_atoms(self.task.queries)[1]) @ self.by_query(layer)

    def value_and_gradient(self, layer):
        return eqx.filter_value_and_grad(self.of_layer)(layer)

    def average(self, layer):
        return Replicates(jnp.ones(()), self.of_layer(layer)[None])

    def average_with_gradient(self, layer):
        return Replicates(jnp.ones(()), jax.tree.map(lambda leaf: leaf[None], self.value_and_gradient(layer)))


def count_moments(
    scores: Float[Array, " n"], log_p: Float[Array, " n"], L: int | float, X: Float[Array, "n d"], Omega
) -> tuple[Float[Array, " d"], Float[Array, ""], Float[Array, ""]]:
    r"""$E\,X^\top a$, $E\,a^\top X\Omega X^\top a$ and $\sum_iE\,a_i^2/N_i$."""
    if math.inf == L:
        mean = X.T @ jax.nn.softmax(scores + log_p)
        return mean, mean @ Omega @ mean, jnp.zeros(())
    L = float(L)  # JAX has no whole numbers past 2^63
    there = jnp.isfinite(log_p)  # an atom of weight 0 has a score, and no part in the scale
    p = jnp.exp(log_p)
    top = jax.lax.stop_gradient(jnp.max(jnp.where(there, scores, -jnp.inf)))
    s = jnp.where(there, scores - top, 0)
    low, high = -_LEFT - math.log(L), _RIGHT - jax.lax.stop_gradient(s.min())
    x, step = jnp.linspace(low, high, NODES, retstep=True)
    t = jnp.exp(x)[:, None]
    e = jnp.exp(s)
    log_phi = _log_mean(-t * e, p, log_p)
    weighted = p * jnp.exp(s - t * e)  # p e^S q
    m = weighted @ X
    # dt = t d(log t); powers of φ through its logarithm, and none where the exponent is 0
    first = step * jnp.exp(x + math.log(L) + (L - 1) * log_phi)
    pairs = step * jnp.exp(2 * x + 2 * math.log(L) + (L - 2) * log_phi) * (1 - 1 / L) if L > 1 else jnp.zeros_like(x)
    single = first * t[:, 0]
    alone = (weighted * e) @ jnp.stack([jnp.sum((X @ Omega) * X, axis=1), jnp.ones_like(p)], axis=1)
    square = single @ alone[:, 0] + pairs @ jnp.sum((m @ Omega) * m, axis=1)
    return first @ m, square, single @ alone[:, 1]


def _each(function, queries):
    """A function of every query: all at once, or one by one where the nodes of all would fill much memory."""
    q, n = jax.tree.leaves(queries)[0].shape
    return jax.vmap(function)(queries) if q * n * NODES <= 2**24 else jax.lax.map(function, queries)


def _log_mean(exponents: Float[Array, "t n"], p: Float[Array, " n"], log_p: Float[Array, " n"]) -> Float[Array, " t"]:
    """log Σ p e^x for x ≤ 0: near 0 without losing the digits that a power L multiplies."""
    less = jnp.expm1(exponents) @ p
    near = less > -0.5
    far = jax.nn.logsumexp(jnp.where(near[:, None], 0, exponents) + log_p, axis=1)
    return jnp.where(near, jnp.log1p(jnp.where(near, less, 0)), far)


def _atoms(mu: object) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
    assert isinstance(mu, Empirical)
    return mu.points, mu.log_masses()


def is_finite(task: RegressionOn) -> bool:
    """Whether covariates and queries are finitely many."""
    return type(task.covariates) is Empirical and type(task.queries) is Empirical
