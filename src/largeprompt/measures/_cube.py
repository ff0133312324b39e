import math
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._measure import AbstractMeasure


def _series(terms: int) -> list[float]:
    """Coefficients of x², x⁴, … in log(sinh x / x) = Σ_k 2^{2k} B_{2k} x^{2k} / (2k (2k)!)."""
    bernoulli = [Fraction(1)]
    for n in range(1, 2 * terms + 1):
        bernoulli.append(-sum(math.comb(n + 1, k) * bernoulli[k] for k in range(n)) / Fraction(n + 1))
    return [float(4**k * bernoulli[2 * k] / (2 * k * math.factorial(2 * k))) for k in range(1, terms + 1)]


# The series converges like (x/π)^{2k}: 18 terms leave 1e-19 at |x| = 1, where the closed forms take over.
_SERIES = _series(18)


def _polynomial(coefficients: list[float], q):
    """Σ_k c_k q^k with k from 0."""
    value = jnp.zeros_like(q)
    for c in reversed(coefficients):
        value = value * q + c
    return value


def _split(x):
    """Where the series serves, x with 0 elsewhere for it, and |x| with 1 there for the closed form.

    Each form sees only what it can bear: an overflow in the one not chosen would be NaN in reverse mode.
    """
    near = jnp.abs(x) < 1
    return near, jnp.where(near, x, 0.0), jnp.where(near, 1.0, jnp.abs(x))


def _log_sinhc(x):
    """log(sinh x / x)."""
    near, small, far = _split(x)
    return jnp.where(near, small**2 * _polynomial(_SERIES, small**2), far + _remainder(far))


def _remainder(far):
    """log(sinh x / x) - |x| for |x| ≥ 1."""
    return jnp.log1p(-jnp.exp(-2 * far)) - jnp.log(2 * far)


def _langevin(x):
    """Its derivative, coth x - 1/x."""
    near, small, far = _split(x)
    slopes = [2 * (k + 1) * c for k, c in enumerate(_SERIES)]
    return jnp.where(near, small * _polynomial(slopes, small**2), jnp.sign(x) * (1 / jnp.tanh(far) - 1 / far))


def _langevin_slope(x):
    """Its second derivative, 1/x² - 1/sinh² x."""
    near, small, far = _split(x)
    curvatures = [(2 * k + 2) * (2 * k + 1) * c for k, c in enumerate(_SERIES)]
    decay = jnp.exp(-2 * far)
    return jnp.where(near, _polynomial(curvatures, small**2), 1 / far**2 - 4 * decay / (1 - decay) ** 2)


class Cube(AbstractMeasure):
    r"""Uniform on the box $\prod_i[-h_i, h_i]$: $\Lambda(\theta) = \sum_i \log\frac{\sinh h_i\theta_i}{h_i\theta_i}$.

    A tilt makes each coordinate a truncated exponential of rate $\theta_i$.
    """

    h: Float[Array, " D"]
    theta: Float[Array, " D"]

    def __init__(self, half_width: Numbers):
        self.h = checks.scales("half_width", half_width)
        self.theta = jnp.zeros_like(self.h)

    @property
    def dim(self) -> int:
        return self.h.shape[0]

    @eqx.filter_jit  # one program, not ten
    def _cgf(self, theta):
        start, step = self.h * self.theta, self.h * theta
        end = start + step
        (near_start, _, far_start), (near_end, _, far_end) = _split(start), _split(end)
        # On one side of zero the |x| parts differ by the step itself: no cancellation between numbers of size 1e6.
        same_side = ~near_start & ~near_end & (jnp.sign(start) == jnp.sign(end))
        along = jnp.sign(start) * step + _remainder(far_end) - _remainder(far_start)
        return jnp.where(same_side, along, _log_sinhc(end) - _log_sinhc(start)).sum()

    def _tilt(self, theta):
        return eqx.tree_at(lambda mu: mu.theta, self, self.theta + theta)

    @eqx.filter_jit
    def _mean(self):
        return self.h * _langevin(self.h * self.theta)

    @eqx.filter_jit
    def _cov(self):
        return jnp.diag(self.h**2 * _langevin_slope(self.h * self.theta))

    def _sample(self, key: PRNGKeyArray, n: int):
        """By inversion: the distance from the favoured face is exponential, cut at the other face."""
        rate = jnp.abs(self.h * self.theta)
        survival = jax.random.uniform(key, (n, self.dim), self.h.dtype)
        some = jnp.where(rate == 0, 1.0, rate)
        distance = jnp.where(rate == 0, 2 * survival, -jnp.log1p(survival * jnp.expm1(-2 * some)) / some)
        return jnp.where(self.theta < 0, -1.0, 1.0) * self.h * (1 - distance)

    def _subgaussian(self):
        """σ² = max h²/3: the second derivative of Λ is largest at 0, whatever the tilt."""
        return self.h.max() / math.sqrt(3)

    def _radius(self):
        return jnp.linalg.norm(self.h)

    def _tails(self):
        return (jnp.zeros((self.dim, self.dim)),)
