"""The loop over steps: instances, columns, readings, gradients, a step down. One compiled function a kind of run.

Compiled code is kept on disk by Numba under a name that depends on every source file of this folder, so that no change
is missed; `nogil`, so that runs go on side by side in threads.
"""

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from ._elementary import FASTMATH, with_widest_vectors
from ._lanes import LANES, aligned, apply, assembled, dot, fill_normals, on_lanes, row, rows
from ._philox import INSTANCE
from ._readings import infinite_readings, linear_readings, softmax_readings, whole_token_readings
from ._tokens import WIDE, sums_of
from ._weights import descend, look

f32, u32, f64 = np.float32, np.uint32, np.float64
_LONG = 16  # from this dimension on, vectors run along it where they can
across_lanes = numba.njit(fastmath=FASTMATH | {"reassoc"}, error_model="numpy", nogil=True)


class Law(NamedTuple):
    """Regression in the coordinates of the sampling: tokens x = B x̂ and queries x = B_q x̂, both standard normal in x̂.

    Given ε standard normal, labels are ŵ·x̂ + noise with ŵ = F ε, and the query's is (F_q ε)·x̂ + noise. Where
    `diagonal`, F and F_q are the same diagonal matrix; where `plain`, B and B_q are the identity.
    """

    B: np.ndarray
    Bq: np.ndarray
    F: np.ndarray
    Fq: np.ndarray
    scales: np.ndarray
    noise: float
    plain: bool
    diagonal: bool


class Workspace(NamedTuple):
    """Rows for a group of prompts."""

    drawn: np.ndarray
    w: np.ndarray
    wq: np.ndarray
    target: np.ndarray
    u: np.ndarray
    columns: np.ndarray
    E: np.ndarray
    R: np.ndarray
    xi: np.ndarray
    S: np.ndarray
    sums: np.ndarray
    carried: np.ndarray
    gram64: np.ndarray
    root64: np.ndarray
    gram: np.ndarray
    root: np.ndarray
    T: np.ndarray
    below: np.ndarray
    cross: np.ndarray
    tokens: np.ndarray
    softmax: np.ndarray
    linear: np.ndarray
    work: np.ndarray
    queries: np.ndarray
    bits: np.ndarray
    other: np.ndarray
    radial: np.ndarray
    angular: np.ndarray
    first: np.ndarray
    second: np.ndarray


def workspace(d: int, softmax: int, linear: int) -> Workspace:
    """Room for that many columns of softmax and of linear heads, two a head."""
    D, n, m = d + 1, softmax + linear, max(softmax, linear)
    sizes = {
        "drawn": 2 * d + 1,
        "w": d,
        "wq": d,
        "target": 1,
        "u": D,
        "columns": n * D,
        "E": n * D,
        "R": n * n,
        "xi": (2 * softmax + linear) * D,
        "S": max(2 * 15 + 1, sums_of(softmax) + 3 * softmax + 8, 2 * (2 * softmax)),
        "sums": max(14, sums_of(softmax)),
        "carried": 12,
        "gram64": 4 * softmax**2,
        "root64": 4 * softmax**2,
        "gram": 4 * softmax**2,
        "root": 4 * softmax**2,
        "T": linear**2,
        "below": linear**2,
        "cross": softmax * D,
        "tokens": 2 * softmax * D,
        "softmax": softmax * D,
        "linear": linear * D,
        "work": m + 4,
    }
    wide = {"sums", "carried", "gram64", "root64"}
    parts = [rows(max(size, 1), np.float64 if name in wide else np.float32) for name, size in sizes.items()]
    bits, other = aligned(LANES, np.uint64), aligned(LANES, np.uint64)
    padded = -(-d // _LONG) * _LONG
    queries = aligned((LANES + 1) * padded, np.float32).reshape(LANES + 1, padded)
    views = [bits.view(np.uint32), other.view(np.uint32), aligned(WIDE, np.float32), aligned(WIDE, np.float32)]
    return Workspace._make([*parts, queries, bits, other, *views])


@assembled
def _instances(d, law, s, prompt, step, k0, k1):
    """Draw ŵ, the query and its label."""
    fill_normals(s.drawn, 0, 2 * d + 1, prompt, step, INSTANCE, k0, k1)
    if law.diagonal:
        for i in range(d):
            size = f32(law.scales[i])
            for j in range(LANES):
                s.w[row(i, j)] = size * s.drawn[row(d + i, j)]
        dot(s.w, 0, s.drawn, 0, d, s.target, 0)
    else:
        apply(law.F, s.drawn, d, d, s.w, 0)
        apply(law.Fq, s.drawn, d, d, s.wq, 0)
        dot(s.wq, 0, s.drawn, 0, d, s.target, 0)
    noise = f32(law.noise)
    for j in range(LANES):
        s.target[j] += noise * s.drawn[row(2 * d, j)]


@assembled
def _columns(d, w, law, first, s):
    """α = Cᵀ u and γ = Cᵀ v of each head, u = Û x̂ of the query, into the columns from `first` on."""
    noise = f32(law.noise)
    for h in range(w.U_hat.shape[0]):
        apply(w.U_hat[h], s.drawn, 0, d, s.u, 0)
        alpha, gamma = (first + 2 * h) * (d + 1), (first + 2 * h + 1) * (d + 1)
        label = w.v_hat[h, d]
        for i in range(d):
            value = w.v_hat[h, i]
            for j in range(LANES):
                s.columns[row(alpha + i, j)] = s.u[row(i, j)] + s.w[row(i, j)] * s.u[row(d, j)]
                s.columns[row(gamma + i, j)] = value + s.w[row(i, j)] * label
        for j in range(LANES):
            s.columns[row(alpha + d, j)] = noise * s.u[row(d, j)]
            s.columns[row(gamma + d, j)] = noise * label


@on_lanes
def _errors(d, heads, first, readings, valid, s):
    """Row 0 of `work`: prediction minus label, 0 for the lanes that hold no prompt of the batch."""
    with_widest_vectors()
    D = d + 1
    for j in range(LANES):
        s.work[j] = -s.target[j]
    for h in range(heads):
        dot(s.columns, (first + 2 * h + 1) * D, readings, 2 * h * D, D, s.work, 1)
        for j in range(LANES):
            s.work[j] += s.work[row(1, j)]
    for j in range(valid, LANES):
        s.work[j] = f32(0)


@on_lanes
def _weigh(d, c, readings, law, s):
    """Reading c in the coordinates of (x̂, y), times the error."""
    with_widest_vectors()
    at = c * (d + 1)
    noise = f32(law.noise)
    dot(s.w, 0, readings, at, d, s.work, 1)
    for j in range(LANES):
        readings[row(at + d, j)] = s.work[j] * (s.work[row(1, j)] + noise * readings[row(at + d, j)])
    for i in range(d):
        for j in range(LANES):
            readings[row(at + i, j)] *= s.work[j]


@across_lanes
def _sum_over_lanes(D, h, readings, queries, dv, dU):
    """Add Σ_lanes m to dv and, for few covariates, Σ_lanes k xᵀ to dU; float32 within the lanes, float64 beyond."""
    with_widest_vectors()
    d = D - 1
    for i in range(D):
        m, k = 2 * h * D + i, (2 * h + 1) * D + i
        total = f32(0)
        for j in range(LANES):
            total += readings[row(m, j)]
        dv[h, i] += total
        if d < _LONG:
            for c in range(d):
                total = f32(0)
                for j in range(LANES):
                    total += readings[row(k, j)] * queries[row(c, j)]
                dU[h, i, c] += total


@on_lanes
def _transpose(a, n, out):
    """n rows of lanes as lanes of rows: out[j, i]."""
    for i in range(n):
        for j in range(LANES):
            out[j, i] = a[row(i, j)]


@on_lanes
def _add_outer_products(a, ra, transposed, n, out):
    """out[k] += Σ_lanes a · b_k with b given lane by lane, and a last row for the sums: here vectors run along k."""
    with_widest_vectors()
    padded = transposed.shape[1]
    for k in range(padded):
        transposed[LANES, k] = f32(0)
    for j in range(0, LANES, 8):
        p, q, r, s = a[row(ra, j)], a[row(ra, j + 1)], a[row(ra, j + 2)], a[row(ra, j + 3)]
        t, u, v, w = a[row(ra, j + 4)], a[row(ra, j + 5)], a[row(ra, j + 6)], a[row(ra, j + 7)]
        for k in range(padded):
            first = (
                p * transposed[j, k] + q * transposed[j + 1, k] + r * transposed[j + 2, k] + s * transposed[j + 3, k]
            )
            second = (
                t * transposed[j + 4, k]
                + u * transposed[j + 5, k]
                + v * transposed[j + 6, k]
                + w * transposed[j + 7, k]
            )
            transposed[LANES, k] += first + second
    for k in range(n):
        out[k] += transposed[LANES, k]


@assembled
def _gradients(d, w, first, readings, valid, law, s):
    """Add the batch's share to the slopes of a layer: readings times errors, and these times the query."""
    heads = w.U_hat.shape[0]
    _errors(d, heads, first, readings, valid, s)
    for h in range(heads):
        _weigh(d, 2 * h, readings, law, s)
        _weigh(d, 2 * h + 1, readings, law, s)
        _sum_over_lanes(d + 1, h, readings, s.drawn, w.dv, w.dU)
        if d >= _LONG:
            for i in range(d + 1):
                _add_outer_products(readings, (2 * h + 1) * (d + 1) + i, s.queries, d, w.dU[h, i])


@on_lanes
def _silence(w):
    for h in range(w.U_hat.shape[0]):
        for i in range(w.U_hat.shape[1]):
            w.v_hat[h, i] = f32(0)
            for j in range(w.U_hat.shape[2]):
                w.U_hat[h, i, j] = f32(0)


@functools.cache
def trainer(softmax: bool, linear: bool):
    """The compiled loop over steps for layers of softmax heads, of linear heads, or one of each on the same prompts."""
    return _trainer(source_hash(), softmax, linear)


def source_hash() -> str:
    """Of this folder: compiled code is kept on disk under a name that holds it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _trainer(sources: str, softmax: bool, linear: bool):
    @numba.njit(nogil=True, error_model="numpy", cache=True)
    def train(start, stop, L, batch, rate, far, seed, law, soft, line, s, diverged):
        """Steps from start to stop; L = 0 is the infinite prompt. Fills `diverged`."""
        with_widest_vectors()
        _ = sources  # part of the name under which the compiled code is kept
        d = law.B.shape[0] - 1
        k0, k1 = u32(seed & 0xFFFFFFFF), u32(seed >> 32)
        m = 2 * soft.K.shape[0] if softmax else 0
        n = 2 * line.K.shape[0] if linear else 0
        for step in range(start, stop):
            if softmax:
                look(soft, law.B, law.Bq, law.plain)
                if diverged[0] >= 0:  # it stays as it was, but the other must not see such numbers
                    _silence(soft)
            if linear:
                look(line, law.B, law.Bq, law.plain)
            for prompt in range(0, batch, LANES):
                valid = min(batch - prompt, LANES)
                t = u32(step)
                _instances(d, law, s, prompt, t, k0, k1)
                if softmax:
                    _columns(d, soft, law, 0, s)
                if linear:
                    _columns(d, line, law, m, s)
                if L == 0:
                    infinite_readings(d + 1, m, n, s)
                elif softmax and 2 * m > L:
                    whole_token_readings(L, d + 1, m, n, s, prompt, t, k0, k1)
                else:
                    if softmax:
                        softmax_readings(L, d + 1, m, m + n, linear, s, prompt, t, k0, k1)
                    if linear:
                        linear_readings(L, d + 1, n, m, s, prompt, t, k0, k1)
                if d >= _LONG:
                    _transpose(s.drawn, d, s.queries)
                if softmax:
                    _gradients(d, soft, 0, s.softmax, valid, law, s)
                if linear:
                    _gradients(d, line, m, s.linear, valid, law, s)
            going = False
            if softmax:
                if diverged[0] < 0 and not descend(soft, law.B, law.Bq, law.plain, rate / batch, far):
                    diverged[0] = step
                going = going or diverged[0] < 0
            if linear:
                at = 1 if softmax else 0
                if diverged[at] < 0 and not descend(line, law.B, law.Bq, law.plain, rate / batch, far):
                    diverged[at] = step
                going = going or diverged[at] < 0
            if not going:
                return

    return train
