r"""The loop over tokens: sums over a prompt of products of softmax weights, values and the coordinates that are drawn.

A head h sees a token through its score $s_h$ and its value $f_h$, both linear in the coordinates $g$ of the token along
an orthonormal basis: $s_h = \sum_iR_{i,2h}g_i$, $f_h = \sum_iR_{i,2h+1}g_i$. With $x_{2h} = e^{s_h}$ and $x_{2h+1} =
e^{s_h}f_h$ all that a gradient needs are $X_c = \sum x_c$, $\sum x_cg_i$, $\sum x_cx_{c'}$, and for a pair $\sum
g_ig_{i'}$. Sums of float32 are carried over to float64 every few hundred tokens.

Where scores are small, $e^sf$ is nearly $f$, and what a pair needs of their difference is below the rounding of these
sums. One head therefore has one more sum for a pair, $\sum(f - \lambda e^sf)^2$, with $\lambda$ near 1 for small
scores. Where scores are large, one token has nearly all weight, and what $e^sf$ is across $e^s$ cancels. In short
prompts, where this is common, the f of one head are therefore counted from that of the token with the largest score so
far: then the terms that cancel are 0.
"""

import math

import numpy as np

from ._elementary import LARGEST_NORMAL, exp2, scalar, two_normals
from ._lanes import LANES, assembled, on_lanes, row
from ._philox import TOKENS, philox, philox_pairs
from ._target import lanes, tuned

f32, u32, f64 = np.float32, np.uint32, np.float64
LOG2_E = f32(math.log2(math.e))
_LARGEST_EXPONENT = 110.0  # of two: float32 ends at 127, and a sum or a value may be large too
_LARGEST_VALUE = f32(100)  # the square of a value's size up to which that margin does
CHUNK = 256  # pairs of tokens
_SUMS = 12
_GIVEN = 5  # rows of S before the sums
SHORT = 64  # tokens of a prompt, up to which values are counted from one of them
_APART = LANES  # the products lie half a row off: 4096 bytes from another sum, loads would wait for its stores
WIDE = 2 * LANES
_TOP, _CENTRE = 17 * WIDE + _APART, 18 * WIDE + _APART  # in S: the largest g so far, and the value of that token
_LEFT = 19 * WIDE + _APART  # Σ w f, counted from there
_LOW = f32(-1e30)


@scalar
def sums_of(m):
    """How many sums m columns have: X, x·g, x·x and g·g, whole square matrices for plain indexing."""
    return m + 3 * m * m


@on_lanes
def must_shift(R, m, stride):
    """Whether the square of a weight, or of one times its value, may leave float32 for some lane.

    Then scores are taken from their maximum.
    """
    tuned()
    limit = f32((_LARGEST_EXPONENT / (2 * LOG2_E * LARGEST_NORMAL)) ** 2 / m)
    for c in range(m):
        largest = limit if c % 2 == 0 else _LARGEST_VALUE
        for j in range(lanes()):
            square = f32(0)
            for i in range(m):
                square += R[row(i * stride + c, j)] ** 2
            if square > largest:
                return True
    return False


@on_lanes
def _carry(S, first, count, sums):
    """Add `count` rows of float32 sums to the float64 ones, and clear them."""
    tuned()
    for i in range(count):
        for j in range(lanes()):
            sums[row(i, j)] += S[row(first + i, j)]
            S[row(first + i, j)] = f32(0)


@on_lanes
def _bits(index, bits, other, prompt, step, k0, k1):
    """The four words of a counter for each lane: those of one token in even places, of the next in odd ones."""
    tuned()
    for j in range(LANES):
        bits[j], other[j] = philox_pairs(u32(index), u32(prompt + j), step, TOKENS, k0, k1)


@on_lanes
def _normals(radial, angular, first, second):
    """The two coordinates of the token in each place.

    In a loop of its own: with the sums in one loop, the chain of operations on one vector is so long that the processor
    waits for it.
    """
    tuned()
    for j in range(WIDE):
        first[j], second[j] = two_normals(radial[j], angular[j])


@scalar
def weighed(g, h, beta, shift, along, across):
    """The weight 2^(β (g - shift)) of a token with coordinates g and h, its value, and their product."""
    w = exp2(beta * (g - shift))
    f = along * g + across * h
    return w, f, w * f


@scalar
def leveller(beta, shift):
    """λ with λ 2^(β (g - shift)) = 2^(β (g - β)): small scores or large ones, (1 - λ w)² has a mean below 1."""
    return exp2(beta * (shift - beta))


@scalar
def recentred(by, wg, wh, fg, fh, ww, wf, ff):
    """The sums that have values in them, those of w f g, w f h, w² f and w² f², once all values are less by so much."""
    less = wf - by * ww
    return fg - by * wg, fh - by * wh, less, ff - by * (wf + less)


def _adding(products: bool, centred: bool):
    """One head, two tokens a lane in places 2j and 2j + 1: with or without the products that a linear head needs.

    Rows 0 to 4 of S, of double width: β log2 e, the shift of g, the two coordinates of the value, λ; then sums.
    """

    @on_lanes
    def add(first, second, S):
        tuned()
        for j in range(WIDE):
            g, h = first[j], second[j]
            w, f, wf = weighed(g, h, S[j], S[WIDE + j], S[2 * WIDE + j], S[3 * WIDE + j])
            if products:
                rest = f - S[4 * WIDE + j] * wf
                S[16 * WIDE + _APART + j] += rest * rest
            if centred:
                top, centre = S[_TOP + j], S[_CENTRE + j]
                new = f if g > top else centre
                sg, sh, ss = S[6 * WIDE + j], S[7 * WIDE + j], S[10 * WIDE + j]
                fg, fh, sf, ff = S[8 * WIDE + j], S[9 * WIDE + j], S[11 * WIDE + j], S[12 * WIDE + j]
                fg, fh, sf, ff = recentred(new - centre, sg, sh, fg, fh, ss, sf, ff)
                S[8 * WIDE + j], S[9 * WIDE + j], S[11 * WIDE + j], S[12 * WIDE + j] = fg, fh, sf, ff
                S[_TOP + j], S[_CENTRE + j] = max(top, g), new
                wf = w * (f - new)
                S[_LEFT + j] += wf - (new - centre) * S[5 * WIDE + j]
            S[5 * WIDE + j] += w
            S[6 * WIDE + j] += w * g
            S[7 * WIDE + j] += w * h
            S[8 * WIDE + j] += wf * g
            S[9 * WIDE + j] += wf * h
            S[10 * WIDE + j] += w * w
            S[11 * WIDE + j] += w * wf
            S[12 * WIDE + j] += wf * wf
            if products:
                S[13 * WIDE + _APART + j] += g * g
                S[14 * WIDE + _APART + j] += g * h
                S[15 * WIDE + _APART + j] += h * h

    return add


_add_with_products, _add = _adding(True, False), _adding(False, False)
_add_centred_with_products, _add_centred = _adding(True, True), _adding(False, True)


@scalar
def _place(i):
    """Where the i-th sum of one head begins."""
    return (_GIVEN + i) * WIDE + (_APART if i >= 8 else 0)


@on_lanes
def _begin(S):
    """Clear the sums; no token so far."""
    tuned()
    for k in range(_SUMS * WIDE + _APART):
        S[_GIVEN * WIDE + k] = f32(0)
    for j in range(WIDE):
        S[_TOP + j], S[_CENTRE + j], S[_LEFT + j] = _LOW, f32(0), f32(0)


@on_lanes
def _carry_centred(S, products, first_only, sums):
    """Add the sums of both places, or of the first alone, whose values are counted from different tokens; clear them.

    Then all are counted from that with the largest score: rows 12 to 14 of `sums`, its value, its g, and Σ w f.
    """
    tuned()
    for place in range(1 if first_only else 2):
        for j in range(LANES):
            at = np.uintp(2 * j + place)
            centre, top = f64(S[_CENTRE + at]), f64(S[_TOP + at])
            old = sums[row(12, j)]
            new = centre if top > sums[row(13, j)] else old
            sums[row(12, j)], sums[row(13, j)] = new, max(top, sums[row(13, j)])
            w, wg, wh = f64(S[5 * WIDE + at]), f64(S[6 * WIDE + at]), f64(S[7 * WIDE + at])
            fg, fh, ww = f64(S[8 * WIDE + at]), f64(S[9 * WIDE + at]), f64(S[10 * WIDE + at])
            wf, ff = f64(S[11 * WIDE + at]), f64(S[12 * WIDE + at])
            fg, fh, wf, ff = recentred(new - centre, wg, wh, fg, fh, ww, wf, ff)
            x, y, xx = sums[row(1, j)], sums[row(2, j)], sums[row(5, j)]
            vx, vy, xv, vv = sums[row(3, j)], sums[row(4, j)], sums[row(6, j)], sums[row(7, j)]
            vx, vy, xv, vv = recentred(new - old, x, y, vx, vy, xx, xv, vv)
            sums[row(14, j)] += S[_LEFT + at] - (new - centre) * w - (new - old) * sums[j]
            sums[j] += w
            sums[row(1, j)], sums[row(2, j)], sums[row(3, j)], sums[row(4, j)] = x + wg, y + wh, vx + fg, vy + fh
            sums[row(5, j)], sums[row(6, j)], sums[row(7, j)] = xx + ww, xv + wf, vv + ff
            if products:
                for i in range(8, _SUMS):
                    sums[row(i, j)] += S[np.uintp(_place(i)) + at]
    _begin(S)


@on_lanes
def _carry_wide(S, products, centred, first_only, sums):
    """Add the sums of both places of a lane, or of the first alone, to the float64 ones; clear them."""
    tuned()
    if centred:
        _carry_centred(S, products, first_only, sums)
        return
    for i in range(_SUMS if products else _SUMS - 4):
        for j in range(LANES):
            at = np.uintp(_place(i) + 2 * j)
            sums[row(i, j)] += S[at] if first_only else S[at] + S[at + np.uintp(1)]
        for j in range(WIDE):
            S[np.uintp(_place(i) + j)] = f32(0)


@on_lanes
def _largest_first_coordinate(S, L, bits, other, radial, angular, first, second, prompt, step, k0, k1):
    """Row 1 of S: the largest g of each prompt; the same numbers are drawn again afterwards."""
    tuned()
    for j in range(WIDE):
        S[WIDE + j] = f32(-1e30)
    for i in range((L + 1) // 2):
        _bits(i, bits, other, prompt, step, k0, k1)
        _normals(radial, angular, first, second)
        if 2 * i + 1 < L:
            for j in range(WIDE):
                S[WIDE + j] = max(S[WIDE + j], first[j])
        else:  # the second place holds no token
            for j in range(LANES):
                S[WIDE + 2 * j] = max(S[WIDE + 2 * j], first[2 * j])
    for j in range(LANES):
        largest = max(S[WIDE + 2 * j], S[WIDE + 2 * j + 1])
        S[WIDE + 2 * j] = largest
        S[WIDE + 2 * j + 1] = largest


@on_lanes
def _level(S):
    """Row 4 of S: λ."""
    tuned()
    for j in range(WIDE):
        S[4 * WIDE + j] = leveller(S[j], S[WIDE + j])


@assembled
def sums_of_one_head(L, stride, products, w, prompt, step, k0, k1):
    """The sums of one head: rows X (2), x·g (4), x·x (4), g·g (4), λ, Σ (f - λ e^s f)² and what f are counted from.

    R has rows `stride` apart.
    """
    R, S, sums, carried = w.R, w.S, w.sums, w.carried
    shifted = must_shift(R, 2, stride)
    if shifted:
        _largest_first_coordinate(S, L, w.bits, w.other, w.radial, w.angular, w.first, w.second, prompt, step, k0, k1)
    for j in range(LANES):
        beta = R[j] * LOG2_E
        for place in range(2 * j, 2 * j + 2):
            S[place] = beta
            S[WIDE + place] = S[WIDE + place] if shifted else f32(0)
            S[2 * WIDE + place] = R[LANES + j]
            S[3 * WIDE + place] = R[row(stride + 1, j)]
    if products:
        _level(S)
    _begin(S)
    for j in range(LANES):
        for i in range(_SUMS + 3):
            carried[row(i, j)] = 0.0
        carried[row(13, j)] = _LOW
    short = L <= SHORT
    pairs = (L + 1) // 2
    for i in range(pairs):
        _bits(i, w.bits, w.other, prompt, step, k0, k1)
        last = i == pairs - 1
        if last and L % 2:  # what came before counts for both places, the last for the first alone
            _carry_wide(S, products, short, False, carried)
        _normals(w.radial, w.angular, w.first, w.second)
        if short and products:
            _add_centred_with_products(w.first, w.second, S)
        elif short:
            _add_centred(w.first, w.second, S)
        elif products:
            _add_with_products(w.first, w.second, S)
        else:
            _add(w.first, w.second, S)
        if last or i % CHUNK == CHUNK - 1:
            _carry_wide(S, products, short, last and L % 2 == 1, carried)
    for j in range(LANES):
        sums[row(14, j)] = S[4 * WIDE + 2 * j]
    arrange(stride, short, R, carried, sums)


@on_lanes
def arrange(stride, short, R, carried, sums):
    """The sums of one head from the twelve that were added up, beside λ: Σ e^s f follows from Σ e^s g and Σ e^s h."""
    tuned()
    for j in range(lanes()):
        sums[row(0, j)] = carried[row(0, j)]
        of_value = R[row(1, j)] * carried[row(1, j)] + R[row(stride + 1, j)] * carried[row(2, j)]
        sums[row(1, j)] = carried[row(14, j)] if short else of_value
        sums[row(16, j)] = carried[row(12, j)]
        for i in range(4):
            sums[row(2 + i, j)] = carried[row(1 + i, j)]
        for block in range(2):  # x·x and g·g, symmetric
            at, of = 6 + 4 * block, 5 + 3 * block
            sums[row(at, j)] = carried[row(of, j)]
            sums[row(at + 1, j)] = carried[row(of + 1, j)]
            sums[row(at + 2, j)] = carried[row(of + 1, j)]
            sums[row(at + 3, j)] = carried[row(of + 2, j)]
        sums[row(15, j)] = carried[row(11, j)]


@on_lanes
def _coordinates(g, m, l, prompt, step, k0, k1):
    """The m coordinates of token l."""
    tuned()
    quarters = (m + 3) // 4
    for q in range(quarters):
        for j in range(lanes()):
            a, b, c, d = philox(u32(l * quarters + q), u32(prompt + j), step, TOKENS, k0, k1)
            x, y = two_normals(a, b)
            z, t = two_normals(c, d)
            g[row(4 * q, j)] = x
            g[row(4 * q + 1, j)] = y
            g[row(4 * q + 2, j)] = z
            g[row(4 * q + 3, j)] = t


@on_lanes
def _combination(R, stride, c, g, out, ro):
    """Row `ro` of out = Σ_i R[i, c] g_i, the score or the value of a head."""
    tuned()
    for j in range(lanes()):
        out[row(ro, j)] = R[row(c, j)] * g[j]
    for i in range(1, c + 1):
        for j in range(lanes()):
            out[row(ro, j)] += R[row(i * stride + c, j)] * g[row(i, j)]


@assembled
def sums_of_heads(L, m, R, stride, products, S, sums, prompt, step, k0, k1):
    """The sums of m / 2 heads. Rows of S: coordinates (a multiple of four), x (m), tops (m / 2), a score, the sums."""
    x = (m + 3) // 4 * 4
    top = x + m
    score = top + m // 2
    s = score + 1
    n = sums_of(m)
    shifted = must_shift(R, m, stride)
    for h in range(m // 2):
        for j in range(lanes()):
            S[row(top + h, j)] = f32(-1e30) if shifted else f32(0)
    if shifted:
        for l in range(L):
            _coordinates(S, m, l, prompt, step, k0, k1)
            for h in range(m // 2):
                _combination(R, stride, 2 * h, S, S, score)
                for j in range(lanes()):
                    S[row(top + h, j)] = max(S[row(top + h, j)], S[row(score, j)])
    for i in range(n):
        for j in range(lanes()):
            S[row(s + i, j)] = f32(0)
            sums[row(i, j)] = 0.0
    for l in range(L):
        _coordinates(S, m, l, prompt, step, k0, k1)
        for h in range(m // 2):
            _combination(R, stride, 2 * h, S, S, score)
            _combination(R, stride, 2 * h + 1, S, S, x + 2 * h + 1)
            for j in range(lanes()):
                w = exp2(LOG2_E * (S[row(score, j)] - S[row(top + h, j)]))
                S[row(x + 2 * h, j)] = w
                S[row(x + 2 * h + 1, j)] *= w
        for c in range(m):
            for j in range(lanes()):
                S[row(s + c, j)] += S[row(x + c, j)]
            for i in range(m):
                at = s + m + c * m + i
                for j in range(lanes()):
                    S[row(at, j)] += S[row(x + c, j)] * S[row(i, j)]
            for i in range(c + 1):
                at = s + m + m * m + c * m + i
                for j in range(lanes()):
                    S[row(at, j)] += S[row(x + c, j)] * S[row(x + i, j)]
                if products:
                    at += m * m
                    for j in range(lanes()):
                        S[row(at, j)] += S[row(c, j)] * S[row(i, j)]
        if l % (2 * CHUNK) == 2 * CHUNK - 1 or l == L - 1:
            _carry(S, s, n, sums)
    for block in range(2):  # the other halves of x·x and g·g
        first = m + (1 + block) * m * m
        for c in range(m):
            for i in range(c):
                for j in range(lanes()):
                    sums[row(first + i * m + c, j)] = sums[row(first + c * m + i, j)]
