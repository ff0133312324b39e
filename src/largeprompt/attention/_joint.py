"""Two softmaxes over the same L Gaussian tokens: the moments of `joint_integrals`, tabulated in three variables."""

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial import chebyshev

from largeprompt._typing import Numbers

from ._chebyshev_nodes import chebyshev_coefficients, chebyshev_nodes
from ._joint_integrals import TABULATED, held, nonempty, opposite_integrals
from ._lengths import Lengths, length_or_law, longest
from ._weights import WeightMoments

_SCALE = math.sqrt(2)  # β = √2 tan(angle): smooth at β = 0 and towards infinity


class _Box(NamedTuple):
    """A table for standard deviations up to `widest`: nodes in each of the two, and in the correlation."""

    widest: float
    nodes: int
    correlations: int

    @property
    def angle(self) -> float:
        return math.atan(self.widest / _SCALE)


# heads with narrow scores may have large values that nearly cancel: they need more digits
_NARROW, _WIDE = _Box(1.0, 9, 8), _Box(8.0, 14, 12)
WIDEST_JOINT = 8.0  # standard deviation of scores up to which ratios are known
LONGEST_JOINT = 10**9


class JointCoefficients(NamedTuple):
    """E m m'ᵀ = Q Γ + Γ(uu·uuᵀ + uv·uu'ᵀ + vu·u'uᵀ + vv·u'u'ᵀ)Γ, as arrays."""

    Q: Array
    uu: Array
    uv: Array
    vu: Array
    vv: Array


class JointMoments(eqx.Module):
    r"""Moments of two softmaxes on the same L tokens $z_l\sim\mathcal N(0,\Gamma)$, of scores $u\cdot z_l$ and
    $u'\cdot z_l$, as functions of $\nu = u^\top\Gamma u$, $\nu' = u'^\top\Gamma u'$ and $\rho = u^\top\Gamma u'$.

    Tabulated are ratios to the moments of each softmax alone, which are exact: $\log(q/\sqrt{QQ'})$, $c_{uu}/q$,
    $c_{vv}/q$, $c_{vu}/q$ and $c_{uv}/\sqrt{(1-Q)(1-Q')}$, as polynomials. Relative to $\sqrt{QQ'}$ the error
    is near 1e-6 where scores have standard deviations up to 1, and from 1e-5 to 1e-3 up to 8; beyond, the ratios are
    those at 8. For 1 ≤ L ≤ 1e9; for a law of `Lengths` they are averages over its prompts that are not empty.
    """

    alone: WeightMoments
    spread: Float[Array, ""]
    narrow: Float[Array, "5 n n r"]
    wide: Float[Array, "5 m m s"]

    def __init__(self, L: int | float | Lengths):
        L = length_or_law(L)
        if longest(L) > LONGEST_JOINT:
            raise ValueError(f"L is {longest(L):.4g}; the moments of two softmaxes are known for L up to 1e9")
        self.alone, self.spread = WeightMoments(L), jnp.asarray(_spread(L))
        self.narrow, self.wide = (jnp.asarray(_table(L, box)) for box in (_NARROW, _WIDE))

    @jax.jit
    def coefficients(self, nu: Numbers, other: Numbers, rho: Numbers) -> JointCoefficients:
        """The five functions at ν, ν' and ρ of one shape."""
        nu, other, rho = jnp.broadcast_arrays(*(jnp.asarray(part, float) for part in (nu, other, rho)))
        shape = nu.shape
        nu, other, rho = nu.ravel(), other.ravel(), rho.ravel()
        (Q, unheld, *_), (Q2, unheld2, *_) = self.alone.shares(nu), self.alone.shares(other)
        beta, beta2 = _root(nu), _root(other)
        product = beta * beta2
        tiny = jnp.finfo(nu.dtype).tiny
        correlation = jnp.where(product > tiny, rho / jnp.where(product > tiny, product, 1.0), 0.0)
        narrow = _interpolated(self.narrow, _NARROW, beta, beta2, correlation)
        narrow = narrow.at[0].add(_distance(nu, other, rho, self.spread))
        wide = _interpolated(self.wide, _WIDE, beta, beta2, correlation)
        ratios = jnp.where(jnp.maximum(beta, beta2) <= _NARROW.widest, narrow, wide)
        q = jnp.exp(ratios[0]) * jnp.sqrt(Q * Q2)
        uv = ratios[4] * _root(unheld * unheld2)
        found = q, ratios[1] * q, uv, ratios[3] * q, ratios[2] * q
        return JointCoefficients(*(part.reshape(shape) for part in found))


def _spread(L: int | float | Lengths) -> float:
    """1 − 1/L, averaged over the shares of long and of short prompts in q."""
    lengths, shares = nonempty(L)
    return 1 - float(shares @ lengths**-2.0) / float(shares @ lengths**-1.0)


def _distance(nu, other, rho, spread):
    """What log(q/√(QQ')) starts as at 0: exact for long prompts and narrow scores."""
    return spread * (rho - (nu + other) / 2)


def _root(nu: Float[Array, " n"]) -> Float[Array, " n"]:
    """√ν, with a slope of 0 at 0."""
    return jnp.where(nu > 0, jnp.sqrt(jnp.where(nu > 0, nu, 1.0)), 0.0)


def _interpolated(table: Float[Array, "5 n n r"], box: _Box, beta, beta2, correlation) -> Float[Array, "5 m"]:
    table = jax.lax.stop_gradient(table).astype(beta.dtype)

    def basis(x: Float[Array, " m"], terms: int) -> Float[Array, "m k"]:
        # powers by doubling: a few operations to compile
        powers, step = jnp.stack([jnp.ones_like(x), x], axis=-1), x**2
        while powers.shape[-1] < terms:
            powers, step = jnp.concatenate([powers, powers * step[:, None]], axis=-1), step**2
        return powers[:, :terms]

    one, two = (
        basis(2 * jnp.arctan(jnp.minimum(b, box.widest) / _SCALE) / box.angle - 1, box.nodes) for b in (beta, beta2)
    )
    three = basis(jnp.clip(correlation, -1.0, 1.0), box.correlations)
    flat = one @ jnp.moveaxis(table, 1, 0).reshape(box.nodes, -1)
    inner = jnp.einsum("mfbc,mb->mfc", flat.reshape(len(beta), 5, box.nodes, box.correlations), two)
    return jnp.einsum("mfc,mc->fm", inner, three)


@functools.lru_cache(maxsize=64)
def _table(L: int | float | Lengths, box: _Box) -> np.ndarray:
    """The coefficients of the five ratios as polynomials on one box, from the quadrature at Chebyshev nodes."""
    n, m, nodes = box.nodes, box.correlations, chebyshev_nodes(box.correlations)
    if longest(L) == 1:  # one weight, which is 1
        return np.zeros((5, n, n, m))
    beta = _SCALE * np.tan(box.angle * (chebyshev_nodes(n) + 1) / 2)
    L, spread = L if isinstance(L, Lengths) else float(L), _spread(L)
    alone = [held(float(b), L) for b in beta]
    values = np.zeros((5, n, n, m))
    for i in range(n):
        for j in range(i, n):
            scale = [math.sqrt(one * other) for one, other in zip(alone[i], alone[j], strict=True)]
            pairs = [
                opposite_integrals(float(beta[i]), float(beta[j]), float(r), L, TABULATED) for r in nodes[: m // 2]
            ]
            # the nodes are as many below 0 as above it
            for k, found in enumerate([pair[0] for pair in pairs] + [pair[1] for pair in pairs[::-1]]):
                correlation, (q, uu, uv, vu, vv) = nodes[k], found
                start = math.log(q / scale[0])
                if box is _NARROW:
                    rho = correlation * beta[i] * beta[j]
                    start -= _distance(beta[i] ** 2, beta[j] ** 2, rho, spread)
                ratios = np.array([start, uu / q, vv / q, vu / q, uv / scale[1]])
                values[:, i, j, k], values[:, j, i, k] = ratios, ratios[[0, 2, 1, 3, 4]]
    one, other = _from_values(n), _from_values(m)
    return np.einsum("ai,bj,ck,fijk->fabc", one, one, other, values, optimize=True)


def _from_values(n: int) -> np.ndarray:
    """The matrix that takes values at n Chebyshev nodes to the coefficients of powers; n is small enough for that."""
    powers = np.zeros((n, n))
    for k in range(n):
        powers[: k + 1, k] = chebyshev.cheb2poly(np.eye(n)[k])[: k + 1]
    return powers @ chebyshev_coefficients(n)
