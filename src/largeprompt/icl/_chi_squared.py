r"""Averages over $x\sim\mathcal N(0, I)$ of functions of $\nu = \sum_j \lambda_j x_j^2$, $\lambda_j\ge0$.

The Laplace transform of the density is a product, $E e^{-s\nu} = \prod_j(1+2s\lambda_j)^{-1/2}$; weighing by $x_i^2$
divides it by $1+2s\lambda_i$. Its singularities are real, and so are all saddle points of $e^{s\nu}$ times it. So the
path of steepest descent from the largest of these meets no other, and along it the integrand that inverts the transform
is $e^{-u^2}$ times a smooth function, whichever directions are wide or narrow: a few nodes of the trapezoidal rule give
the density to rounding, far out too. What is left is an integral over $\nu$.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Int

Function = Callable[[Float[np.ndarray, " m"]], Float[np.ndarray, "f m"]]

_PATH_NODES, _PATH_END = 24, 6.1  # e^{-6.1²} is rounding
_PANEL_NODES = 16
_NARROWEST = 1e-13  # of the widest direction, or of what functions change over: a form that they do not see
_EXTRA = 4  # directions as wide as the widest, added for the path alone: it then suits the weights x_i² x_j² too


class Averages(NamedTuple):
    r"""Of functions $f$: $E f(\nu)$, $E x_i^2f(\nu)$ and, where asked for, $E x_i^2x_j^2f(\nu)$."""

    means: Float[np.ndarray, " f"]
    squares: Float[np.ndarray, "f n"]
    fourths: Float[np.ndarray, "f n n"] | None


def quadratic_form_averages(
    weights: Float[np.ndarray, " n"], function: Function, reach: float = 9.5, *, fourths: bool = False
) -> Averages:
    r"""Averages of functions of $\nu = \sum_i$ `weights`$_i\,x_i^2$ that change over distances of order 1.

    What lies `reach` standard deviations out is left out: functions that grow like $e^{\nu/(2\lambda)}$ need more.
    """
    weights = np.maximum(np.asarray(weights, float), 0)
    top, n = weights.max(initial=0.0), len(weights)
    pairs = 1 + 2 * np.eye(n)  # E x_i² x_j²
    if top == 0:
        at_zero = function(np.zeros(1))[:, 0]
        squares = np.repeat(at_zero[:, None], n, axis=1)
        return Averages(at_zero, squares, at_zero[:, None, None] * pairs if fourths else None)
    unit = max(top**-0.5, 1e-40)
    ratios = np.where(weights < _NARROWEST * min(1.0, unit**2) * top, 0.0, weights / top)
    ratios, which, counts = np.unique(ratios, return_inverse=True, return_counts=True)
    y, steps = _nodes(ratios, counts, reach, unit)
    values = function(top * y**2) * (2 * y * steps)
    means, squares = np.zeros(len(values)), np.zeros((len(values), len(ratios)))
    products = np.zeros((len(values), len(ratios), len(ratios)))
    for share, resolvents in _steepest_descent(y**2, ratios, counts):
        weighted = values * share
        means += np.real(weighted.sum(axis=1))
        squares += np.real(weighted @ resolvents.T)
        if fourths:
            products += np.real((weighted[:, None] * resolvents) @ resolvents.T)
    return Averages(means, squares[:, which], products[:, which[:, None], which] * pairs if fourths else None)


def _nodes(
    ratios: Float[np.ndarray, " g"], counts: Int[np.ndarray, " g"], reach: float, unit: float
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Gauss-Legendre panels in y = √ν, in which the density is analytic at 0, the widest direction being 1.

    As fine as the narrowest direction whose reach has not been passed, and near 0 as fine as functions ask for that
    change over distances of order `unit`.
    """
    ends = np.sqrt(np.cumsum(ratios * counts) + 4 * ratios) + reach * np.sqrt(ratios)
    edges = [0.0]
    while edges[-1] < ends[-1]:
        passed, y = int(np.argmax(ends > edges[-1])), edges[-1]
        # what has been passed leaves a power of y
        edges.append(y + min(4 * math.sqrt(ratios[passed]), max(unit, y / 4), 3 * y or math.inf))
    x, w = np.polynomial.legendre.leggauss(_PANEL_NODES)
    half = np.diff(edges)[:, None] / 2
    return (np.array(edges[:-1])[:, None] + half * (x + 1)).ravel(), (half * w).ravel()


def _steepest_descent(
    nu: Float[np.ndarray, " m"], ratios: Float[np.ndarray, " g"], counts: Int[np.ndarray, " g"]
) -> Iterator[tuple[Complex[np.ndarray, " m"], Complex[np.ndarray, "g m"]]]:
    r"""Complex shares of the density at each ν, whose real parts sum to it, and $1/(1+2s\lambda)$ there.

    With $s = \sigma - 1/2$, the widest direction being 1, $1+2s\lambda = \tau = 1-\lambda+2\lambda\sigma$: the path is
    that on which $K = \sigma\nu - \tfrac12\sum\log\tau$ falls from its value at the saddle by $u^2$.
    """
    v, near = ratios[:, None], (1 - ratios)[:, None]
    m = counts.astype(float)[:, None]
    m[-1] += _EXTRA

    def at(sigma) -> tuple[np.ndarray, np.ndarray]:
        tau = near + 2 * v * sigma
        return tau, nu - np.sum(m * v / tau, axis=0)

    def height(sigma, tau) -> np.ndarray:
        return sigma * nu - np.sum(m * np.log(tau), axis=0) / 2

    saddle = _saddle(nu, v, near, m)
    tau, _ = at(saddle)
    top = height(saddle, tau)
    curvature, bend = np.sum(2 * m * (v / tau) ** 2, axis=0), np.sum(8 * m * (v / tau) ** 3, axis=0)
    step = _PATH_END / _PATH_NODES
    ahead = 1j * np.sqrt(2 / curvature) * step / 2
    sigma = saddle + ahead + bend / (6 * curvature) * ahead**2
    for i in range(_PATH_NODES):
        u = (i + 0.5) * step
        for _ in range(3 if i == 0 else 2):  # of Newton's method, from a guess of third order
            tau, slope = at(sigma)
            sigma = sigma - (height(sigma, tau) - top + u**2) / slope
        tau, slope = at(sigma)
        velocity = -2 * u / slope
        share = np.exp(top - nu / 2 - u**2) * tau[-1] ** (_EXTRA // 2) * velocity * (step / (math.pi * 1j))
        yield share, 1 / tau
        curvature = np.sum(2 * m * (v / tau) ** 2, axis=0)
        sigma = sigma + step * velocity - step**2 * (1 + curvature * velocity**2 / 2) / slope


def _saddle(nu: Float[np.ndarray, " m"], v, near, m) -> Float[np.ndarray, " m"]:
    """The σ > 0 at which Σ mλ/τ = ν; σν lies between half the number of the widest directions and that of all."""
    low, high = np.full_like(nu, math.log(m[-1, 0] / 2)), np.full_like(nu, math.log(m.sum() / 2))
    for _ in range(12):
        middle = (low + high) / 2
        beyond = np.sum(m * v / (near + 2 * v * np.exp(middle) / nu), axis=0) > nu
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    sigma = np.exp((low + high) / 2) / nu
    for _ in range(2):
        tau = near + 2 * v * sigma
        sigma = sigma + (np.sum(m * v / tau, axis=0) - nu) / np.sum(2 * m * (v / tau) ** 2, axis=0)
    return sigma
