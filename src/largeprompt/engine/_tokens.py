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

from ._elementary import LARGEST_NORMAL, exp2, scalar
from ._lanes import assembled, carry, fill_normals, on_lanes, row
from ._philox import TOKENS
from ._target import lanes, tuned

f32, f64 = np.float32, np.float64
LOG2_E = f32(math.log2(math.e))
_LARGEST_EXPONENT = 110.0  # of two: float32 ends at 127, and a sum or a value may be large too
_LARGEST_VALUE = f32(100)  # the square of a value's size up to which that margin does
CHUNK = 256  # pairs of tokens after which float32 sums are carried over
SHORT = 64  # tokens of a prompt, up to which values are counted from one of them
LOWEST = f32(-1e30)  # below every coordinate

# The sums of one head over its tokens, with w = e^s, f counted from `CENTRE` in short prompts, and u = f - λ e^s f.
W, WG, WH, WFG, WFH, WW, WWF, WWFF, GG, GH, HH, UU = SUMS = tuple(range(12))
CENTRE, TOP, WF = range(12, 15)  # for short prompts: the value and the g of the token with the largest g, and Σ w f
# The rows that `arrange` adds to the sums of two columns: λ, Σ u², and what values are counted from.
LEVEL, REST, ORIGIN = 14, 15, 16
ARRANGED = 17


def sums_of(m):
    """How many sums m columns have: X, x·g, x·x and g·g, whole square matrices for plain indexing."""
    return m + 3 * m * m


_sums_of = scalar(sums_of)  # for compiled functions


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


@scalar
def leveller(beta, shift):
    """λ with λ 2^(β (g - shift)) = 2^(β (g - β)): small scores or large ones, (1 - λ w)² has a mean below 1."""
    return exp2(beta * (shift - beta))


@scalar
def recentred(by, wg, wh, fg, fh, ww, wf, ff):
    """The sums that have values in them, those of w f g, w f h, w² f and w² f², once all values are less by so much."""
    less = wf - by * ww
    return fg - by * wg, fh - by * wh, less, ff - by * (wf + less)


@scalar
def with_token(products, centred, token, given, sums, centring):
    """The twelve sums and (centre, top, Σ w f) once a token is added, whose coordinates are g and h.

    Given are β log2 e, the shift of g, the two coordinates of the value and λ. A linear head needs the `products`;
    where values are `centred` they are counted from that of the token with the largest g.
    """
    g, h = token
    beta, shift, along, across, level = given
    w, wg, wh, wfg, wfh, ww, wwf, wwff, gg, gh, hh, uu = sums
    centre, top, left = centring
    weight = exp2(beta * (g - shift))
    f = along * g + across * h
    weighted = weight * f
    if products:
        rest = f - level * weighted
        uu += rest * rest
    if centred:
        new = f if g > top else centre
        wfg, wfh, wwf, wwff = recentred(new - centre, wg, wh, wfg, wfh, ww, wwf, wwff)
        weighted = weight * (f - new)
        left += weighted - (new - centre) * w
        centre, top = new, max(top, g)
    w += weight
    wg += weight * g
    wh += weight * h
    wfg += weighted * g
    wfh += weighted * h
    ww += weight * weight
    wwf += weight * weighted
    wwff += weighted * weighted
    if products:
        gg += g * g
        gh += g * h
        hh += h * h
    return (w, wg, wh, wfg, wfh, ww, wwf, wwff, gg, gh, hh, uu), (centre, top, left)


@on_lanes
def arrange(stride, short, R, carried, sums):
    """The sums of one head from the twelve that were added up: Σ e^s f follows from Σ e^s g and Σ e^s h."""
    tuned()
    for j in range(lanes()):
        sums[row(0, j)] = carried[row(W, j)]
        of_value = R[row(1, j)] * carried[row(WG, j)] + R[row(stride + 1, j)] * carried[row(WH, j)]
        sums[row(1, j)] = carried[row(WF, j)] if short else of_value
        sums[row(ORIGIN, j)] = carried[row(CENTRE, j)]
        for i in range(4):
            sums[row(2 + i, j)] = carried[row(WG + i, j)]
        for block in range(2):  # x·x and g·g, symmetric
            at, of = 6 + 4 * block, WW + 3 * block
            sums[row(at, j)] = carried[row(of, j)]
            sums[row(at + 1, j)] = carried[row(of + 1, j)]
            sums[row(at + 2, j)] = carried[row(of + 1, j)]
            sums[row(at + 3, j)] = carried[row(of + 2, j)]
        sums[row(REST, j)] = carried[row(UU, j)]


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
    n = _sums_of(m)
    shifted = must_shift(R, m, stride)
    for h in range(m // 2):
        for j in range(lanes()):
            S[row(top + h, j)] = LOWEST if shifted else f32(0)
    if shifted:
        for l in range(L):
            fill_normals(S, l * (x // 4), m, prompt, step, TOKENS, k0, k1)
            for h in range(m // 2):
                _combination(R, stride, 2 * h, S, S, score)
                for j in range(lanes()):
                    S[row(top + h, j)] = max(S[row(top + h, j)], S[row(score, j)])
    for i in range(n):
        for j in range(lanes()):
            S[row(s + i, j)] = f32(0)
            sums[row(i, j)] = 0.0
    for l in range(L):
        fill_normals(S, l * (x // 4), m, prompt, step, TOKENS, k0, k1)
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
            carry(S, s, n, sums)
    for block in range(2):  # the other halves of x·x and g·g
        first = m + (1 + block) * m * m
        for c in range(m):
            for i in range(c):
                for j in range(lanes()):
                    sums[row(first + i * m + c, j)] = sums[row(first + c * m + i, j)]
