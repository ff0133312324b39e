"""The threads of one prompt on a GPU: how they deal its tokens out, and what they hand over to one another."""

from typing import Any

import numpy as np

from ._batch import draw_instances
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import MOST_PARTS, KernelShape
from ._gpu_tokens import add_long, add_scaled, add_short, largest_of_part, put_tokens
from ._readings import draw_across
from ._target import together
from ._tokens import LEVEL, LOG2_E, SHORT, SUMS, arrange, leveller, must_shift, sums_of_heads

f32, f64 = np.float32, np.float64


def drawing_ahead(shape: KernelShape) -> tuple[Any, Any, Any, Any]:
    """Functions of the second thread of a prompt, which draws for the first what the next prompts need.

    One draws, two hand that over once the first thread has done with what it had, of which it takes some by the last.
    """
    d, own, xi_rows, (m, n) = shape.d, shape.own, shape.rows_across, shape.columns

    @cuda.jit(device=True)
    def draw(length, s, prompt, step, k0, k1):
        draw_instances(d, s, prompt, step, k0, k1)
        draw_across(length, d + 1, m, n, s, prompt, step, k0, k1)

    @cuda.jit(device=True)
    def hand_over(s, lane, drawn):
        for i in range(xi_rows):
            drawn[u((3 + i) * own + lane)] = s.xi[i]
        for i in range(n * n):
            drawn[u((3 + xi_rows + i) * own + lane)] = s.T[i]

    @cuda.jit(device=True)
    def hand_instances(s, lane, stage):
        for i in range(2 * d + 1):
            stage[u(i * own + lane)] = s.drawn[i]

    @cuda.jit(device=True)
    def take_instances(s, lane, stage):
        for i in range(2 * d + 1):
            s.drawn[i] = stage[u(i * own + lane)]

    return draw, hand_over, hand_instances, take_instances


def sums_over_tokens(shape: KernelShape) -> Any:
    """`s.sums` of all softmax heads, by all threads of the block; of a short prompt one draws and one adds up."""
    (m, n), own, linear, spread = shape.columns, shape.own, shape.linear is not None, shape.blocks > 1
    xi_rows, helped, most_ahead = shape.rows_across, shape.helped, shape.pairs_ahead
    apart = own + 1  # of tokens drawn ahead, as of readings
    first_parts = MOST_PARTS  # a name of its own, by which compilers know a constant
    ahead_at = shape.instance_rows * apart

    if m > 2:

        @cuda.jit(device=True)
        def of_heads(length, lane, part, parts, s, partial, drawn, prompt, step, k0, k1):
            if part == 0:
                sums_of_heads(length, m, s.R, m + n, linear, s.S, s.sums, prompt, step, k0, k1)

        return of_heads

    @cuda.jit(device=True)
    def take_over(s, lane, drawn):
        for i in range(xi_rows):
            s.xi[i] = drawn[u((3 + i) * own + lane)]
        for i in range(n * n):
            s.T[i] = drawn[u((3 + xi_rows + i) * own + lane)]

    @cuda.jit(device=True)
    def of_short(length, part, s, lane, partial, prompt, step, k0, k1):
        """One thread adds up, of a prompt that another may have drawn some of."""
        ahead = min(most_ahead, (length + 1) // 2) if helped else 0
        if helped:
            if part == 1:
                put_tokens(ahead, prompt, step, k0, k1, partial, ahead_at + lane, apart)
            together()
        beta, shift = s.R[0] * LOG2_E, f32(0)
        if part == 0:
            if must_shift(s.R, 2, m + n):
                shift = largest_of_part(length, 0, 1, prompt, step, k0, k1)
            values, counters, where = (s.R[1], s.R[m + n + 1]), (prompt, step, k0, k1), (ahead_at + lane, apart)
            add_short(length, linear, beta, shift, *values, *counters, s.carried, ahead, partial, *where)
        return shift

    @cuda.jit(device=True)
    def of_long(length, part, parts, s, lane, partial, drawn, prompt, step, k0, k1):
        """Many threads add up; the first of each prompt has the whole then."""
        dealt = 2 * first_parts if spread else parts  # threads that read tokens
        first = first_parts if spread else parts  # threads that then have what two parts add up to
        if part == 0:
            drawn[lane] = s.R[0]
            drawn[own + lane] = s.R[1]
            drawn[2 * own + lane] = s.R[m + n + 1]
        together()
        if part > 0:
            s.R[0] = drawn[lane]
            s.R[1] = drawn[own + lane]
            s.R[m + n] = f32(0)
            s.R[m + n + 1] = drawn[2 * own + lane]
        beta, shift = s.R[0] * LOG2_E, f32(0)
        if part < dealt and must_shift(s.R, 2, m + n):
            shift = largest_of_part(length, part, dealt, prompt, step, k0, k1)
        if spread:  # twins have one shift, as if they were one thread's
            if part < dealt:
                partial[part * own + lane] = shift
            together()
            if part < dealt:
                shift = max(shift, partial[(part + first) % dealt * own + lane])
            together()
        if part < dealt:
            values, counters = (s.R[1], s.R[m + n + 1]), (prompt, step, k0, k1)
            add_long(length, part, first, not spread, linear, beta, shift, *values, *counters, s.carried, s.sums)
        if spread:
            if first <= part < dealt:
                for i in range(len(SUMS)):
                    partial[((part - first) * len(SUMS) + i) * own + lane] = f32(s.carried[i])
            together()
            if part < first:
                for i in range(len(SUMS)):
                    s.carried[i] += f64(partial[(part * len(SUMS) + i) * own + lane])
            together()
        else:
            for i in range(len(SUMS)):
                s.carried[i] += f64(f32(s.sums[i]))
        top = shift
        if 0 < part < first:
            at = (part - 1) * (len(SUMS) + 1) * own + lane
            for i in range(len(SUMS)):
                partial[at + i * own] = f32(s.carried[i])
            partial[at + len(SUMS) * own] = shift
        together()
        if part == 0:
            for other in range(first - 1):
                top = max(top, partial[(other * (len(SUMS) + 1) + len(SUMS)) * own + lane])
            for i in range(len(SUMS)):
                s.sums[i] = s.carried[i]
                s.carried[i] = 0.0
            add_scaled(beta, top, shift, s.sums, 0, 1, s.carried)
            for other in range(first - 1):
                at = other * (len(SUMS) + 1) * own + lane
                other_shift = partial[at + len(SUMS) * own]
                add_scaled(beta, top, other_shift, partial, at, own, s.carried)
        together()
        return top

    @cuda.jit(device=True)
    def of_one_head(length, lane, part, parts, s, partial, drawn, prompt, step, k0, k1):
        if length > SHORT:
            top = of_long(length, part, parts, s, lane, partial, drawn, prompt, step, k0, k1)
        else:
            top = of_short(length, part, s, lane, partial, prompt, step, k0, k1)
        if part == 0:
            if helped:
                take_over(s, lane, drawn)
            s.sums[LEVEL] = leveller(s.R[0] * LOG2_E, top)
            arrange(m + n, length <= SHORT, s.R, s.carried, s.sums)

    return of_one_head
