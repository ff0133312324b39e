"""Wishart matrices by Bartlett's decomposition, one chi-squared draw per column, whatever the number of tokens."""

import math

import numpy as np

from ._elementary import two_normals
from ._lanes import fill_normals, on_lanes, row
from ._philox import BELOW_DIAGONAL, CHI, philox
from ._target import lanes, tuned

f32, u32, f64 = np.float32, np.uint32, np.float64


@on_lanes
def _chi(degrees, column, out, ro, prompt, step, k0, k1):
    """A row of √χ² with that many degrees of freedom, by Marsaglia and Tsang's rejection (ACM TOMS 26, 2000).

    Accepted is a normal x where log u < x²/2 + d (1 - v + log v) with v = (1 + y)³, y = cx, c² = 1/9d. The right side
    is -c²x⁴ (1/12 - y/15 + y²/18 - …), at least -0.1413 c²x⁴ for y from -1/2 on, so that a smaller u needs no
    logarithm; the few lanes that are left are settled one by one, with the next counters.
    """
    tuned()
    stream = u32(CHI + u32(column))
    d = degrees / 2.0 - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d) if degrees > 1.0 else 0.0
    for j in range(lanes()):
        first, second, third, _ = philox(u32(0), u32(prompt + j), step, stream, k0, k1)
        x, _ = two_normals(first, second)
        if degrees == 1.0:
            out[row(ro, j)] = abs(x)
        else:
            v = 1.0 + c * f64(x)
            uniform = (f64(third) + 0.5) * 2.0**-32
            square = c * f64(x) * f64(x)
            accepted = (v >= 0.5) & (uniform < 1.0 - 0.1413 * square * square)
            out[row(ro, j)] = f32(math.sqrt(max(2.0 * d * v * v * v, 0.0))) if accepted else f32(-1)
    for j in range(lanes()):
        attempt = 0
        while out[row(ro, j)] < f32(0):
            first, second, third, _ = philox(u32(attempt), u32(prompt + j), step, stream, k0, k1)
            x, _ = two_normals(first, second)
            v = 1.0 + c * f64(x)
            if v > 0.0:
                v = v * v * v
                uniform = (f64(third) + 0.5) * 2.0**-32
                if math.log(uniform) < 0.5 * f64(x) * f64(x) + d * (1.0 - v + math.log(v)):
                    out[row(ro, j)] = f32(math.sqrt(2.0 * d * v))
            attempt += 1


@on_lanes
def bartlett(degrees, m, T, below, prompt, step, k0, k1):
    r"""The lower triangular $T$ (m by m, 0 from column `degrees` on) with $TT^\top$ Wishart of that many degrees."""
    tuned()
    if m > 1:
        fill_normals(below, 0, m * (m - 1) // 2, prompt, step, BELOW_DIAGONAL, k0, k1)
    for c in range(m):
        for i in range(c):
            for j in range(lanes()):
                T[row(c * m + i, j)] = below[row(c * (c - 1) // 2 + i, j)] if i < degrees else f32(0)
        if c < degrees:
            _chi(f64(degrees - c), c, T, c * m + c, prompt, step, k0, k1)
        else:
            for j in range(lanes()):
                T[row(c * m + c, j)] = f32(0)
