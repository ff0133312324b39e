r"""Averages over $x\sim\mathcal N(0, I)$ of functions of $\nu = \sum_j \lambda_j x_j^2$, $\lambda_j\ge0$.

The Laplace transform of the density is a product, $E e^{-s\nu} = \prod_j(1+2s\lambda_j)^{-1/2}$; weighting by $x_i^2$
divides it by $1+2s\lambda_i$. All of its singularities are real and lie to the left of the saddle point of $e^{s\nu}$
times it. A parabola through the saddle, with the curvature of the path of steepest descent there, passes around all of
them. Along it the integrand that inverts the transform is nearly $e^{-u^2}$, whichever directions are wide or narrow:
a few nodes of the trapezoidal rule give the density to rounding, far out too. What is left is an integral over $\nu$.
"""

import bisect
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Int

Function = Callable[[Float[np.ndarray, " m"]], Float[np.ndarray, "f m"]]

_PATH_NODES, _PATH_END = 24, 7.0
_THINNEST = 2.0  # νb at most: beside hundreds of narrow directions the parabola of a wide one would be too thin
_NUMBERS = 2**16  # complex ones held at once
_GAUSS = np.polynomial.legendre.leggauss(16)  # nodes and weights of a panel
_NARROWEST = 1e-13  # of the widest direction, or of what functions change over: a form that they do not see
_EXTRA = 4  # directions as wide as the widest, added for the path alone: it then suits the weights x_i² x_j² too


class Averages(NamedTuple):
    r"""Of functions $f$: $E f(\nu)$, $E x_i^2f(\nu)$ and $E x_i^2x_j^2f(\nu)$ of the last `fourths` functions."""

    means: Float[np.ndarray, " f"]
    squares: Float[np.ndarray, "f n"]
    fourths: Float[np.ndarray, "k n n"]


def quadratic_form_averages(
    weights: Float[np.ndarray, " n"], function: Function, reach: float = 9.5, *, fourths: int = 0
) -> Averages:
    r"""Averages of functions of $\nu = \sum_i$ `weights`$_i\,x_i^2$ that change over distances of order 1.

    What lies `reach` standard deviations out is left out: functions that grow like $e^{\nu/(2\lambda)}$ need more.
    """
    weights = np.maximum(np.asarray(weights, float), 0)
    top, n = weights.max(initial=0.0), len(weights)
    pairs = 1 + 2 * np.eye(n)  # E x_i² x_j²
    if top == 0:
        at_zero = function(np.zeros(1))[:, 0]
        last = at_zero[len(at_zero) - fourths :]
        return Averages(at_zero, np.repeat(at_zero[:, None], n, axis=1), last[:, None, None] * pairs)
    unit = max(top**-0.5, 1e-40)
    ratios = np.where(weights < _NARROWEST * min(1.0, unit**2) * top, 0.0, weights / top)
    ratios, which, counts = np.unique(ratios, return_inverse=True, return_counts=True)
    y, steps = _nodes(ratios, counts, reach, unit)
    values = function(top * y**2) * (2 * y * steps)
    last = values[len(values) - fourths :]
    density, once = np.zeros(len(y)), np.zeros((len(ratios), len(y)))
    products = np.zeros((fourths, len(ratios), len(ratios)))
    for share, resolvents in _parabola(y**2, ratios, counts):
        density += np.real(share.sum(axis=0))
        weighted = share * resolvents
        once += np.real(weighted.sum(axis=1))
        if fourths:
            products += np.real(np.tensordot(last[:, None, None] * weighted, resolvents, axes=((2, 3), (1, 2))))
    return Averages(values @ density, (values @ once.T)[:, which], products[:, which[:, None], which] * pairs)


def _nodes(
    ratios: Float[np.ndarray, " g"], counts: Int[np.ndarray, " g"], reach: float, unit: float
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Gauss-Legendre panels in y = √ν, in which the density is analytic at 0, the widest direction being 1.

    As fine as the narrowest direction whose reach has not been passed, and near 0 as fine as functions ask for that
    change over distances of order `unit`.
    """
    widths = np.sqrt(ratios)
    ends = (np.sqrt(np.cumsum(ratios * counts) + 4 * ratios) + reach * widths).tolist()  # increasing, as ratios are
    widths, edges = widths.tolist(), [0.0]
    while (y := edges[-1]) < ends[-1]:
        # what has been passed leaves a power of y
        edges.append(y + min(4 * widths[bisect.bisect_right(ends, y)], max(unit, y / 4), 3 * y or math.inf))
    x, w = _GAUSS
    half = np.diff(edges)[:, None] / 2
    return (np.array(edges[:-1])[:, None] + half * (x + 1)).ravel(), (half * w).ravel()


def _parabola(
    nu: Float[np.ndarray, " m"], ratios: Float[np.ndarray, " g"], counts: Int[np.ndarray, " g"]
) -> Iterator[tuple[Complex[np.ndarray, "p m"], Complex[np.ndarray, "g p m"]]]:
    r"""Complex shares of the density at each ν, whose real parts sum to it, and $1/(1+2s\lambda)$ there.

    With $s = \sigma - 1/2$, the widest direction being 1, $1+2s\lambda = \tau = 1-\lambda+2\lambda\sigma$. From the
    saddle of $K = \sigma\nu - \tfrac12\sum\log\tau$ the path is $\sigma = \sigma_0 + icu - bu^2$, on which K falls by
    $u^2$ up to the fourth order.
    """
    v, near = ratios[:, None], (1 - ratios)[:, None]
    m = counts.astype(float)[:, None]
    m[-1] += _EXTRA
    saddle = _saddle(nu, v, near, m)
    slopes = v / (near + 2 * v * saddle)
    curvature, bend = np.sum(2 * m * slopes**2, axis=0), np.sum(8 * m * slopes**3, axis=0)
    c = np.sqrt(2 / curvature)
    b = np.minimum(bend * c**2 / (6 * curvature), _THINNEST / nu)
    step = _PATH_END / _PATH_NODES
    path = (np.arange(_PATH_NODES) + 0.5) * step
    at_once = max(1, _NUMBERS // (len(ratios) * len(nu)))
    for start in range(0, _PATH_NODES, at_once):
        u = path[start : start + at_once, None]
        # real and imaginary parts apart: NumPy's logarithm and modulus of complex numbers take ten times as long
        along, across = saddle - b * u**2, c * u
        re, im = near[:, None] + 2 * v[:, None] * along, 2 * v[:, None] * across
        square = re**2 + im**2
        fall = np.tensordot(m[:, 0], np.log(square), 1) / 4
        turn = np.tensordot(m[:, 0], np.arctan2(im, re), 1) / 2
        height = (along - 0.5) * nu - fall + 1j * (across * nu - turn)
        velocity = (c + 2j * b * u) * (step / math.pi)
        yield np.exp(height) * (re[-1] + 1j * im[-1]) ** (_EXTRA // 2) * velocity, (re - 1j * im) / square


def _saddle(nu: Float[np.ndarray, " m"], v, near, m) -> Float[np.ndarray, " m"]:
    """The σ > 0 at which Σ mλ/τ = ν; σν lies between half the number of the widest directions and that of all."""
    low, high = np.full_like(nu, m[-1, 0] / 2), np.full_like(nu, m.sum() / 2)
    slope, weights = 2 * v / nu, (m * v)[:, 0]
    for _ in range(12):
        middle = np.sqrt(low * high)
        beyond = weights @ (1 / (near + slope * middle)) > nu
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return np.sqrt(low * high) / nu
