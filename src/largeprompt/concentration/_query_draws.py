r"""How queries are drawn: from their law, or for Gaussian ones from a wider Gaussian and importance-weighted.

The squared error at a query grows like $e^{\nu(z)}$, so that a plain mean over queries is made by a few rare ones.
Drawn from the law tilted by $e^{t\nu}$, which for N(m, S) is a wider Gaussian about m, each carries the weight $\det
P^{-1/2} e^{-t\nu}$, $P = I-2tR^\top JR$, $RR^\top = S$, $J = U^\top\Gamma U$: bounded, of mean 1, and the product of
weight and error has light tails again.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt.attention import AbstractAttention
from largeprompt.measures import AbstractMeasure, Gaussian

from ._spectrum import spectrum

_WIDEST = 0.8  # 2tθ²: at most 1/√(1-0.8) = 2.2 times as wide


class PlainQueries(eqx.Module):
    """Queries of their law, of equal weight."""

    nu: AbstractMeasure

    @eqx.filter_jit
    def draw(self, key: PRNGKeyArray, n: int) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
        """Queries and their weights, all 1."""
        z = self.nu._sample(key, n)
        return z, jnp.ones(n, z.dtype)


class WiderQueries(eqx.Module):
    """Queries of a Gaussian that is wider where scores are, each with its importance weight."""

    m: Float[Array, " D"]
    R: Float[Array, "D r"]
    widening: Float[Array, " r"]

    @eqx.filter_jit
    def draw(self, key: PRNGKeyArray, n: int) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
        """Queries and their weights, of mean 1."""
        xi = jax.random.normal(key, (n, len(self.widening)), self.m.dtype) * self.widening
        log_weight = jnp.log(self.widening).sum() - jnp.sum(xi**2 * (1 - self.widening**-2), axis=1) / 2
        return self.m + xi @ self.R.T, jnp.exp(log_weight)


def query_draws(
    heads: Sequence[AbstractAttention], mu: AbstractMeasure, nu: AbstractMeasure, widen: bool
) -> PlainQueries | WiderQueries:
    """The wider draws where they apply and are asked for: exponential kinds, Gaussian queries, Gaussian ends of tokens.

    Of several heads, that with the widest scores sets how much wider: the weights make up for any choice.
    """
    tails, exponential = mu.tails(), [np.asarray(head.U, float) for head in heads if head.exponential]
    if not widen or tails is None or not isinstance(nu, Gaussian) or not exponential:
        return PlainQueries(nu)
    spectra = [spectrum(U.T @ np.asarray(Gamma, float) @ U, nu.Gamma) for Gamma in tails for U in exponential]
    weights, axes = max(spectra, key=lambda found: found[0][-1])
    if weights[-1] <= 0:
        return PlainQueries(nu)
    t = min(1.0, _WIDEST / (2 * weights[-1]))
    widening = (1 - 2 * t * np.maximum(weights, 0)) ** -0.5
    dtype = nu.m.dtype
    return WiderQueries(nu.m, jnp.asarray(axes, dtype), jnp.asarray(widening, dtype))
