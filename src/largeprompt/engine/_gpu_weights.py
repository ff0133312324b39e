"""The weights of a run on a GPU and the law of its prompts: where a block keeps them."""

from numba import types

from ._batch import Law
from ._chain_rule import u
from ._cuda import cuda  # under this name, by which its simulator finds it
from ._gpu_shapes import KernelShape, LayerShape
from ._head_arrays import Weights
from ._target import PLAIN_PYTHON, member, members

real32, real64 = types.float32, types.float64  # of arrays


def weights_on_chip(layer: LayerShape, shape: KernelShape, number: int):
    """A function of the GPU that makes room for a layer's weights in the memory that a block shares."""
    shapes = {name: size for name, (size, _) in layer.arrays(shape.d + 1).items()}
    K, Q, V, O, K_hat, Q_hat, v = (shapes[name] for name in ("K", "Q", "V", "O", "K_hat", "Q_hat", "v"))
    U_hat, v_hat, dU, dv = (shapes[name] for name in ("U_hat", "v_hat", "dU", "dv"))
    dK, dQ, proposed = (shapes[name] for name in ("dK", "dQ", "proposed"))
    learns_K, learns_O, width, single = layer.learns_K, layer.learns_O, shape.width, shape.single

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
            cuda.shared.array(proposed, real64),
            mate,
            mates,
            width,
            single,
        )

    if PLAIN_PYTHON:  # the simulator distinguishes arrays by the line that makes them, and has one for both layers
        make.__code__ = make.__code__.replace(co_filename=f"{__file__}, layer {number}")
    return cuda.jit(device=True)(make)


def weights_in_memory(layer: LayerShape, shape: KernelShape):
    """A function of the GPU that finds a layer's weights in the memory of the card, where each run has its own room."""
    learns_K, learns_O, width, single = layer.learns_K, layer.learns_O, shape.width, shape.single

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
            w.proposed[run],
            mate,
            mates,
            width,
            single,
        )

    return make


def law_of_run(shape: KernelShape):
    """A function of the GPU that finds the law of a run's prompts, on the chip where the weights are.

    Then the sizes of its arrays are known: how far rows lie apart takes no registers.
    """
    d, D, on_chip = shape.d, shape.d + 1, shape.on_chip

    @cuda.jit(device=True)
    def copy(given, to):
        rows, columns = to.shape
        e = member()
        while e < rows * columns:
            to[u(e // columns), u(e % columns)] = given[u(e // columns), u(e % columns)]
            e += members()

    @cuda.jit(device=True)
    def find(laws, at):
        numbers = laws.noise[at], laws.plain[at], laws.diagonal[at]
        if on_chip:
            B = cuda.shared.array((D, D), real64)
            Bq = cuda.shared.array((D, d), real64)
            F = cuda.shared.array((d, d), real32)
            Fq = cuda.shared.array((d, d), real32)
            scales = cuda.shared.array(d, real64)
            copy(laws.B[at], B)
            copy(laws.Bq[at], Bq)
            copy(laws.F[at], F)
            copy(laws.Fq[at], Fq)
            if member() < d:
                scales[u(member())] = laws.scales[at, u(member())]
            return Law(B, Bq, F, Fq, scales, *numbers)
        return Law(laws.B[at], laws.Bq[at], laws.F[at], laws.Fq[at], laws.scales[at], *numbers)

    return find
