"""The Bessel functions of the sphere, stable for every order ν ≥ -1/2 and every argument κ = √q ≥ 0.

Written in q = κ², in which everything is analytic, so that automatic differentiation works at 0 to any order.
At orders of at least 24 Debye's expansion, uniform in κ, gives full precision; lower orders come down from there by
the recurrence of the ratios, which contracts errors. The number of steps depends on ν only, so nothing branches.
Reference: NIST Digital Library of Mathematical Functions, 10.29.1 (recurrence) and 10.41.3, 10.41.9 (Debye).
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_LOWEST_DEBYE_ORDER = 24
_DEBYE_TERMS = 14


@functools.cache
def _debye_polynomials() -> tuple[tuple[float, ...], ...]:
    """U_0, …, U_n as coefficients of p^0, p^1, …: U_{k+1} = ½p²(1-p²)U_k' + ⅛∫₀ᵖ(1-5t²)U_k dt."""
    polynomials = [[Fraction(1)]]
    for _ in range(_DEBYE_TERMS):
        last = polynomials[-1]
        following = [Fraction(0)] * (len(last) + 3)
        for n, c in enumerate(last):
            following[n + 1] += c * (Fraction(n, 2) + Fraction(1, 8 * (n + 1)))
            following[n + 3] -= c * (Fraction(n, 2) + Fraction(5, 8 * (n + 3)))
        polynomials.append(following)
    return tuple(tuple(map(float, u)) for u in polynomials)


@functools.cache
def _debye_series(order: float) -> np.ndarray:
    """Coefficients in p of Σ_k U_k(p)/ν^k."""
    coefficients = np.zeros(3 * _DEBYE_TERMS + 1)
    for k, u in enumerate(_debye_polynomials()):
        coefficients[: len(u)] += np.asarray(u) / order**k
    return coefficients


def _top(order: float) -> tuple[float, int]:
    """The order at which Debye's expansion is used, and how many steps lead down from it."""
    steps = max(1, round(_LOWEST_DEBYE_ORDER - order + 0.5))
    return order + steps, steps


def _debye(order: float, q):
    """At a high order: the remainder of log I (see `_at`), B (see `bessel_ratio`) and (κB)'."""
    s = jnp.sqrt(order**2 + q)
    series, n = _debye_series(order), np.arange(3 * _DEBYE_TERMS + 1)
    powers = (order / s) ** n.astype(q.dtype)
    # in the type of q: a NumPy array of doubles would widen all that follows
    slopes, curvatures = (n * series)[1:].astype(q.dtype), (n * (n - 1) * series)[2:].astype(q.dtype)
    value, slope, curvature = powers @ series.astype(q.dtype), powers[:-1] @ slopes, powers[:-2] @ curvatures
    slope, curvature = slope / value, curvature / value - (slope / value) ** 2  # of the logarithm
    remainder = (
        -order * jnp.log1p(q / (2 * order * (s + order)))
        - jnp.log1p(q / order**2) / 4
        + jnp.log(value)
        - math.log(series.sum())
    )
    ratio = 1 / (order + s) - 1 / (2 * s**2) - order / s**3 * slope
    # The terms of size 1/κ in the derivative of κB cancel; here they are gone by hand.
    climb = (
        order / (s * (order + s))
        + (q - order**2) / (2 * s**4)
        + order / s**5 * slope * (3 * q - s**2)
        + q * order**2 / s**6 * curvature
    )
    return remainder, ratio, climb


@functools.partial(jax.jit, static_argnums=0)
def _descent(order: float, q):
    """The same three at any order, by B_ν = 1/(2(ν+1) + q B_{ν+1}) and its derivative, and B_{ν+1}."""
    top, steps = _top(order)

    def step(carry, nu):
        remainder, above, climb, _ = carry
        ratio = 1 / (2 * (nu + 1) + q * above)
        return (remainder - jnp.log(2 * (nu + 1) * ratio), ratio, ratio**2 * (2 * (nu + 1) - q * climb), above), None

    # a loop, not unrolled: it is compiled once for each derivative asked for, and nothing is differentiated through it
    start = (*_debye(top, q), jnp.zeros_like(q))
    return jax.lax.scan(step, start, top - 1 - jnp.arange(steps, dtype=q.dtype))[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _at(order: float, q):
    """F_ν (see `log_bessel`) less √(ν'²+q) - ν', with the order ν' of Debye's expansion; B_ν, (κB_ν)', B_{ν+1}.

    One descent gives all four, and all that their derivatives take.
    """
    return _descent(order, q)


@_at.defjvp
def _at_jvp(order, primals, tangents):
    (q,) = primals
    _, ratio, _, _ = values = _at(order, q)
    slope = _slope(order, q, values)
    # (κB)' = A' is 1 - A² - (2ν+1)A/κ with A = I_{ν+1}/I_ν
    climb_slope = -(ratio**2) - 2 * q * ratio * slope - (2 * order + 1) * slope
    growth_slope = 1 / (2 * jnp.sqrt(_top(order)[0] ** 2 + q))
    above_slope = _slope(order + 1, q, _at(order + 1, q))
    return values, tuple(of * tangents[0] for of in (ratio / 2 - growth_slope, slope, climb_slope, above_slope))


def _slope(order: float, q, values):
    # B' = ½B(B_{ν+1} - B) has no singularity at 0; past κ = ν+1 the same thing as ((κB)' - B)/2q cancels less.
    _, ratio, climb, above = values
    is_near = q < (order + 1) ** 2
    return jnp.where(is_near, ratio * (above - ratio) / 2, (climb - ratio) / (2 * jnp.where(is_near, 1.0, q)))


def bessel_ratio(order: float, q: Float[Array, ""]) -> Float[Array, ""]:
    r"""$B_\nu(\kappa^2) = I_{\nu+1}(\kappa) / (\kappa I_\nu(\kappa))$, differentiable in $q=\kappa^2$ to any order."""
    return _at(order, q)[1]


def log_bessel(order: float, q: Float[Array, ""]) -> Float[Array, ""]:
    r"""$F_\nu(\kappa^2) = \log[\Gamma(\nu+1)(2/\kappa)^\nu I_\nu(\kappa)]$, at 0 within rounding of 0."""
    return _growth(order, jnp.zeros_like(q), q) + _at(order, q)[0]


def log_bessel_increment(order: float, q: Float[Array, ""], step: Float[Array, ""]) -> Float[Array, ""]:
    r"""$F_\nu(q+\text{step}) - F_\nu(q)$."""
    return _growth(order, q, step) + _at(order, q + step)[0] - _at(order, q)[0]


def _growth(order: float, q, step):
    # F grows like √(ν'²+q): that increment is taken in closed form, not as a difference of numbers of size 1e6.
    top = _top(order)[0]
    return step / (jnp.sqrt(top**2 + q + step) + jnp.sqrt(top**2 + q))
