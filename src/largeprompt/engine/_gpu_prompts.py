"""The threads of one prompt on a GPU: how they deal its tokens out, and what they hand over to one another."""

from typing import Any

import numpy as np

from ._batch import draw_instances
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import KernelShape
from ._gpu_tokens import add_part, add_scaled, largest_of_part, put_tokens
from ._readings import draw_across
from ._target import together
from ._tokens import LEVEL, LOG2_E, SHORT, SUMS, arrange, leveller, must_shift, sums_of_heads

f32 = np.float32


def drawing_ahead(shape: KernelShape) -> tuple[Any, Any, Any, Any]:
    """Functions of the second thread of a prompt, which draws for the first what the next prompts need.

    One draws, two hand that over once the first thread has done with what it had, of which it takes some by the last.
    """
    d, prompts, xi_rows, (m, n) = shape.d, shape.prompts, shape.rows_across, shape.columns

    @cuda.jit(device=True)
    def draw(length, s, prompt, step, k0, k1):
        draw_instances(d, s, prompt, step, k0, k1)
        draw_across(length, d + 1, m, n, s, prompt, step, k0, k1)

    @cuda.jit(device=True)
    def hand_over(s, lane, drawn):
        for i in range(xi_rows):
            drawn[u((3 + i) * prompts + lane)] = s.xi[i]
        for i in range(n * n):
            drawn[u((3 + xi_rows + i) * prompts + lane)] = s.T[i]

    @cuda.jit(device=True)
    def hand_instances(s, lane, stage):
        for i in range(2 * d + 1):
            stage[u(i * prompts + lane)] = s.drawn[i]

    @cuda.jit(device=True)
    def take_instances(s, lane, stage):
        for i in range(2 * d + 1):
            s.drawn[i] = stage[u(i * prompts + lane)]

    return draw, hand_over, hand_instances, take_instances


def sums_over_tokens(shape: KernelShape) -> Any:
    """`s.sums` of all softmax heads, by all threads of the block; of a short prompt one draws and one adds up."""
    (m, n), prompts, linear = shape.columns, shape.prompts, shape.linear is not None
    xi_rows, helped, most_ahead = shape.rows_across, shape.helped, shape.pairs_ahead
    apart = prompts + 1  # of tokens drawn ahead, as of readings
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
            s.xi[i] = drawn[u((3 + i) * prompts + lane)]
        for i in range(n * n):
            s.T[i] = drawn[u((3 + xi_rows + i) * prompts + lane)]

    @cuda.jit(device=True)
    def of_one_head(length, lane, part, parts, s, partial, drawn, prompt, step, k0, k1):
        dealt, ahead = parts if length > SHORT else 1, 0
        if dealt > 1:
            if part == 0:
                drawn[lane] = s.R[0]
                drawn[prompts + lane] = s.R[1]
                drawn[2 * prompts + lane] = s.R[m + n + 1]
            together()
            if part > 0:
                s.R[0] = drawn[lane]
                s.R[1] = drawn[prompts + lane]
                s.R[m + n] = f32(0)
                s.R[m + n + 1] = drawn[2 * prompts + lane]
        elif helped:
            ahead = min(most_ahead, (length + 1) // 2)
            if part == 1:
                put_tokens(ahead, prompt, step, k0, k1, partial, ahead_at + lane, apart)
            together()
        beta, shift = s.R[0] * LOG2_E, f32(0)
        if part < dealt:
            if must_shift(s.R, 2, m + n):
                shift = largest_of_part(length, part, dealt, prompt, step, k0, k1)
            values, counters, where = (s.R[1], s.R[m + n + 1]), (prompt, step, k0, k1), (ahead_at + lane, apart)
            add_part(length, part, dealt, linear, beta, shift, *values, *counters, s.carried, ahead, partial, *where)
        top = shift
        if dealt > 1 and part > 0:
            at = (part - 1) * (len(SUMS) + 1) * prompts + lane
            for i in range(len(SUMS)):
                partial[at + i * prompts] = f32(s.carried[i])
            partial[at + len(SUMS) * prompts] = shift
        if dealt > 1:
            together()
            if part == 0:
                for other in range(parts - 1):
                    top = max(top, partial[(other * (len(SUMS) + 1) + len(SUMS)) * prompts + lane])
                for i in range(len(SUMS)):
                    s.sums[i] = s.carried[i]
                    s.carried[i] = 0.0
                add_scaled(beta, top, shift, s.sums, 0, 1, s.carried)
                for other in range(parts - 1):
                    at = other * (len(SUMS) + 1) * prompts + lane
                    other_shift = partial[at + len(SUMS) * prompts]
                    add_scaled(beta, top, other_shift, partial, at, prompts, s.carried)
            together()
        if part == 0:
            if helped:
                take_over(s, lane, drawn)
            s.sums[LEVEL] = leveller(beta, top)
            arrange(m + n, dealt == 1, s.R, s.carried, s.sums)

    return of_one_head
