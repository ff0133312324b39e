"""What a step computes for each prompt of its batch, before and after the tokens are read."""

from typing import NamedTuple

import numpy as np

from ._cpu_tokens import ROOM
from ._lanes import apply, assembled, dot, fill_normals, on_lanes, row
from ._philox import INSTANCE
from ._target import lanes, tuned
from ._tokens import ARRANGED, WF, sums_of

f32 = np.float32


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


def rows_of(d: int, softmax: int, linear: int) -> dict[str, int]:
    """How many rows each field holds for so many columns of softmax and of linear heads, two per head."""
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
        "S": max(ROOM, sums_of(softmax) + 3 * softmax + 8, 2 * (2 * softmax)),
        "sums": max(ARRANGED, sums_of(softmax)),
        "carried": WF + 1,
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
    return {name: -(-max(size, 1) // 4) * 4 for name, size in sizes.items()}  # normals come in fours


WIDE_ROWS = ("sums", "carried", "gram64", "root64")  # float64, all others float32


@on_lanes
def draw_instances(d, s, prompt, step, k0, k1):
    """Draw what is random in ŵ, the query and its label."""
    tuned()
    fill_normals(s.drawn, 0, 2 * d + 1, prompt, step, INSTANCE, k0, k1)


@assembled
def instances(d, law, s):
    """Compute ŵ, the query and its label from what was drawn."""
    if law.diagonal:
        for i in range(d):
            size = f32(law.scales[i])
            for j in range(lanes()):
                s.w[row(i, j)] = size * s.drawn[row(d + i, j)]
        dot(s.w, 0, s.drawn, 0, d, s.target, 0)
    else:
        apply(law.F, d, s.drawn, d, d, s.w, 0)
        apply(law.Fq, d, s.drawn, d, d, s.wq, 0)
        dot(s.wq, 0, s.drawn, 0, d, s.target, 0)
    noise = f32(law.noise)
    for j in range(lanes()):
        s.target[j] += noise * s.drawn[row(2 * d, j)]


@assembled
def columns(d, w, law, first, s):
    """Compute α = Cᵀ u and γ = Cᵀ v of each head, u = Û x̂ of the query, into the columns from `first` on."""
    noise = f32(law.noise)
    for h in range(w.U_hat.shape[0]):
        apply(w.U_hat[h], d + 1, s.drawn, 0, d, s.u, 0)
        alpha, gamma = (first + 2 * h) * (d + 1), (first + 2 * h + 1) * (d + 1)
        label = w.v_hat[h, d]
        for i in range(d):
            value = w.v_hat[h, i]
            for j in range(lanes()):
                s.columns[row(alpha + i, j)] = s.u[row(i, j)] + s.w[row(i, j)] * s.u[row(d, j)]
                s.columns[row(gamma + i, j)] = value + s.w[row(i, j)] * label
        for j in range(lanes()):
            s.columns[row(alpha + d, j)] = noise * s.u[row(d, j)]
            s.columns[row(gamma + d, j)] = noise * label


@on_lanes
def errors(d, heads, first, readings, valid, s):
    """Set row 0 of `work` to prediction minus label, and to 0 for the lanes that hold no prompt of the batch."""
    tuned()
    D = d + 1
    for j in range(lanes()):
        s.work[j] = -s.target[j]
    for h in range(heads):
        dot(s.columns, (first + 2 * h + 1) * D, readings, 2 * h * D, D, s.work, 1)
        for j in range(lanes()):
            s.work[j] += s.work[row(1, j)]
    for j in range(valid, lanes()):
        s.work[j] = f32(0)


@on_lanes
def times_error(d, c, readings, law, s):
    """Bring reading c into the coordinates of (x̂, y) and multiply it by the error."""
    tuned()
    at = c * (d + 1)
    noise = f32(law.noise)
    dot(s.w, 0, readings, at, d, s.work, 1)
    for j in range(lanes()):
        readings[row(at + d, j)] = s.work[j] * (s.work[row(1, j)] + noise * readings[row(at + d, j)])
    for i in range(d):
        for j in range(lanes()):
            readings[row(at + i, j)] *= s.work[j]
