r"""One-dimensional averages over $x\sim\mathcal N(0, I)$ of functions of $\nu = \sum_j \lambda_j x_j^2$.

The law of $\nu$ is a mixture of scaled chi-squares with positive weights (Ruben 1962): with $\lambda$ the least
$\lambda_j$ and $q_j = 1-\lambda/\lambda_j$, $\nu \sim \lambda\chi^2_{n+2k}$ with probability $c_k$, where
$\sum_k c_kz^k = \prod_j \sqrt{(1-q_j)/(1-q_jz)}$. Weighing by $x_i^2$ turns one $\chi^2_1$ into $\chi^2_3$: one more
such factor, squared. Directions too narrow for that series are averaged over by a few Gauss-Laguerre nodes each: there
$\lambda_jx_j^2$ is small and the function all but polynomial in it.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy.signal import fftconvolve, lfilter
from scipy.special import gammaln, roots_genlaguerre

_TERMS = 8_000  # of the mixture; beyond it the form is too anisotropic for this series
_NARROW = 0.03  # of the widest direction: what is below is averaged over by nodes of its own
_COMBINATIONS = 2**12  # of these nodes


def quadratic_form_averages(
    weights: Float[np.ndarray, " n"],
    function: Callable[[Float[np.ndarray, " m"]], Float[np.ndarray, "f m"]],
    reach: float = 9.5,
) -> tuple[Float[np.ndarray, " f"], Float[np.ndarray, "f n"]] | None:
    r"""$E f(\nu)$ and, for each $i$, $E x_i^2 f(\nu)$; None where the series would be too long.

    What lies `reach` standard deviations out is left out: functions that grow like $e^{\nu/(2\lambda)}$ need more.
    """
    weights = np.maximum(np.asarray(weights, float), 0)
    top = weights.max(initial=0.0)
    alive = weights > 1e-14 * top
    if top == 0:
        at_zero = function(np.zeros(1))[:, 0]
        return at_zero, np.repeat(at_zero[:, None], len(weights), axis=1)
    live = weights[alive]
    scale, n = live.min(), len(live)
    ratios = 1 - scale / live
    decay = ratios.max()
    terms = _length(decay, n, max(40.0, reach**2 / 2))
    if terms > _TERMS:
        return _with_narrow_directions(weights, function, weights < _NARROW * top, reach)
    coefficients = _mixture(ratios, decay, terms)
    y, step = _nodes(live, reach)
    values = function(y**2)
    mean = values @ (step * _density(y, coefficients, decay, scale, n))
    squares = np.empty((len(values), len(weights)))
    squares[:, ~alive] = mean[:, None]
    shared = {}
    for i, ratio in zip(np.flatnonzero(alive), ratios, strict=True):
        if ratio not in shared:
            tilted = lfilter([1 - ratio], [1, -ratio / decay if decay else 0.0], coefficients)
            shared[ratio] = values @ (step * _density(y, tilted, decay, scale, n + 2))
        squares[:, i] = shared[ratio]
    return mean, squares


def _with_narrow_directions(
    weights: Float[np.ndarray, " n"],
    function: Callable[[Float[np.ndarray, " m"]], Float[np.ndarray, "f m"]],
    narrow: np.ndarray,
    reach: float,
) -> tuple[Float[np.ndarray, " f"], Float[np.ndarray, "f n"]] | None:
    """The same with the narrow directions on nodes: as many as their width asks for, all combinations of them."""
    held = np.flatnonzero(narrow & (weights > 0))
    counts = [3 if weights[j] < 0.003 else 5 if weights[j] < 0.03 else 8 if weights[j] < 0.2 else 20 for j in held]
    if not len(held) or math.prod(counts) > _COMBINATIONS:
        return None
    rules = [roots_genlaguerre(count, -0.5) for count in counts]
    squares = np.stack([part.ravel() for part in np.meshgrid(*(2 * x for x, _ in rules), indexing="ij")])
    chances = functools.reduce(np.multiply.outer, [w / w.sum() for _, w in rules]).ravel()
    offsets = weights[held] @ squares

    def shifted(nu):
        values = function((nu + offsets[:, None]).ravel())
        return values.reshape(-1, len(nu))  # each function at each offset

    found = quadratic_form_averages(np.where(narrow, 0.0, weights), shifted, reach)
    if found is None:
        return None
    mean, of_squares = (part.reshape(-1, len(offsets), *part.shape[1:]) for part in found)
    average = np.einsum("fsn,s->fn", of_squares, chances)
    average[:, held] = np.einsum("fs,js,s->fj", mean, squares, chances)
    return mean @ chances, average


def _length(ratio: float, n: int, depth: float) -> int:
    """How many terms leave less than e^-depth of the mixture: c_k falls like k^{n/2} ratio^k at worst."""
    if ratio == 0:
        return 1
    terms = depth / -np.log(ratio)
    return int(terms + (n / 2 + 1) * np.log1p(terms) / -np.log(ratio)) + 2


def _mixture(ratios: Float[np.ndarray, " n"], decay: float, terms: int) -> Float[np.ndarray, " terms"]:
    """The c_k over decay^k: they fall like a power of k, so that Fourier transforms leave the far ones their digits."""
    k = np.arange(terms)
    binomial = np.exp(gammaln(k + 0.5) - gammaln(0.5) - gammaln(k + 1))
    coefficients = np.zeros(terms)
    coefficients[0] = 1.0
    for ratio in ratios[ratios > 0]:
        coefficients = fftconvolve(coefficients, np.sqrt(1 - ratio) * binomial * (ratio / decay) ** k)[:terms]
    return np.maximum(coefficients, 0)


def _nodes(live: Float[np.ndarray, " n"], reach: float) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Gauss-Legendre panels in y = √ν, in which the density is analytic at 0.

    As fine as the narrowest direction, and near 0 as fine as functions that change over a distance of order 1.
    """
    end = np.sqrt(live.max()) * (np.sqrt(len(live) + 2) + reach)
    edges = [0.0]
    while edges[-1] < end:
        edges.append(edges[-1] + min(4 * np.sqrt(live.min()), max(1.0, edges[-1] / 4), end / 6))
    x, w = np.polynomial.legendre.leggauss(24)
    half = np.diff(edges)[:, None] / 2
    return (np.array(edges[:-1])[:, None] + half * (x + 1)).ravel(), (half * w).ravel()


def _density(y, coefficients, decay: float, scale: float, n: int) -> Float[np.ndarray, " m"]:
    """Of y = √ν: each term is a chi law of n + 2k degrees of freedom."""
    kept = np.flatnonzero(coefficients)
    half = n / 2 + kept
    v = y**2 / (2 * scale)
    log_mixture = np.log(coefficients[kept]) + (kept * np.log(decay) if decay else 0.0)
    log = log_mixture - gammaln(half) + np.log(2 / y[:, None]) + half * np.log(v)[:, None] - v[:, None]
    return np.exp(log).sum(axis=1)
