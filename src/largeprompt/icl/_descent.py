"""Downhill on the risk of a layer's blocks with exact Hessians, to a stationary point, and the errors there."""

import functools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize

from ._closed_forms import gaussian_risk
from ._risk_functions import ClosedForm, OverNodes
from ._softmax_risk import softmax_risk
from ._symmetries import balanced, from_flat, least

Risk = ClosedForm | OverNodes
Vector = Float[np.ndarray, " n"]
ROUNDING = 1e-12  # of the largest curvature: what is zero in float64
_NEARLY_STATIONARY = 1e-9  # where Newton's method takes over
_NEWTON_STEPS = 30


def downhill(function: Risk, x: Vector, subspace: Float[np.ndarray, "n m"] | None = None) -> Vector:
    """A minimum below `x`, or where the search gave up; within `x` plus the subspace."""
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
    if isinstance(function, ClosedForm):
        x = balanced(x, function.task.d, function.task.targets)
    _, gradient, _ = derivatives(function, x)
    return x, float(np.linalg.norm(gradient))


def best_scaled(function: Risk, x: Vector) -> Vector:
    """The layer (sU, V/s) of least risk; linear attention has one risk for all."""
    if isinstance(function, ClosedForm):
        return x
    split = function.task.d**2 + function.task.d * function.task.targets
    layers = [np.concatenate([s * x[:split], x[split:] / s]) for s in np.geomspace(0.05, 3, 30)]
    without = with_control(function, 0)
    return min(layers, key=lambda x: float(replicates(without, x).mean()))


def controlled(function: Risk, x: Vector) -> Sequence[Risk]:
    """The ways to take the average, the one of smaller error at `x` first; without a control it is bounded below."""
    if isinstance(function, ClosedForm):
        return [function]
    ways = [with_control(function, theta) for theta in (1, 0)]
    spreads = [float(replicates(way, x).std()) for way in ways]
    return ways if spreads[0] <= spreads[1] else ways[1:]


def with_control(function: OverNodes, theta: int) -> OverNodes:
    """The same average with the control variate of this weight."""
    return eqx.tree_at(lambda f: f.theta, function, theta * jnp.ones(()))


def errors(function: Risk, x: Vector, directions: Float[np.ndarray, "n m"]) -> tuple[Vector, Vector]:
    """The standard errors of the slopes and of the curvatures along the directions."""
    if isinstance(function, ClosedForm):
        return np.zeros(directions.shape[1]), np.zeros(directions.shape[1])
    slopes, curvatures = _directional_derivatives(function, x, directions.T)
    of_mean = math.sqrt(slopes.shape[1])
    return np.asarray(slopes.std(axis=1, ddof=1)) / of_mean, np.asarray(curvatures.std(axis=1, ddof=1)) / of_mean


@eqx.filter_jit
def replicates(function: Risk, x) -> Float[Array, "*r"]:
    task = function.task
    parts = from_flat(x, task.d, task.targets)
    if isinstance(function, ClosedForm):
        return gaussian_risk(parts, task, function.L)
    return softmax_risk(parts, task, function.moments, function.nodes, function.theta)


def derivatives(function: Risk, x: Vector) -> tuple[float, Vector, Float[np.ndarray, "n n"]]:
    """The value, the gradient and the Hessian."""
    value, gradient, hessian = _compiled_derivatives(function, x)
    return float(value), np.asarray(gradient), np.asarray(hessian)


@eqx.filter_jit
def _compiled_derivatives(function: Risk, x):
    def gradient_first(x):
        value, gradient = jax.value_and_grad(lambda x: replicates(function, x).mean())(x)
        return gradient, (value, gradient)

    hessian, (value, gradient) = jax.jacfwd(gradient_first, has_aux=True)(x)
    return value, gradient, hessian


@eqx.filter_jit
def _directional_derivatives(function: OverNodes, x, directions):
    """Of first and second order, in each replicate of the nodes."""

    def along(direction):
        def slope(t):
            return jax.jvp(lambda t: replicates(function, x + t * direction), (t,), (jnp.ones_like(t),))[1]

        return jax.jvp(slope, (jnp.zeros(()),), (jnp.ones(()),))

    return jax.vmap(along)(directions)
