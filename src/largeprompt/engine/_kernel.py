"""The loop over steps on a processor: instances, columns, readings, gradients, a step down.

Compiled code is kept on disk by Numba under a name that depends on every source file of this folder, so that no change
is missed; `nogil`, so that runs go on side by side in threads.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np

from ._batch import WIDE_ROWS, Workspace, columns, draw_instances, errors, instances, rows_of, times_error
from ._chain_rule import (
    accept,
    backprop,
    begin_backprop,
    begin_projection,
    clear_projection,
    project,
    propose,
    surely_within,
)
from ._cpu_tokens import WIDE, sums_of_one_head
from ._lanes import LANES, aligned, assembled, on_lanes, orthonormalise, row, rows
from ._readings import draw_across, infinite_readings, linear_readings, readings_from_sums, whole_token_readings
from ._target import product_over_lanes, tuned
from ._tiles import WIDTH, set_product
from ._tokens import sums_of_heads
from ._update import rule_at
from ._within import outermost

f32, u32, f64 = np.float32, np.uint32, np.float64
_LONG = 16  # from this dimension on, vectors run along it where they can


def workspace(d: int, softmax: int, linear: int) -> Workspace:
    """Room for so many columns of softmax and of linear heads, two per head."""
    sizes = rows_of(d, softmax, linear)
    parts = [rows(size, np.float64 if name in WIDE_ROWS else np.float32) for name, size in sizes.items()]
    bits, other = aligned(LANES, np.uint64), aligned(LANES, np.uint64)
    padded = -(-d // WIDTH) * WIDTH
    queries = aligned((LANES + d + 1) * padded, np.float32).reshape(LANES + d + 1, padded)
    views = [bits.view(np.uint32), other.view(np.uint32), aligned(WIDE, np.float32), aligned(WIDE, np.float32)]
    return Workspace._make([*parts, queries, bits, other, *views])


@assembled
def _softmax_readings(L, D, m, n, products, w, prompt, step, k0, k1):
    """The readings of the m / 2 softmax heads into `w.softmax`, of n columns in all; Ξ and Λ stay for linear heads."""
    orthonormalise(w.columns, 0, m, D, w.E, w.R, n, w.work)
    if m == 2:
        sums_of_one_head(L, n, products, w, prompt, step, k0, k1)
    else:
        sums_of_heads(L, m, w.R, n, products, w.S, w.sums, prompt, step, k0, k1)
    readings_from_sums(D, m, n, products, w)


@on_lanes
def _sum_over_lanes(D, h, readings, queries, dv, dU):
    """Add Σ_lanes m to dv and, for few covariates, Σ_lanes k xᵀ to dU; float32 within the lanes, float64 beyond."""
    tuned()
    d = D - 1
    for i in range(D):
        m, k = 2 * h * D + i, (2 * h + 1) * D + i
        total = f32(0)
        for j in range(LANES):
            total += readings[row(m, j)]
        dv[h, i] += total
        if d < _LONG:
            for c in range(d):
                dU[h, i, c] += product_over_lanes(readings, k * LANES, queries, c * LANES)


@on_lanes
def _transpose(a, n, out):
    """n rows of lanes as lanes of rows: out[j, i]."""
    for i in range(n):
        for j in range(LANES):
            out[j, i] = a[row(i, j)]


@on_lanes
def _add_outer_products(a, first, D, queries, out):
    """out += Σ_lanes a xᵀ for D rows of a, with x given lane by lane, and room for the products below."""
    tuned()
    products = queries[LANES:]
    set_product(a.reshape(len(a) // LANES, LANES)[first : first + D], queries, LANES, f32(1), products)
    for i in range(D):
        for c in range(D - 1):
            out[i, c] += products[i, c]


@assembled
def _gradients(d, w, first, readings, valid, law, s):
    """Add these prompts to the gradients of a layer: readings times errors, and these times the query."""
    heads = w.U_hat.shape[0]
    errors(d, heads, first, readings, valid, s)
    for h in range(heads):
        times_error(d, 2 * h, readings, law, s)
        times_error(d, 2 * h + 1, readings, law, s)
        _sum_over_lanes(d + 1, h, readings, s.drawn, w.dv, w.dU)
        if d >= _LONG:
            _add_outer_products(readings, (2 * h + 1) * (d + 1), d + 1, s.queries, w.dU[h])


@assembled
def _descend(w, law, rate, far, step, coefficients, moments, begin, size):
    begin_backprop(w, law.B, law.plain)
    backprop(w, law.B, law.plain)
    if len(moments) == 0:
        square = propose(w, law.Bq, law.plain, rate, None)
    else:
        square = propose(w, law.Bq, law.plain, rate, rule_at(step, coefficients, moments, begin, size))
    return accept(w, surely_within(square, far, 1), far)


@functools.cache
def trainer(softmax: bool, linear: bool):
    """The compiled loop over steps for layers of softmax heads, of linear heads, or one of each on the same prompts."""
    return _trainer(source_hash(), softmax, linear)


def source_hash() -> str:
    """The hash of the sources in this folder: compiled code is kept on disk under a name that contains it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _trainer(sources: str, softmax: bool, linear: bool):
    @outermost()
    def train(start, stop, L, batch, rate, far, seed, law, soft, line, s, diverged, coefficients, moments):
        """Steps from start to stop; L = 0 is the infinite prompt. Fills `diverged`, and changes `moments`."""
        tuned()
        _ = sources  # part of the name under which the compiled code is kept
        d = law.B.shape[0] - 1
        k0, k1 = u32(seed & 0xFFFFFFFF), u32(seed >> 32)
        m = 2 * soft.K.shape[0] if softmax else 0
        n = 2 * line.K.shape[0] if linear else 0
        order = (len(soft.proposed) if softmax else 0) + (len(line.proposed) if linear else 0)
        for step in range(start, stop):
            if softmax:
                begin_projection(soft, law.B, law.Bq, law.plain)
                project(soft, law.B, law.plain)
                if diverged[0] >= 0:  # it stays as it was, but the other must not see such numbers
                    clear_projection(soft)
            if linear:
                begin_projection(line, law.B, law.Bq, law.plain)
                project(line, law.B, law.plain)
            for prompt in range(0, batch, LANES):
                valid = min(batch - prompt, LANES)
                t = u32(step)
                draw_instances(d, s, prompt, t, k0, k1)
                instances(d, law, s)
                if softmax:
                    columns(d, soft, law, 0, s)
                if linear:
                    columns(d, line, law, m, s)
                if L == 0:
                    infinite_readings(d + 1, m, n, s)
                elif softmax and 2 * m > L:
                    whole_token_readings(L, d + 1, m, n, s, prompt, t, k0, k1)
                else:
                    draw_across(L, d + 1, m, n, s, prompt, t, k0, k1)
                    if softmax:
                        _softmax_readings(L, d + 1, m, m + n, linear, s, prompt, t, k0, k1)
                    if linear:
                        linear_readings(L, d + 1, n, m, s)
                if d >= _LONG:
                    _transpose(s.drawn, d, s.queries)
                if softmax:
                    _gradients(d, soft, 0, s.softmax, valid, law, s)
                if linear:
                    _gradients(d, line, m, s.linear, valid, law, s)
            going = False
            if softmax:
                if diverged[0] < 0 and not _descend(
                    soft, law, rate / batch, far, step, coefficients, moments, 0, order
                ):
                    diverged[0] = step
                going = going or diverged[0] < 0
            if linear:
                at = 1 if softmax else 0
                begin = len(soft.proposed) if softmax else 0
                if diverged[at] < 0 and not _descend(
                    line, law, rate / batch, far, step, coefficients, moments, begin, order
                ):
                    diverged[at] = step
                going = going or diverged[at] < 0
            if not going:
                return

    return train
