"""Gradients on a GPU: all threads of a block add up what each has for its own prompt."""

from typing import Any, NamedTuple

import numpy as np

from ._batch import errors, times_error
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import CHAINS, GROUPED, LATE, PROMPTS, KernelShape
from ._target import fresh, mark_in, member, members, number_in, put_marked, together

f32, f64 = np.float32, np.float64


class Meeting(NamedTuple):
    """What the blocks of a run share: sums over their prompts, and whether time is over.

    Each number is written with the number of the meeting in one word, so that who reads it sees whether it has come.
    There are two places for sums, used in turn: who writes to one has since read from all the others what they wrote
    after they had read there.
    """

    sums: np.ndarray
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
    helped, helper, own, spread = shape.helped, shape.helper, shape.own, shape.blocks > 1
    apart, last = (own if spread else staged) + 1, len(shape.layers) - 1
    groups, chain, exchanged = shape.groups, PROMPTS // CHAINS, shape.exchanged // 2
    heads, other_heads = shape.layers[0].number, shape.layers[-1].number
    after_readings = shape.reading_rows * apart

    @cuda.jit(device=True)
    def put(s, h, at, stage):
        """Put the query and the readings of a head of each layer into the memory that all threads of a block share."""
        for i in range(d):
            stage[u(i * apart + at)] = s.drawn[i]
        for i in range(2 * D):
            if 2 * h < m:
                stage[u((d + i) * apart + at)] = s.softmax[2 * h * D + i]
            if 2 * h < n:
                stage[u((d + 2 * last * D + i) * apart + at)] = s.linear[2 * h * D + i]

    @cuda.jit(device=True)
    def add_chain(layer, i, group, j, count, stage):
        """Sums over some of the shared prompts: of m to the gradient in v, of k xᵀ to that in U.

        They are three columns of row i, so that k is read once for all of them; the last of D columns is that of m.
        """
        c, to_v = D - GROUPED * (groups - group), group == groups - 1
        k, x, y, z = d + (2 * layer + 1) * D + i, max(c, 0), max(c + 1, 0), max(c + 2, 0)
        if to_v:
            z = d + 2 * layer * D + i
        one, two, three = f32(0), f32(0), f32(0)
        for a in range(count):
            at = j + a
            factor = stage[u(k * apart + at)]
            one += factor * stage[u(x * apart + at)]
            two += factor * stage[u(y * apart + at)]
            three += (f32(1) if to_v else factor) * stage[u(z * apart + at)]
        return one, two, three

    @cuda.jit(device=True)
    def add_up(soft, line, h, layer, count, stage, entry):
        """Sums over the shared prompts or over pieces of them, each chain by itself."""
        e = soft.mate
        while e < pieces * groups * D:
            i, group, piece = entry if single else (e % D, e // D % groups, e // (D * groups))
            j, end = piece * count // pieces, (piece + 1) * count // pieces
            one, two, three = f32(0), f32(0), f32(0)
            while j + chain <= end:
                x, y, z = add_chain(layer, i, group, j, chain, stage)
                one, two, three = one + x, two + y, three + z
                j += chain
            if j < end:
                x, y, z = add_chain(layer, i, group, j, end - j, stage)
                one, two, three = one + x, two + y, three + z
            c = D - GROUPED * (groups - group)
            if c >= 0:
                put_sum(soft, line, h, layer, piece, i, c, one, stage)
            if c + 1 >= 0:
                put_sum(soft, line, h, layer, piece, i, c + 1, two, stage)
            put_sum(soft, line, h, layer, piece, i, c + 2, three, stage)
            e += soft.mates
            if single:
                break

    @cuda.jit(device=True)
    def put_sum(soft, line, h, layer, piece, i, c, total, stage):
        if pieces > 1:
            stage[u(after_readings + ((layer * pieces + piece) * D + i) * D + c)] = total
        else:
            add(soft, line, h, layer, i, c, total)

    @cuda.jit(device=True)
    def join(soft, line, h, layer, stage):
        """Add the sums over all shared prompts from those over pieces of them."""
        e = soft.mate
        while e < D * D:
            total, other = f32(0), f32(0)  # none waits for the other
            for piece in range(pieces // 2):
                total += stage[u(after_readings + (layer * pieces + 2 * piece) * D * D + e)]
                other += stage[u(after_readings + (layer * pieces + 2 * piece + 1) * D * D + e)]
            add(soft, line, h, layer, e // D, e % D, total + other)
            e += soft.mates
            if single:
                break

    @cuda.jit(device=True)
    def add(soft, line, h, layer, i, c, total):
        if layer == 0:
            add_to(soft, h, i, c, f64(total))
        else:
            add_to(line, h, i, c, f64(total))

    @cuda.jit(device=True)
    def add_to(w, h, i, c, total):
        if c == d:
            w.dv[u(h), u(i)] += total
        else:
            w.dU[u(h), u(i), u(c)] += total

    @cuda.jit(device=True)
    def give(layer, mate, mates, stage, meeting):
        """Put the sums over this block's chains of prompts where the other blocks find them."""
        to, first, mark = meeting.sums, meeting.number % 2 * exchanged, meeting.number + 1
        e = mate
        while e < own // chain * groups * D:
            i, group, at = e % D, e // D % groups, e // (D * groups)
            one, two, three = add_chain(layer, i, group, at * chain, chain, stage)
            c = D - GROUPED * (groups - group)
            place = first + ((layer * CHAINS + meeting.block * (own // chain) + at) * D + i) * D + c
            if c >= 0:
                put_marked(to, place, one, mark)
            if c + 1 >= 0:
                put_marked(to, place + 1, two, mark)
            put_marked(to, place + 2, three, mark)
            e += mates
        if meeting.block == 0 and member() == 0:
            put_marked(to, first + exchanged - 1, f32(1) if meeting.no_time else f32(0), mark)

    @cuda.jit(device=True)
    def half(given, first):
        """The words of half of the chains: each takes long to come, and none waits for another."""
        return (
            fresh(given, first),
            fresh(given, first + D * D),
            fresh(given, first + 2 * D * D),
            fresh(given, first + 3 * D * D),
            fresh(given, first + 4 * D * D),
            fresh(given, first + 5 * D * D),
            fresh(given, first + 6 * D * D),
            fresh(given, first + 7 * D * D),
        )

    @cuda.jit(device=True)
    def join_pieces(words, sums):
        """Add the pieces of half of the chains to the two sums of `join`."""
        total, other, piece, number = sums[0], sums[1], f32(0), 0
        for word in words:  # with `enumerate` the compiler leaves a loop with branches for every word
            piece += number_in(word)
            number += 1  # noqa: SIM113
            if number % (CHAINS // pieces) == 0:
                if number // (CHAINS // pieces) % 2 == 1:
                    total += piece
                else:
                    other += piece
                piece = f32(0)
        return total, other

    @cuda.jit(device=True)
    def take(soft, line, layer, mate, mates, meeting):
        """Add the sums over all prompts from those that the blocks give, once they have come, as one block would."""
        given, first, mark = meeting.sums, meeting.number % 2 * exchanged, meeting.number + 1
        if member() == members() - 1:
            word = fresh(given, first + exchanged - 1)
            while mark_in(word) != mark:
                word = fresh(given, first + exchanged - 1)
            meeting.flags[LATE] = number_in(word) > f32(0)
        e = mate
        while e < D * D:
            at = first + layer * CHAINS * D * D + e
            while True:
                words, others = half(given, at), half(given, at + CHAINS // 2 * D * D)
                waiting = False
                for word in words:
                    waiting |= mark_in(word) != mark
                for word in others:
                    waiting |= mark_in(word) != mark
                if not waiting:
                    break
            total, other = join_pieces(others, join_pieces(words, (f32(0), f32(0))))
            add(soft, line, 0, layer, e // D, e % D, total + other)
            e += mates

    @cuda.jit(device=True)
    def gradients(soft, line, layer, valid, law, s, lane, part, stage, drawn, entry, meeting):
        """Add the prompts of a run to the gradients of both layers, each thread to the entries that it keeps.

        The blocks of a run give one another sums over chains of prompts, of which each adds up all as one alone would.
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
                at = lane if spread else lane - begin
                if part == 0 and 0 <= at < staged:
                    put(s, h, at, stage)
                together()
                if helped and part == helper and begin == 0:  # one head has `helped`
                    hand_over(s, lane, drawn)
                if spread:
                    give(layer, soft.mate, soft.mates, stage, meeting)
                    take(soft, line, layer, soft.mate, soft.mates, meeting)
                    together()
                else:
                    count = min(staged, prompts - begin)
                    if h < (heads if layer == 0 else other_heads):
                        add_up(soft, line, h, layer, count, stage, entry)
                    together()
                    if pieces > 1:
                        if h < (heads if layer == 0 else other_heads):
                            join(soft, line, h, layer, stage)
                        together()

    return gradients
