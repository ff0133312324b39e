"""The loop over the tokens of one head on a processor: two tokens of each of `LANES` prompts side by side.

The four words of a counter are the random bits of two tokens. They lie in places 2j and 2j + 1 of an array twice as
wide as a row, so that two loops do for a pair of tokens: one over 64-bit words for the bits, one over 32-bit ones for
the rest.
"""

import math

import numpy as np

from ._elementary import LARGEST_NORMAL, two_normals
from ._lanes import LANES, assembled, on_lanes, row
from ._philox import TOKENS, philox_pairs
from ._target import tuned
from ._tokens import (
    CENTRE,
    CHUNK,
    GG,
    LEVEL,
    LOG2_E,
    LOWEST,
    SHORT,
    SUMS,
    TOP,
    WF,
    WFG,
    WFH,
    WG,
    WH,
    WW,
    WWF,
    WWFF,
    W,
    arrange,
    leveller,
    must_shift,
    recentred,
    with_token,
)

f32, u32, f64 = np.float32, np.uint32, np.float64
WIDE = 2 * LANES
_GIVEN = 5  # rows of S before the sums: β log2 e, the shift of g, the two coordinates of the value, λ
# Where sums begin, in rows of ordinary width; those of products lie half a row off: 4096 bytes from another sum, loads
# would wait for its stores.
_AT = tuple(2 * (_GIVEN + i) + (i >= GG) for i in range(WF + 1))
ROOM = _AT[-1] + 2
_LARGEST_GUESSED = f32(110)  # exponent of two of a weight
_LEAST_WEIGHT, _MOST_WEIGHT = 2.0**-40, 2.0**45  # of a prompt in all: squares of weights are normal float32 numbers,
_LARGEST_SQUARE = f32(2**24)  # also times the square of a value of up to this one's size and a normal


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


def _adding(products: bool, centred: bool):
    """A function that adds the tokens in all places, with or without the products that a linear head needs."""
    zero = f32(0)

    @on_lanes
    def add(first, second, S):
        tuned()
        for j in range(WIDE):
            given = S[j], S[WIDE + j], S[2 * WIDE + j], S[3 * WIDE + j], S[4 * WIDE + j] if products else zero
            a, b, c, d = S[row(_AT[0], j)], S[row(_AT[1], j)], S[row(_AT[2], j)], S[row(_AT[3], j)]
            e, f, g, h = S[row(_AT[4], j)], S[row(_AT[5], j)], S[row(_AT[6], j)], S[row(_AT[7], j)]
            k, l, m, n = zero, zero, zero, zero
            centring = zero, zero, zero
            if products:
                k, l, m, n = S[row(_AT[8], j)], S[row(_AT[9], j)], S[row(_AT[10], j)], S[row(_AT[11], j)]
            if centred:
                centring = S[row(_AT[CENTRE], j)], S[row(_AT[TOP], j)], S[row(_AT[WF], j)]
            sums = a, b, c, d, e, f, g, h, k, l, m, n
            sums, centring = with_token(products, centred, (first[j], second[j]), given, sums, centring)
            S[row(_AT[0], j)], S[row(_AT[1], j)], S[row(_AT[2], j)], S[row(_AT[3], j)] = sums[:4]
            S[row(_AT[4], j)], S[row(_AT[5], j)], S[row(_AT[6], j)], S[row(_AT[7], j)] = sums[4:8]
            if products:
                S[row(_AT[8], j)], S[row(_AT[9], j)], S[row(_AT[10], j)], S[row(_AT[11], j)] = sums[8:]
            if centred:
                S[row(_AT[CENTRE], j)], S[row(_AT[TOP], j)], S[row(_AT[WF], j)] = centring

    return add


_add_with_products, _add = _adding(True, False), _adding(False, False)
_add_centred_with_products, _add_centred = _adding(True, True), _adding(False, True)


@on_lanes
def _begin(S):
    """Clear the sums; no token so far."""
    tuned()
    for k in range(row(_AT[0], 0), row(_AT[CENTRE], 0)):
        S[k] = f32(0)
    for j in range(WIDE):
        S[row(_AT[CENTRE], j)], S[row(_AT[TOP], j)], S[row(_AT[WF], j)] = f32(0), LOWEST, f32(0)


@on_lanes
def _carry_centred(S, products, first_only, sums):
    """Add the sums of both places, or of the first alone, whose values are counted from different tokens; clear them.

    Then all are counted from that with the largest score.
    """
    tuned()
    for place in range(1 if first_only else 2):
        for j in range(LANES):
            at = np.uintp(2 * j + place)
            centre, top = f64(S[row(_AT[CENTRE], at)]), f64(S[row(_AT[TOP], at)])
            old = sums[row(CENTRE, j)]
            new = centre if top > sums[row(TOP, j)] else old
            sums[row(CENTRE, j)], sums[row(TOP, j)] = new, max(top, sums[row(TOP, j)])
            w, wg, wh = f64(S[row(_AT[W], at)]), f64(S[row(_AT[WG], at)]), f64(S[row(_AT[WH], at)])
            fg, fh, ww = f64(S[row(_AT[WFG], at)]), f64(S[row(_AT[WFH], at)]), f64(S[row(_AT[WW], at)])
            wf, ff = f64(S[row(_AT[WWF], at)]), f64(S[row(_AT[WWFF], at)])
            fg, fh, wf, ff = recentred(new - centre, wg, wh, fg, fh, ww, wf, ff)
            x, y, xx = sums[row(WG, j)], sums[row(WH, j)], sums[row(WW, j)]
            vx, vy, xv, vv = sums[row(WFG, j)], sums[row(WFH, j)], sums[row(WWF, j)], sums[row(WWFF, j)]
            vx, vy, xv, vv = recentred(new - old, x, y, vx, vy, xx, xv, vv)
            sums[row(WF, j)] += S[row(_AT[WF], at)] - (new - centre) * w - (new - old) * sums[row(W, j)]
            sums[row(W, j)] += w
            sums[row(WG, j)], sums[row(WH, j)], sums[row(WW, j)] = x + wg, y + wh, xx + ww
            sums[row(WFG, j)], sums[row(WFH, j)] = vx + fg, vy + fh
            sums[row(WWF, j)], sums[row(WWFF, j)] = xv + wf, vv + ff
            if products:
                for i in range(GG, len(SUMS)):
                    sums[row(i, j)] += S[row(_AT[i], at)]
    _begin(S)


@on_lanes
def _carry(S, products, centred, first_only, sums):
    """Add the sums of both places of a lane, or of the first alone, to the float64 ones; clear them."""
    tuned()
    if centred:
        _carry_centred(S, products, first_only, sums)
        return
    for i in range(len(SUMS) if products else GG):
        for j in range(LANES):
            at = row(_AT[i], 2 * j)
            sums[row(i, j)] += S[at] if first_only else S[at] + S[at + np.uintp(1)]
        for j in range(WIDE):
            S[row(_AT[i], j)] = f32(0)


@on_lanes
def _largest_first_coordinate(S, L, bits, other, radial, angular, first, second, prompt, step, k0, k1):
    """Row 1 of S: the largest g of each prompt; the same numbers are drawn again afterwards."""
    tuned()
    for j in range(WIDE):
        S[WIDE + j] = LOWEST
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
def _guess_largest(S, L, R, stride):
    """Row 1 of S: about the largest of L normals; return whether no weight leaves float32 then, whatever is drawn."""
    tuned()
    guess = f32(0.85 * math.sqrt(2.0 * math.log(f64(L))))
    for j in range(WIDE):
        S[WIDE + j] = guess
    largest, value = f32(0), f32(0)
    for j in range(LANES):
        largest = max(largest, R[row(0, j)])
        value = max(value, R[row(1, j)] ** 2 + R[row(stride + 1, j)] ** 2)
    return largest * LOG2_E * (f32(LARGEST_NORMAL) - guess) <= _LARGEST_GUESSED and value <= _LARGEST_SQUARE


@on_lanes
def _is_far(sums):
    """Whether the guess was so far off that squares of weights, or of weights times values, may have left float32."""
    tuned()
    far = False
    for j in range(LANES):
        far = far | (sums[row(W, j)] < _LEAST_WEIGHT) | (sums[row(W, j)] > _MOST_WEIGHT)
    return far


@on_lanes
def _level(S):
    """Row 4 of S: λ."""
    tuned()
    for j in range(WIDE):
        S[4 * WIDE + j] = leveller(S[j], S[WIDE + j])


@assembled
def _add_tokens(L, stride, products, w, prompt, step, k0, k1):
    """The sums of all tokens into `w.carried`, with the g of each lane counted from row 1 of S."""
    R, S, carried = w.R, w.S, w.carried
    for j in range(LANES):
        beta = R[j] * LOG2_E
        for place in range(2 * j, 2 * j + 2):
            S[place] = beta
            S[2 * WIDE + place] = R[LANES + j]
            S[3 * WIDE + place] = R[row(stride + 1, j)]
    if products:
        _level(S)
    _begin(S)
    for j in range(LANES):
        for i in range(WF + 1):
            carried[row(i, j)] = 0.0
        carried[row(TOP, j)] = LOWEST
    short = L <= SHORT
    pairs = (L + 1) // 2
    for i in range(pairs):
        _bits(i, w.bits, w.other, prompt, step, k0, k1)
        last = i == pairs - 1
        if last and L % 2:  # what came before counts for both places, the last for the first alone
            _carry(S, products, short, False, carried)
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
            _carry(S, products, short, last and L % 2 == 1, carried)


@assembled
def sums_of_one_head(L, stride, products, w, prompt, step, k0, k1):
    """The sums of one head, as `arrange` orders them. R has rows `stride` apart.

    Large scores are counted from about the largest that L tokens have; only if this was far off, which is rare, are all
    tokens drawn to find the largest and then once more.
    """
    S, sums = w.S, w.sums
    attempt, shifted = 0, must_shift(w.R, 2, stride)
    for j in range(WIDE):
        S[WIDE + j] = f32(0)
    if shifted and not _guess_largest(S, L, w.R, stride):
        attempt = 1
    while attempt < 2:  # one place from which it is called: what is here becomes part of the caller
        if attempt == 1:
            _largest_first_coordinate(
                S, L, w.bits, w.other, w.radial, w.angular, w.first, w.second, prompt, step, k0, k1
            )
        _add_tokens(L, stride, products, w, prompt, step, k0, k1)
        attempt = attempt + 1 if attempt == 0 and shifted and _is_far(w.carried) else 2
    for j in range(LANES):
        sums[row(LEVEL, j)] = S[4 * WIDE + 2 * j]
    arrange(stride, L <= SHORT, w.R, w.carried, sums)
