"""Gradients on a GPU: all threads of a block add up what each has for its own prompt."""

from typing import Any

import numpy as np

from ._batch import errors, times_error
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import KernelShape
from ._target import together

f32, f64 = np.float32, np.float64


def adding_gradients(shape: KernelShape, hand_over: Any) -> Any:
    """A function of the GPU that adds a block's prompts to the gradients of both layers.

    Readings are shared in rows of `staged` prompts, so far apart that threads meet no bank of memory twice.
    """
    d, D, prompts, staged, pieces, single = (
        shape.d,
        shape.d + 1,
        shape.prompts,
        shape.staged,
        shape.pieces,
        shape.single,
    )
    (m, n), softmax, linear = shape.columns, shape.softmax is not None, shape.linear is not None
    apart, last = staged + 1, len(shape.layers) - 1
    helped = shape.helped
    heads, other_heads = shape.layers[0].number, shape.layers[-1].number
    after_readings = (2 * len(shape.layers) + 1) * D * apart

    @cuda.jit(device=True)
    def put(readings, h, layer, at, stage):
        """Put the readings of a head into the memory that all threads of a block share."""
        for i in range(2 * D):
            stage[u(((2 * layer + 1) * D + i) * apart + at)] = readings[2 * h * D + i]

    @cuda.jit(device=True)
    def add_up(soft, line, h, layer, count, stage, entry):
        """Sums over the shared prompts, or over pieces of them: of m to the gradient in v, of k xᵀ to that in U."""
        e = soft.mate
        while e < pieces * D * D:
            i, c, piece = entry if single else (e // D % D, e % D, e // (D * D))
            left, right = ((2 * layer + (1 if c == d else 2)) * D + i) * apart, c * apart
            j, end = piece * count // pieces, (piece + 1) * count // pieces
            one, two, three, four = f32(0), f32(0), f32(0), f32(0)  # none waits for another
            while j + 8 <= end:
                one += stage[u(left + j)] * stage[u(right + j)]
                two += stage[u(left + j + 1)] * stage[u(right + j + 1)]
                three += stage[u(left + j + 2)] * stage[u(right + j + 2)]
                four += stage[u(left + j + 3)] * stage[u(right + j + 3)]
                one += stage[u(left + j + 4)] * stage[u(right + j + 4)]
                two += stage[u(left + j + 5)] * stage[u(right + j + 5)]
                three += stage[u(left + j + 6)] * stage[u(right + j + 6)]
                four += stage[u(left + j + 7)] * stage[u(right + j + 7)]
                j += 8
            while j < end:
                one += stage[u(left + j)] * stage[u(right + j)]
                j += 1
            total = (one + two) + (three + four)
            if pieces > 1:
                stage[u(after_readings + layer * pieces * D * D + e)] = total
            else:
                add(soft, line, h, layer, i, c, f64(total))
            e += soft.mates
            if single:
                break

    @cuda.jit(device=True)
    def join(soft, line, h, layer, stage, entry):
        """Add the sums over all shared prompts from those over pieces of them."""
        e = soft.mate
        while e < D * D:
            i, c, _ = entry if single else (e // D, e % D, 0)
            total = 0.0
            for piece in range(pieces):
                total += f64(stage[u(after_readings + (layer * pieces + piece) * D * D + e)])
            add(soft, line, h, layer, i, c, total)
            e += soft.mates
            if single:
                break

    @cuda.jit(device=True)
    def add(soft, line, h, layer, i, c, total):
        if layer == 0:
            add_to(soft, h, i, c, total)
        else:
            add_to(line, h, i, c, total)

    @cuda.jit(device=True)
    def add_to(w, h, i, c, total):
        if c == d:
            w.dv[u(h), u(i)] += total
        else:
            w.dU[u(h), u(i), u(c)] += total

    @cuda.jit(device=True)
    def gradients(soft, line, layer, valid, law, s, lane, part, stage, drawn, entry):
        """Add a block's prompts to the gradients of both layers, each thread to the entries that it keeps."""
        if part == 0 and softmax:
            errors(d, m // 2, 0, s.softmax, valid, s)
            for c in range(m):
                times_error(d, c, s.softmax, law, s)
        if part == 0 and linear:
            errors(d, n // 2, m, s.linear, valid, s)
            for c in range(n):
                times_error(d, c, s.linear, law, s)
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
                if helped and part == 1 and begin == 0:  # one head has `helped`
                    hand_over(s, lane, drawn)
                count = min(staged, prompts - begin)
                if h < (heads if layer == 0 else other_heads):
                    add_up(soft, line, h, layer, count, stage, entry)
                together()
                if pieces > 1:
                    if h < (heads if layer == 0 else other_heads):
                        join(soft, line, h, layer, stage, entry)
                    together()

    return gradients
