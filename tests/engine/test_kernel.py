"""The loop over steps on a processor: sums over prompts."""

import numpy as np

from compiled import from_python
from largeprompt.engine._lanes import LANES, on_lanes, rows
from largeprompt.engine._target import product_over_lanes


@from_python
@on_lanes
def product(a, b):
    return product_over_lanes(a, 0, b, 0)


def fused(a, b, c):
    """a b + c, rounded once: products of float32 numbers are exact in float64."""
    return (np.float64(a) * np.float64(b) + c).astype(np.float32)


def test_sums_over_prompts_are_added_in_one_order_whatever_the_compiler_would_choose():
    """Else a run in the process that compiles the loop and one in a process that loads it would end at other bits."""
    draws = np.random.default_rng(0)
    for _ in range(50):
        a, b = rows(1), rows(1)
        a[:LANES], b[:LANES] = draws.normal(size=(2, LANES))
        sums = a[48:64] * b[48:64]
        for start in (32, 16, 0):
            sums = fused(a[start : start + 16], b[start : start + 16], sums)
        while len(sums) > 1:
            half = len(sums) // 2
            sums = sums[:half] + sums[half:]
        assert product(a, b) == sums[0]
