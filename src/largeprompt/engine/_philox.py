"""Philox4x32-7, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC'11): bits as a function of a counter.

Here the counter is (index, prompt, step, stream) and the key is the seed: no state, so that a number does not depend on
threads, on pieces, on an interruption, or on who draws it. Plain scalar functions: compilers vectorise them over lanes.
"""

import numpy as np

from ._elementary import scalar
from ._target import shared, wide_product, wrapped_sum, xor

u32, u64 = np.uint32, np.uint64

# What a number is for. A stream of its own for each purpose lets runs that share a purpose share the numbers.
INSTANCE, TOKENS, ACROSS, BELOW_DIAGONAL, CHI = (u32(stream) for stream in range(5))

_FIRST, _SECOND = u32(0xD2511F53), u32(0xCD9E8D57)
_WEYL = u32(0x9E3779B9), u32(0xBB67AE85)
# The fewest with which the authors saw no failure in TestU01's BigCrush. Three more, the usual margin, would cost a
# fifth of the time of a token.
_ROUNDS = 7
_LOW = u64(0xFFFFFFFF)


@scalar
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of 32 bits for the counter (c0, c1, c2, c3) under the key (k0, k1)."""
    for _ in range(_ROUNDS):
        high, low = wide_product(c0, _FIRST)
        above, below = wide_product(c2, _SECOND)
        c0, c1, c2, c3 = xor(above, c1, k0), below, xor(high, c3, k1), low
        k0, k1 = wrapped_sum(k0, _WEYL[0]), wrapped_sum(k1, _WEYL[1])
    return c0, c1, c2, c3


@scalar
def philox_pairs(c0, c1, c2, c3, k0, k1):
    """The same four words as two numbers of 64 bits: (second, first) and (fourth, third) from low to high bits.

    The last round's products already are such pairs. Stored as 64 and read as 32 bits they need no shuffling, and the
    rest of the arithmetic sees full vectors.
    """
    a, b, c, d = u64(c0), u64(c1), u64(c2), u64(c3)
    for _ in range(_ROUNDS - 1):
        first, second = (a & _LOW) * u64(_FIRST), (c & _LOW) * u64(_SECOND)
        a, b, c, d = (second >> u64(32)) ^ b ^ u64(k0), second, (first >> u64(32)) ^ d ^ u64(k1), first
        k0, k1 = wrapped_sum(k0, _WEYL[0]), wrapped_sum(k1, _WEYL[1])
    first, second = (a & _LOW) * u64(_FIRST), (c & _LOW) * u64(_SECOND)
    return second ^ ((b ^ u64(k0)) << u64(32)), first ^ ((d ^ u64(k1)) << u64(32))


@scalar
def words(c0, c1, c2, c3, k0, k1):
    """The four words of 32 bits by the way that suits the machine: vectors of pairs need no packing in each round."""
    if shared():
        return philox(c0, c1, c2, c3, k0, k1)
    first, second = philox_pairs(c0, c1, c2, c3, k0, k1)
    return u32(first >> u64(32)), u32(first & _LOW), u32(second >> u64(32)), u32(second & _LOW)
