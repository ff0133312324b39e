"""The threads of one prompt on a GPU: how they deal its tokens out, and what they hand over to one another."""

from typing import Any

import numpy as np

from ._batch import draw_instances
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import MOST_PARTS, KernelShape
from ._gpu_tokens import add_short, largest_of_part, one_sub_sum, put_tokens, sub_sums, two_sub_sums
from ._readings import draw_across
from ._target import all_agree, members, together
from ._tokens import CENTRE, CHUNK, LEVEL, LOG2_E, SHORT, SUMS, arrange, leveller, must_shift, sums_of_heads

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
    # names of their own, by which compilers know constants
    readers, chains, n_sums = shape.readers, MOST_PARTS, len(SUMS)
    ahead_at = shape.instance_rows * apart

    if m > 2:

        @cuda.jit(device=True)
        def of_heads(length, lane, part, parts, s, partial, drawn, totals, prompt, step, k0, k1):
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
    def share_scores(length, part, s, lane, partial, drawn, prompt, step, k0, k1):
        """All threads of a prompt learn how to read its tokens; what scores are taken from is returned."""
        if part == 0:
            drawn[lane] = s.R[0]
            drawn[own + lane] = s.R[1]
            drawn[2 * own + lane] = s.R[m + n + 1]
        none_shifts = all_agree(part > 0 or not must_shift(s.R, 2, m + n))
        if part > 0:
            s.R[0] = drawn[lane]
            s.R[1] = drawn[own + lane]
            s.R[m + n] = f32(0)
            s.R[m + n + 1] = drawn[2 * own + lane]
        shift = f32(0)
        if not none_shifts:
            if part < readers:
                if must_shift(s.R, 2, m + n):
                    shift = largest_of_part(length, part, min(readers, members() // own), prompt, step, k0, k1)
                partial[part * own + lane] = shift
            together()
            for other in range(min(readers, members() // own)):
                shift = max(shift, partial[other * own + lane])
            together()
        return shift

    @cuda.jit(device=True)
    def of_long(length, part, parts, s, lane, partial, drawn, totals, prompt, step, k0, k1):
        """All threads add up sub-sums, and these in four chains; the first of each prompt has the whole then."""
        shift = share_scores(length, part, s, lane, partial, drawn, prompt, step, k0, k1)
        beta, along, across = s.R[0] * LOG2_E, s.R[1], s.R[m + n + 1]
        given, subs, pairs = (beta, shift, along, across, leveller(beta, shift)), sub_sums(length), (length + 1) // 2
        chain = part
        while chain < chains:
            for c in range(n_sums):
                s.carried[c] = 0.0
            begin = 0
            while begin < pairs:
                end, q = begin + CHUNK * subs, chain
                while q < subs:
                    found, twin = two_sub_sums(
                        length, begin + q, end, chains, subs, linear, given, prompt, step, k0, k1
                    )
                    for c in range(n_sums):
                        s.carried[c] += f64(found[c])
                        s.carried[c] += f64(twin[c])
                    q += 2 * chains
                begin = end
            if chain > 0:
                for c in range(n_sums):
                    partial[((chain - 1) * n_sums + c) * own + lane] = f32(s.carried[c])
            else:
                for c in range(n_sums):
                    s.sums[c] = f64(f32(s.carried[c]))
            chain += parts
        together()
        if part == 0:
            for c in range(n_sums):
                at = c * own + lane
                one, two = f64(partial[at]), f64(partial[at + n_sums * own])
                s.carried[c] = (s.sums[c] + two) + (one + f64(partial[at + 2 * n_sums * own]))
        together()
        return shift

    @cuda.jit(device=True)
    def of_long_spread(length, part, parts, s, lane, partial, drawn, totals, prompt, step, k0, k1):
        """The same with a thread a sub-sum, or few, and then one for each of the sums."""
        shift = share_scores(length, part, s, lane, partial, drawn, prompt, step, k0, k1)
        beta, along, across = s.R[0] * LOG2_E, s.R[1], s.R[m + n + 1]
        given, subs, pairs = (beta, shift, along, across, leveller(beta, shift)), sub_sums(length), (length + 1) // 2
        one, two, three, four = 0.0, 0.0, 0.0, 0.0
        begin = 0
        while begin < pairs:
            end = begin + CHUNK * subs
            if part < readers:
                q = part
                while q < subs:
                    found = one_sub_sum(length, begin + q, end, subs, linear, given, prompt, step, k0, k1)
                    for c in range(n_sums):
                        partial[(q * n_sums + c) * own + lane] = found[c]
                    q += readers
            together()
            if part < n_sums:
                for twice in range(subs // (2 * chains)):  # each takes long to come
                    at, row = (twice * 2 * chains * n_sums + part) * own + lane, n_sums * own
                    first, second = f64(partial[at]), f64(partial[at + row])
                    third, fourth = f64(partial[at + 2 * row]), f64(partial[at + 3 * row])
                    fifth, sixth = f64(partial[at + 4 * row]), f64(partial[at + 5 * row])
                    seventh, eighth = f64(partial[at + 6 * row]), f64(partial[at + 7 * row])
                    one, two, three, four = one + first, two + second, three + third, four + fourth
                    one, two, three, four = one + fifth, two + sixth, three + seventh, four + eighth
            begin = end
            if begin < pairs:
                together()
        if part < n_sums:
            totals[part * own + lane] = (f64(f32(one)) + f64(f32(three))) + (f64(f32(two)) + f64(f32(four)))
        together()
        if part == 0:
            for c in range(n_sums):
                s.carried[c] = totals[c * own + lane]
        return shift

    @cuda.jit(device=True)
    def of_one_head(length, lane, part, parts, s, partial, drawn, totals, prompt, step, k0, k1):
        if spread:
            top = of_long_spread(length, part, parts, s, lane, partial, drawn, totals, prompt, step, k0, k1)
        elif length > SHORT:
            top = of_long(length, part, parts, s, lane, partial, drawn, totals, prompt, step, k0, k1)
        else:
            top = of_short(length, part, s, lane, partial, prompt, step, k0, k1)
        if part == 0:
            if helped:
                take_over(s, lane, drawn)
            if length > SHORT:
                s.carried[CENTRE] = 0.0
            s.sums[LEVEL] = leveller(s.R[0] * LOG2_E, top)
            arrange(m + n, length <= SHORT, s.R, s.carried, s.sums)

    return of_one_head
