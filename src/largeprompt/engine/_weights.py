r"""Weights of heads as arrays, and the chain rule between them and the (U, v) that the sampling sees.

Each head predicts $v^\top m$ with $U = sK^\top Q$ and $v = V^\top o$; the (U, V) form is $K = I$ and $o = 1$, not learnt. In
the coordinates of the sampling tokens are $z = B\hat z$ and queries $B_q\hat x$, so that $\hat U = B^\top UB_q$.
"""

from typing import NamedTuple

import numba
import numpy as np

# no fast arithmetic here: this is where a number that is not finite is noticed
on_matrices = numba.njit(error_model="numpy", nogil=True)


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
    moved: np.ndarray


def weights(K, Q, V, O, learns_K: bool, learns_O: bool, scale: float) -> Weights:
    """K and Q of shape (h, k, D), V (h, r, D) and O (h, r), with the room they need. Sampling reads Û, v̂ in float32."""
    K, Q, V, O = (np.array(part, dtype=np.float64, order="C") for part in (K, Q, V, O))
    h, k, D = K.shape
    d = D - 1
    room = [np.zeros(shape) for shape in ((h, k, D), (h, k, d), (h, D))]
    seen = [np.zeros(shape, np.float32) for shape in ((h, D, d), (h, D))]
    slopes = [np.zeros(shape) for shape in ((h, D, d), (h, D), (k, D), (k, D), (K.size + Q.size + V.size + O.size,))]
    return Weights(K, Q, V, O, learns_K, learns_O, float(scale), *room, *seen, *slopes)


@on_matrices
def _product(a, b, out):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = 0.0
        for k in range(b.shape[0]):
            for j in range(out.shape[1]):
                out[i, j] += a[i, k] * b[k, j]


@on_matrices
def look(w, B, Bq, plain):
    """Û and v̂ of every head, with their slopes at 0; `plain` says that B and Bq are the identity."""
    heads, k, D = w.K.shape
    for h in range(heads):
        if plain:
            w.K_hat[h] = w.K[h]
            w.Q_hat[h] = w.Q[h, :, : D - 1]
        else:
            _product(w.K[h], B, w.K_hat[h])
            _product(w.Q[h], Bq, w.Q_hat[h])
        for i in range(D):
            for j in range(D - 1):
                w.dU[h, i, j] = 0.0
            for a in range(k):
                for j in range(D - 1):
                    w.dU[h, i, j] += w.K_hat[h, a, i] * w.Q_hat[h, a, j]
            for j in range(D - 1):
                w.U_hat[h, i, j] = w.scale * w.dU[h, i, j]
                w.dU[h, i, j] = 0.0
            w.dv[h, i] = 0.0
        for i in range(D):
            total = 0.0
            for a in range(w.V.shape[1]):
                total += w.O[h, a] * w.V[h, a, i]
            w.v[h, i] = total
        for i in range(D):
            total = w.v[h, i]
            if not plain:
                total = 0.0
                for a in range(D):
                    total += B[a, i] * w.v[h, a]
            w.v_hat[h, i] = total


@on_matrices
def descend(w, B, Bq, plain, rate, far):
    """One step down dU and dv, unless it ends beyond `far` or nowhere; whether it was taken."""
    heads, k, D = w.K.shape
    square, at = 0.0, 0
    for h in range(heads):
        for i in range(D):  # the slope in v, in the room of v
            total = w.dv[h, i]
            if not plain:
                total = 0.0
                for a in range(D):
                    total += B[i, a] * w.dv[h, a]
            w.v[h, i] = total
        _slope_in_K(w, h, B, plain)
        _slope_in_Q(w, h, Bq, plain)
        for a in range(k):
            for i in range(D):
                w.moved[at] = w.K[h, a, i] - (rate * w.dK[a, i] if w.learns_K else 0.0)
                w.moved[at + 1] = w.Q[h, a, i] - rate * w.dQ[a, i]
                at += 2
        for a in range(w.V.shape[1]):
            slope = 0.0
            for i in range(D):
                slope += w.V[h, a, i] * w.v[h, i]
                w.moved[at] = w.V[h, a, i] - rate * w.O[h, a] * w.v[h, i]
                at += 1
            w.moved[at] = w.O[h, a] - (rate * slope if w.learns_O else 0.0)
            at += 1
    for i in range(at):
        square += w.moved[i] * w.moved[i]
    if not square <= far * far:  # true for NaN as well
        return False
    at = 0
    for h in range(heads):
        for a in range(k):
            for i in range(D):
                w.K[h, a, i], w.Q[h, a, i] = w.moved[at], w.moved[at + 1]
                at += 2
        for a in range(w.V.shape[1]):
            for i in range(D):
                w.V[h, a, i] = w.moved[at]
                at += 1
            w.O[h, a] = w.moved[at]
            at += 1
    return True


@on_matrices
def _slope_in_K(w, h, B, plain):
    r"""$s\hat Q\,(\partial\hat U)^\top B^\top$, by way of the room of the slope in Q."""
    k, D = w.dK.shape
    for a in range(k):
        for i in range(D):
            total = 0.0
            for j in range(D - 1):
                total += w.Q_hat[h, a, j] * w.dU[h, i, j]
            w.dQ[a, i] = w.scale * total
    for a in range(k):
        for i in range(D):
            total = w.dQ[a, i]
            if not plain:
                total = 0.0
                for j in range(D):
                    total += w.dQ[a, j] * B[i, j]
            w.dK[a, i] = total


@on_matrices
def _slope_in_Q(w, h, Bq, plain):
    r"""$s\hat K\,\partial\hat U\,B_q^\top$; nothing moves in the column of the empty label. In the room of Q̂."""
    k, D = w.dQ.shape
    for a in range(k):
        for j in range(D - 1):
            w.Q_hat[h, a, j] = 0.0
        for i in range(D):
            for j in range(D - 1):
                w.Q_hat[h, a, j] += w.scale * w.K_hat[h, a, i] * w.dU[h, i, j]
    for a in range(k):
        for i in range(D):
            total = w.Q_hat[h, a, i] if i < D - 1 else 0.0
            if not plain:
                total = 0.0
                for j in range(D - 1):
                    total += w.Q_hat[h, a, j] * Bq[i, j]
            w.dQ[a, i] = total
