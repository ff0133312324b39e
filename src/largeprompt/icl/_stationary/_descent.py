"""Descents on the risk of heads: rough ones from many starts, and to a stationary point with its errors."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize

from largeprompt._compiled import optimised_jit

from .._risk._abstract import is_formula
from .._risk._closed_form import ClosedForm
from .._risk._heads import OverHeads
from .._risk._heads_closed_form import HeadsInClosedForm, of_predicting_zero
from .._risk._over_nodes import OverNodes
from ._differences import differences, in_all_blocks, replicate_gradients
from ._symmetries import balanced, from_flat, least, sizes, stacked

Exact = ClosedForm | HeadsInClosedForm
Averaged = OverNodes | OverHeads
Risk = Exact | Averaged
Vector = Float[np.ndarray, " n"]
Points = Float[np.ndarray, "s n"]
ROUNDING = 1e-12  # of the largest curvature: what is zero in float64
_NEARLY_STATIONARY = 1e-9  # where Newton's method takes over
_NEWTON_STEPS = 30
_FEW_NODES = 2**9  # enough to know one basin from another
_MOST_SORTS = 8  # of ends known roughly: each is followed to its stationary point


def downhill(function: Risk, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None) -> Vector:
    """A minimum below `x`, or where the search gave up; within `x` plus the subspace."""
    if isinstance(function, OverHeads):  # its Hessians are dear
        return _quickly_downhill(function, x, 400, 1e-8).x
    B = np.eye(len(x)) if subspace is None else subspace

    @functools.lru_cache(maxsize=2)  # value and Hessian are asked for apart
    def at(z: bytes) -> tuple[float, Vector, Float[np.ndarray, "m m"]]:
        value, gradient, hessian = derivatives(function, x + B @ np.frombuffer(z))
        # a risk below 0 is one that the control variate has carried away from the nodes
        return (value if value >= 0 else math.inf), B.T @ gradient, B.T @ hessian @ B

    found = minimize(
        lambda z: at(z.tobytes())[:2],
        np.zeros(B.shape[1]),
        jac=True,
        hess=lambda z: at(z.tobytes())[2],
        # small trusted steps with the exact curvature follow the narrow valleys of long prompts and stay in their basin
        method="trust-exact",
        options={"gtol": _NEARLY_STATIONARY, "maxiter": 300, "initial_trust_radius": 0.1},
    )
    return x + B @ found.x


def settled(function: Risk, x: Vector) -> tuple[Vector, float]:
    """The stationary point next to `x` by Newton steps that leave flat directions alone, and the gradient's norm."""
    _, gradient, hessian = derivatives(function, x)
    for _ in range(_NEWTON_STEPS):
        if not np.isfinite(hessian).all():
            break
        new = x - np.linalg.pinv(hessian, rcond=ROUNDING, hermitian=True) @ gradient
        _, smaller, hessian = derivatives(function, new)
        if not np.linalg.norm(smaller) < np.linalg.norm(gradient):
            break
        x, gradient = new, smaller
    x = least(x, function.task)
    if function.exact:
        x = balanced(x, function.task.d, function.task.targets)
    _, gradient, _ = derivatives(function, x)
    return x, float(np.linalg.norm(gradient))


def best_scaled(function: Risk, x: Vector) -> Vector:
    """The layer (sU, V/s) of least risk; linear attention has one risk for all."""
    if not isinstance(function, OverNodes):
        return x
    split = function.task.d * (function.task.d + function.task.targets)
    layers = [np.concatenate([s * x[:split], x[split:] / s]) for s in np.geomspace(0.05, 3, 30)]
    without = function.without_control()
    return min(layers, key=lambda x: float(replicates(without, x).mean()))


def controlled(function: Risk, x: Vector) -> Sequence[Risk]:
    """The ways to take the average, the one of smaller error at `x` first; without a control it is bounded below."""
    if isinstance(function, ClosedForm | HeadsInClosedForm):
        return [function]
    ways = [function.with_control(1), function.without_control()]
    spreads = [float(replicates(way, x).std()) for way in ways]
    return ways if spreads[0] <= spreads[1] else ways[1:]


class Local(NamedTuple):
    """The gradient and the Hessian at a point, and the standard errors of slopes and curvatures along directions."""

    gradient: Vector
    hessian: Float[np.ndarray, "n n"]
    errors: Callable[[Float[np.ndarray, "n m"]], tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]]


def local(function: Risk, full: Risk | None, x: Vector) -> Local:
    """What a certificate takes, in all blocks; `full` is the average over nodes of (W, x) of a search at P = C = 0."""
    if isinstance(function, OverHeads):
        assert isinstance(full, OverHeads)
        found = in_all_blocks(function, full.with_control(function.control), x)
        return Local(found.gradients.mean(axis=0), found.hessians.mean(axis=0), found.errors)
    _, gradient, hessian = derivatives(function, x)
    return Local(gradient, hessian, functools.partial(_errors, function, x))


def _errors(
    function: Risk, x: Vector, directions: Float[np.ndarray, "n m"]
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    if function.exact:
        return np.zeros(directions.shape[1]), np.zeros(directions.shape[1])
    slopes, curvatures = _directional_derivatives(function, x, directions.T)
    of_mean = math.sqrt(slopes.shape[1])
    return np.asarray(slopes.std(axis=1, ddof=1)) / of_mean, np.asarray(curvatures.std(axis=1, ddof=1)) / of_mean


@eqx.filter_jit
def replicates(function: Risk, x) -> Float[Array, " r"]:
    """The risk at the blocks `x` over each replicate of the nodes."""
    d, k = function.task.d, function.task.targets
    if isinstance(function, ClosedForm | OverNodes):
        return function.of_blocks(from_flat(x, d, k))
    return function.of_heads(stacked(x, d, k))


def derivatives(function: Risk, x: Vector) -> tuple[float, Vector, Float[np.ndarray, "n n"]]:
    """The value, the gradient and the Hessian."""
    if isinstance(function, OverHeads):
        found = differences(function, x, order=2)
        return float(found.values.mean()), found.gradients.mean(axis=0), found.hessians.mean(axis=0)
    value, gradient, hessian = _compiled_derivatives(function, x)
    return float(value), np.asarray(gradient), np.asarray(hessian)


@functools.partial(optimised_jit, unless=is_formula)
def _compiled_derivatives(function: Risk, x):
    def gradient_first(x):
        value, gradient = jax.value_and_grad(lambda x: replicates(function, x).mean())(x)
        return gradient, (value, gradient)

    hessian, (value, gradient) = jax.jacfwd(gradient_first, has_aux=True)(x)
    return value, gradient, hessian


@eqx.filter_jit
def _directional_derivatives(function: Risk, x, directions):
    """Of first and second order, in each replicate of the nodes."""

    def along(direction):
        def slope(t):
            return jax.jvp(lambda t: replicates(function, x + t * direction), (t,), (jnp.ones_like(t),))[1]

        return jax.jvp(slope, (jnp.zeros(()),), (jnp.ones(()),))

    return jax.vmap(along)(directions)


def rough_ends(function: Risk, starts: Points) -> Float[np.ndarray, "m n"]:
    """Where descents from many starts end, one of each sort: the same to every number that symmetries leave alone.

    The stationary points of linear attention are known well, so that all sorts count. Ends that were not reached, and
    those over few nodes, are compared roughly, and only the most frequent sorts count.
    """
    steps, tolerance = 400, 1e-7
    if isinstance(function, OverNodes | OverHeads):
        # without the control variate an average of squares: bounded below on however few nodes
        nodes = next(iter(function.nodes.pieces(_FEW_NODES)))
        function = eqx.tree_at(lambda f: f.nodes, function.without_control(), nodes)
        steps, tolerance = 150, 1e-4

    found = [_quickly_downhill(function, start, steps, tolerance) for start in starts]
    ends, values = np.stack([one.x for one in found]), np.array([one.fun for one in found])
    slopes = np.array([np.linalg.norm(one.jac) for one in found])
    task = function.task
    # the risk is quadratic in V, so that no stationary point is above V = 0
    nothing = float(of_predicting_zero(task))
    possible = np.flatnonzero((values <= nothing * (1 + 1e-6)) & np.isfinite(ends).all(axis=1))
    reached = possible[slopes[possible] <= 1e-6] if function.exact else possible[:0]
    numbers = np.array([[v, *sizes(row, task, linear=function.exact)] for row, v in zip(ends, values, strict=True)])
    same = numbers.shape[1] - 1
    fine = _sorts(numbers, reached, np.array([1e-7, *same * [1e-2]]))
    rough = _sorts(numbers, np.setdiff1d(possible, reached), np.array([2e-2 * nothing, *same * [0.2]]))
    chosen = fine + sorted(rough, key=len, reverse=True)[: max(0, _MOST_SORTS - len(fine))]
    return ends[[sort[0] for sort in chosen]]


def _quickly_downhill(function: Risk, x: Vector, steps: int, tolerance: float) -> Any:
    """Where descent by gradients alone ends."""

    found: Callable[..., Any] = replicate_gradients if isinstance(function, OverHeads) else _compiled_value_and_gradient

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        values, gradients = found(function, x)
        return float(values.mean()), np.asarray(gradients).reshape(-1, x.size).mean(axis=0)

    options = {"gtol": tolerance, "maxiter": steps, "norm": 2}
    return minimize(value_and_gradient, x, jac=True, method="BFGS", options=options)


@eqx.filter_jit
def _compiled_value_and_gradient(function: Risk, x):
    return jax.value_and_grad(lambda x: replicates(function, x).mean())(x)


def _sorts(numbers: Float[np.ndarray, "s m"], rows: np.ndarray, tolerance: Float[np.ndarray, " m"]) -> list[list[int]]:
    """The rows by sort, the lowest risk first in each."""
    found: list[list[int]] = []
    for i in rows[np.argsort(numbers[rows, 0], kind="stable")]:
        for sort in found:
            first = numbers[sort[0]]
            if np.all(np.abs(numbers[i] - first) <= tolerance * np.array([1, *first[1:].clip(1)])):
                sort.append(int(i))
                break
        else:
            found.append([int(i)])
    return found
