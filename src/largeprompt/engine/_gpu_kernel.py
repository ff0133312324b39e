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

from ._batch import Law, Workspace, columns, errors, instances, rows_of, weigh
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
    Heads,
    Kind,
    width_for,
)
from ._gpu_tokens import SUMS, add_part, add_scaled, largest_of_part
from ._lanes import on_lanes, orthonormalise
from ._readings import infinite_readings, linear_readings, readings_from_sums, whole_token_readings
from ._target import PLAIN_PYTHON, across, all_agree, cycles, member, members, together, tuned
from ._tokens import LOG2_E, arrange, must_shift, sums_of_heads
from ._weights import Weights, descend, look, u

cuda: Any = _cuda  # under this name, by which its simulator finds it
f32, u32, f64 = np.float32, np.uint32, np.float64
real32, real64 = types.float32, types.float64  # of arrays


@on_lanes
def _copy(w, row, first, there):
    """The weights to a row of numbers from `first` on, or from there."""
    tuned()
    heads, k, D = w.K.shape
    r = w.V.shape[1]
    for h in range(heads):
        a = member() // across(w.width)
        while a < max(k, r):
            i = member() % across(w.width)
            while i < D:
                if a < k:
                    at = first + (h * k + a) * D + i
                    _exchange(w.K, h, a, i, row, at, there)
                    _exchange(w.Q, h, a, i, row, at + heads * k * D, there)
                if a < r:
                    _exchange(w.V, h, a, i, row, first + 2 * heads * k * D + (h * r + a) * D + i, there)
                i += across(w.width)
            a += members() // across(w.width)
        a = member()
        while a < r:
            at = first + heads * (2 * k + r) * D + h * r + a
            if there:
                row[u(at)] = w.O[u(h), u(a)]
            else:
                w.O[u(h), u(a)] = row[u(at)]
            a += members()


@on_lanes
def _exchange(array, h, a, i, row, at, there):
    tuned()
    if there:
        row[u(at)] = array[u(h), u(a), u(i)]
    else:
        array[u(h), u(a), u(i)] = row[u(at)]


@on_lanes
def _silence(w):
    tuned()
    heads, D, d = w.U_hat.shape
    for h in range(heads):
        i = member()
        while i < D:
            w.v_hat[u(h), u(i)] = f32(0)
            for j in range(d):
                w.U_hat[u(h), u(i), u(j)] = f32(0)
            i += members()
    together()


def _weights_on_chip(heads: Heads, D: int, layer: int):
    """A function of the GPU that makes room for a layer's weights in the memory that a block shares."""
    shapes = {name: shape for name, (shape, _) in heads.fields(D).items()}
    K, Q, V, O, K_hat, Q_hat, v = (shapes[name] for name in ("K", "Q", "V", "O", "K_hat", "Q_hat", "v"))
    U_hat, v_hat, dU, dv = (shapes[name] for name in ("U_hat", "v_hat", "dU", "dv"))
    dK, dQ, moved = (shapes[name] for name in ("dK", "dQ", "moved"))
    learns_K, learns_O, width = heads.learns_K, heads.learns_O, width_for(D)

    def make(given, run, scale):
        return Weights(
            cuda.shared.array(K, real64),
            cuda.shared.array(Q, real64),
            cuda.shared.array(V, real64),
            cuda.shared.array(O, real64),
            learns_K,
            learns_O,
            scale,
            cuda.shared.array(K_hat, real64),
            cuda.shared.array(Q_hat, real64),
            cuda.shared.array(v, real64),
            cuda.shared.array(U_hat, real32),
            cuda.shared.array(v_hat, real32),
            cuda.shared.array(dU, real64),
            cuda.shared.array(dv, real64),
            cuda.shared.array(dK, real64),
            cuda.shared.array(dQ, real64),
            cuda.shared.array(moved, real64),
            width,
        )

    if PLAIN_PYTHON:  # the simulator tells arrays apart by the line that makes them, and has one for both layers
        make.__code__ = make.__code__.replace(co_filename=f"{__file__}, layer {layer}")
    return cuda.jit(device=True)(make)


def _weights_in_memory(heads: Heads, D: int):
    """The same in the memory of the card, where each run has room of its own."""
    learns_K, learns_O, width = heads.learns_K, heads.learns_O, width_for(D)

    @cuda.jit(device=True)
    def make(w, run, scale):
        return Weights(
            w.K[run],
            w.Q[run],
            w.V[run],
            w.O[run],
            learns_K,
            learns_O,
            scale,
            w.K_hat[run],
            w.Q_hat[run],
            w.v[run],
            w.U_hat[run],
            w.v_hat[run],
            w.dU[run],
            w.dv[run],
            w.dK[run],
            w.dQ[run],
            w.moved[run],
            width,
        )

    return make


@functools.cache
def train(kind: Kind) -> Any:
    """The loop over steps for runs of a kind, compiled when it is first called."""
    d, D, prompts, staged, pieces = kind.d, kind.d + 1, kind.prompts, kind.staged, kind.pieces
    softmax, linear = kind.softmax is not None, kind.linear is not None
    m, n = (2 * heads.count if heads else 0 for heads in (kind.softmax, kind.linear))
    one_head, three_rows = m == 2, 3 * prompts
    first_size = kind.layers[0].size(D)
    place_soft, place_line = (
        _weights_on_chip(heads, D, layer) if kind.on_chip else _weights_in_memory(heads, D)
        for layer, heads in enumerate((kind.layers[0], kind.layers[-1]))
    )
    sizes = rows_of(d, m, n)
    assert tuple(sizes) == Workspace._fields[: len(sizes)]
    N0, N1, N2, N3, N4, N5, N6, N7, N8, N9, N10, N11, N12, N13, N14, N15, N16, N17, N18, N19, N20, N21, N22 = (
        sizes.values()
    )

    @cuda.jit(device=True)
    def sums_over_tokens(length, lane, part, parts, s, along, partial, prompt, step, k0, k1):
        """`s.sums` of one head, by all threads of the block."""
        if parts > 1:
            if part == 0:
                along[lane] = s.R[0]
                along[prompts + lane] = s.R[1]
                along[2 * prompts + lane] = s.R[m + n + 1]
            together()
            s.R[0] = along[lane]
            s.R[1] = along[prompts + lane]
            s.R[m + n] = f32(0)
            s.R[m + n + 1] = along[2 * prompts + lane]
        beta, shift = s.R[0] * LOG2_E, f32(0)
        if must_shift(s.R, 2, m + n):
            shift = largest_of_part(length, part, parts, prompt, step, k0, k1)
        inner, across = s.R[1], s.R[m + n + 1]
        add_part(length, part, parts, linear, beta, shift, inner, across, prompt, step, k0, k1, s.carried)
        if parts > 1:
            if part > 0:
                at = (part - 1) * (SUMS + 1) * prompts + lane
                for i in range(SUMS):
                    partial[at + i * prompts] = s.carried[i]
                partial[at + SUMS * prompts] = shift
            together()
            if part == 0:
                top = shift
                for other in range(parts - 1):
                    top = max(top, f32(partial[(other * (SUMS + 1) + SUMS) * prompts + lane]))
                for i in range(SUMS):
                    s.sums[i] = s.carried[i]
                    s.carried[i] = 0.0
                add_scaled(beta, top, shift, s.sums, 0, 1, s.carried)
                for other in range(parts - 1):
                    at = other * (SUMS + 1) * prompts + lane
                    other_shift = f32(partial[at + SUMS * prompts])
                    add_scaled(beta, top, other_shift, partial, at, prompts, s.carried)
            together()
        arrange(m + n, s.R, s.carried, s.sums)

    @cuda.jit(device=True)
    def gradients(w, first, readings, valid, law, s, lane, part, stage):
        """Add the share of a block's prompts to the slopes of a layer."""
        heads = w.U_hat.shape[0]
        if part == 0:
            errors(d, heads, first, readings, valid, s)
            for c in range(2 * heads):
                weigh(d, c, readings, law, s)
        for h in range(heads):
            for begin in range(0, prompts, staged):
                at = lane - begin
                if part == 0 and 0 <= at < staged:
                    for i in range(2 * D):
                        stage[u(i * (staged + 1) + at)] = readings[2 * h * D + i]
                    for i in range(d):
                        stage[u((2 * D + i) * (staged + 1) + at)] = s.drawn[i]
                    stage[u((2 * D + d) * (staged + 1) + at)] = f32(1)
                together()
                count = min(staged, prompts - begin)
                e = member()
                while e < pieces * D * D:
                    i, c, piece = e // D % D, e % D, e // (D * D)
                    left, right = (i if c == d else D + i) * (staged + 1), (2 * D + c) * (staged + 1)
                    total, j = f32(0), piece * count // pieces
                    while j < (piece + 1) * count // pieces:
                        total += stage[u(left + j)] * stage[u(right + j)]
                        j += 1
                    if pieces > 1:
                        stage[u(3 * D * (staged + 1) + e)] = total
                    elif c == d:
                        w.dv[u(h), u(i)] += f64(total)
                    else:
                        w.dU[u(h), u(i), u(c)] += f64(total)
                    e += members()
                together()
                if pieces > 1:
                    e = member()
                    while e < D * D:
                        i, c, sum64 = e // D, e % D, 0.0
                        for piece in range(pieces):
                            sum64 += f64(stage[u(3 * D * (staged + 1) + piece * D * D + e)])
                        if c == d:
                            w.dv[u(h), u(i)] += sum64
                        else:
                            w.dU[u(h), u(i), u(c)] += sum64
                        e += members()
                    together()

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
        stage, partial = cuda.shared.array(0, real32), cuda.shared.array(0, real64)
        along = cuda.shared.array(three_rows, real32)
        state = states[u(run)]
        _copy(soft, state, 0, False)
        if softmax and linear:
            _copy(line, state, first_size, False)
        together()
        step, stop, mark = whole[u(run), u(STEP)], whole[u(run), u(STOP)], whole[u(run), u(MARK)]
        diverged, other_diverged = whole[u(run), u(DIVERGED)], whole[u(run), u(OTHER_DIVERGED)]
        began = cycles()
        going = True
        while going and step < stop:
            look(soft, law.B, law.Bq, law.plain)
            if softmax and linear:
                if diverged >= 0:  # it stays as it was, but the other must not see such numbers
                    _silence(soft)
                look(line, law.B, law.Bq, law.plain)
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
                elif softmax and 2 * m > length:
                    if part == 0:
                        whole_token_readings(length, D, m, n, s, prompt, t, k0, k1)
                else:
                    if softmax:
                        if part == 0:
                            orthonormalise(s.columns, 0, m, D, s.E, s.R, m + n, s.work)
                        if one_head:
                            sums_over_tokens(length, lane, part, parts, s, along, partial, prompt, t, k0, k1)
                        else:
                            sums_of_heads(length, m, s.R, m + n, linear, s.S, s.sums, prompt, t, k0, k1)
                        if part == 0:
                            readings_from_sums(D, m, linear, s, prompt, t, k0, k1)
                    if linear and part == 0:
                        linear_readings(length, D, n, m, s, prompt, t, k0, k1)
                if softmax:
                    gradients(soft, 0, s.softmax, valid, law, s, lane, part, stage)
                if linear:
                    gradients(line, m, s.linear, valid, law, s, lane, part, stage)
            if diverged < 0 and not descend(soft, law.B, law.Bq, law.plain, rate, far):
                diverged = step
            going = diverged < 0
            if softmax and linear:
                if other_diverged < 0 and not descend(line, law.B, law.Bq, law.plain, rate, far):
                    other_diverged = step
                going = going or other_diverged < 0
            step += 1
            if mark < marks.shape[1] and marks[u(run), u(mark)] == step:
                _copy(soft, kept[u(run), u(mark)], 0, True)
                if softmax and linear:
                    _copy(line, kept[u(run), u(mark)], first_size, True)
                mark += 1
            if not all_agree(cycles() - began < budget):
                break
        _copy(soft, state, 0, True)
        if softmax and linear:
            _copy(line, state, first_size, True)
        if member() == 0:
            whole[u(run), u(STEP)] = step
            whole[u(run), u(MARK)] = mark
            whole[u(run), u(DIVERGED)] = diverged
            whole[u(run), u(OTHER_DIVERGED)] = other_diverged

    options = {} if PLAIN_PYTHON else {"max_registers": REGISTERS}
    return cuda.jit(fastmath=True, **options)(run_blocks)
