"""The loop over steps on a processor: sums over prompts, and products of matrices."""

import numpy as np
import pytest

from compiled import from_python
from largeprompt.engine._lanes import LANES, on_lanes, rows
from largeprompt.engine._target import product_over_lanes
from largeprompt.engine._tiles import WIDTH, set_product

matrix_product = from_python(set_product)


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


@pytest.mark.parametrize("columns", [5, WIDTH, WIDTH + 1, 2 * WIDTH, 3 * WIDTH + 1])
@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_products_by_tiles_are_products_of_matrices(rows, columns, kind):
    """Of whole numbers, exactly; and nothing beside the result is written."""
    draws = np.random.default_rng(rows * columns)
    a, b = (draws.integers(-9, 10, shape).astype(kind) for shape in ((6, rows), (8, columns)))
    room = np.full((rows + 2, columns), 0.5, kind)
    matrix_product(a.T, b, 5, kind(2), room[1:-1])
    np.testing.assert_array_equal(room[1:-1], 2 * a[:5].T @ b[:5])
    assert np.all(room[[0, -1]] == 0.5)
