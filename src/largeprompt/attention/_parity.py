r"""Two softmaxes over the same L Gaussian tokens, split by what reversing every token does.

With $m(u) = \sum a_lz_l$, $m^-(u) = \frac12(m(u)-m(-u))$ and $m^+(u) = \frac12(m(u)+m(-u))$, of tokens $-z_l$ the first
is the same and the second changes its sign: the two are uncorrelated, and $E\,m(u)m(u')^\top$ is the sum of
$$E\,m^\mp(u)m^\mp(u')^\top = \tfrac12\big(E\,m(u)m(u')^\top \mp E\,m(u)m(-u')^\top\big),$$
each of the form $q\Gamma + \Gamma(c_{uu}uu^\top + c_{uv}uu'^\top + c_{vu}u'u^\top + c_{vv}u'u'^\top)\Gamma$ of
`joint_integrals`. What heads with opposite signs have in common cancels here before anything is tabulated.

With $\beta = \sqrt2\tan\alpha$ the table holds, for the odd parts and for the even ones,
$$\log\frac{q^-}{r\sin\alpha\sin\alpha'},\ \frac{c^-_{uu}}{q^-\cos^2\alpha},\ \frac{c^-_{vv}}{q^-\cos^2\alpha'},\
  \frac{c^-_{uv}+c^-_{vu}}{\cos\alpha\cos\alpha'},\qquad
  \log q^+,\ \frac{c^+_{uu}}{q^+\cos^2\alpha},\ \frac{c^+_{vv}}{q^+\cos^2\alpha'},\
  \frac{c^+_{uv}+c^+_{vu}}{r\sin\alpha\sin\alpha'\cos\alpha\cos\alpha'},$$
functions of the angles and of r², where r is the correlation of the scores.
"""

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks

from ._chebyshev_nodes import chebyshev_coefficients, chebyshev_nodes
from ._joint_integrals import TABULATED, Accuracy, opposite_integrals

_SCALE = math.sqrt(2)


class _Box(NamedTuple):
    """A table for standard deviations up to `widest`: nodes in each of the two, and in the squared correlation."""

    widest: float
    nodes: int
    correlations: int
    accuracy: Accuracy

    @property
    def angle(self) -> float:
        return math.atan(self.widest / _SCALE)


LINE, SPACE = _Box(16.0, 22, 1, Accuracy(0.4, 12.0)), _Box(8.0, 16, 9, TABULATED)


class Parts(NamedTuple):
    """q, c_uu, c_vv and c_uv + c_vu of the odd or of the even parts."""

    Q: Array
    uu: Array
    vv: Array
    both: Array


class ParityMoments(eqx.Module):
    """The odd and the even parts of the joint moments of two softmaxes, for 2 ≤ L < ∞.

    With `line` the scores of both are multiples of each other, with standard deviations up to 16: relative errors are
    near 1e-6 up to 4 and 1e-5 beyond, for L up to 1000. Otherwise they go up to 8, with errors of 1e-4 of odd parts and
    2e-3 of even ones up to 4 and L = 100, and of a tenth at 8 and L = 1000. Beyond, angles are those of the widest.
    """

    table: Float[Array, "8 n n r"]
    line: bool = eqx.field(static=True)

    def __init__(self, L: int | float, *, line: bool):
        L = checks.prompt_length(L)
        if L in (1, math.inf):
            raise ValueError(f"L is {L}; the parts of two softmaxes are tabulated for 2 <= L < inf")
        self.table, self.line = jnp.asarray(_table(float(L), LINE if line else SPACE)), line

    @property
    def widest(self) -> float:
        """The standard deviation of scores up to which the table goes."""
        return (LINE if self.line else SPACE).widest

    def odd(self, beta: Array, other: Array, correlation: Array) -> Parts:
        """Those of m⁻, at arrays of one shape."""
        a, b, found = self._found(self.table[:4], beta, other, correlation)
        q = correlation * jnp.sin(a) * jnp.sin(b) * jnp.exp(found[0])
        return _parts(a, b, q, found, 1.0)

    def even(self, beta: Array, other: Array, correlation: Array) -> Parts:
        """Those of m⁺, at arrays of one shape."""
        a, b, found = self._found(self.table[4:], beta, other, correlation)
        return _parts(a, b, jnp.exp(found[0]), found, correlation * jnp.sin(a) * jnp.sin(b))

    def _found(self, table: Float[Array, "4 n n r"], beta: Array, other: Array, correlation: Array):
        """The angles, and the functions of a table there."""
        angle = (LINE if self.line else SPACE).angle
        a, b = (jnp.minimum(jnp.arctan(part / _SCALE), angle) for part in (beta, other))
        one, two = (_polynomials(2 * part / angle - 1, table.shape[1]) for part in (a, b))
        flat = one @ jnp.moveaxis(table, 1, 0).reshape(table.shape[1], -1)
        inner = jnp.einsum("...fbc,...b->...fc", flat.reshape(*flat.shape[:-1], 4, *table.shape[2:]), two)
        three = _polynomials(2 * jnp.clip(correlation**2, 0.0, 1.0) - 1, table.shape[3])
        return a, b, jnp.einsum("...fc,...c->f...", inner, three)


def _parts(a: Array, b: Array, q: Array, found: Array, factor: Array | float) -> Parts:
    cos, cos2 = jnp.cos(a), jnp.cos(b)
    return Parts(q, q * found[1] * cos**2, q * found[2] * cos2**2, factor * cos * cos2 * found[3])


def _polynomials(x: Float[Array, "*s"], terms: int) -> Float[Array, "*s k"]:
    """Chebyshev's at x; by doubling, T_{p+j} = 2 T_p T_j − T_{p−j}, which takes few operations to compile."""
    found = jnp.stack([jnp.ones_like(x), x], axis=-1)
    while found.shape[-1] < terms:
        found = jnp.concatenate([found, 2 * found[..., -1:] * found[..., 1:] - found[..., -2::-1]], axis=-1)
    return found[..., :terms]


@functools.lru_cache(maxsize=64)
def _table(L: float, box: _Box) -> np.ndarray:
    n, m = box.nodes, box.correlations
    angles = box.angle * (chebyshev_nodes(n) + 1) / 2
    squares = np.ones(1) if m == 1 else (chebyshev_nodes(m) + 1) / 2
    values = np.zeros((8, n, n, m))
    for i in range(n):
        for j in range(i, n):
            for k, square in enumerate(squares):
                found = _ratios(angles[i], angles[j], math.sqrt(square), L, box)
                values[:, i, j, k], values[:, j, i, k] = found, found[[0, 2, 1, 3, 4, 6, 5, 7]]
    along, across = chebyshev_coefficients(n), chebyshev_coefficients(m)
    return np.einsum("ai,bj,ck,fijk->fabc", along, along, across, values, optimize=True)


def direct_parts(beta: float, other: float, correlation: float, L: float, accuracy: Accuracy) -> np.ndarray:
    """q, c_uu, c_vv and c_uv + c_vu of the odd parts, then of the even ones, by quadrature."""
    both = opposite_integrals(beta, other, correlation, L, accuracy)
    one, two = (np.array([found.Q, found.uu, found.vv, found.uv + found.vu]) for found in both)
    two[3] *= -1  # of a product of the two scores
    return np.concatenate([(one - two) / 2, (one + two) / 2])


def _ratios(angle: float, other: float, correlation: float, L: float, box: _Box) -> np.ndarray:
    """What the table holds at one point."""
    betas = _SCALE * math.tan(angle), _SCALE * math.tan(other)
    odd, even = np.split(direct_parts(*betas, correlation, L, box.accuracy), 2)
    sines, one, two = correlation * math.sin(angle) * math.sin(other), math.cos(angle), math.cos(other)
    powers = np.array([1, one**2, two**2, one * two])
    found = [
        np.array([math.log(odd[0] / sines), odd[1] / odd[0], odd[2] / odd[0], odd[3]]) / powers,
        np.array([math.log(even[0]), even[1] / even[0], even[2] / even[0], even[3] / sines]) / powers,
    ]
    return np.concatenate(found)
