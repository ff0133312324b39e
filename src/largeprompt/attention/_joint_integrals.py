r"""Moments of two softmaxes over the same L Gaussian tokens, as two-dimensional integrals, for any scores and any L.

Tokens are $z_l\sim\mathcal N(0,\Gamma)$, scores $u\cdot z_l$ and $u'\cdot z_l$, weights $a$ and $a'$, sums of
exponentials $S$ and $S'$; $m = \sum a_lz_l = \nabla_u\log S$ and $m' = \nabla_{u'}\log S'$. So
$E\,mm'^\top = \nabla_u\nabla_{u'}^\top E[\log S\log S']$, a function of $\nu = u^\top\Gamma u$, $\nu' = u'^\top\Gamma
u'$ and $\rho = u^\top\Gamma u'$ alone, and
$$E\,mm'^\top = q\,\Gamma + \Gamma(c_{uu}\,uu^\top + c_{uv}\,uu'^\top + c_{vu}\,u'u^\top + c_{vv}\,u'u'^\top)\Gamma,$$
with $s_{jk} = \sum_l a_l^ja_l'^k$:
$$q = E s_{11},\quad c_{uu} = 2\partial_\nu q = 2E[s_{20}s_{11}-s_{21}],\quad c_{vv} = 2E[s_{02}s_{11}-s_{12}],\quad
  c_{vu} = \partial_\rho q = E[s_{11}-s_{21}-s_{12}+s_{11}^2],\quad c_{uv} = E(1-s_{20})(1-s_{02}).$$
With $1/(S^jS'^k) = \iint s^{j-1}s'^{k-1}e^{-sS-s'S'}$ these are integrals over $(\log s,\log s') = (\tau,\tau')$ of
$P_{jk} = E[(s\omega)^j(s'\omega')^ke^{-s\omega-s'\omega'}]$, which one Gaussian average makes a product of matrices.
Of the length they see $\ell\phi^{\ell-1}$ and $\ell(\ell-1)\phi^{\ell-2}$, $\phi = P_{00}$: for a law of lengths,
$G'$ and $G''$ of its generating function $G(\phi) = E\,\phi^\ell$.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ._lengths import Lengths, longest
from ._weight_integrals import integrate, smoothing

Grid = Float[np.ndarray, " n"]
_LARGEST = 6.0  # of τ + s: e^{-e^6} is nothing
_FINEST = 200  # points of the inner average per step of τ', beyond which it is taken point by point
_PARTS = 8  # of that step, for the same reason
_LESS_THAN_1 = 1 - 2.0**-53


class Accuracy(NamedTuple):
    """The step of the trapezoidal rules, with an error near e^{-π²/step}, and the digits that tails are kept to."""

    step: float
    digits: float

    @property
    def tail(self) -> float:
        return self.digits * math.log(10)

    def widest_step(self, width: float) -> float:
        """Between nodes for a standard normal g, of a function of `width` times g."""
        return min(0.8, self.step / 0.6, self.step / max(width, 1e-300))

    def normal(self, width: float, top: int, step: float | None = None) -> tuple[Grid, Grid]:
        """Nodes and weights for a standard normal g, of a function of `width` times g that may grow like e^{top x}."""
        step, reach = self.widest_step(width) if step is None else step, math.sqrt(2 * self.tail)
        g = step * np.arange(-math.ceil(reach / step), math.ceil((reach + top * min(width, 1)) / step) + 1)
        return g, np.exp(-(g**2) / 2) * (step / math.sqrt(2 * math.pi))


FULL, TABULATED = Accuracy(0.3, 15.0), Accuracy(0.5, 9.0)


class JointIntegrals(NamedTuple):
    """The five numbers that make E m m'ᵀ: of Γ, and of Γuuᵀ Γ, Γuu'ᵀΓ, Γu'uᵀΓ and Γu'u'ᵀΓ."""

    Q: float
    uu: float
    uv: float
    vu: float
    vv: float


def joint_integrals(
    beta: float, other: float, correlation: float, L: float | Lengths, accuracy: Accuracy = FULL
) -> JointIntegrals:
    r"""The moments of scores with standard deviations `beta` and `other`, for 2 ≤ L < ∞, by direct quadrature.

    For a law of lengths they are averages over its prompts that are not empty.
    """
    return _integrals(beta, other, [correlation], L, accuracy)[0]


def opposite_integrals(
    beta: float, other: float, correlation: float, L: float | Lengths, accuracy: Accuracy = FULL
) -> tuple[JointIntegrals, JointIntegrals]:
    """The same at the correlation and at its negative, which have much in common."""
    same, opposite = _integrals(beta, other, [correlation, -correlation], L, accuracy)
    return same, opposite


def _integrals(
    beta: float, other: float, correlations: list[float], L: float | Lengths, accuracy: Accuracy
) -> list[JointIntegrals]:
    """The moments at correlations that differ by their signs alone."""
    if beta < other:
        swapped = _integrals(other, beta, correlations, L, accuracy)
        return [JointIntegrals(Q, vv, uv, vu, uu) for Q, uu, uv, vu, vv in swapped]
    # a wide step for one of the two only: along τ − τ' the integrand is as narrow as ever where scores are proportional
    most = float(longest(L))
    (tau, step), (tau2, step2) = _tau(beta, most, accuracy, wide=True), _tau(other, most, accuracy, wide=False)
    # s = βg and s' = β'(rg + √(1−r²)g'): given g the two averages are apart
    slope, rest = correlations[0] * other, other * math.sqrt(max(0.0, 1 - correlations[0] ** 2))
    g, weights, finer = _outer(step2, beta, abs(slope), rest, accuracy)
    F = [values * weights for values in _powers(tau[:, None] + beta * g)]
    of_F = [values.sum(axis=1)[:, None] for values in F]
    apart = held(beta, L)[1] - held(other, L)[0]
    found = []
    for correlation in correlations:
        second = _inner(g, tau2, step2, correlation * other, rest, finer, accuracy)
        # 1 − φ to its own relative accuracy: 1 − ab = (1−a) + (1−b) − (1−a)(1−b)
        gap = of_F[0] + weights @ second[0] - F[0] @ second[0]
        token, pair = (step * step2 * part for part in _generating(L, np.log1p(-np.minimum(gap, _LESS_THAN_1))))

        P11, P20, P02 = F[1] @ second[1], of_F[2] - F[2] @ second[0], weights @ second[2] - F[0] @ second[2]
        # sums of token·P_jk in the order that takes the fewest products of matrices
        weighted = [None, *(token @ values.T for values in second[1:])]
        Q, P21, P12, P22, P31, P13 = (
            float(np.vdot(F[j], weighted[k])) for j, k in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3))
        )
        uu, vv, vu, uv = (float(np.vdot(pair, part)) for part in (P20 * P11, P02 * P11, P11**2, P20 * P02))
        found.append(
            JointIntegrals(Q, P31 - 2 * P21 + uu, apart + P22 + uv, Q + P22 - P21 - P12 + vu, P13 - 2 * P12 + vv)
        )
    return found


@functools.lru_cache(maxsize=64)
def nonempty(L: float | Lengths) -> tuple[Grid, Grid]:
    """Lengths of at least 1 and their probabilities, by the rule of a law."""
    lengths, shares = L.rule() if isinstance(L, Lengths) else (np.array([float(L)]), np.ones(1))
    kept = lengths > 0
    return lengths[kept], shares[kept] / shares[kept].sum()


def _generating(L: float | Lengths, log_phi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """G′ and G″ of the generating function G(φ) = E φ^ℓ."""
    first, second = np.zeros_like(log_phi), np.zeros_like(log_phi)
    for length, share in zip(*nonempty(L), strict=True):
        first = first + share * length * np.exp((length - 1) * log_phi)
        if length > 1:
            second = second + share * length * (length - 1) * np.exp((length - 2) * log_phi)
    return first, second


@functools.lru_cache(maxsize=4096)
def held(beta: float, L: float | Lengths) -> tuple[float, float]:
    """Q = E Σa² of one softmax, and 1 − Q."""
    smooth = smoothing((float(beta),), math.log(longest(L)))
    found = np.zeros(2)
    for length, share in zip(*nonempty(L), strict=True):
        one = integrate(smooth, length) if length > 1 else None
        found += share * np.array([1.0, 0.0] if one is None else [one.Q[0], one.one_minus_Q[0]])
    return float(found[0]), float(found[1])


def _tau(beta: float, L: float, accuracy: Accuracy, wide: bool) -> tuple[Grid, float]:
    """Where φ^{L-1} P is not negligible, as for a single softmax."""
    log_L, tail = math.log(L), accuracy.tail
    step = accuracy.step * (max(1.0, beta / math.sqrt(2 * log_L + 2)) if wide else 1.0)
    lowest, reach = -(log_L + beta**2 / 2 + tail), math.sqrt(4 * log_L + 2 * tail)
    if 2 * beta > reach:
        lowest = max(lowest, -beta * reach)
    highest = math.sqrt(2 * tail) * beta + math.log(tail) + 0.5
    return step * np.arange(math.floor(lowest / step), math.ceil(highest / step)), step


def _powers(x: np.ndarray) -> list[np.ndarray]:
    """1 − e^{-e^x}, and e^{kx}e^{-e^x} for k = 1, 2, 3."""
    exponential = np.exp(np.minimum(x, _LARGEST))
    found, power = [-np.expm1(-exponential)], np.exp(-exponential)
    for _ in range(3):
        power = power * exponential
        found.append(power)
    return found


def _smoothed(x: np.ndarray, width: float, accuracy: Accuracy) -> list[np.ndarray]:
    """The Gaussian averages of these at x + width·g."""
    if width < 1e-12:
        return _powers(x)
    g, weights = accuracy.normal(width, 3)
    return [values @ weights for values in _powers(x[..., None] + width * g)]


def _smoothed_along(
    start: float | Float[np.ndarray, " s"], spacing: float, points: int, width: float, accuracy: Accuracy
) -> list[np.ndarray]:
    """The same at equally spaced points: where nodes of g lie on a grid of them too, few numbers are needed."""
    start, widest = np.asarray(start)[..., None], accuracy.widest_step(width) * width
    parts = math.ceil(spacing / widest) if width > 1e-12 else _PARTS + 1  # of the spacing
    if parts > _PARTS:
        return _smoothed(start + spacing * np.arange(points), width, accuracy)
    fine = spacing / parts
    every = max(1, int(widest / fine))  # where rounding leaves less than one
    g, weights = accuracy.normal(width, 3, every * fine / width)
    first, long = round(g[0] * width / fine), every * (len(g) - 1) + 1
    values = np.stack(_powers(start + fine * np.arange(first, first + parts * (points - 1) + long)))
    windows = np.lib.stride_tricks.sliding_window_view(values, long, axis=-1)
    return list(windows[..., ::parts, ::every] @ weights)


def _outer(step: float, beta: float, slope: float, rest: float, accuracy: Accuracy) -> tuple[Grid, Grid, int]:
    """Nodes g for the outer average, and where slope·g lies on a grid, how many of its steps make one of τ'; else 0."""
    spacing = accuracy.widest_step(beta)
    finer = math.ceil(step / (slope * spacing)) if rest > 1e-12 and slope * spacing * _FINEST > step else 0
    return *accuracy.normal(beta, 3, step / (finer * slope) if finer else spacing), finer


def _inner(
    g: Grid, tau: Float[np.ndarray, " t"], step: float, slope: float, rest: float, finer: int, accuracy: Accuracy
) -> list[Float[np.ndarray, "g t"]]:
    """The inner average at slope·g + τ' for all g and τ'."""
    if not finer:
        return _smoothed_along(tau[0] + slope * g, step, len(tau), rest, accuracy)
    # on the grid few different numbers are needed
    lowest, long = round(min(slope * g[0], slope * g[-1]) * finer / step), finer * (len(tau) - 1) + 1
    spacing = step / finer
    averages = _smoothed_along(tau[0] + spacing * lowest, spacing, len(g) + long - 1, rest, accuracy)
    windows = np.lib.stride_tricks.sliding_window_view(np.stack(averages), long, axis=1)[:, :, ::finer]
    return list(np.ascontiguousarray(windows if slope > 0 else windows[:, ::-1]))
