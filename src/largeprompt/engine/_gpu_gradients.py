"""Gradients on a GPU: all threads of a block add up what each has for its own prompt."""

from typing import Any, NamedTuple

import numpy as np

from ._batch import errors, times_error
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import LATE, KernelShape
from ._target import fresh, fresh_whole, member, members, together

f32, f64 = np.float32, np.float64
_LATE = 2**40  # more blocks than ever come


class Meeting(NamedTuple):
    """What the blocks of a run share: readings, how many blocks have come, and whether time is over.

    There are two places for readings, used in turn: who writes to one has met all the others since they read it. That
    time is over is counted with the blocks that have come, as a large number.
    """

    readings: np.ndarray
    arrived: np.ndarray
    flags: np.ndarray
    block: int
    number: int
    no_time: bool


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
    helped, helper, own, blocks, spread = shape.helped, shape.helper, shape.own, shape.blocks, shape.blocks > 1
    exchanged, rows = shape.exchanged // 2, (2 * len(shape.layers) + 1) * D
    heads, other_heads = shape.layers[0].number, shape.layers[-1].number
    after_readings = rows * apart

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
    def give(s, lane, meeting):
        """Put the readings of one head of each layer where the other blocks find them."""
        to, at = meeting.readings, meeting.number % 2 * exchanged + meeting.block * own + lane
        for i in range(d):
            to[u(at + i * prompts)] = s.drawn[i]
        to[u(at + d * prompts)] = f32(1)
        for i in range(2 * D):
            if softmax:
                to[u(at + (D + i) * prompts)] = s.softmax[i]
            if linear:
                to[u(at + ((2 * last + 1) * D + i) * prompts)] = s.linear[i]
        cuda.threadfence()

    @cuda.jit(device=True)
    def meet(meeting):
        """Wait for the other blocks of a run; all of them then know whether the first had time left."""
        together()
        if member() == 0:
            first_late = meeting.block == 0 and meeting.no_time and meeting.flags[LATE] == 0
            cuda.atomic.add(meeting.arrived, 0, 1 + (_LATE if first_late else 0))
            seen = fresh_whole(meeting.arrived, 0)
            while seen % _LATE < (meeting.number + 1) * blocks:
                seen = fresh_whole(meeting.arrived, 0)
            meeting.flags[LATE] = seen // _LATE
        together()

    @cuda.jit(device=True)
    def take(meeting, stage):
        """Copy what all blocks gave, eight numbers at a time: each takes long to come."""
        given, first, step, end = meeting.readings, meeting.number % 2 * exchanged, members(), rows * prompts
        e, most = member(), end - 1
        while e < end:
            found = (
                fresh(given, first + e),
                fresh(given, first + min(e + step, most)),
                fresh(given, first + min(e + 2 * step, most)),
                fresh(given, first + min(e + 3 * step, most)),
                fresh(given, first + min(e + 4 * step, most)),
                fresh(given, first + min(e + 5 * step, most)),
                fresh(given, first + min(e + 6 * step, most)),
                fresh(given, first + min(e + 7 * step, most)),
            )
            for value in found:
                if e < end:
                    stage[u(e // prompts * apart + e % prompts)] = value
                e += step

    @cuda.jit(device=True)
    def gradients(soft, line, layer, valid, law, s, lane, part, stage, drawn, entry, meeting):
        """Add the prompts of a run to the gradients of both layers, each thread to the entries that it keeps.

        Each block of a run has the readings of all, and adds them up as one alone would: the sums are the same.
        """
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
                if spread:
                    if part == 0:
                        give(s, lane, meeting)
                    meet(meeting)
                    take(meeting, stage)
                elif part == 0 and 0 <= at < staged:
                    for i in range(d):
                        stage[u(i * apart + at)] = s.drawn[i]
                    stage[u(d * apart + at)] = f32(1)
                    if 2 * h < m:
                        put(s.softmax, h, 0, at, stage)
                    if 2 * h < n:
                        put(s.linear, h, last, at, stage)
                together()
                if helped and part == helper and begin == 0:  # one head has `helped`
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
