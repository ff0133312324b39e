r"""What each head reads off a prompt, drawn through the few numbers that a gradient sees: exact in law, jointly.

In whitened coordinates tokens are $\zeta\sim\mathcal N(0,I)$. A head looks at them along two *columns*, $\alpha =
C^\top u$ and $\gamma = C^\top v$. The gradient needs its two *readings*: $\sum_la_l\zeta_l$ and $\sum_la_l(f_l-\bar
f)\zeta_l$ of a softmax head, $\hat S\alpha$ and $\hat S\gamma$ of a linear one. With E an orthonormal basis of the
softmax columns and $g_l = E^\top\zeta_l$, sums $\sum_l\kappa_l\zeta_l$ with coefficients that are functions of the
$g_l$ are, given these,
$$E\sum_l\kappa_lg_l + \Xi\Lambda^\top,\qquad \Lambda\Lambda^\top=(\kappa_c\cdot\kappa_{c'})_{cc'},$$
with $\Xi$ standard normal across E. A linear head needs $\sum\zeta\zeta^\top$ along its columns. On the same tokens let
$\kappa$ run over the softmax coefficients and the $g$ themselves, 2m in all; across E the tokens are $\Xi$ along the
span of these and otherwise independent of everything so far: what is left of $\sum\zeta\zeta^\top$ there is
$\Xi\Xi^\top$ plus a Wishart matrix of $L - 2m$ degrees. With no softmax head, m = 0 and only the Wishart matrix is
left.
"""

import math

import numpy as np

from ._elementary import exp2
from ._lanes import (
    add_multiple,
    assembled,
    dot,
    dot_strided,
    fill_normals,
    on_lanes,
    orthonormalise,
    remove_span,
    row,
)
from ._philox import ACROSS, TOKENS
from ._target import lanes, tuned
from ._tokens import LEVEL, LOG2_E, ORIGIN, REST
from ._wishart import bartlett

f32, f64 = np.float32, np.float64
_ROUNDING = 1e-13  # of float64, in a square less others
_LEAST_SQUARE = 1e-30  # whose terms float32 holds


@on_lanes
def coefficients(m, sums, products, gram):
    r"""The Gram matrix of the coefficients $a_h$, $p_h = a_h(f_h-\bar f_h)$ and the coordinates $g_i$, in float64.

    2m by 2m, coefficients before coordinates, the lower half filled; without `products` all but the square of the g.
    """
    tuned()
    n = 2 * m
    xg, xx, gg = m, m + m * m, m + 2 * m * m
    for h in range(m // 2):
        for other in range(h + 1):
            for j in range(lanes()):
                inverse, inverse_o = 1.0 / sums[row(2 * h, j)], 1.0 / sums[row(2 * other, j)]
                f, fo = sums[row(2 * h + 1, j)] * inverse, sums[row(2 * other + 1, j)] * inverse_o
                scale = inverse * inverse_o
                at, to = xx + 2 * h * m + 2 * other, 2 * h * n + 2 * other
                aa, ap = sums[row(at, j)], sums[row(at + 1, j)]
                pa, pp = sums[row(at + m, j)], sums[row(at + m + 1, j)]
                gram[row(to, j)] = scale * aa
                gram[row(to + 1, j)] = scale * (ap - fo * aa)
                gram[row(to + n, j)] = scale * (pa - f * aa)
                gram[row(to + n + 1, j)] = scale * (pp - fo * pa - f * ap + f * fo * aa)
        for i in range(m):
            for j in range(lanes()):
                inverse = 1.0 / sums[row(2 * h, j)]
                f = sums[row(2 * h + 1, j)] * inverse
                at, to = xg + 2 * h * m + i, (m + i) * n + 2 * h
                ag, pg = sums[row(at, j)], sums[row(at + m, j)]
                gram[row(to, j)] = ag * inverse
                gram[row(to + 1, j)] = (pg - f * ag) * inverse
    if products:
        for i in range(m):
            for k in range(i + 1):
                for j in range(lanes()):
                    gram[row((m + i) * n + m + k, j)] = sums[row(gg + i * m + k, j)]


@on_lanes
def cholesky(gram, n, first, stride, root, inverse):
    """The first columns of the lower triangular root of n by n Gram matrices; a pivot of rounding alone counts as 0."""
    tuned()
    for i in range(first):
        for c in range(i, n):
            at = c * stride + i
            for j in range(lanes()):
                root[row(at, j)] = gram[row(at, j)]
            for k in range(i):
                for j in range(lanes()):
                    root[row(at, j)] -= root[row(c * stride + k, j)] * root[row(i * stride + k, j)]
            for j in range(lanes()):
                if c == i:
                    left = root[row(at, j)]
                    there = left > max(_LEAST_SQUARE, _ROUNDING * gram[row(at, j)])
                    inverse[j] = 1.0 / math.sqrt(left) if there else 0.0
                root[row(at, j)] *= inverse[j]


@on_lanes
def split_value(R, stride, sums, gram, root):
    r"""The corner of one head's root that belongs to the coordinates g, computed again so that small scores do no harm.

    For these $e^sf$ is nearly f. What is left of f across a and p is then nearly 0, and its square, taken from the Gram
    matrix, rounding alone. But $u = f - \lambda e^sf$ differs from f by a sum of multiples of a and p, is as small,
    and its square has been added up. With b the coordinate of unit size across f, the corner is the root for b, then f,
    turned back to g: no triangle, but good to the rounding of the sums instead of to its square root.
    """
    tuned()
    for j in range(lanes()):
        along, across = f64(R[row(1, j)]), f64(R[row(stride + 1, j)])
        square = along * along + across * across
        valued = square > _LEAST_SQUARE  # else f is 0 and has no direction
        unit = 1.0 / math.sqrt(square) if valued else 0.0
        c, s = along * unit, across * unit if valued else 1.0
        ga, gp, ha, hp = root[row(8, j)], root[row(9, j)], root[row(12, j)], root[row(13, j)]
        gg, hg, hh = gram[row(10, j)], gram[row(14, j)], gram[row(15, j)]
        fa, fp, ba, bp = c * ga + s * ha, c * gp + s * hp, s * ga - c * ha, s * gp - c * hp
        bb = s * s * gg - 2.0 * c * s * hg + c * c * hh - ba * ba - bp * bp
        fb = c * s * (gg - hh) + (s * s - c * c) * hg - fa * ba - fp * bp
        Z, scaled = sums[row(0, j)], sums[row(LEVEL, j)] * unit
        values = sums[row(1, j)] + sums[row(ORIGIN, j)] * Z  # e^s f = Z p + Σ e^s f a
        ua = fa - scaled * (Z * root[row(4, j)] + values * root[row(0, j)])
        up = fp - scaled * Z * root[row(5, j)]
        without = c * c * gg + 2.0 * c * s * hg + s * s * hh - fa * fa - fp * fp
        ff = sums[row(REST, j)] * unit * unit - ua * ua - up * up if valued else without
        b = math.sqrt(max(bb, 0.0))
        slope = fb / b if b > 0.0 else 0.0
        f = math.sqrt(max(ff - slope * slope, 0.0))
        root[row(10, j)] = s * b + c * slope
        root[row(11, j)] = c * f
        root[row(14, j)] = s * slope - c * b
        root[row(15, j)] = s * f


@on_lanes
def _as_float32(a, n, out):
    tuned()
    for k in range(n * lanes()):
        out[k] = f32(a[k])


@on_lanes
def _clear(y, n):
    tuned()
    for k in range(n * lanes()):
        y[k] = f32(0)


@assembled
def draw_across(L, D, m, n, w, prompt, step, k0, k1):
    """Draw what is random beside the tokens: Ξ of m softmax and n linear columns, and a Wishart matrix's root T."""
    across = 2 * m if n else m
    fill_normals(w.xi, 0, (across + n) * D, prompt, step, ACROSS, k0, k1)
    if n:
        bartlett(L - across, n, w.T, w.below, prompt, step, k0, k1)


@assembled
def readings_from_sums(D, m, n, products, w):
    """Compute the softmax readings from `w.sums`, the sums over tokens along the directions `w.E`, of n columns."""
    across = 2 * m if products else m
    coefficients(m, w.sums, products, w.gram64)
    corner = m == 2 and products
    cholesky(w.gram64, across, m if corner else across, 2 * m, w.root64, w.carried)
    if corner:
        split_value(w.R, n, w.sums, w.gram64, w.root64)
    _as_float32(w.gram64, 4 * m * m, w.gram)
    _as_float32(w.root64, 4 * m * m, w.root)
    remove_span(w.xi, 0, across, D, w.E, 0, m, w.work)
    _clear(w.softmax, m * D)
    for c in range(m):
        for i in range(m):
            add_multiple(w.softmax, c * D, w.gram, (m + i) * 2 * m + c, w.E, i * D, D)
        for i in range(c + 1):
            add_multiple(w.softmax, c * D, w.root, c * 2 * m + i, w.xi, i * D, D)


@assembled
def linear_readings(L, D, m, shared, w):
    """The readings of the m / 2 linear heads into `w.linear`, on the tokens of `shared` / 2 softmax heads if any.

    Their columns come after the shared ones in `w.columns`, and so do their directions in `w.E`.
    """
    n, across = shared + m, 2 * shared
    orthonormalise(w.columns, shared, m, D, w.E, w.R, n, w.work)
    remove_span(w.xi, across, m, D, w.E, 0, n, w.work)
    _clear(w.linear, m * D)
    for c in range(m):
        column = shared + c
        for i in range(m):  # (Tᵀ R_c)_i, along the i-th direction across everything
            dot_strided(w.T, i * m + i, m, w.R, (shared + i) * n + column, n, m - i, w.work, i)
            add_multiple(w.linear, c * D, w.work, i, w.xi, (across + i) * D, D)
        for i in range(m):  # (T Tᵀ R_c)_i, along the i-th direction of the heads' own
            dot(w.T, i * m, w.work, 0, i + 1, w.work, m)
            add_multiple(w.linear, c * D, w.work, m, w.E, (shared + i) * D, D)
    if shared:
        _add_shared(D, m, shared, w)
    scale = f32(1.0 / L)
    for k in range(m * D * lanes()):
        w.linear[k] *= scale


@assembled
def _add_shared(D, m, shared, w):
    """Add to each reading of a linear head what tokens along the softmax heads' directions and along Ξ contribute."""
    n, across = shared + m, 2 * shared
    _clear(w.cross, shared * D)
    for i in range(shared):  # Σ_l g_li ζ⊥_l
        for k in range(across if shared == 2 else shared + i + 1):  # see `split_value`
            add_multiple(w.cross, i * D, w.root, (shared + i) * across + k, w.xi, k * D, D)
    for c in range(m):
        column = shared + c
        for i in range(shared):
            dot(w.cross, i * D, w.columns, column * D, D, w.work, 0)
            for k in range(shared):
                low, high = min(i, k), max(i, k)
                add_multiple(w.work, 0, w.gram, (shared + high) * across + shared + low, w.R, k * n + column, 1)
            add_multiple(w.linear, c * D, w.work, 0, w.E, i * D, D)
            add_multiple(w.linear, c * D, w.R, i * n + column, w.cross, i * D, D)
        for k in range(across):
            dot(w.xi, k * D, w.columns, column * D, D, w.work, 0)
            add_multiple(w.linear, c * D, w.work, 0, w.xi, k * D, D)


@assembled
def whole_token_readings(L, D, softmax, linear, w, prompt, step, k0, k1):
    """The readings of all heads from whole tokens, for prompts with fewer tokens than the other way has directions."""
    fill_normals(w.tokens, 0, L * D, prompt, step, TOKENS, k0, k1)
    _clear(w.softmax, softmax * D)
    _clear(w.linear, linear * D)
    for c in range(0, softmax, 2):
        for l in range(L):
            dot(w.tokens, l * D, w.columns, c * D, D, w.S, l)
            dot(w.tokens, l * D, w.columns, (c + 1) * D, D, w.S, L + l)
        _softmax_in_place(L, w.S, w.work)
        for l in range(L):
            add_multiple(w.softmax, c * D, w.S, l, w.tokens, l * D, D)
            add_multiple(w.softmax, (c + 1) * D, w.S, L + l, w.tokens, l * D, D)
    for c in range(linear):
        for l in range(L):
            dot(w.tokens, l * D, w.columns, (softmax + c) * D, D, w.work, 0)
            for j in range(lanes()):
                w.work[j] /= f32(L)
            add_multiple(w.linear, c * D, w.work, 0, w.tokens, l * D, D)


@on_lanes
def _softmax_in_place(L, S, work):
    """Scores and values, L rows each, become the weights a and the coefficients a (f - Σ a f)."""
    tuned()
    for j in range(lanes()):
        work[j] = S[j]
    for l in range(1, L):
        for j in range(lanes()):
            work[j] = max(work[j], S[row(l, j)])
    for j in range(lanes()):
        work[row(1, j)] = f32(0)
        work[row(2, j)] = f32(0)
    for l in range(L):
        for j in range(lanes()):
            weight = exp2(LOG2_E * (S[row(l, j)] - work[j]))
            S[row(l, j)] = weight
            work[row(1, j)] += weight
    for l in range(L):
        for j in range(lanes()):
            S[row(l, j)] /= work[row(1, j)]
            work[row(2, j)] += S[row(l, j)] * S[row(L + l, j)]
    for l in range(L):
        for j in range(lanes()):
            S[row(L + l, j)] = S[row(l, j)] * (S[row(L + l, j)] - work[row(2, j)])


@assembled
def infinite_readings(D, softmax, linear, w):
    """The readings off the law of the tokens: the columns themselves, for softmax and linear heads alike."""
    for k in range(softmax * D * lanes()):
        w.softmax[k] = w.columns[k]
    for k in range(linear * D * lanes()):
        w.linear[k] = w.columns[np.uintp(softmax * D * lanes() + k)]
