"""The loop over tokens on a GPU: a thread adds up some of the tokens of one prompt, in its registers.

Pairs of tokens of a long prompt are dealt out to a number of sums that depends on its length alone. However many
threads share them, each sum is the same, and so is the order in which they are added up.
"""

import numpy as np

from ._elementary import scalar, two_normals
from ._lanes import on_lanes
from ._philox import TOKENS, philox
from ._target import tuned
from ._tokens import CENTRE, LOWEST, SUMS, WF, leveller, with_token

f32, u32, f64 = np.float32, np.uint32, np.float64
MOST_SUB_SUMS = 32
_FEWEST, _TOKENS = 8, 24  # sub-sums, and tokens of one from which on there are more


@on_lanes
def two_tokens(i, prompt, step, k0, k1):
    """The coordinates of the tokens 2i and 2i + 1."""
    tuned()
    a, b, c, d = philox(u32(i), u32(prompt), step, TOKENS, k0, k1)
    g, h = two_normals(b, d)
    x, y = two_normals(a, c)
    return g, h, x, y


@on_lanes
def largest_of_part(L, part, parts, prompt, step, k0, k1):
    """The largest first coordinate of the tokens of a part; `LOWEST` where it has none."""
    tuned()
    top, i = LOWEST, part
    while 2 * i < L:
        g, _, x, _ = two_tokens(i, prompt, step, k0, k1)
        top = max(top, g)
        if 2 * i + 1 < L:
            top = max(top, x)
        i += parts
    return top


@on_lanes
def put_tokens(pairs, prompt, step, k0, k1, out, at, apart):
    """Tokens drawn ahead: the four coordinates of each pair, `apart` from one another from `at` on."""
    tuned()
    for i in range(pairs):
        g, h, x, y = two_tokens(i, prompt, step, k0, k1)
        first = at + 4 * i * apart
        out[np.uintp(first)] = g
        out[np.uintp(first + apart)] = h
        out[np.uintp(first + 2 * apart)] = x
        out[np.uintp(first + 3 * apart)] = y


@on_lanes
def _two_tokens_ahead(i, drawn, at, apart):
    tuned()
    first = at + 4 * i * apart
    g, h = drawn[np.uintp(first)], drawn[np.uintp(first + apart)]
    return g, h, drawn[np.uintp(first + 2 * apart)], drawn[np.uintp(first + 3 * apart)]


@on_lanes
def add_short(L, products, beta, shift, along, across, prompt, step, k0, k1, sums, ahead, drawn, at, apart):
    """The sums over the tokens of a short prompt, for scores β g in units of log 2 and values along · g + across · h.

    They are few enough for float32. f is counted from `CENTRE`. The first pairs, as many as `ahead`, have been drawn.
    """
    tuned()
    zero, given = f32(0), (beta, shift, along, across, leveller(beta, shift))
    found = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    centring = zero, LOWEST, zero
    pairs, rest = (L + 1) // 2, L % 2
    for i in range(pairs):
        if i < ahead:
            g, h, x, y = _two_tokens_ahead(i, drawn, at, apart)
        else:
            g, h, x, y = two_tokens(i, prompt, step, k0, k1)
        found, centring = with_token(products, True, (g, h), given, found, centring)
        if rest == 0 or i < pairs - 1:
            found, centring = with_token(products, True, (x, y), given, found, centring)
    for c in range(len(SUMS)):
        sums[c] = f64(found[c])
    sums[CENTRE] = f64(centring[0])
    sums[WF] = f64(centring[2])


@on_lanes
def sub_sums(L):
    """Into how many sums the tokens of a long prompt are dealt out: each has six pairs of tokens at least."""
    tuned()
    return _FEWEST if L <= _TOKENS * _FEWEST else 2 * _FEWEST if L <= 2 * _TOKENS * _FEWEST else MOST_SUB_SUMS


@on_lanes
def two_sub_sums(L, first, last, apart, stride, products, given, prompt, step, k0, k1):
    """Two sub-sums of a long prompt: over pairs from `first` on, `stride` apart, before `last`, and `apart` further.

    Two pairs are drawn at a time, since none waits for another.
    """
    tuned()
    zero = f32(0)
    found = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    twin, i, full = found, first, L // 2
    end = min(full, last)
    while i + apart < end:
        one = two_tokens(i, prompt, step, k0, k1)
        other = two_tokens(i + apart, prompt, step, k0, k1)
        found = _with_pair(products, one, given, found)
        twin = _with_pair(products, other, given, twin)
        i += stride
    if i < end:
        found = _with_pair(products, two_tokens(i, prompt, step, k0, k1), given, found)
        i += apart
    if i == full and full < last and L % 2 == 1:
        g, h, _, _ = two_tokens(i, prompt, step, k0, k1)
        if (i - first) % stride == 0:
            found, _ = with_token(products, False, (g, h), given, found, (zero, zero, zero))
        else:
            twin, _ = with_token(products, False, (g, h), given, twin, (zero, zero, zero))
    return found, twin


@on_lanes
def one_sub_sum(L, first, last, stride, products, given, prompt, step, k0, k1):
    """The first of these alone, to the same bits, four pairs at a time."""
    tuned()
    zero = f32(0)
    found = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    i, full = first, L // 2
    end = min(full, last)
    while i + 3 * stride < end:
        one = two_tokens(i, prompt, step, k0, k1)
        two = two_tokens(i + stride, prompt, step, k0, k1)
        three = two_tokens(i + 2 * stride, prompt, step, k0, k1)
        four = two_tokens(i + 3 * stride, prompt, step, k0, k1)
        found = _with_pair(products, one, given, found)
        found = _with_pair(products, two, given, found)
        found = _with_pair(products, three, given, found)
        found = _with_pair(products, four, given, found)
        i += 4 * stride
    while i < end:
        found = _with_pair(products, two_tokens(i, prompt, step, k0, k1), given, found)
        i += stride
    if i == full and full < last and L % 2 == 1:
        g, h, _, _ = two_tokens(i, prompt, step, k0, k1)
        found, _ = with_token(products, False, (g, h), given, found, (zero, zero, zero))
    return found


@scalar
def _with_pair(products, pair, given, sums):
    """The twelve sums once two tokens of a long prompt are added."""
    g, h, x, y = pair
    nothing = f32(0), f32(0), f32(0)
    sums, _ = with_token(products, False, (g, h), given, sums, nothing)
    sums, _ = with_token(products, False, (x, y), given, sums, nothing)
    return sums
