"""The loop over tokens on a GPU: a thread adds up some of the tokens of one prompt, in its registers.

Token pairs are dealt out to the threads of a prompt, and each takes scores from the largest of its own where that is
needed: what they add up is brought to one scale at the end.
"""

import numpy as np

from ._elementary import exp2, scalar, two_normals
from ._lanes import on_lanes
from ._philox import TOKENS, philox
from ._target import tuned
from ._tokens import CENTRE, CHUNK, GG, LOWEST, SUMS, WF, WW, leveller, with_token

f32, u32, f64 = np.float32, np.uint32, np.float64


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
def add_long(L, part, parts, both, products, beta, shift, along, across, prompt, step, k0, k1, sums, twins):
    """The same over the tokens of a part of a long prompt, or of `both`, the part and its twin, `parts` further.

    Pairs of tokens are dealt out to twice as many parts, and each part is added up by itself: one thread with two of
    them finds what two threads would. Several pairs are drawn at a time, since none waits for another. Float32 within a
    few hundred tokens, float64 beyond, as on a processor.
    """
    tuned()
    for c in range(WF + 1):
        sums[c] = 0.0
        twins[c] = 0.0
    given, zero = (beta, shift, along, across, leveller(beta, shift)), f32(0)
    i, pairs, full, stride = part, (L + 1) // 2, L // 2, 2 * parts
    while i < pairs:
        found = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
        twin = found
        last = min(full, i + CHUNK * stride)
        if both:
            while i + parts < last:
                one = two_tokens(i, prompt, step, k0, k1)
                other = two_tokens(i + parts, prompt, step, k0, k1)
                found = _with_pair(products, one, given, found)
                twin = _with_pair(products, other, given, twin)
                i += stride
        else:
            while i + 3 * stride < last:
                first = two_tokens(i, prompt, step, k0, k1)
                second = two_tokens(i + stride, prompt, step, k0, k1)
                third = two_tokens(i + 2 * stride, prompt, step, k0, k1)
                fourth = two_tokens(i + 3 * stride, prompt, step, k0, k1)
                for pair in (first, second, third, fourth):
                    found = _with_pair(products, pair, given, found)
                i += 4 * stride
        while i < last:
            found = _with_pair(products, two_tokens(i, prompt, step, k0, k1), given, found)
            i += parts if both else stride
        if full <= i < pairs:  # the last token of an odd number
            g, h, _, _ = two_tokens(i, prompt, step, k0, k1)
            if (i - part) % stride == 0:
                found, _ = with_token(products, False, (g, h), given, found, (zero, zero, zero))
            else:
                twin, _ = with_token(products, False, (g, h), given, twin, (zero, zero, zero))
        if last == full:
            i = pairs
        for c in range(len(SUMS)):
            sums[c] += f64(found[c])
            twins[c] += f64(twin[c])


@scalar
def _with_pair(products, pair, given, sums):
    """The twelve sums once two tokens of a long prompt are added."""
    g, h, x, y = pair
    nothing = f32(0), f32(0), f32(0)
    sums, _ = with_token(products, False, (g, h), given, sums, nothing)
    sums, _ = with_token(products, False, (x, y), given, sums, nothing)
    return sums


@on_lanes
def add_scaled(beta, shift, other_shift, other, lane, stride, sums):
    """Add the sums of a part, `stride` apart from `lane` on, taken from a shift that is at most ours."""
    tuned()
    factor = 1.0 if other_shift == shift else f64(exp2(beta * (other_shift - shift)))
    for i in range(len(SUMS)):
        power = factor if i < WW else factor * factor if i < GG else 1.0  # the others know of no shift
        sums[i] += power * other[lane + i * stride]
