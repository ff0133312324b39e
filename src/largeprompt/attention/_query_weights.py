r"""The softmax weights of L Gaussian scores and the query's own: the query as one more token of the prompt.

The moments are functions of ν and of λ, the score of the query. They are tabulated in y = 1/√(1+ν/2), which covers
every ν ≥ 0, and in the distance of λ from $E\log\sum_le^{\beta g_l}$, in units of the width over which the weight of
the query rises from 0 to 1: past 40 units on either side it has all of the weight or none.
"""

import functools
import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial import chebyshev

from largeprompt._typing import Numbers

from ._lengths import Lengths, length_or_law
from ._query_integrals import QueryIntegrals, query_integrals, token_integrals
from ._weights import _SCALE, _clipped, _from_values, _nodes

_PANELS, _TERMS = (16, 64), (10, 10)  # in y and in λ
_REACH, _BEND = 40.0, 2.5  # x = REACH sinh(BEND t) / sinh(BEND): panels are narrow where the weight changes
_LONGEST = 10**12  # the table is then good to 1e-8
_AT_ONCE = 32  # points
_POWERS = np.array([0, 1, 0, 1, 2, 2])  # of y, to which each moment falls as ν grows


class QueryShares(NamedTuple):
    """Moments of the weights with the query in the prompt, in the notation of `QueryMoments`."""

    C: Array
    C2: Array
    Q: Array
    kept: Array
    K2: Array
    X: Array


class QueryMoments(eqx.Module):
    r"""Moments of $(a_1,\dots,a_L,c) = \mathrm{softmax}(\beta g_1,\dots,\beta g_L,\lambda)$, functions of (ν, λ).

    With $s_j = \sum_la_l^j$, $1-c = s_1$, and $m_1 = \sum_la_lg_l$, by Stein's identity
    $$C = E\,c,\quad C_2 = E\,c^2,\quad Q = E\,s_2,\quad E\,m_1 = \beta(1-C-Q),\quad E\,c\,m_1 = \beta X,\quad
      E\,m_1^2 = Q + \nu K_2,$$
    $$X = E[c(s_1-2s_2)],\qquad K_2 = E[s_1^2-4s_1s_2+3s_2+6(s_2^2-s_3)].$$
    With $F = E\log(\sum_le^{\beta g_l}+e^\lambda)$ they are $C = \partial_\lambda F$, $1-C-Q = 2\,\partial_\nu F$,
    $X = -2\,\partial_\nu C$ and $C-C_2 = \partial_\lambda C$: F and K₂ give them all. For a law of `Lengths` they are
    averages over it, the empty prompt included, where $c = 1$. Errors are below 1e-9 for L up to 10⁶,
    below 1e-8 up to 10¹².
    """

    table: Float[Array, "cells 6 y_terms x_terms"]
    centre: Float[Array, "y_panels y_terms"]
    narrowness: Float[Array, ""]

    def __init__(self, L: int | float | Lengths):
        L = length_or_law(L)
        if math.inf == L:
            raise ValueError("L is inf; the query has no weight in an infinite prompt: use WeightMoments(math.inf)")
        self.table, self.centre, self.narrowness = map(jnp.asarray, _table(L))

    @jax.jit
    def shares(self, nu: Numbers, lam: Numbers) -> QueryShares:
        """All of them, at ν and λ of one shape; a negative ν is read as 0."""
        nu = _clipped(nu)
        lam = jnp.asarray(lam, nu.dtype)
        y = jax.lax.rsqrt(1 + nu / _SCALE)
        table, centre = (jax.lax.stop_gradient(part).astype(nu.dtype) for part in (self.table, self.centre))
        row, p = _place(y, _PANELS[0])
        middle = jnp.sum(centre[row] * _powers(p, _TERMS[0]), axis=-1)
        x = (lam * y - middle) / _width(y, self.narrowness.astype(nu.dtype))
        t = jnp.arcsinh(jnp.clip(x, -_REACH, _REACH) * (math.sinh(_BEND) / _REACH)) / _BEND
        column, q = _place((t + 1) / 2, _PANELS[1])
        flat = (part.ravel() for part in (row * _PANELS[1] + column, p, q))
        C, spread, Q, kept, K2, X = _polynomials(table, *flat).T.reshape(6, *nu.shape)
        return QueryShares(C, C - y * spread, Q, y * kept, y**2 * K2, y**2 * X)


def _width(y, narrowness):
    """That of the law of log Σω beside the logistic function's, times y: 1 at y = 1, √(2v) at 0."""
    return (y**2 + _SCALE * narrowness * (1 - y**2)) ** 0.5


def _place(z: Array, panels: int) -> tuple[Array, Array]:
    """The panel of each z in [0, 1], and the position in it, from -1 to 1."""
    panel = jnp.clip(jax.lax.stop_gradient(z * panels).astype(int), 0, panels - 1)
    return panel, 2 * (z * panels - panel) - 1


def _powers(x: Array, n: int) -> Array:
    return jnp.stack([jnp.ones_like(x), *itertools.accumulate([x] * (n - 1), jnp.multiply)], axis=-1)


@jax.custom_jvp
def _polynomials(table: Array, cell: Array, p: Array, q: Array) -> Float[Array, "n 6"]:
    """Those of each cell at its point (p, q)."""

    def at_one(point):
        cell, p, q = point
        return jnp.einsum("fij,i,j->f", table[cell], _powers(p, _TERMS[0]), _powers(q, _TERMS[1]))

    # few at a time: the coefficients of all points together would fill the memory many times slower than the cache
    return jax.lax.map(at_one, (cell, p, q), batch_size=_AT_ONCE)


@_polynomials.defjvp
def _polynomials_jvp(primals, tangents):
    found, (_, _, dp, dq) = _with_slopes(*primals), tangents
    return found[:, 0, 0], found[:, 1, 0] * dp[:, None] + found[:, 0, 1] * dq[:, None]


def _with_slopes(table: Array, cell: Array, p: Array, q: Array) -> Float[Array, "n 2 2 6"]:
    """The polynomials, the derivatives in p (second axis) and in q (third)."""

    def at_one(point):
        cell, p, q = point
        along, across = (
            jnp.stack([_powers(x, n), jnp.append(0.0, jnp.arange(1, n) * _powers(x, n - 1))])
            for x, n in zip((p, q), _TERMS, strict=True)
        )
        return jnp.einsum("fij,ai,bj->abf", table[cell], along, across)

    return jax.lax.map(at_one, (cell, p, q), batch_size=_AT_ONCE)


@functools.lru_cache(maxsize=64)
def _table(L: int | float | Lengths) -> tuple[np.ndarray, np.ndarray, float]:
    lengths, shares = L.rule() if isinstance(L, Lengths) else (np.array([float(L)]), np.ones(1))
    if lengths[-1] > _LONGEST:
        raise ValueError(f"L is {lengths[-1]:.4g}; the query's own weight is known for L up to 1e12: leave it out")
    # all but the empty prompt, of which the query has all of the weight
    full = float(shares[lengths > 0].sum())
    lengths, shares = lengths[lengths > 0], shares[lengths > 0] / full
    narrowness = 1 / (1 + 1.2 * math.log(lengths[-1]))  # about the variance of the largest of L scores
    y = _all_nodes(0)
    t = 2 * _all_nodes(1) - 1
    x = _REACH * np.sinh(_BEND * t) / math.sinh(_BEND)
    values, centre = np.empty((6, len(y), len(x))), np.empty(len(y))
    for i, at in enumerate(y):
        tokens = token_integrals(math.sqrt(_SCALE * (1 - at) * (1 + at)) / at, lengths, shares)
        centre[i] = at * tokens.mean_log
        found: QueryIntegrals = query_integrals(tokens, (centre[i] + x * _width(at, narrowness)) / at)
        values[:, i] = full * np.stack(found) / at ** _POWERS[:, None]
        values[0, i] += 1 - full
    (m, n), (p, q) = _PANELS, _TERMS
    panels = values.reshape(6, m, p, n, q)
    table = np.einsum("ip,jq,fmpnq->mnfij", _to_powers(p), _to_powers(q), panels, optimize=True)
    return table.reshape(m * n, 6, p, q), np.einsum("ip,mp->mi", _to_powers(p), centre.reshape(m, p)), narrowness


def _all_nodes(axis: int) -> np.ndarray:
    """The Chebyshev nodes of all panels of [0, 1]."""
    panels, terms = _PANELS[axis], _TERMS[axis]
    return ((np.arange(panels)[:, None] + (_nodes(terms) + 1) / 2) / panels).astype(float).ravel()


def _to_powers(n: int) -> np.ndarray:
    """The matrix that takes values at n Chebyshev nodes to the coefficients of powers."""
    powers = np.zeros((n, n))
    for k in range(n):
        powers[: k + 1, k] = chebyshev.cheb2poly(np.eye(n)[k])[: k + 1]
    return (powers @ _from_values(n)).astype(float)
