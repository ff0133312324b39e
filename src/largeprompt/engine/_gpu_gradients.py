"""Slopes of the weights on a GPU: sums over prompts, by all threads of a block, of what each thread has of its own."""

from typing import Any

import numpy as np
from numba import cuda as _cuda  # an extra

from ._batch import errors, weigh
from ._gpu_kinds import Kind
from ._target import member, members, together
from ._weights import u

cuda: Any = _cuda  # under this name, by which its simulator finds it
f32, f64 = np.float32, np.float64


def adding_gradients(kind: Kind) -> Any:
    """A function of the GPU that adds the share of a block's prompts to the slopes of both layers.

    Readings are shared in rows of `staged` prompts, so far apart that threads meet no bank of memory twice.
    """
    d, D, prompts, staged, pieces, single = kind.d, kind.d + 1, kind.prompts, kind.staged, kind.pieces, kind.single
    (m, n), softmax, linear = kind.columns, kind.softmax is not None, kind.linear is not None
    apart, last = staged + 1, len(kind.layers) - 1
    after_readings = (2 * len(kind.layers) + 1) * D * apart

    @cuda.jit(device=True)
    def put(readings, h, layer, at, stage):
        """Share the readings of a head."""
        for i in range(2 * D):
            stage[u(((2 * layer + 1) * D + i) * apart + at)] = readings[2 * h * D + i]

    @cuda.jit(device=True)
    def add_up(w, h, layer, count, stage, own):
        """Sums over the shared prompts, or over pieces of them: of m to the slope of v, of k xᵀ to that of U."""
        e = member()
        while e < pieces * D * D:
            i, c, piece = own if single else (e // D % D, e % D, e // (D * D))
            left, right = ((2 * layer + (1 if c == d else 2)) * D + i) * apart, c * apart
            total, j = f32(0), piece * count // pieces
            while j < (piece + 1) * count // pieces:
                total += stage[u(left + j)] * stage[u(right + j)]
                j += 1
            if pieces > 1:
                stage[u(after_readings + layer * pieces * D * D + e)] = total
            else:
                add(w, h, i, c, f64(total))
            e += members()
            if single:
                break

    @cuda.jit(device=True)
    def join(w, h, layer, stage, own):
        """The sums over all shared prompts from those over pieces of them."""
        e = member()
        while e < D * D:
            i, c, _ = own if single else (e // D, e % D, 0)
            total = 0.0
            for piece in range(pieces):
                total += f64(stage[u(after_readings + (layer * pieces + piece) * D * D + e)])
            add(w, h, i, c, total)
            e += members()
            if single:
                break

    @cuda.jit(device=True)
    def add(w, h, i, c, total):
        if c == d:
            w.dv[u(h), u(i)] += total
        else:
            w.dU[u(h), u(i), u(c)] += total

    @cuda.jit(device=True)
    def gradients(soft, line, valid, law, s, lane, part, stage, own):
        """Add the share of a block's prompts to the slopes of both layers."""
        if part == 0 and softmax:
            errors(d, m // 2, 0, s.softmax, valid, s)
            for c in range(m):
                weigh(d, c, s.softmax, law, s)
        if part == 0 and linear:
            errors(d, n // 2, m, s.linear, valid, s)
            for c in range(n):
                weigh(d, c, s.linear, law, s)
        for h in range(max(m, n) // 2):
            for begin in range(0, prompts, staged):
                at = lane - begin
                if part == 0 and 0 <= at < staged:
                    for i in range(d):
                        stage[u(i * apart + at)] = s.drawn[i]
                    stage[u(d * apart + at)] = f32(1)
                    if 2 * h < m:
                        put(s.softmax, h, 0, at, stage)
                    if 2 * h < n:
                        put(s.linear, h, last, at, stage)
                together()
                count = min(staged, prompts - begin)
                if 2 * h < m:
                    add_up(soft, h, 0, count, stage, own)
                if 2 * h < n:
                    add_up(line, h, last, count, stage, own)
                together()
                if pieces > 1:
                    if 2 * h < m:
                        join(soft, h, 0, stage, own)
                    if 2 * h < n:
                        join(line, h, last, stage, own)
                    together()

    return gradients
