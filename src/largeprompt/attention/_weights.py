"""The softmax weights of L Gaussian scores: what attention over a finite prompt depends on, as functions of one number.

The integrals are tabulated in y = 1/√(1+ν/2), which is analytic in ν at 0 and in 1/β at infinity: [0, 1] covers every
ν ≥ 0, and nothing is extrapolated. What is tabulated are the exponents p and q in
$$\\frac{1-Q}{Q} = y(e^p-1),\\qquad \\frac{K_2}{1-K_2} = y^2(e^q-1),$$
smooth for every L, from which Q, 1-Q, K₂ and 1-K₂ all follow without cancellation. At ν = 0 both are ln L.
"""

import functools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial import chebyshev

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.attention._lengths import Lengths, length_or_law
from largeprompt.attention._weight_integrals import LONGEST, WeightIntegrals, integrate, smoothing

_SCALE = 2.0  # of ν in y, found by trial: p and q are then equally smooth in all panels
_PANELS, _NODES = 20, 20  # of the quadrature: polynomials exact to rounding for 2 ≤ L ≤ 1e12
_PIECES, _TERMS = 16, 8  # each panel is cut for evaluation, which is faster at a low degree


class WeightMoments(eqx.Module):
    r"""Moments of $a = \mathrm{softmax}(\beta g)$, $g_1,\dots,g_L$ iid N(0,1), as functions of $\nu=\beta^2$.

    With $s_j = \sum_l a_l^j$ and $m_1 = \sum_l a_lg_l$, by Stein's identity, for every L from 1 to infinity:
    $$Q = E s_2,\quad W = E[s_3-s_2^2],\quad K_2 = (E m_1^2-Q)/\nu = 1-Q-6W,\quad D_v = E(m_1-\beta)^2 = Q+\nu(Q-6W).$$
    All take ν of any shape, and read a negative one as 0. Q, 1-Q, K₂ and 1-K₂ are relatively accurate, however small.
    The table has one shape for every L, so that nothing is compiled again for another. For a law of `Lengths` they are
    the averages over its prompts that are not empty.
    """

    table: Float[Array, "terms 2 panels"]

    def __init__(self, L: int | float | Lengths):
        self.table = jnp.asarray(_table(length_or_law(L)))

    def Q(self, nu: Numbers) -> Array:
        r"""$E\sum_l a_l^2$, which rises from 1/L at ν = 0 to 1; $E m_1 = \beta(1-Q)$."""
        return self.shares(nu)[0]

    def W(self, nu: Numbers) -> Array:
        r"""$E[\sum_l a_l^3 - (\sum_l a_l^2)^2]$, the mean variance of a weight under the weights; 0 at both ends."""
        Q, _, _, lost = self.shares(nu)
        return (lost - Q) / 6

    def K2(self, nu: Numbers) -> Array:
        r"""$(E m_1^2-Q)/\nu$, which falls from 1-1/L at ν = 0 to 0."""
        return self.shares(nu)[2]

    def Dv(self, nu: Numbers) -> Array:
        r"""$E(m_1-\beta)^2$, the squared error of the mean of a prompt along the query."""
        Q, _, _, lost = self.shares(nu)
        return Q + _clipped(nu) * (2 * Q - lost)

    @jax.jit
    def shares(self, nu: Numbers) -> tuple[Array, Array, Array, Array]:
        """Q, 1 − Q, K₂ and 1 − K₂, each relatively accurate, whichever is small."""
        nu = _clipped(nu)
        y = jax.lax.rsqrt(1 + nu / _SCALE)
        p, q = self._exponents(y)
        held, spread = jnp.exp(-p), -y * jnp.expm1(-p)
        lost, kept = jnp.exp(-q), -(y**2) * jnp.expm1(-q)
        return _share(held, spread), _share(spread, held), _share(kept, lost), _share(lost, kept)

    def shares_of_many(self, nu: np.ndarray) -> list[np.ndarray]:
        """The same for a vector of any length, of which only a few are compiled."""
        padded = np.zeros(960 << (-(-len(nu) // 960) - 1).bit_length())
        padded[: len(nu)] = nu
        return [np.asarray(share)[: len(nu)] for share in self.shares(padded)]

    def _exponents(self, y: Array) -> list[Array]:
        table = jax.lax.stop_gradient(self.table).astype(y.dtype)
        panels = table.shape[-1]
        panel = jnp.clip(jax.lax.stop_gradient(y * panels).astype(int), 0, panels - 1)
        position = 2 * (y * panels - panel) - 1
        # one look-up a coefficient: XLA fuses them with the sum, and never forms the coefficients of every ν
        return [_polynomial([c[panel] for c in coefficients], position) for coefficients in table.swapaxes(0, 1)]


def _real(nu: Numbers) -> Array:
    """ν in its own floating-point type, but never in half precision."""
    nu = jnp.asarray(nu)
    return nu.astype(jnp.promote_types(nu.dtype, jnp.float32) if jnp.issubdtype(nu.dtype, jnp.floating) else float)


def _clipped(nu: Numbers) -> Array:
    """A ν below 0 is rounding: it counts as 0, but its derivative is not cut off."""
    nu = _real(nu)
    return nu + jax.lax.stop_gradient(jnp.maximum(nu, 0) - nu)


@jax.custom_jvp
def _polynomial(coefficients: Sequence[Array], x: Array) -> Array:
    """Σ_k c_k x^k; its derivative in x is such a polynomial too, which is faster than differentiating the loop."""
    value = jnp.zeros_like(x)
    for c in reversed(coefficients):
        value = value * x + c
    return value


@_polynomial.defjvp
def _polynomial_jvp(primals, tangents):
    coefficients, x = primals
    slope = _polynomial([k * c for k, c in enumerate(coefficients)][1:], x)
    return _polynomial(coefficients, x), slope * tangents[1]


@jax.custom_jvp
def _share(a: Array, b: Array) -> Array:
    """a/(a+b), with a derivative that is relatively accurate also where the share is nearly 1."""
    return a / (a + b)


@_share.defjvp
def _share_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    share = _share(a, b)
    return share, _share(b, a) * (da / (a + b)) - share * (db / (a + b))


@functools.lru_cache(maxsize=1024)
def _table(L: int | float | Lengths) -> np.ndarray:
    """The coefficients of p and q on every piece of every panel, from the quadrature at the panels' Chebyshev nodes."""
    shape = (_TERMS, 2, _PANELS * _PIECES)
    if L in (1, math.inf):  # one weight, Q = 1 and K₂ = 0; or none, Q = 0 and K₂ = 1: e^{-800} is 0
        return np.where(np.arange(_TERMS)[:, None, None] > 0, 0.0, np.full(shape, 0.0 if L == 1 else 800.0))
    lengths, shares = L.rule() if isinstance(L, Lengths) else (np.array([float(L)]), np.ones(1))
    if lengths[-1] > LONGEST:
        raise ValueError(f"L is {lengths[-1]:.4g}; the moments are known for L up to 1e60, and for math.inf")
    y = ((np.arange(_PANELS)[:, None] + (_nodes(_NODES) + 1) / 2) / _PANELS).astype(float)
    betas = np.sqrt(_SCALE * (1 - y) * (1 + y)) / y
    smooth = smoothing(tuple(betas.ravel()), math.log(lengths[-1]))
    one = WeightIntegrals(*(np.full(betas.size, value) for value in (1.0, 0.0, 0.0, 0.0)))
    each = [integrate(smooth, length) if length > 1 else one for length in lengths if length > 0]
    averages = np.tensordot(shares[lengths > 0] / shares[lengths > 0].sum(), [_parts(found) for found in each], axes=1)
    Q, one_minus_Q, K2, one_minus_K2 = averages
    p = np.log1p(one_minus_Q / (Q * y.ravel()))
    q = np.log1p(K2 / (one_minus_K2 * y.ravel() ** 2))
    values = np.stack([p, q]).reshape(2, _PANELS, _NODES)
    return np.einsum("kpn,ejn->kejp", _cut(), values).reshape(shape).astype(float)


def _parts(found: WeightIntegrals) -> tuple[np.ndarray, ...]:
    return found.Q, found.one_minus_Q, found.K2, found.one_minus_K2


def _nodes(n: int) -> np.ndarray:
    # longdouble: rounding of 1e-16 that differs from node to node shows in the second derivatives
    return np.cos(np.pi * (np.arange(n, dtype=np.longdouble) + 0.5) / n)


def _from_values(n: int) -> np.ndarray:
    """The matrix that takes values at n Chebyshev nodes to Chebyshev coefficients."""
    matrix = 2 * chebyshev.chebvander(_nodes(n), n - 1).T / n
    matrix[0] /= 2
    return matrix


@functools.cache
def _cut() -> np.ndarray:
    """The tensor that takes a panel's values to the coefficients of powers on each of its pieces."""
    pieces = (np.arange(_PIECES)[:, None] + (_nodes(_TERMS) + 1) / 2) / _PIECES * 2 - 1
    interpolation = chebyshev.chebvander(pieces, _NODES - 1) @ _from_values(_NODES)
    powers = np.zeros((_TERMS, _TERMS))
    for k in range(_TERMS):
        powers[: k + 1, k] = chebyshev.cheb2poly(np.eye(_TERMS)[k])[: k + 1]
    return np.einsum("km,mt,ptn->kpn", powers, _from_values(_TERMS), interpolation)


def weight_expansion(nu: Numbers, L: int | float) -> tuple[Array, Array]:
    r"""Q and K₂ to second order in 1/L, for $L \gg e^{2\nu}$: $W = (e^{3\nu}-e^{2\nu})/L^2$ to that order, and
    $$Q = \frac{e^\nu}{L} - \frac{2e^{3\nu}-3e^{2\nu}+e^\nu}{L^2},\qquad
      1-K_2 = \frac{e^\nu}{L} + \frac{4e^{3\nu}-3e^{2\nu}-e^\nu}{L^2}.$$
    """
    e, L = jnp.exp(_real(nu)), float(checks.prompt_length(L))
    return e / L - (2 * e**3 - 3 * e**2 + e) / L**2, 1 - e / L - (4 * e**3 - 3 * e**2 - e) / L**2
