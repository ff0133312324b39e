"""Many descents side by side, by the quasi-Newton method of Broyden, Fletcher, Goldfarb and Shanno.

They cost little more than one, so that random starts can be many; where they end is rough, and one of each sort is
enough to go on from.
"""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from ._descent import Risk, replicates, with_control
from ._risk_functions import ClosedForm
from ._symmetries import sizes

Points = Float[np.ndarray, "s n"]
Numbers = Float[np.ndarray, " s"]
_NODES = 2**9  # enough to know one basin from another
_SUFFICIENT_DECREASE = 1e-4
_LEAST_STEP = 1e-9
_LONGEST_STEP = 0.5  # of the distance from 0: a longer one may leave the basin
_MOST_SORTS = 8  # of ends known roughly: each is followed to its stationary point
_ENOUGH = 0.95  # of the descents: the last ones are not waited for


def ends(function: Risk, x: Points) -> tuple[Points, Numbers, Numbers]:
    """Where the descents from each row of `x` end, the risks there and the norms of the gradients."""
    if isinstance(function, ClosedForm):
        return _descended(function, x, steps=400, tolerance=1e-7)
    nodes = next(iter(function.nodes.pieces(_NODES)))
    # without the control variate an average of squares: bounded below on however few nodes
    coarse = eqx.tree_at(lambda f: f.nodes, with_control(function, 0), nodes)
    return _descended(coarse, x, steps=150, tolerance=1e-4)


def _descended(function: Risk, x: Points, steps: int, tolerance: float) -> tuple[Points, Numbers, Numbers]:
    x, n = x.copy(), x.shape[1]
    value, gradient = _values_and_gradients(function, x)
    inverse = np.tile(np.eye(n), (len(x), 1, 1))  # of the Hessians, approximately
    known, length = np.zeros(len(x), bool), np.ones(len(x))
    active = np.isfinite(value) & np.isfinite(gradient).all(axis=1)
    for _ in range(steps):
        active &= (_norms(gradient) > tolerance) & (length > _LEAST_STEP)
        if np.count_nonzero(active) <= (1 - _ENOUGH) * len(x):
            break
        i = np.flatnonzero(active)
        step = -np.einsum("sij,sj->si", inverse[i], gradient[i])
        longest = _LONGEST_STEP * np.maximum(_norms(x[i]), 0.1)
        step *= (length[i] * np.minimum(1, longest / np.maximum(_norms(step), 1e-300)))[:, None]
        trial = x.copy()
        trial[i] += step
        value_there, gradient_there = (part[i] for part in _values_and_gradients(function, trial))
        slope = np.sum(step * gradient[i], axis=1)
        better = value_there <= value[i] + _SUFFICIENT_DECREASE * slope
        better &= np.isfinite(gradient_there).all(axis=1)
        length[i] = np.where(better, 1.0, length[i] / 3)
        change = gradient_there - gradient[i]
        bent = better & (np.sum(step * change, axis=1) > 1e-12 * _norms(step) * _norms(change))
        at = i[bent]
        inverse[at] = _updated(inverse[at], known[at], step[bent], change[bent])
        known[at] = True
        to = i[better]
        x[to], value[to], gradient[to] = trial[to], value_there[better], gradient_there[better]
    return x, value, _norms(gradient)


def _updated(inverse: np.ndarray, known: np.ndarray, step: Points, change: Points) -> np.ndarray:
    """The inverse Hessians that agree with the last step; before the first one, multiples of the identity."""
    product = np.sum(step * change, axis=1)[:, None, None]
    scale = product / np.sum(change**2, axis=1)[:, None, None]
    inverse = np.where(known[:, None, None], inverse, scale * np.eye(step.shape[1]))
    bend = np.einsum("sij,sj->si", inverse, change)
    along = (product[:, 0] + np.sum(change * bend, axis=1)[:, None])[..., None] / product**2
    cross = step[:, :, None] * bend[:, None, :] / product
    return inverse + along * step[:, :, None] * step[:, None, :] - cross - cross.transpose(0, 2, 1)


def _norms(x: Points) -> Numbers:
    return np.sqrt(np.sum(x**2, axis=1))


def _values_and_gradients(function: Risk, x: Points) -> tuple[Numbers, Points]:
    value, gradient = _compiled_values_and_gradients(function, x)
    return np.array(value), np.array(gradient)


@eqx.filter_jit
def _compiled_values_and_gradients(function: Risk, x):
    return jax.vmap(jax.value_and_grad(lambda x: replicates(function, x).mean()))(x)


def one_of_each(function: Risk, x: Points, value: Numbers, slope: Numbers) -> Float[np.ndarray, "m n"]:
    """A row of each sort of ends that numbers which no symmetry changes cannot tell apart.

    Linear attention at its stationary points is known well, so that all sorts count. Ends that were not reached, and
    those over few nodes, are told apart roughly, and only the most frequent sorts count.
    """
    task = function.task
    # the risk is quadratic in V, so that no stationary point is above V = 0
    nothing = task.targets * float((task.query_Sigma * task.Omega).sum() + task.noise) / 2
    possible = np.flatnonzero((value <= nothing * (1 + 1e-6)) & np.isfinite(x).all(axis=1))
    exact = isinstance(function, ClosedForm)
    settled = possible[slope[possible] <= 1e-6] if exact else possible[:0]
    rest = np.setdiff1d(possible, settled)
    numbers = np.array([[v, *sizes(row, task, scale=exact)] for row, v in zip(x, value, strict=True)])
    fine = _sorts(numbers, settled, np.array([1e-7, *4 * [1e-2]]))
    rough = sorted(_sorts(numbers, rest, np.array([2e-2 * nothing, *4 * [0.2]])), key=len, reverse=True)
    chosen = fine + rough[: max(0, _MOST_SORTS - len(fine))]
    return x[[sort[0] for sort in chosen]]


def _sorts(numbers: Float[np.ndarray, "s m"], rows: np.ndarray, tolerance: Float[np.ndarray, " m"]) -> list[list[int]]:
    """The rows by sort, the lowest risk first in each."""
    found: list[list[int]] = []
    for i in rows[np.argsort(numbers[rows, 0], kind="stable")]:
        for sort in found:
            if np.all(
                np.abs(numbers[i] - numbers[sort[0]]) <= tolerance * np.array([1, *numbers[sort[0], 1:].clip(1)])
            ):
                sort.append(int(i))
                break
        else:
            found.append([int(i)])
    return found
