"""The heads of one layer as stacked arrays, with the room that a step needs beside them."""

from typing import NamedTuple

import numpy as np


class Weights(NamedTuple):
    """The heads of one layer, stacked on the first axis, and room for what each step computes from them."""

    K: np.ndarray
    Q: np.ndarray
    V: np.ndarray
    O: np.ndarray
    learns_K: bool
    learns_O: bool
    scale: float
    K_hat: np.ndarray
    Q_hat: np.ndarray
    v: np.ndarray
    U_hat: np.ndarray
    v_hat: np.ndarray
    dU: np.ndarray
    dv: np.ndarray
    dK: np.ndarray
    dQ: np.ndarray
    proposed: np.ndarray
    mate: int
    mates: int
    width: int
    single: bool


def array_shapes(h: int, k: int, r: int, D: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of every array of `Weights` for h heads of rank k and r values; sampling reads Û, v̂ in float32."""
    shapes = {
        "K": (h, k, D),
        "Q": (h, k, D),
        "V": (h, r, D),
        "O": (h, r),
        "K_hat": (h, k, D),
        "Q_hat": (h, k, D - 1),
        "v": (h, D),
        "U_hat": (h, D, D - 1),
        "v_hat": (h, D),
        "dU": (h, D, D - 1),
        "dv": (h, D),
        "dK": (h, k, D),
        "dQ": (h, k, D),
        "proposed": (h * (2 * k * D + r * (D + 1)),),
    }
    return {name: (shape, np.float32 if name in ("U_hat", "v_hat") else np.float64) for name, shape in shapes.items()}


def weights(K, Q, V, O, learns_K: bool, learns_O: bool, scale: float) -> Weights:
    """K and Q of shape (h, k, D), V (h, r, D) and O (h, r), with the room they need."""
    h, k, D = K.shape
    arrays = {name: np.zeros(shape, kind) for name, (shape, kind) in array_shapes(h, k, V.shape[1], D).items()}
    for name, part in zip("KQVO", (K, Q, V, O), strict=True):
        arrays[name][...] = part
    return Weights(
        **arrays, learns_K=learns_K, learns_O=learns_O, scale=float(scale), mate=0, mates=1, width=1, single=False
    )
