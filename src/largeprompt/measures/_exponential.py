"""2^x for the token loop: a polynomial that XLA vectorises, within about one unit in the last place."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def _polynomial(degree: int) -> list[float]:
    """Coefficients of 2^r on |r| ≤ ½, from a Chebyshev fit that keeps 2^0 = 1."""
    half = 0.5001
    r = half * np.cos(np.pi * (np.arange(4000) + 0.5) / 4000)
    fit = np.polynomial.chebyshev.chebfit(r / half, np.expm1(r * math.log(2)) / r, degree - 1)
    return [1.0, *(np.polynomial.chebyshev.cheb2poly(fit) / half ** np.arange(degree)).tolist()]


# Per type: the polynomial, the number whose addition puts an integer into the low mantissa bits, the width of the
# mantissa, the integer type, and the largest |x|.
_FORMATS = {
    "float64": (_polynomial(11), 1.5 * 2**52, 52, jnp.int64, 1020.0),
    "float32": (_polynomial(6), 1.5 * 2**23, 23, jnp.int32, 124.0),
}


@jax.custom_jvp
def power_of_two(x):
    """2^x, saturating at the largest |x| of its type; types other than these two go to `jnp.exp2`."""
    if x.dtype.name not in _FORMATS:
        return jnp.exp2(x)
    coefficients, magic, mantissa, integer, largest = _FORMATS[x.dtype.name]
    x = jnp.clip(x, -largest, largest)
    n = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    r = x - n
    value = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        value = value * r + c
    # times 2^n, by adding n to the exponent bits
    exponent = jax.lax.bitcast_convert_type(n + magic, integer) << mantissa
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(value, integer) + exponent, x.dtype)


@power_of_two.defjvp
def _power_of_two_jvp(primals, tangents):
    value = power_of_two(*primals)
    return value, math.log(2) * value * tangents[0]
