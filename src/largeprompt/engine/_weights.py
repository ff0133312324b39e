r"""Weights of heads as arrays, and the chain rule between them and the (U, v) that the sampling sees.

Each head predicts $v^\top m$ with $U = sK^\top Q$ and $v = V^\top o$; the (U, V) form is $K = I$ and $o = 1$, not
learnt. In the coordinates of the sampling tokens are $z = B\hat z$ and queries $B_q\hat x$, so that $\hat U = B^\top
UB_q$.
"""

from typing import NamedTuple

import numba
import numpy as np

# sums in any order, but nothing that supposes numbers finite: this is where one that is not is noticed
on_matrices = numba.njit(error_model="numpy", nogil=True, fastmath={"contract", "reassoc", "nsz"})


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
def _add_product(a, b, scale, out):
    """out += scale · aᵀ b, four rows of b a pass."""
    rows, columns = out.shape
    for i in range(rows):
        k = 0
        while k + 4 <= b.shape[0]:
            p, q, r, s = scale * a[k, i], scale * a[k + 1, i], scale * a[k + 2, i], scale * a[k + 3, i]
            for j in range(columns):
                out[i, j] += p * b[k, j] + q * b[k + 1, j] + r * b[k + 2, j] + s * b[k + 3, j]
            k += 4
        while k < b.shape[0]:
            p = scale * a[k, i]
            for j in range(columns):
                out[i, j] += p * b[k, j]
            k += 1


@on_matrices
def _set_product(a, b, plain, out):
    """out = a b, or a's first columns where b is the identity."""
    rows, columns = out.shape
    for i in range(rows):
        for j in range(columns):
            out[i, j] = a[i, j] if plain else 0.0
        if not plain:
            for k in range(b.shape[0]):
                for j in range(columns):
                    out[i, j] += a[i, k] * b[k, j]


@on_matrices
def _set_product_transposed(a, b, plain, out):
    """out = a bᵀ; where b is the identity, a itself with zeros after its last column."""
    rows, columns = out.shape
    for i in range(rows):
        for j in range(columns):
            total = 0.0
            if plain:
                total = a[i, j] if j < a.shape[1] else 0.0
            else:
                for k in range(a.shape[1]):
                    total += a[i, k] * b[j, k]
            out[i, j] = total


@on_matrices
def _apply(matrix, vector, plain, out):
    """out = matrix · vector, or the vector itself where the matrix is the identity."""
    for i in range(len(out)):
        total = vector[i]
        if not plain:
            total = 0.0
            for a in range(len(vector)):
                total += matrix[i, a] * vector[a]
        out[i] = total


@on_matrices
def look(w, B, Bq, plain):
    """Û and v̂ of every head, with their slopes at 0; `plain` says that B and Bq are the identity."""
    heads, _, D = w.K.shape
    for h in range(heads):
        _set_product(w.Q[h], Bq, plain, w.Q_hat[h])
        U = w.dU[h]
        if w.learns_K:
            _set_product(w.K[h], B, plain, w.K_hat[h])
            for i in range(D):
                for j in range(D - 1):
                    U[i, j] = 0.0
            _add_product(w.K_hat[h], w.Q_hat[h], w.scale, U)
        elif plain:
            for i in range(D):
                for j in range(D - 1):
                    U[i, j] = w.Q_hat[h, i, j]
        else:
            for i in range(D):
                for j in range(D - 1):
                    U[i, j] = 0.0
            _add_product(B, w.Q_hat[h], 1.0, U)
        for i in range(D):
            for j in range(D - 1):
                w.U_hat[h, i, j] = U[i, j]
                U[i, j] = 0.0
            w.dv[h, i] = 0.0
        for i in range(D):
            total = 0.0
            for a in range(w.V.shape[1]):
                total += w.O[h, a] * w.V[h, a, i]
            w.v[h, i] = total
        _apply(B.T, w.v[h], plain, w.v_hat[h])


@on_matrices
def _slopes(w, h, B, Bq, plain):
    r"""The slopes of head h in K, Q and v, that in v in the room of v.

    They are $s\hat Q(\partial\hat U)^\top B^\top$, $s\hat K\,\partial\hat U B_q^\top$ and $B\,\partial\hat v$.
    """
    k, D = w.dK.shape
    _apply(B, w.dv[h], plain, w.v[h])
    dU, Q_hat, K_hat = w.dU[h], w.Q_hat[h], w.K_hat[h]
    if not w.learns_K:
        for i in range(D):  # Û = Bᵀ Q B_q: the slope in Q is B ∂Û B_qᵀ
            for j in range(D - 1):
                Q_hat[i, j] = dU[i, j] if plain else 0.0
            if not plain:
                for a in range(D):
                    for j in range(D - 1):
                        Q_hat[i, j] += B[i, a] * dU[a, j]
        _set_product_transposed(Q_hat, Bq, plain, w.dQ)
        return
    for a in range(k):
        for i in range(D):
            total = 0.0
            for j in range(D - 1):
                total += Q_hat[a, j] * dU[i, j]
            w.dQ[a, i] = w.scale * total
    _set_product_transposed(w.dQ, B, plain, w.dK)
    for a in range(k):
        for j in range(D - 1):
            Q_hat[a, j] = 0.0
    _add_product(K_hat.T, dU, w.scale, Q_hat)
    _set_product_transposed(Q_hat, Bq, plain, w.dQ)


@on_matrices
def descend(w, B, Bq, plain, rate, far):
    """One step down dU and dv, unless it ends beyond `far` or nowhere; whether it was taken."""
    heads, k, D = w.K.shape
    at = 0
    for h in range(heads):
        _slopes(w, h, B, Bq, plain)
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
    square = 0.0
    for i in range(at):
        square += w.moved[i] * w.moved[i]
    if not square <= far * far:  # true for NaN as well
        return False
    at = 0
    for h in range(heads):
        for a in range(k):
            for i in range(D):
                w.K[h, a, i] = w.moved[at]
                w.Q[h, a, i] = w.moved[at + 1]
                at += 2
        for a in range(w.V.shape[1]):
            for i in range(D):
                w.V[h, a, i] = w.moved[at]
                at += 1
            w.O[h, a] = w.moved[at]
            at += 1
    return True
