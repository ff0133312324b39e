"""The loop over steps on a GPU: a block of threads is a run, a thread of it one prompt of the batch.

The weights stay in the memory that a block shares, what is computed for a prompt in the registers of its thread. Long
prompts have several threads, which deal the tokens out among them; one of them then does the rest. Sources that a
processor compiles as well are `_batch`, `_readings`, `_wishart`, `_weights` and all below them.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda as _cuda  # an extra
from numba import types

from ._batch import Law, Workspace, columns, instances, rows_of
from ._gpu_gradients import adding_gradients
from ._gpu_kinds import (
    BATCH,
    DIAGONAL,
    DIVERGED,
    HIGH,
    LENGTH,
    LOW,
    MARK,
    NOISE,
    OTHER_DIVERGED,
    OTHER_SCALE,
    PLAIN,
    RATE,
    REGISTERS,
    SCALE,
    STEP,
    STOP,
    Kind,
)
from ._gpu_prompts import handing_over, sums_over_tokens
from ._gpu_weights import copy, silence, weights_in_memory, weights_on_chip
from ._lanes import orthonormalise
from ._readings import draw_across, infinite_readings, linear_readings, readings_from_sums, whole_token_readings
from ._target import PLAIN_PYTHON, all_agree, cycles, member, members, together
from ._weights import begin_look, begin_slopes, look, move, set_moved, slopes, u

cuda: Any = _cuda  # under this name, by which its simulator finds it
u32 = np.uint32
real32, real64 = types.float32, types.float64  # of arrays


@functools.cache
def train(kind: Kind) -> Any:
    """The loop over steps for runs of a kind, compiled when it is first called."""
    d, D, prompts, helped, few = kind.d, kind.d + 1, kind.prompts, kind.helped, kind.few
    (m, n), softmax, linear = kind.columns, kind.softmax is not None, kind.linear is not None
    drawn_size = max(kind.drawn_rows, 1) * prompts
    hand_over, add_up_tokens, gradients = handing_over(kind), sums_over_tokens(kind), adding_gradients(kind)
    first_size = kind.layers[0].size(D)
    place_soft, place_line = (
        weights_on_chip(heads, kind, layer) if kind.on_chip else weights_in_memory(heads, kind)
        for layer, heads in enumerate((kind.layers[0], kind.layers[-1]))
    )
    sizes = rows_of(d, m, n)
    assert tuple(sizes) == Workspace._fields[: len(sizes)]
    N0, N1, N2, N3, N4, N5, N6, N7, N8, N9, N10, N11, N12, N13, N14, N15, N16, N17, N18, N19, N20, N21, N22 = (
        sizes.values()
    )

    def run_blocks(order, whole, numbers, laws, softs, lines, states, marks, kept, far, budget):
        """Each block a run: from its step on until its stop, or until `budget` cycles of the clock are spent."""
        run = order[cuda.blockIdx.x]
        lane, part, parts = member() % prompts, member() // prompts, members() // prompts
        length, batch = whole[u(run), u(LENGTH)], whole[u(run), u(BATCH)]
        k0, k1 = u32(whole[u(run), u(LOW)]), u32(whole[u(run), u(HIGH)])
        plain, diagonal = whole[u(run), u(PLAIN)] != 0, whole[u(run), u(DIAGONAL)] != 0
        scales, noise, rate = laws.scales[u(run)], numbers[u(run), u(NOISE)], numbers[u(run), u(RATE)] / batch
        law = Law(laws.B[u(run)], laws.Bq[u(run)], laws.F[u(run)], laws.Fq[u(run)], scales, noise, plain, diagonal)
        soft = place_soft(softs, run, numbers[u(run), u(SCALE)])
        line = place_line(lines, run, numbers[u(run), u(OTHER_SCALE)]) if softmax and linear else soft
        s = Workspace(
            cuda.local.array(N0, real32),
            cuda.local.array(N1, real32),
            cuda.local.array(N2, real32),
            cuda.local.array(N3, real32),
            cuda.local.array(N4, real32),
            cuda.local.array(N5, real32),
            cuda.local.array(N6, real32),
            cuda.local.array(N7, real32),
            cuda.local.array(N8, real32),
            cuda.local.array(N9, real32),
            cuda.local.array(N10, real64),
            cuda.local.array(N11, real64),
            cuda.local.array(N12, real64),
            cuda.local.array(N13, real64),
            cuda.local.array(N14, real32),
            cuda.local.array(N15, real32),
            cuda.local.array(N16, real32),
            cuda.local.array(N17, real32),
            cuda.local.array(N18, real32),
            cuda.local.array(N19, real32),
            cuda.local.array(N20, real32),
            cuda.local.array(N21, real32),
            cuda.local.array(N22, real32),
            order,
            order,
            order,
            order,
            order,
            order,
            order,
        )
        stage = cuda.shared.array(0, real32)  # readings, and before them the sums over parts of the tokens
        drawn = cuda.shared.array(drawn_size, real32)
        state = states[u(run)]
        copy(soft, state, 0, False)
        if softmax and linear:
            copy(line, state, first_size, False)
        together()
        step, stop, mark = whole[u(run), u(STEP)], whole[u(run), u(STOP)], whole[u(run), u(MARK)]
        diverged, other_diverged = whole[u(run), u(DIVERGED)], whole[u(run), u(OTHER_DIVERGED)]
        own = member() // D % D, member() % D, member() // (D * D)  # the sum over prompts that this thread computes
        began = cycles()
        going = True
        while going and step < stop:
            begin_look(soft, law.B, law.Bq, law.plain)
            if softmax and linear:
                begin_look(line, law.B, law.Bq, law.plain)
            together()
            look(soft, law.B, law.plain)
            if softmax and linear:
                look(line, law.B, law.plain)
            together()
            if softmax and linear and diverged >= 0:  # it stays as it was, but the other must not see such numbers
                silence(soft)
            t = u32(step)
            for first in range(0, batch, prompts):
                prompt = first + lane
                valid = 1 if prompt < batch else 0
                if part == 0:
                    instances(d, law, s, prompt, t, k0, k1)
                    if softmax:
                        columns(d, soft, law, 0, s)
                    if linear:
                        columns(d, line, law, m, s)
                if length == 0:
                    infinite_readings(D, m, n, s)
                elif few:
                    if part == 0:
                        whole_token_readings(length, D, m, n, s, prompt, t, k0, k1)
                else:
                    if part == (1 if parts > 1 and helped else 0):
                        draw_across(length, D, m, n, s, prompt, t, k0, k1)
                        if parts > 1 and helped:
                            hand_over(s, lane, drawn)
                    if softmax:
                        if part == 0:
                            orthonormalise(s.columns, 0, m, D, s.E, s.R, m + n, s.work)
                        add_up_tokens(length, lane, part, parts, s, stage, drawn, prompt, t, k0, k1)
                        if part == 0:
                            readings_from_sums(D, m, m + n, linear, s)
                    if linear and part == 0:
                        linear_readings(length, D, n, m, s)
                gradients(soft, line, valid, law, s, lane, part, stage, own)
            begin_slopes(soft, law.B, law.plain)
            if softmax and linear:
                begin_slopes(line, law.B, law.plain)
            together()
            slopes(soft, law.B, law.plain)
            if softmax and linear:
                slopes(line, law.B, law.plain)
            together()
            square = set_moved(soft, law.Bq, law.plain, rate)
            if softmax and linear:
                other_square = set_moved(line, law.Bq, law.plain, rate)
                if other_diverged < 0 and not move(line, other_square, far):
                    other_diverged = step
            if diverged < 0 and not move(soft, square, far):
                diverged = step
            going = diverged < 0 or (softmax and linear and other_diverged < 0)
            step += 1
            if mark < marks.shape[1] and marks[u(run), u(mark)] == step:
                together()
                copy(soft, kept[u(run), u(mark)], 0, True)
                if softmax and linear:
                    copy(line, kept[u(run), u(mark)], first_size, True)
                mark += 1
            if not all_agree(cycles() - began < budget):
                break
        copy(soft, state, 0, True)
        if softmax and linear:
            copy(line, state, first_size, True)
        if member() == 0:
            whole[u(run), u(STEP)] = step
            whole[u(run), u(MARK)] = mark
            whole[u(run), u(DIVERGED)] = diverged
            whole[u(run), u(OTHER_DIVERGED)] = other_diverged

    options = {} if PLAIN_PYTHON else {"max_registers": REGISTERS}
    return cuda.jit(fastmath=True, **options)(run_blocks)
