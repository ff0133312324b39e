import math
from collections.abc import Callable

import numpy as np

from ._bound import Bound, Number, logarithm, real

_GRID, _HALVINGS = 60, 44


def length_for(bound_function: Callable[[float], Bound], target: Number, *, largest: float = 1e7) -> float:
    """ln of the length from which on a bound stays below a target, infinite where it never does up to ln L = `largest`.

    `bound_function` maps ln L to a bound: `lambda log_L: output_bound(layer, mu, nu, log_L=log_L)`. Bounds may rise
    with L before they fall, so the last crossing on a grid of ln L is the one that is refined.
    """
    goal = logarithm(real("target", target))

    def above(log_L: float) -> bool:
        return bound_function(log_L).log > goal

    grid = np.geomspace(math.log(2), real("largest", largest, at_least=1), _GRID)
    last = next((i for i in reversed(range(_GRID)) if above(float(grid[i]))), None)
    if last is None:
        return float(grid[0])
    if last == _GRID - 1:
        return math.inf
    return crossing(above, float(grid[last]), float(grid[last + 1]))


def crossing(above: Callable[[float], bool], low: float, high: float) -> float:
    """The point of [low, high] from which on `above` fails, by bisection in its logarithm."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if above(middle) else (low, middle)
    return high
