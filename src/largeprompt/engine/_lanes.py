"""Arithmetic on many prompts at once: a *row* is one number of each of `lanes()` prompts, an array is a stack of rows.

Prompts as lanes, not tokens: then a prompt of ten tokens keeps the processor's vectors as busy as one of a thousand,
and no sum runs across a vector. The rows of a D-vector follow one another. Offsets are constants times `lanes()`, so
that the compiler sees which rows are apart.
"""

import math

import numpy as np
from numpy.typing import DTypeLike

from ._elementary import FASTMATH, two_normals
from ._philox import words
from ._target import LANES, lanes, row, tuned
from ._within import within

f32, u32 = np.float32, np.uint32

on_lanes = within(fastmath=FASTMATH)
# For what only calls such functions: made part of its caller before LLVM sees it, or all below would be compiled again.
assembled = within(inline="always", fastmath=FASTMATH)


_PAGE = 4096


def aligned(n: int, dtype: DTypeLike) -> np.ndarray:
    """Zeros that start on a page.

    A vector across two cache lines costs twice; and a load whose address agrees with that of a recent store in its last
    twelve bits waits for it, which depends on where arrays lie to each other.
    """
    size = n * np.dtype(dtype).itemsize
    room = np.zeros(size + _PAGE, np.uint8)
    start = -room.ctypes.data % _PAGE
    return room[start : start + size].view(dtype)


def rows(n: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Room for n rows, rounded up to a multiple of four since normals come in fours."""
    return aligned(-(-n // 4) * 4 * LANES, dtype)


@on_lanes
def fill_normals(out, first, n, prompt, step, stream, k0, k1):
    """The first n rows of out, rounded up to a multiple of four: four normals for each counter from `first` on."""
    tuned()
    for i in range((n + 3) // 4):
        for j in range(lanes()):
            a, b, c, d = words(u32(first + i), u32(prompt + j), step, stream, k0, k1)
            g, h = two_normals(a, b)
            out[row(4 * i, j)] = g
            out[row(4 * i + 1, j)] = h
            g, h = two_normals(c, d)
            out[row(4 * i + 2, j)] = g
            out[row(4 * i + 3, j)] = h


@on_lanes
def carry(S, first, n, sums):
    """Add n rows of float32 sums, from `first` on, to the float64 ones, and clear them."""
    tuned()
    for i in range(n):
        for j in range(lanes()):
            sums[row(i, j)] += S[row(first + i, j)]
            S[row(first + i, j)] = f32(0)


@on_lanes
def dot(a, ra, b, rb, n, out, ro):
    """Row `ro` of out = Σ_i a_i b_i over n rows."""
    tuned()
    dot_strided(a, ra, 1, b, rb, 1, n, out, ro)


@on_lanes
def dot_strided(a, ra, sa, b, rb, sb, n, out, ro):
    """Row `ro` of out = Σ_i a_i b_i over n rows, those of a and b `sa` and `sb` apart."""
    tuned()
    for j in range(lanes()):
        out[row(ro, j)] = f32(0)
    for i in range(n):
        for j in range(lanes()):
            out[row(ro, j)] += a[row(ra + i * sa, j)] * b[row(rb + i * sb, j)]


@on_lanes
def add_multiple(out, ro, factor, rf, a, ra, n):
    """Rows of out += factor · rows of a."""
    tuned()
    for i in range(n):
        for j in range(lanes()):
            out[row(ro + i, j)] += factor[row(rf, j)] * a[row(ra + i, j)]


@on_lanes
def subtract_multiple(out, ro, factor, rf, a, ra, n):
    """Rows of out -= factor · rows of a."""
    tuned()
    for i in range(n):
        for j in range(lanes()):
            out[row(ro + i, j)] -= factor[row(rf, j)] * a[row(ra + i, j)]


@on_lanes
def apply(matrix, m, a, ra, n, out, ro):
    """m rows of out = a matrix, the same for all lanes, times n rows of a: four of out and four of a at a time."""
    tuned()
    i = 0
    while i + 4 <= m:
        for j in range(4 * lanes()):
            out[row(ro + i, j)] = f32(0)
        k = 0
        while k + 4 <= n:
            b = matrix[i : i + 4, k : k + 4]
            p, q, r, s = b[0, 0], b[0, 1], b[0, 2], b[0, 3]
            t, u, v, w = b[1, 0], b[1, 1], b[1, 2], b[1, 3]
            e, f, g, h = b[2, 0], b[2, 1], b[2, 2], b[2, 3]
            c, d, y, z = b[3, 0], b[3, 1], b[3, 2], b[3, 3]
            for j in range(lanes()):
                x0, x1 = a[row(ra + k, j)], a[row(ra + k + 1, j)]
                x2, x3 = a[row(ra + k + 2, j)], a[row(ra + k + 3, j)]
                out[row(ro + i, j)] += p * x0 + q * x1 + r * x2 + s * x3
                out[row(ro + i + 1, j)] += t * x0 + u * x1 + v * x2 + w * x3
                out[row(ro + i + 2, j)] += e * x0 + f * x1 + g * x2 + h * x3
                out[row(ro + i + 3, j)] += c * x0 + d * x1 + y * x2 + z * x3
            k += 4
        for o in range(i, i + 4):
            for rest in range(k, n):
                p = matrix[o, rest]
                for j in range(lanes()):
                    out[row(ro + o, j)] += p * a[row(ra + rest, j)]
        i += 4
    for o in range(i, m):
        for j in range(lanes()):
            out[row(ro + o, j)] = f32(0)
        for k in range(n):
            p = matrix[o, k]
            for j in range(lanes()):
                out[row(ro + o, j)] += p * a[row(ra + k, j)]


@on_lanes
def orthonormalise(columns, first, count, D, E, R, stride, work):
    """Gram and Schmidt: directions E from column `first` on, orthonormal to E's earlier ones, and coordinates R.

    Column c is Σ_i R[i, c] E_i. A column that depends on those before it, to rounding, gets E = 0: then it adds no
    direction, and what is drawn across the span covers it. Twice, since once leaves float32 rounding in the span.
    """
    tuned()
    for c in range(first, first + count):
        dot(columns, c * D, columns, c * D, D, work, 0)
        for i in range(D):
            for j in range(lanes()):
                E[row(c * D + i, j)] = columns[row(c * D + i, j)]
        for i in range(stride):
            for j in range(lanes()):
                R[row(i * stride + c, j)] = f32(0)
        for _ in range(2):
            for i in range(c):
                dot(E, i * D, E, c * D, D, work, 1)
                subtract_multiple(E, c * D, work, 1, E, i * D, D)
                for j in range(lanes()):
                    R[row(i * stride + c, j)] += work[row(1, j)]
        dot(E, c * D, E, c * D, D, work, 1)
        for j in range(lanes()):
            size = math.sqrt(work[row(1, j)])
            there = work[row(1, j)] > f32(1e-10) * work[row(0, j)]
            R[row(c * stride + c, j)] = size if there else f32(0)
            work[row(2, j)] = f32(1) / size if there else f32(0)
        for i in range(D):
            for j in range(lanes()):
                E[row(c * D + i, j)] *= work[row(2, j)]


@on_lanes
def remove_span(vectors, start, count, D, E, first, last, work):
    """Project `count` D-vectors from the `start`-th on off the span of E_first … E_last-1."""
    tuned()
    for v in range(start, start + count):
        for c in range(first, last):
            dot(E, c * D, vectors, v * D, D, work, 0)
            subtract_multiple(vectors, v * D, work, 0, E, c * D, D)
