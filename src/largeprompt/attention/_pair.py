r"""Half the difference of two softmaxes with opposite scores, $m = \frac12(m_+ - m_-)$: a ± pair of heads.

On L Gaussian tokens $E m = (1-Q)\Gamma u$ as for one softmax, and $E mm^\top = q\Gamma + k\Gamma uu^\top\Gamma$ with
$q = \frac12(Q-Q_{12})$ and $k = \frac12(K_2-c_{uu}-c_{vv}+c_{uv}+c_{vu})$ of `joint_integrals` at u' = -u. As ν → 0,
$$q = \frac{L-1}{L^2}\Big(\nu-\frac{2\nu^2}L\Big)+O(\nu^3),\qquad
  k = \frac{L-1}L\Big(1-\frac{2\nu}L\big(1+\frac2L\big)\Big)+O(\nu^2),$$
the moments of linear attention over a prompt whose mean is subtracted. Tabulated in y = 1/√(1+ν/2) are q/(1-y²) and
k/y², both smooth up to y = 0 and y = 1.
"""

import functools
import math

import numpy as np
from jaxtyping import Float
from numpy.polynomial import chebyshev

from largeprompt import _checks as checks

from ._chebyshev_nodes import chebyshev_coefficients, chebyshev_nodes
from ._joint_integrals import joint_integrals
from ._weight_integrals import weight_integrals

PairTable = Float[np.ndarray, "pair_terms 2 pair_panels"]
_EDGES = np.array([0.07, 0.25, 0.5, 0.75, 1.0])  # below, scores pick one token, and the first panel is continued
_TERMS = 14


@functools.lru_cache(maxsize=256)
def pair_table(L: int | float) -> PairTable:
    """Chebyshev coefficients of both functions on each panel of y, for a finite L."""
    L = checks.prompt_length(L)
    if L in (1, math.inf):
        raise ValueError(f"L is {L}; a pair of opposite softmaxes is tabulated for 2 <= L < inf")
    nodes = chebyshev_nodes(_TERMS)
    y = _EDGES[:-1] + np.diff(_EDGES) * (nodes[:, None] + 1) / 2
    values = np.array([_pair(float(point), float(L)) for point in y.ravel()]).reshape(*y.shape, 2)
    return np.einsum("kn,npf->kfp", chebyshev_coefficients(_TERMS), values)


def _pair(y: float, L: float) -> tuple[float, float]:
    beta = math.sqrt(2 * (1 - y) * (1 + y)) / y
    alone, both = weight_integrals(beta, L), joint_integrals(beta, beta, -1.0, L)
    q, k = (alone.Q - both.Q) / 2, (alone.K2 - both.uu - both.vv + both.uv + both.vu) / 2
    return float(q) / ((1 - y) * (1 + y)), float(k) / y**2


def pair_shares(table: PairTable, nu: Float[np.ndarray, " m"]) -> Float[np.ndarray, "4 m"]:
    """q, k and their derivatives in ν, by NumPy."""
    y = 1 / np.sqrt(1 + nu / 2)
    panel = np.clip(np.searchsorted(_EDGES, y, side="right") - 1, 0, len(_EDGES) - 2)
    width = np.diff(_EDGES)[panel]
    x = 2 * (y - _EDGES[panel]) / width - 1
    coefficients = table[:, :, panel]
    (f, h), (df, dh) = _series(coefficients, x), _series(chebyshev.chebder(table)[:, :, panel], x) * (2 / width)
    share = nu / (nu + 2)  # 1 − y², with no cancellation
    slope = -(y**3) / 4  # of y in ν
    dq = (df * share - 2 * y * f) * slope
    return np.stack([f * share, h * y**2, dq, (dh * y**2 + 2 * y * h) * slope])


def _series(coefficients: Float[np.ndarray, "terms 2 m"], x: Float[np.ndarray, " m"]) -> Float[np.ndarray, "2 m"]:
    """Clenshaw's sum of a Chebyshev series with other coefficients at each point."""
    ahead = behind = np.zeros(coefficients.shape[1:])
    for c in coefficients[:0:-1]:
        ahead, behind = 2 * x * ahead - behind + c, ahead
    return x * ahead - behind + coefficients[0]
