"""The loop over steps on a GPU: a block of threads is a run, and each of its threads has one prompt of the batch.

A run that has much of the card to itself may have several blocks, which share the prompts and keep the same weights.
The weights stay in the memory that a block shares, what is computed for a prompt in the registers of its thread. Long
prompts have several threads, which deal the tokens out among them; one of them then does the rest. Of two layers, each
half of the threads keeps one. The processor compiles the same `_batch`, `_readings`, `_wishart`, `_chain_rule` and all
below them.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import types

from ._batch import Workspace, columns, draw_instances, instances, rows_of
from ._chain_rule import (
    accept,
    backprop,
    begin_backprop,
    begin_projection,
    clear_projection,
    copy,
    project,
    propose,
    surely_within,
    u,
)
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_gradients import Meeting, adding_gradients
from ._gpu_prompts import drawing_ahead, sums_over_tokens
from ._gpu_shapes import (
    BATCH,
    DIVERGED,
    FLAGS,
    HIGH,
    LATE,
    LENGTH,
    LOW,
    MARK,
    STEP,
    STOP,
    KernelShape,
)
from ._gpu_weights import law_of_run, weights_in_memory, weights_on_chip
from ._lanes import orthonormalise
from ._readings import draw_across, infinite_readings, linear_readings, readings_from_sums, whole_token_readings
from ._target import PLAIN_PYTHON, all_agree, cycles, member, members, nanoseconds, together
from ._tokens import SUMS
from ._update import rule_at

u32 = np.uint32
real32, real64, whole32 = types.float32, types.float64, types.int32  # of arrays
_FORGOTTEN = math.nan if PLAIN_PYTHON else 0.0  # what no one reads again; the simulator shows who does


def _on_own(function: Any, pair: bool) -> Any:
    """Apply a function to the layer, of two, that a thread keeps."""

    @cuda.jit(device=True)
    def on_own(second, soft, line, *rest):
        if pair and second:
            return function(line, *rest)
        return function(soft, *rest)

    return on_own


def _forgetting(sizes: Iterable[int]) -> Any:
    """A function of the GPU that forgets what a thread has of a prompt, arrays of these sizes.

    One thread of a prompt computes most of it, and none needs it in the next step. Compilers do not see that: all
    threads would keep it from step to step, and there are no registers for so much.
    """

    @cuda.jit(device=True)
    def forget(s):
        pass

    for number, size in enumerate(sizes):
        forget = _and_one(forget, number, size)
    return forget


def _and_one(others: Any, number: int, size: int) -> Any:
    @cuda.jit(device=True)
    def forget(s):
        others(s)
        for i in range(size):
            s[number][i] = _FORGOTTEN

    return forget


@functools.cache
def train(shape: KernelShape) -> Any:
    """The loop over steps for runs of one shape, compiled when it is first called."""
    d, D, prompts, helped = shape.d, shape.d + 1, shape.prompts, shape.helped
    own, blocks, spread, helper = shape.own, shape.blocks, shape.blocks > 1, shape.helper
    (m, n), softmax, linear = shape.columns, shape.softmax is not None, shape.linear is not None
    drawn_size = max(shape.drawn_rows, 1) * own
    few, infinite, groups = shape.few, shape.infinite, shape.groups
    draw, hand_over, hand_instances, take_instances = drawing_ahead(shape)
    add_up_tokens, gradients = sums_over_tokens(shape), adding_gradients(shape, hand_over)
    pair, layers, first_size = softmax and linear, len(shape.layers), shape.layers[0].size(D)
    moments, size = shape.moments > 0, shape.size
    place_soft, place_line = (
        weights_on_chip(layer, shape, number) if shape.on_chip else weights_in_memory(layer, shape)
        for number, layer in enumerate((shape.layers[0], shape.layers[-1]))
    )
    find_law = law_of_run(shape)
    own_begin_projection, own_begin_backprop, own_backprop, own_propose, own_accept, own_copy = (
        _on_own(function, pair) for function in (begin_projection, begin_backprop, backprop, propose, accept, copy)
    )
    sizes = rows_of(d, m, n)
    forget = _forgetting(sizes.values())
    assert tuple(sizes) == Workspace._fields[: len(sizes)]
    # compilers take the size of a local array from a name alone
    (
        n_drawn,
        n_w,
        n_wq,
        n_target,
        n_u,
        n_columns,
        n_E,
        n_R,
        n_xi,
        n_S,
        n_sums,
        n_carried,
        n_gram64,
        n_root64,
        n_gram,
        n_root,
        n_T,
        n_below,
        n_cross,
        n_tokens,
        n_softmax,
        n_linear,
        n_work,
    ) = sizes.values()
    n_flags, n_totals = FLAGS, len(SUMS) * own if spread else 1

    def run_blocks(
        order,
        integers,
        rates,
        coefficients,
        scales,
        laws,
        softs,
        lines,
        states,
        marks,
        kept,
        readings,
        far,
        deadline,
        budget,
        speed,
    ):
        """Advance one run per block, or per few: from its step on until its stop, or until the deadline.

        That is `budget` nanoseconds after the first block of all has begun; `speed` is the most cycles of a nanosecond.
        """
        place, block = cuda.blockIdx.x // blocks, cuda.blockIdx.x % blocks
        run = order[place]
        lane, part, parts = member() % own, member() // own, members() // own
        number = block * own + lane  # of the first prompt of this thread
        mates = members() // layers
        layer, mate = member() // mates, member() % mates
        length, batch = integers[u(run), u(LENGTH)], integers[u(run), u(BATCH)]
        k0, k1 = u32(integers[u(run), u(LOW)]), u32(integers[u(run), u(HIGH)])
        rate, at = rates[u(run)] / batch, u(run)
        law = find_law(laws, at)
        soft = place_soft(softs, run, scales[at, u(0)], mate, mates)
        line = place_line(lines, run, scales[at, u(1)], mate, mates) if pair else soft
        second = pair and layer > 0
        s = Workspace(
            cuda.local.array(n_drawn, real32),
            cuda.local.array(n_w, real32),
            cuda.local.array(n_wq, real32),
            cuda.local.array(n_target, real32),
            cuda.local.array(n_u, real32),
            cuda.local.array(n_columns, real32),
            cuda.local.array(n_E, real32),
            cuda.local.array(n_R, real32),
            cuda.local.array(n_xi, real32),
            cuda.local.array(n_S, real32),
            cuda.local.array(n_sums, real64),
            cuda.local.array(n_carried, real64),
            cuda.local.array(n_gram64, real64),
            cuda.local.array(n_root64, real64),
            cuda.local.array(n_gram, real32),
            cuda.local.array(n_root, real32),
            cuda.local.array(n_T, real32),
            cuda.local.array(n_below, real32),
            cuda.local.array(n_cross, real32),
            cuda.local.array(n_tokens, real32),
            cuda.local.array(n_softmax, real32),
            cuda.local.array(n_linear, real32),
            cuda.local.array(n_work, real32),
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
        totals = cuda.shared.array(n_totals, real64)  # over tokens, where a thread adds up each
        flags = cuda.shared.array(n_flags, whole32)  # whether each layer has diverged, and whether no time is left
        state, offset = states[u(run)], layer * first_size
        own_copy(second, soft, line, state, offset, False)
        diverged = integers[u(run), u(DIVERGED + layer)]
        if mate == 0:
            flags[layer] = diverged >= 0
        if member() == 0:
            flags[LATE] = 0
            cuda.atomic.cas(deadline, 0, 0, nanoseconds() + budget)
        together()
        began = cycles()
        last = began + int((deadline[0] - nanoseconds()) * speed)
        step, stop, mark = integers[u(run), u(STEP)], integers[u(run), u(STOP)], integers[u(run), u(MARK)]
        due = marks[u(run), u(mark)] if mark < marks.shape[1] else -1
        entry = mate % D, mate // D % groups, mate // (D * groups)  # what this thread computes of the sums over prompts
        # a block that comes too late leaves; the first does a step at least, and so do all where runs have several
        going = spread or cuda.blockIdx.x == 0 or all_agree(began < last)
        meetings = 0
        if helped and part == helper:
            draw(length, s, number, u32(step), k0, k1)
            hand_over(s, lane, drawn)
            hand_instances(s, lane, stage)
        while going and step < stop:
            own_begin_projection(second, soft, line, law.B, law.Bq, law.plain)
            together()
            if second:
                project(line, law.B, law.plain)
            elif pair and diverged >= 0:  # it stays as it was, but the other must not see such numbers
                clear_projection(soft)
            else:
                project(soft, law.B, law.plain)
            together()
            t = u32(step)
            for first in range(0, batch, prompts):
                forget(s)
                prompt = first + number
                valid = 1 if prompt < batch else 0
                if part == 0:
                    if helped:
                        take_instances(s, lane, stage)
                    else:
                        draw_instances(d, s, prompt, t, k0, k1)
                    instances(d, law, s)
                    if softmax:
                        columns(d, soft, law, 0, s)
                    if linear:
                        columns(d, line, law, m, s)
                if infinite:
                    if part == 0:
                        infinite_readings(D, m, n, s)
                elif few:
                    if part == 0:
                        whole_token_readings(length, D, m, n, s, prompt, t, k0, k1)
                else:
                    if part == 0 and not helped:
                        draw_across(length, D, m, n, s, prompt, t, k0, k1)
                    if softmax:
                        if part == 0:
                            orthonormalise(s.columns, 0, m, D, s.E, s.R, m + n, s.work)
                        add_up_tokens(length, lane, part, parts, s, stage, drawn, totals, prompt, t, k0, k1)
                        if part == 0:
                            readings_from_sums(D, m, m + n, linear, s)
                    if linear and part == 0:
                        linear_readings(length, D, n, m, s)
                if helped and part == helper:
                    same = first + prompts < batch
                    draw(length, s, prompt + prompts if same else number, t if same else u32(t + u32(1)), k0, k1)
                no_time = spread and cycles() >= last
                shared = place if spread else 0
                meeting = Meeting(readings[shared], flags, block, meetings, no_time)
                gradients(soft, line, layer, valid, law, s, lane, part, stage, drawn, entry, meeting)
                meetings += 1
                if helped:
                    if part == helper:
                        hand_instances(s, lane, stage)
                    if batch > prompts:
                        together()
            own_begin_backprop(second, soft, line, law.B, law.plain)
            together()
            own_backprop(second, soft, line, law.B, law.plain)
            together()
            if moments:
                rule = rule_at(step, coefficients[u(run)], state[size:], offset, size)
                square = own_propose(second, soft, line, law.Bq, law.plain, rate, rule)
            else:
                square = own_propose(second, soft, line, law.Bq, law.plain, rate, None)
            all_within = all_agree(diverged >= 0 or surely_within(square, far, mates))
            if diverged < 0 and not own_accept(second, soft, line, all_within, far):
                diverged = step
                if mate == 0:
                    flags[layer] = True
            step += 1
            if step == due and block == 0:  # each thread copies the entries that it has set
                own_copy(second, soft, line, kept[u(run), u(mark)], offset, True)
                mark += 1
                due = marks[u(run), u(mark)] if mark < marks.shape[1] else -1
            in_time = flags[LATE] == 0 if spread else cycles() < last
            going = all_agree(in_time) and (diverged < 0 or (pair and not flags[1 - layer]))
        if block > 0:
            return
        own_copy(second, soft, line, state, offset, True)
        if mate == 0:
            integers[u(run), u(DIVERGED + layer)] = diverged
        if member() == 0:
            integers[u(run), u(STEP)] = step
            integers[u(run), u(MARK)] = mark

    options = {} if PLAIN_PYTHON else {"max_registers": shape.registers}
    return cuda.jit(fastmath=True, **options)(run_blocks)
