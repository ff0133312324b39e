r"""Weights of heads as arrays, and the chain rule between them and the (U, v) that the sampling sees.

Each head predicts $v^\top m$ with $U = sK^\top Q$ and $v = V^\top o$; the (U, V) form is $K = I$ and $o = 1$, not
learnt. In the coordinates of the sampling tokens are $z = B\hat z$ and queries $B_q\hat x$, so that $\hat U = B^\top
UB_q$.

Where threads of a GPU share a layer, each computes entries of its own of every matrix, `across(width)` columns and
`mates(mates) // across(width)` rows apart, at most one where that is `single`; a processor's one thread computes all.
Loops over them are `while` loops: how often a range with a step runs takes a division to know.
"""

from ._target import across, alone, mate, mates, shared, tuned
from ._tiles import set_product
from ._update import change, on_matrices, u
from ._within import within

in_caller = within(forceinline=True)
_BEYOND = 2**62


@in_caller
def first_row(w):
    """The first row of a matrix of which this thread has entries."""
    return mate(w.mate) // across(w.width)


@in_caller
def first_column(w):
    """The first column of which it has entries."""
    return mate(w.mate) % across(w.width)


@in_caller
def next_row(w, i):
    """The next row of which it has entries; beyond all of them where it has one entry at most."""
    return _BEYOND if alone(w.single) else i + mates(w.mates) // across(w.width)


@in_caller
def next_column(w, j):
    """The next column of which it has entries."""
    return _BEYOND if alone(w.single) else j + across(w.width)


@in_caller
def next_entry(w, i):
    """The next entry of a vector that it has."""
    return _BEYOND if alone(w.single) else i + mates(w.mates)


@on_matrices
def _set_product(a, b, inner, plain, out, w):
    """out = a b with that inner dimension, or a's first columns where b is the identity."""
    tuned()
    if not shared() and not plain:
        set_product(a, b, inner, 1.0, out)
        return
    rows, columns = out.shape
    i = first_row(w)
    while i < rows:
        j = first_column(w)
        while j < columns:
            total = a[u(i), u(j)] if plain else 0.0
            if not plain:
                for k in range(inner):
                    total += a[u(i), u(k)] * b[u(k), u(j)]
            out[u(i), u(j)] = total
            j = next_column(w, j)
        i = next_row(w, i)


@on_matrices
def _set_product_of_transposed(a, b, inner, scale, out, w):
    """out = scale · aᵀ b with that inner dimension."""
    tuned()
    if not shared():
        set_product(a.T, b, inner, scale, out)
        return
    rows, columns = out.shape
    i = first_row(w)
    while i < rows:
        j = first_column(w)
        while j < columns:
            total = 0.0
            for k in range(inner):
                total += a[u(k), u(i)] * b[u(k), u(j)]
            out[u(i), u(j)] = scale * total
            j = next_column(w, j)
        i = next_row(w, i)


@on_matrices
def _transpose(a, out):
    tuned()
    rows, columns = out.shape
    for i in range(rows):
        for j in range(columns):
            out[u(i), u(j)] = a[u(j), u(i)]


@on_matrices
def _set_product_with_transposed(a, b, inner, scale, plain, out, w):
    """out = scale · a bᵀ with that inner dimension; where b is the identity, a itself with zeros after its columns."""
    tuned()
    rows, columns = out.shape
    i = first_row(w)
    while i < rows:
        j = first_column(w)
        while j < columns:
            total = 0.0
            if plain:
                total = a[u(i), u(j)] if j < inner else 0.0
            else:
                for k in range(inner):
                    total += a[u(i), u(k)] * b[u(j), u(k)]
            out[u(i), u(j)] = scale * total
            j = next_column(w, j)
        i = next_row(w, i)


@on_matrices
def _apply(matrix, vector, n, plain, out, w):
    """out = matrix · vector, n entries of each, or the vector itself where the matrix is the identity."""
    tuned()
    i = mate(w.mate)
    while i < n:
        total = vector[u(i)]
        if not plain:
            total = 0.0
            for a in range(n):
                total += matrix[u(i), u(a)] * vector[u(a)]
        out[u(i)] = total
        i = next_entry(w, i)


@on_matrices
def begin_projection(w, B, Bq, plain):
    """Compute what `project` needs of K, Q, V and O; `plain` says that B and Bq are the identity."""
    tuned()
    heads, _, D = w.K.shape
    for h in range(heads):
        _set_product(w.Q[u(h)], Bq, D, plain, w.Q_hat[u(h)], w)
        if w.learns_K:
            _set_product(w.K[u(h)], B, D, plain, w.K_hat[u(h)], w)
        i = mate(w.mate)
        while i < D:
            total = 0.0
            for a in range(w.V.shape[1]):
                total += w.O[u(h), u(a)] * w.V[u(h), u(a), u(i)]
            w.v[u(h), u(i)] = total
            w.dv[u(h), u(i)] = 0.0
            i = next_entry(w, i)


@on_matrices
def project(w, B, plain):
    """Compute Û and v̂ of every head and clear their gradients, once all threads have begun."""
    tuned()
    heads, k, D = w.K.shape
    for h in range(heads):
        U = w.dU[u(h)]
        if w.learns_K:
            _set_product_of_transposed(w.K_hat[u(h)], w.Q_hat[u(h)], k, w.scale, U, w)
        elif plain:
            _set_product(w.Q_hat[u(h)], B, D, True, U, w)
        else:
            _set_product_of_transposed(B, w.Q_hat[u(h)], D, 1.0, U, w)
        i = first_row(w)
        while i < D:
            j = first_column(w)
            while j < D - 1:
                w.U_hat[u(h), u(i), u(j)] = U[u(i), u(j)]
                U[u(i), u(j)] = 0.0
                j = next_column(w, j)
            i = next_row(w, i)
        _apply(B.T, w.v[u(h)], D, plain, w.v_hat[u(h)], w)


@on_matrices
def clear_projection(w):
    """Set Û = 0 and v̂ = 0 instead of projecting."""
    tuned()
    heads, D, d = w.U_hat.shape
    for h in range(heads):
        i = mate(w.mate)
        while i < D:
            w.v_hat[u(h), u(i)] = 0.0
            for j in range(d):
                w.U_hat[u(h), u(i), u(j)] = 0.0
            i += mates(w.mates)


@on_matrices
def begin_backprop(w, B, plain):
    r"""Compute the gradient in v, in the room of v, and what those in K and Q need.

    They are $s\hat Q(\partial\hat U)^\top B^\top$, $s\hat K\,\partial\hat U B_q^\top$ and $B\,\partial\hat v$.
    """
    tuned()
    heads, k, D = w.K.shape
    for h in range(heads):
        _apply(B, w.dv[u(h)], D, plain, w.v[u(h)], w)
        dU, Q_hat = w.dU[u(h)], w.Q_hat[u(h)]
        if w.learns_K and not shared() and k >= D - 1:
            transposed = w.dK[u(h)][: D - 1]  # room that is not needed yet
            _transpose(dU, transposed)
            set_product(Q_hat, transposed, D - 1, w.scale, w.dQ[u(h)])
        elif w.learns_K:
            _set_product_with_transposed(Q_hat, dU, D - 1, w.scale, False, w.dQ[u(h)], w)
        elif plain:  # Û = Bᵀ Q B_q: the gradient in Q is B ∂Û B_qᵀ
            _set_product(dU, B, D, True, Q_hat, w)
        else:
            _set_product(B, dU, D, False, Q_hat, w)


@on_matrices
def backprop(w, B, plain):
    """Compute the gradient in K and what the one in Q needs, once all threads have begun."""
    tuned()
    heads, _, D = w.K.shape
    if w.learns_K:
        for h in range(heads):
            _set_product_with_transposed(w.dQ[u(h)], B, D, 1.0, plain, w.dK[u(h)], w)
            _set_product_of_transposed(w.K_hat[u(h)].T, w.dU[u(h)], D, w.scale, w.Q_hat[u(h)], w)


@on_matrices
def _places(w, h):
    """Where the entries of head h begin in a row of all weights: those of K, Q, V and O, each of all heads."""
    tuned()
    heads, k, D = w.K.shape
    r = w.V.shape[1]
    return h * k * D, (heads + h) * k * D, (2 * heads * k + h * r) * D, heads * (2 * k + r) * D + h * r


@on_matrices
def _propose_head(w, h, rate, rule):
    """Compute head h after a step; return the sum of the squares of what this thread has of it."""
    tuned()
    _, k, D = w.K.shape
    at_K, at_Q, at_V, at_O = _places(w, h)
    square = 0.0
    a = first_row(w)
    while a < max(k, w.V.shape[1]):
        i = first_column(w)
        while i < D:
            if a < k:
                at = at_K + a * D + i
                K = w.K[u(h), u(a), u(i)] - (change(1.0, w.dK[u(h), u(a), u(i)], rate, rule, at) if w.learns_K else 0.0)
                w.proposed[u(at)] = K
                at = at_Q + a * D + i
                Q = w.Q[u(h), u(a), u(i)] - change(1.0, w.dQ[u(h), u(a), u(i)], rate, rule, at)
                w.proposed[u(at)] = Q
                square += K * K + Q * Q
            if a < w.V.shape[1]:
                at = at_V + a * D + i
                V = w.V[u(h), u(a), u(i)] - change(w.O[u(h), u(a)], w.v[u(h), u(i)], rate, rule, at)
                w.proposed[u(at)] = V
                square += V * V
            i = next_column(w, i)
        a = next_row(w, a)
    a = mate(w.mate)
    while a < w.V.shape[1]:
        slope = 0.0
        if w.learns_O:
            for i in range(D):
                slope += w.V[u(h), u(a), u(i)] * w.v[u(h), u(i)]
        O = w.O[u(h), u(a)]
        if rule is None or w.learns_O:  # what is not learnt has no moments
            O -= change(1.0, slope, rate, rule, at_O + a)
        w.proposed[u(at_O + a)] = O
        square += O * O
        a = next_entry(w, a)
    return square


@on_matrices
def propose(w, Bq, plain, rate, rule):
    """Compute the weights after a step, once all threads have gradients; return the squares of this thread's.

    The rule is None for plain descent; others change the moments of the weights.
    """
    tuned()
    heads, _, D = w.K.shape
    square = 0.0
    for h in range(heads):
        _set_product_with_transposed(w.Q_hat[u(h)], Bq, D - 1, 1.0, plain, w.dQ[u(h)], w)
        square += _propose_head(w, h, rate, rule)
    return square


@on_matrices
def surely_within(square, far, n):
    """Whether n such sums are together within `far`, which NaN is not."""
    tuned()
    return square <= far * far / n


@on_matrices
def _exchange(array, h, a, i, row, at, out):
    tuned()
    if out:
        row[u(at)] = array[u(h), u(a), u(i)]
    else:
        array[u(h), u(a), u(i)] = row[u(at)]


@on_matrices
def copy(w, row, first, out):
    """Copy the weights out to a row of numbers, from `first` on, or in from there."""
    tuned()
    heads, k, D = w.K.shape
    for h in range(heads):
        at_K, at_Q, at_V, at_O = _places(w, h)
        a = first_row(w)
        while a < max(k, w.V.shape[1]):
            i = first_column(w)
            while i < D:
                at = first + a * D + i
                if a < k:
                    _exchange(w.K, h, a, i, row, at_K + at, out)
                    _exchange(w.Q, h, a, i, row, at_Q + at, out)
                if a < w.V.shape[1]:
                    _exchange(w.V, h, a, i, row, at_V + at, out)
                i = next_column(w, i)
            a = next_row(w, a)
        a = mate(w.mate)
        while a < w.V.shape[1]:
            if out:
                row[u(first + at_O + a)] = w.O[u(h), u(a)]
            else:
                w.O[u(h), u(a)] = row[u(first + at_O + a)]
            a = next_entry(w, a)


@on_matrices
def accept(w, is_within, far):
    """Take the proposed weights unless they are beyond `far` or not numbers; return whether they are taken.

    `is_within` says that they are within `far` without another look.
    """
    tuned()
    if not is_within:
        square = 0.0
        for i in range(len(w.proposed)):
            square += w.proposed[u(i)] * w.proposed[u(i)]
        if not square <= far * far:  # nor is NaN
            return False
    copy(w, w.proposed, 0, False)
    return True
