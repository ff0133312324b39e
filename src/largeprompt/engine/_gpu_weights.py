"""The weights of a run on a GPU: where a block keeps them, and how they come and go as rows of numbers."""

from typing import Any

from numba import cuda as _cuda  # an extra
from numba import types

from ._gpu_kinds import Heads, Kind
from ._lanes import on_lanes
from ._target import PLAIN_PYTHON, across, mate, mates, tuned
from ._weights import Weights, u

cuda: Any = _cuda  # under this name, by which its simulator finds it
real32, real64 = types.float32, types.float64  # of arrays


@on_lanes
def copy(w, row, first, there):
    """The weights to a row of numbers from `first` on, or from there."""
    tuned()
    heads, k, D = w.K.shape
    r = w.V.shape[1]
    for h in range(heads):
        a = mate(w.mate) // across(w.width)
        while a < max(k, r):
            i = mate(w.mate) % across(w.width)
            while i < D:
                if a < k:
                    at = first + (h * k + a) * D + i
                    _exchange(w.K, h, a, i, row, at, there)
                    _exchange(w.Q, h, a, i, row, at + heads * k * D, there)
                if a < r:
                    _exchange(w.V, h, a, i, row, first + 2 * heads * k * D + (h * r + a) * D + i, there)
                i += across(w.width)
            a += mates(w.mates) // across(w.width)
        a = mate(w.mate)
        while a < r:
            at = first + heads * (2 * k + r) * D + h * r + a
            if there:
                row[u(at)] = w.O[u(h), u(a)]
            else:
                w.O[u(h), u(a)] = row[u(at)]
            a += mates(w.mates)


@on_lanes
def _exchange(array, h, a, i, row, at, there):
    tuned()
    if there:
        row[u(at)] = array[u(h), u(a), u(i)]
    else:
        array[u(h), u(a), u(i)] = row[u(at)]


def weights_on_chip(heads: Heads, kind: Kind, layer: int):
    """A function of the GPU that makes room for a layer's weights in the memory that a block shares."""
    shapes = {name: shape for name, (shape, _) in heads.fields(kind.d + 1).items()}
    K, Q, V, O, K_hat, Q_hat, v = (shapes[name] for name in ("K", "Q", "V", "O", "K_hat", "Q_hat", "v"))
    U_hat, v_hat, dU, dv = (shapes[name] for name in ("U_hat", "v_hat", "dU", "dv"))
    dK, dQ, moved = (shapes[name] for name in ("dK", "dQ", "moved"))
    learns_K, learns_O, width, single = heads.learns_K, heads.learns_O, kind.width, kind.single

    def make(given, run, scale, mate, mates):
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
            mate,
            mates,
            width,
            single,
        )

    if PLAIN_PYTHON:  # the simulator tells arrays apart by the line that makes them, and has one for both layers
        make.__code__ = make.__code__.replace(co_filename=f"{__file__}, layer {layer}")
    return cuda.jit(device=True)(make)


def weights_in_memory(heads: Heads, kind: Kind):
    """The same in the memory of the card, where each run has room of its own."""
    learns_K, learns_O, width, single = heads.learns_K, heads.learns_O, kind.width, kind.single

    @cuda.jit(device=True)
    def make(w, run, scale, mate, mates):
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
            mate,
            mates,
            width,
            single,
        )

    return make
