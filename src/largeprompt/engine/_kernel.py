"""The loop over steps: instances, columns, readings, gradients, a step down. One compiled function for each kind of run.

Compiled code is kept on disk by Numba under a name that depends on every source file of this folder, so that no change
is missed; `nogil`, so that runs go on side by side in threads.
"""

import functools
import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from ._elementary import FASTMATH, with_widest_vectors
from ._lanes import LANES, aligned, apply, dot, fill_normals, on_lanes, row, rows
from ._philox import INSTANCE
from ._readings import infinite_readings, linear_readings, softmax_readings, whole_token_readings
from ._tokens import sums_of
from ._weights import Weights, descend, look

f32, u32, f64 = np.float32, np.uint32, np.float64
across_lanes = numba.njit(fastmath=FASTMATH | {"reassoc"}, error_model="numpy", nogil=True)


class Law(NamedTuple):
    """Regression in the coordinates of the sampling: tokens x = B x̂ and queries x = B_q x̂, both standard normal in x̂.

    Given ε standard normal, labels are ŵ·x̂ + noise with ŵ = F ε, and the query's is (F_q ε)·x̂ + noise. Where `diagonal`,
    F and F_q are the same diagonal matrix; where `plain`, B and B_q are the identity.
    """

    B: np.ndarray
    Bq: np.ndarray
    F: np.ndarray
    Fq: np.ndarray
    variances: np.ndarray
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
    bits: np.ndarray
    other: np.ndarray
    radial: np.ndarray
    angular: np.ndarray


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
        "S": max(2 * 15, sums_of(softmax) + 3 * softmax + 8, 2 * (2 * softmax)),
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
    return Workspace(*parts, bits, other, bits.view(np.uint32), other.view(np.uint32))


@on_lanes
def _instances(d, law, s, prompt, step, k0, k1):
    """Draw ŵ, the query and its label."""
    with_widest_vectors()
    fill_normals(s.drawn, 0, 2 * d + 1, prompt, step, INSTANCE, k0, k1)
    if law.diagonal:
        for i in range(d):
            size = f32(law.variances[i])
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


@on_lanes
def _columns(d, w, law, first, s):
    """α = Cᵀ u and γ = Cᵀ v of each head, u = Û x̂ of the query, into the columns from `first` on."""
    with_widest_vectors()
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
def _sum_of_products(a, ra, b, rb, n, out):
    """out[k] += Σ_lanes a · b_k, four at a time; float32 within the lanes, float64 from group to group."""
    with_widest_vectors()
    k = 0
    while k + 4 <= n:
        p, q, r, t = f32(0), f32(0), f32(0), f32(0)
        for j in range(LANES):
            x = a[row(ra, j)]
            p += x * b[row(rb + k, j)]
            q += x * b[row(rb + k + 1, j)]
            r += x * b[row(rb + k + 2, j)]
            t += x * b[row(rb + k + 3, j)]
        out[k] += p
        out[k + 1] += q
        out[k + 2] += r
        out[k + 3] += t
        k += 4
    while k < n:
        p = f32(0)
        for j in range(LANES):
            p += a[row(ra, j)] * b[row(rb + k, j)]
        out[k] += p
        k += 1


@across_lanes
def _sum(a, ra):
    with_widest_vectors()
    total = f32(0)
    for j in range(LANES):
        total += a[row(ra, j)]
    return total


@on_lanes
def _gradients(d, w, first, readings, valid, law, s):
    """Add the batch's share to the slopes of a layer: readings times errors, and these times the query."""
    with_widest_vectors()
    heads = w.U_hat.shape[0]
    _errors(d, heads, first, readings, valid, s)
    for h in range(heads):
        _weigh(d, 2 * h, readings, law, s)
        _weigh(d, 2 * h + 1, readings, law, s)
        for i in range(d + 1):
            w.dv[h, i] += _sum(readings, 2 * h * (d + 1) + i)
            _sum_of_products(readings, (2 * h + 1) * (d + 1) + i, s.drawn, 0, d, w.dU[h, i])


@functools.cache
def trainer(softmax: bool, linear: bool):
    """The compiled loop over steps for layers of softmax heads, of linear heads, or one of each on the same prompts."""
    return _trainer(_sources(), softmax, linear)


def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _trainer(sources: str, softmax: bool, linear: bool):
    @numba.njit(nogil=True, error_model="numpy", cache=True)
    def train(start, stop, L, batch, rate, far, seed, law, soft, line, s, diverged):
        """Steps from start to stop; L = 0 is the infinite prompt. Fills `diverged`, and returns where it stopped."""
        with_widest_vectors()
        _ = sources  # part of the name under which the compiled code is kept
        d = law.B.shape[0] - 1
        k0, k1 = u32(seed & 0xFFFFFFFF), u32(seed >> 32)
        m = 2 * soft.K.shape[0] if softmax else 0
        n = 2 * line.K.shape[0] if linear else 0
        for step in range(start, stop):
            if softmax:
                look(soft, law.B, law.Bq, law.plain)
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
                elif softmax and L < 2 * m:
                    whole_token_readings(L, d + 1, m, n, s, prompt, t, k0, k1)
                else:
                    if softmax:
                        softmax_readings(L, d + 1, m, m + n, linear, s, prompt, t, k0, k1)
                    if linear:
                        linear_readings(L, d + 1, n, m, s, prompt, t, k0, k1)
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
                return step + 1
        return stop

    return train
