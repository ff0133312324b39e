"""Elementary functions in float32 that compilers vectorise: 2^x, and two normals from two words of random bits.

Each is a polynomial on a short interval, interpolated at Chebyshev nodes when this module is imported, with the
exponent handled in the bits: no tables, no branches. 2^x is good to 3e-7 relatively, a normal to 1e-6. A GPU has
instructions that are as good.
"""

import math

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from ._target import as_bits, cosine, ex2, from_bits, has_instructions, lg2, sine
from ._within import within

f32, u32, i32 = np.float32, np.uint32, np.int32

# No reassociation: a sum is added in the order written, whatever the width of the machine's vectors.
FASTMATH = {"contract", "nnan", "ninf", "nsz"}
scalar = within(forceinline=True, fastmath=FASTMATH)

LARGEST_NORMAL = math.sqrt(2 * 33 * math.log(2) + 1e-4)  # √(-2 ln u) at the least u, 2^-33: no normal is larger


def _polynomial(function, low: float, high: float, degree: int) -> tuple[np.float32, ...]:
    fitted = Chebyshev.interpolate(function, degree, [low, high]).convert(kind=Polynomial)
    return tuple(f32(c) for c in fitted.coef)


def _root_two_sine(q):
    """√2 sin(πt)/t as a function of q = t²."""
    return math.sqrt(2) * math.pi * np.sinc(np.sqrt(q))


# -ln u for u = 2^e (1.5 + t): the part in t, with enough added that rounding never makes the whole negative
_ABOVE_ROUNDING = 5e-7
_E0, _E1, _E2, _E3, _E4, _E5 = _polynomial(np.exp2, -0.5, 0.5, 5)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = _polynomial(lambda t: _ABOVE_ROUNDING - np.log(1.5 + t), -0.5, 0.5, 7)
_S0, _S1, _S2, _S3, _S4 = _polynomial(_root_two_sine, 0.0, 0.25, 4)
_C0, _C1, _C2, _C3, _C4 = _polynomial(lambda q: math.sqrt(2) * np.cos(np.pi * np.sqrt(q)), 0.0, 0.25, 4)
_LN2 = f32(math.log(2))
_BIAS = i32(127 + 32)  # of float32's exponent, and u is a word over 2^32
_SIGN, _MANTISSA, _ONE = u32(0x80000000), u32(0x7FFFFF), u32(0x3F800000)
_PI, _MINUS_LOG_4, _LEAST = f32(math.pi), f32(-math.log(4)), f32(2**-32)
_ROUNDER = f32(1.5 * 2**23)  # a float32 near this is a whole number


@scalar
def exp2(x):
    """2^x for x up to 127, relative error below 3e-7; below -126 it stays at 2^-126."""
    x = max(x, f32(-126))
    if has_instructions():
        return ex2(x)
    shifted = x + _ROUNDER
    t = x - (shifted - _ROUNDER)
    p = _E0 + t * (_E1 + t * (_E2 + t * (_E3 + t * (_E4 + t * _E5))))
    return from_bits(as_bits(p) + (as_bits(shifted) << u32(23)))


@scalar
def _two_normals_by_instructions(radial, angular):
    """Two normals by the instructions of a GPU, to 1e-6; the factor √2 is in the radius."""
    radius = math.sqrt(max(_MINUS_LOG_4 * lg2((f32(radial) + f32(0.5)) * _LEAST), f32(0)))
    radius = from_bits(as_bits(radius) ^ (angular & _SIGN))
    angle = _PI * (from_bits((angular & _MANTISSA) | _ONE) - f32(1.5))
    return radius * cosine(angle), radius * sine(angle)


@scalar
def two_normals(radial, angular):
    r"""Box and Muller's transform: radius $\sqrt{-2\ln u}$ with $u$ from one word, the angle from the other.

    $u$ is the middle of one of $2^{32}$ intervals. 23 bits choose the angle in a half circle, where polynomials of
    degree 9 do, and one bit which half.
    """
    if has_instructions():
        return _two_normals_by_instructions(radial, angular)
    bits = as_bits(f32(radial) + f32(0.5))
    t = from_bits((bits & _MANTISSA) | _ONE) - f32(1.5)
    of_t = _L0 + t * (_L1 + t * (_L2 + t * (_L3 + t * (_L4 + t * (_L5 + t * (_L6 + t * _L7))))))
    radius = math.sqrt(of_t - _LN2 * f32(i32(bits >> u32(23)) - _BIAS))
    radius = from_bits(as_bits(radius) ^ (angular & _SIGN))
    t = from_bits((angular & _MANTISSA) | _ONE) - f32(1.5)
    q = t * t
    of_cosine = _C0 + q * (_C1 + q * (_C2 + q * (_C3 + q * _C4)))
    of_sine = t * (_S0 + q * (_S1 + q * (_S2 + q * (_S3 + q * _S4))))
    return radius * of_cosine, radius * of_sine
