"""The loop over tokens on a GPU: a thread adds up some of the tokens of one prompt, in its registers.

Token pairs are dealt out to the threads of a prompt, and each takes scores from the largest of its own where that is
needed: what they add up is brought to one scale at the end.
"""

import numpy as np

from ._elementary import exp2, two_normals
from ._lanes import on_lanes
from ._philox import TOKENS, philox
from ._target import tuned
from ._tokens import CHUNK, SHORT, leveller, recentred, weighed

f32, u32, f64 = np.float32, np.uint32, np.float64
SUMS = 12  # as in `_tokens`: w, w g, w h, w f g, w f h, w², w² f, w² f², g², g h, h², (f - λ w f)²


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
    """The largest first coordinate of the tokens of a part; -1e30 where it has none."""
    tuned()
    top, i = f32(-1e30), part
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
def add_part(L, part, parts, products, beta, shift, along, across, prompt, step, k0, k1, sums, ahead, drawn, at, apart):
    """The sums over the tokens of a part, for scores β g in units of log 2 and values along · g + across · h.

    Float32 within a few hundred tokens, float64 beyond, as on a processor. In short prompts, which one thread has, f is
    counted from `sums[12]`, and `sums[14]` is Σ w f. The first pairs, as many as `ahead`, have been drawn.
    """
    tuned()
    for i in range(SUMS + 3):
        sums[i] = 0.0
    short, top, centre, left = L <= SHORT, f32(-1e30), f32(0), f32(0)
    i, pairs, rest = part, (L + 1) // 2, L % 2
    level = leveller(beta, shift)
    while i < pairs:
        s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
        s4, s5, s6, s7 = f32(0), f32(0), f32(0), f32(0)
        s8, s9, s10, s11 = f32(0), f32(0), f32(0), f32(0)
        last = min(pairs, i + CHUNK * parts)
        while i < last:
            if i < ahead:
                g, h, x, y = _two_tokens_ahead(i, drawn, at, apart)
            else:
                g, h, x, y = two_tokens(i, prompt, step, k0, k1)
            w, f, wf = weighed(g, h, beta, shift, along, across)
            if products:
                u = f - level * wf
                s11 += u * u
            if short:
                new = f if g > top else centre
                s3, s4, s6, s7 = recentred(new - centre, s1, s2, s3, s4, s5, s6, s7)
                wf = w * (f - new)
                left += wf - (new - centre) * s0
                top, centre = max(top, g), new
            s0 += w
            s1 += w * g
            s2 += w * h
            s3 += wf * g
            s4 += wf * h
            s5 += w * w
            s6 += w * wf
            s7 += wf * wf
            if products:
                s8 += g * g
                s9 += g * h
                s10 += h * h
            if rest == 0 or i < pairs - 1:
                w, f, wf = weighed(x, y, beta, shift, along, across)
                if products:
                    u = f - level * wf
                    s11 += u * u
                if short:
                    new = f if x > top else centre
                    s3, s4, s6, s7 = recentred(new - centre, s1, s2, s3, s4, s5, s6, s7)
                    wf = w * (f - new)
                    left += wf - (new - centre) * s0
                    top, centre = max(top, x), new
                s0 += w
                s1 += w * x
                s2 += w * y
                s3 += wf * x
                s4 += wf * y
                s5 += w * w
                s6 += w * wf
                s7 += wf * wf
                if products:
                    s8 += x * x
                    s9 += x * y
                    s10 += y * y
            i += parts
        sums[0] += f64(s0)
        sums[1] += f64(s1)
        sums[2] += f64(s2)
        sums[3] += f64(s3)
        sums[4] += f64(s4)
        sums[5] += f64(s5)
        sums[6] += f64(s6)
        sums[7] += f64(s7)
        sums[8] += f64(s8)
        sums[9] += f64(s9)
        sums[10] += f64(s10)
        sums[11] += f64(s11)
    sums[SUMS] = f64(centre)
    sums[SUMS + 2] = f64(left)


@on_lanes
def add_scaled(beta, shift, other_shift, other, lane, stride, sums):
    """Add the sums of a part, `stride` apart from `lane` on, taken from a shift that is at most ours."""
    tuned()
    factor = 1.0 if other_shift == shift else f64(exp2(beta * (other_shift - shift)))
    for i in range(SUMS):
        power = factor if i < 5 else factor * factor if i < 8 else 1.0  # the others know of no shift
        sums[i] += power * other[lane + i * stride]
