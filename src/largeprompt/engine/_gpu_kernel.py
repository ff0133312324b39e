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
)
from ._gpu_tokens import SUMS, add_part, add_scaled, largest_of_part
from ._lanes import on_lanes, orthonormalise
from ._readings import draw_across, infinite_readings, linear_readings, readings_from_sums, whole_token_readings
from ._target import PLAIN_PYTHON, across, all_agree, cycles, member, members, together, tuned
from ._tokens import LOG2_E, SHORT, arrange, leveller, must_shift, sums_of_heads
from ._weights import Weights, begin_look, begin_slopes, look, move, set_moved, slopes, u

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


def _weights_on_chip(heads: Heads, kind: Kind, layer: int):
    """A function of the GPU that makes room for a layer's weights in the memory that a block shares."""
    shapes = {name: shape for name, (shape, _) in heads.fields(kind.d + 1).items()}
    K, Q, V, O, K_hat, Q_hat, v = (shapes[name] for name in ("K", "Q", "V", "O", "K_hat", "Q_hat", "v"))
    U_hat, v_hat, dU, dv = (shapes[name] for name in ("U_hat", "v_hat", "dU", "dv"))
    dK, dQ, moved = (shapes[name] for name in ("dK", "dQ", "moved"))
    learns_K, learns_O, width, single = heads.learns_K, heads.learns_O, kind.width, kind.single

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
            single,
        )

    if PLAIN_PYTHON:  # the simulator tells arrays apart by the line that makes them, and has one for both layers
        make.__code__ = make.__code__.replace(co_filename=f"{__file__}, layer {layer}")
    return cuda.jit(device=True)(make)


def _weights_in_memory(heads: Heads, kind: Kind):
    """The same in the memory of the card, where each run has room of its own."""
    learns_K, learns_O, width, single = heads.learns_K, heads.learns_O, kind.width, kind.single

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
            single,
        )

    return make


@functools.cache
def train(kind: Kind) -> Any:
    """The loop over steps for runs of a kind, compiled when it is first called."""
    d, D, prompts, staged, pieces = kind.d, kind.d + 1, kind.prompts, kind.staged, kind.pieces
    softmax, linear = kind.softmax is not None, kind.linear is not None
    m, n = (2 * heads.number if heads else 0 for heads in (kind.softmax, kind.linear))
    one_head, single, helped = m == 2, kind.single, kind.helped
    xi_rows, drawn_size = kind.rows_across, max(kind.drawn_rows, 1) * prompts
    # readings that a block shares: rows of staged prompts, so far apart that threads meet no bank of memory twice
    apart, last = staged + 1, len(kind.layers) - 1
    after_readings = (2 * len(kind.layers) + 1) * D * apart
    first_size = kind.layers[0].size(D)
    place_soft, place_line = (
        _weights_on_chip(heads, kind, layer) if kind.on_chip else _weights_in_memory(heads, kind)
        for layer, heads in enumerate((kind.layers[0], kind.layers[-1]))
    )
    sizes = rows_of(d, m, n)
    assert tuple(sizes) == Workspace._fields[: len(sizes)]
    N0, N1, N2, N3, N4, N5, N6, N7, N8, N9, N10, N11, N12, N13, N14, N15, N16, N17, N18, N19, N20, N21, N22 = (
        sizes.values()
    )

    @cuda.jit(device=True)
    def hand_over(s, lane, drawn):
        """What the second thread of a prompt has drawn, to the first."""
        for i in range(xi_rows):
            drawn[u((3 + i) * prompts + lane)] = s.xi[i]
        for i in range(n * n):
            drawn[u((3 + xi_rows + i) * prompts + lane)] = s.T[i]

    @cuda.jit(device=True)
    def take_over(s, lane, drawn):
        for i in range(xi_rows):
            s.xi[i] = drawn[u((3 + i) * prompts + lane)]
        for i in range(n * n):
            s.T[i] = drawn[u((3 + xi_rows + i) * prompts + lane)]

    @cuda.jit(device=True)
    def sums_over_tokens(length, lane, part, parts, s, partial, drawn, prompt, step, k0, k1):
        """`s.sums` of one head, by all threads of the block."""
        if parts > 1:
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
                take_over(s, lane, drawn)
        beta, shift = s.R[0] * LOG2_E, f32(0)
        if must_shift(s.R, 2, m + n):
            shift = largest_of_part(length, part, parts, prompt, step, k0, k1)
        inner, across = s.R[1], s.R[m + n + 1]
        add_part(length, part, parts, linear, beta, shift, inner, across, prompt, step, k0, k1, s.carried)
        top = shift
        if parts > 1:
            if part > 0:
                at = (part - 1) * (SUMS + 1) * prompts + lane
                for i in range(SUMS):
                    partial[at + i * prompts] = f32(s.carried[i])
                partial[at + SUMS * prompts] = shift
            together()
            if part == 0:
                for other in range(parts - 1):
                    top = max(top, partial[(other * (SUMS + 1) + SUMS) * prompts + lane])
                for i in range(SUMS):
                    s.sums[i] = s.carried[i]
                    s.carried[i] = 0.0
                add_scaled(beta, top, shift, s.sums, 0, 1, s.carried)
                for other in range(parts - 1):
                    at = other * (SUMS + 1) * prompts + lane
                    other_shift = partial[at + SUMS * prompts]
                    add_scaled(beta, top, other_shift, partial, at, prompts, s.carried)
            together()
        s.sums[14] = leveller(beta, top)
        arrange(m + n, parts == 1 and length <= SHORT, s.R, s.carried, s.sums)

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
        _copy(soft, state, 0, False)
        if softmax and linear:
            _copy(line, state, first_size, False)
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
                _silence(soft)
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
                    if part == (1 if parts > 1 and helped else 0):
                        draw_across(length, D, m, n, s, prompt, t, k0, k1)
                        if parts > 1 and helped:
                            hand_over(s, lane, drawn)
                    if softmax:
                        if part == 0:
                            orthonormalise(s.columns, 0, m, D, s.E, s.R, m + n, s.work)
                        if one_head:
                            sums_over_tokens(length, lane, part, parts, s, stage, drawn, prompt, t, k0, k1)
                        else:
                            sums_of_heads(length, m, s.R, m + n, linear, s.S, s.sums, prompt, t, k0, k1)
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
