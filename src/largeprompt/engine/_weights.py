r"""Weights of heads as arrays, and the chain rule between them and the (U, v) that the sampling sees.

Each head predicts $v^\top m$ with $U = sK^\top Q$ and $v = V^\top o$; the (U, V) form is $K = I$ and $o = 1$, not
learnt. In the coordinates of the sampling tokens are $z = B\hat z$ and queries $B_q\hat x$, so that $\hat U = B^\top
UB_q$.

Where the threads of a GPU share a step, each computes entries of its own of every matrix, `across(width)` columns and
`members() // across(width)` rows apart; a processor's one thread computes them all. Loops over them are written out:
how often a range with a step runs takes a division to know.
"""

from typing import NamedTuple

import numba
import numpy as np

from ._target import across, all_agree, member, members, together, tuned

# sums in any order, but nothing that supposes numbers finite: this is where one that is not is noticed
on_matrices = numba.njit(error_model="numpy", nogil=True, fastmath={"contract", "reassoc", "nsz"})
u = np.uintp  # an index that does not count from the end


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
    width: int


def weights(K, Q, V, O, learns_K: bool, learns_O: bool, scale: float) -> Weights:
    """K and Q of shape (h, k, D), V (h, r, D) and O (h, r), with the room they need. Sampling reads Û, v̂ in float32."""
    K, Q, V, O = (np.array(part, dtype=np.float64, order="C") for part in (K, Q, V, O))
    h, k, D = K.shape
    d = D - 1
    room = [np.zeros(shape) for shape in ((h, k, D), (h, k, d), (h, D))]
    seen = [np.zeros(shape, np.float32) for shape in ((h, D, d), (h, D))]
    slopes = [np.zeros(shape) for shape in ((h, D, d), (h, D), (k, D), (k, D), (K.size + Q.size + V.size + O.size,))]
    return Weights(K, Q, V, O, learns_K, learns_O, float(scale), *room, *seen, *slopes, 1)


@on_matrices
def _fill(out, value, width):
    """All entries of a matrix."""
    tuned()
    i = member() // across(width)
    while i < out.shape[0]:
        j = member() % across(width)
        while j < out.shape[1]:
            out[u(i), u(j)] = value
            j += across(width)
        i += members() // across(width)


@on_matrices
def _add_product(a, b, scale, out, width):
    """out += scale · aᵀ b, four rows of b a pass."""
    tuned()
    rows, columns = out.shape
    i = member() // across(width)
    while i < rows:
        k = 0
        while k + 4 <= b.shape[0]:
            p, q = scale * a[u(k), u(i)], scale * a[u(k + 1), u(i)]
            r, s = scale * a[u(k + 2), u(i)], scale * a[u(k + 3), u(i)]
            j = member() % across(width)
            while j < columns:
                two = p * b[u(k), u(j)] + q * b[u(k + 1), u(j)]
                out[u(i), u(j)] += two + r * b[u(k + 2), u(j)] + s * b[u(k + 3), u(j)]
                j += across(width)
            k += 4
        while k < b.shape[0]:
            p = scale * a[u(k), u(i)]
            j = member() % across(width)
            while j < columns:
                out[u(i), u(j)] += p * b[u(k), u(j)]
                j += across(width)
            k += 1
        i += members() // across(width)


@on_matrices
def _set_product(a, b, plain, out, width):
    """out = a b, or a's first columns where b is the identity."""
    tuned()
    rows, columns = out.shape
    i = member() // across(width)
    while i < rows:
        j = member() % across(width)
        while j < columns:
            out[u(i), u(j)] = a[u(i), u(j)] if plain else 0.0
            j += across(width)
        if not plain:
            for k in range(b.shape[0]):
                j = member() % across(width)
                while j < columns:
                    out[u(i), u(j)] += a[u(i), u(k)] * b[u(k), u(j)]
                    j += across(width)
        i += members() // across(width)


@on_matrices
def _set_product_transposed(a, b, plain, out, width):
    """out = a bᵀ; where b is the identity, a itself with zeros after its last column."""
    tuned()
    rows, columns = out.shape
    i = member() // across(width)
    while i < rows:
        j = member() % across(width)
        while j < columns:
            total = 0.0
            if plain:
                total = a[u(i), u(j)] if j < a.shape[1] else 0.0
            else:
                for k in range(a.shape[1]):
                    total += a[u(i), u(k)] * b[u(j), u(k)]
            out[u(i), u(j)] = total
            j += across(width)
        i += members() // across(width)


@on_matrices
def _apply(matrix, vector, plain, out):
    """out = matrix · vector, or the vector itself where the matrix is the identity."""
    tuned()
    i = member()
    while i < len(out):
        total = vector[u(i)]
        if not plain:
            total = 0.0
            for a in range(len(vector)):
                total += matrix[u(i), u(a)] * vector[u(a)]
        out[u(i)] = total
        i += members()


@on_matrices
def look(w, B, Bq, plain):
    """Û and v̂ of every head, with their slopes at 0; `plain` says that B and Bq are the identity."""
    tuned()
    heads, _, D = w.K.shape
    for h in range(heads):
        _set_product(w.Q[u(h)], Bq, plain, w.Q_hat[u(h)], w.width)
        if w.learns_K:
            _set_product(w.K[u(h)], B, plain, w.K_hat[u(h)], w.width)
        i = member()
        while i < D:
            total = 0.0
            for a in range(w.V.shape[1]):
                total += w.O[u(h), u(a)] * w.V[u(h), u(a), u(i)]
            w.v[u(h), u(i)] = total
            w.dv[u(h), u(i)] = 0.0
            i += members()
    together()
    for h in range(heads):
        U = w.dU[u(h)]
        if w.learns_K:
            _fill(U, 0.0, w.width)
            _add_product(w.K_hat[u(h)], w.Q_hat[u(h)], w.scale, U, w.width)
        elif plain:
            _set_product(w.Q_hat[u(h)], B, True, U, w.width)
        else:
            _fill(U, 0.0, w.width)
            _add_product(B, w.Q_hat[u(h)], 1.0, U, w.width)
        i = member() // across(w.width)
        while i < D:
            j = member() % across(w.width)
            while j < D - 1:
                w.U_hat[u(h), u(i), u(j)] = U[u(i), u(j)]
                U[u(i), u(j)] = 0.0
                j += across(w.width)
            i += members() // across(w.width)
        _apply(B.T, w.v[u(h)], plain, w.v_hat[u(h)])
    together()


@on_matrices
def _slopes(w, h, B, Bq, plain):
    r"""The slopes of head h in K, Q and v, that in v in the room of v.

    They are $s\hat Q(\partial\hat U)^\top B^\top$, $s\hat K\,\partial\hat U B_q^\top$ and $B\,\partial\hat v$.
    """
    tuned()
    k, D = w.dK.shape
    _apply(B, w.dv[u(h)], plain, w.v[u(h)])
    dU, Q_hat, K_hat = w.dU[u(h)], w.Q_hat[u(h)], w.K_hat[u(h)]
    if not w.learns_K:
        if plain:  # Û = Bᵀ Q B_q: the slope in Q is B ∂Û B_qᵀ
            _set_product(dU, B, True, Q_hat, w.width)
        else:
            _set_product(B, dU, False, Q_hat, w.width)
        together()
        _set_product_transposed(Q_hat, Bq, plain, w.dQ, w.width)
        return
    a = member() // across(w.width)
    while a < k:
        i = member() % across(w.width)
        while i < D:
            total = 0.0
            for j in range(D - 1):
                total += Q_hat[u(a), u(j)] * dU[u(i), u(j)]
            w.dQ[u(a), u(i)] = w.scale * total
            i += across(w.width)
        a += members() // across(w.width)
    together()
    _set_product_transposed(w.dQ, B, plain, w.dK, w.width)
    _fill(Q_hat, 0.0, w.width)
    _add_product(K_hat.T, dU, w.scale, Q_hat, w.width)
    together()
    _set_product_transposed(Q_hat, Bq, plain, w.dQ, w.width)


@on_matrices
def _set_moved(w, h, rate, first):
    """Where a step down would lead head h; the sum of the squares of what this thread has of it."""
    tuned()
    k, D = w.dK.shape
    square = 0.0
    a = member() // across(w.width)
    while a < max(k, w.V.shape[1]):
        i = member() % across(w.width)
        while i < D:
            if a < k:
                at = first + 2 * (a * D + i)
                K = w.K[u(h), u(a), u(i)] - (rate * w.dK[u(a), u(i)] if w.learns_K else 0.0)
                Q = w.Q[u(h), u(a), u(i)] - rate * w.dQ[u(a), u(i)]
                w.moved[u(at)] = K
                w.moved[u(at + 1)] = Q
                square += K * K + Q * Q
            if a < w.V.shape[1]:
                V = w.V[u(h), u(a), u(i)] - rate * w.O[u(h), u(a)] * w.v[u(h), u(i)]
                w.moved[u(first + 2 * k * D + a * D + i)] = V
                square += V * V
            i += across(w.width)
        a += members() // across(w.width)
    first += 2 * k * D + w.V.shape[1] * D
    a = member()
    while a < w.V.shape[1]:
        slope = 0.0
        if w.learns_O:
            for i in range(D):
                slope += w.V[u(h), u(a), u(i)] * w.v[u(h), u(i)]
        O = w.O[u(h), u(a)] - rate * slope
        w.moved[u(first + a)] = O
        square += O * O
        a += members()
    return square


@on_matrices
def _move(w, h, first):
    """Set head h to where a step down leads it."""
    tuned()
    k, D = w.dK.shape
    a = member() // across(w.width)
    while a < max(k, w.V.shape[1]):
        i = member() % across(w.width)
        while i < D:
            if a < k:
                at = first + 2 * (a * D + i)
                w.K[u(h), u(a), u(i)] = w.moved[u(at)]
                w.Q[u(h), u(a), u(i)] = w.moved[u(at + 1)]
            if a < w.V.shape[1]:
                w.V[u(h), u(a), u(i)] = w.moved[u(first + 2 * k * D + a * D + i)]
            i += across(w.width)
        a += members() // across(w.width)
    first += 2 * k * D + w.V.shape[1] * D
    a = member()
    while a < w.V.shape[1]:
        w.O[u(h), u(a)] = w.moved[u(first + a)]
        a += members()


@on_matrices
def descend(w, B, Bq, plain, rate, far):
    """One step down dU and dv, unless it ends beyond `far` or nowhere; whether it was taken."""
    tuned()
    heads, k, D = w.K.shape
    size = 2 * k * D + w.V.shape[1] * (D + 1)
    square = 0.0
    for h in range(heads):
        _slopes(w, h, B, Bq, plain)
        square += _set_moved(w, h, rate, h * size)
    # each comparison is false for NaN; where no thread has much, all have little, and only then need they add up
    if not all_agree(square <= far * far / members()):
        square = 0.0
        for i in range(heads * size):
            square += w.moved[u(i)] * w.moved[u(i)]
        if not square <= far * far:
            return False
    for h in range(heads):
        _move(w, h, h * size)
    together()
    return True
