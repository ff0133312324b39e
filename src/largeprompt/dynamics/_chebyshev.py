r"""A stabilised explicit solver for gradient flows: Runge-Kutta-Chebyshev of second order.

Near a minimum the flow's Jacobian is minus a Hessian, with real eigenvalues spread over orders of magnitude: an
ordinary explicit method takes a step per fastest time scale for ever, an implicit one needs Hessians. $s$ stages of
this family are stable up to $h\rho \approx \tfrac23s^2$ for a spectral radius $\rho$, so that the cost grows only like
the square root of the stiffness. (Sommeijer, Shampine and Verwer, J. Comput. Appl. Math. 88, 1998, with their choice of
$\varepsilon$ and of the error estimate.)
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

_STAGES = 100  # at most; beyond it the step shrinks
_DAMPING = 2 / 13


def _coefficients() -> np.ndarray:
    """For each s and each stage j ≤ s the numbers (μ, ν, μ̃, γ̃) of the recurrence."""
    table = np.zeros((_STAGES + 1, _STAGES + 1, 4))
    for s in range(2, _STAGES + 1):
        w0 = 1 + _DAMPING / s**2
        T, dT, ddT = np.zeros(s + 1), np.zeros(s + 1), np.zeros(s + 1)
        T[:2], dT[1] = (1, w0), 1
        for j in range(2, s + 1):
            T[j] = 2 * w0 * T[j - 1] - T[j - 2]
            dT[j] = 2 * T[j - 1] + 2 * w0 * dT[j - 1] - dT[j - 2]
            ddT[j] = 4 * dT[j - 1] + 2 * w0 * ddT[j - 1] - ddT[j - 2]
        w1 = dT[s] / ddT[s]
        b = np.ones(s + 1)
        b[2:] = ddT[2:] / dT[2:] ** 2
        b[:2] = b[2]
        a = 1 - b * T
        table[s, 1, 2] = b[1] * w1
        for j in range(2, s + 1):
            mu_tilde = 2 * b[j] * w1 / b[j - 1]
            table[s, j] = 2 * b[j] * w0 / b[j - 1], -b[j] / b[j - 2], mu_tilde, -a[j - 1] * mu_tilde
    return table


_TABLE = _coefficients()


class Chebyshev(diffrax.AbstractAdaptiveSolver):
    """Runge-Kutta-Chebyshev with as many stages a step as the spectral radius asks for, followed by power iteration."""

    term_structure: ClassVar = diffrax.ODETerm
    interpolation_cls: ClassVar[Callable[..., Any]] = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms) -> int:
        return 2

    def init(self, terms, t0, t1, y0, args):
        # the first step fills these in
        flat, _ = ravel_pytree(y0)
        return jax.tree.map(jnp.zeros_like, y0), jnp.zeros_like(flat), jnp.asarray(False)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        f0, direction, warm = solver_state
        h = jnp.asarray(t1 - t0)
        y, unravel = ravel_pytree(y0)

        def field(flat):
            return ravel_pytree(terms.vf(t0, unravel(flat), args))[0]

        taken = _evaluations(field, _start(y, ravel_pytree(f0)[0], direction, warm), y, h)
        f, f1 = taken.f, taken.f1
        # past the last stable step nothing must be believed, and where stages have overflown, the controller would
        # divide an infinite error by an infinite size
        stable = (_wanted(h, taken.radius) <= _STAGES) & jnp.isfinite(taken.last).all()
        y1 = jnp.where(stable, taken.last, y)
        error = jnp.where(stable, 0.8 * (y - y1) + 0.4 * h * (f + f1), jnp.inf)
        ks = jax.tree.map(lambda *k: jnp.stack(k), unravel(jnp.asarray(h * f)), unravel(jnp.asarray(h * f1)))
        info = {"y0": y0, "y1": unravel(y1), "k": ks}
        state = (unravel(f1), taken.direction, jnp.asarray(True))
        return unravel(y1), unravel(error), info, state, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        return terms.vf(t0, y0, args)


class _Taken(NamedTuple):
    """What the evaluations of one step have found so far; `number` says which one is next."""

    number: Array
    turns: Array
    f: Array
    direction: Array
    radius: Array
    before: Array
    last: Array
    f1: Array


def _start(y, f, direction, warm) -> _Taken:
    # power iteration from scratch the first time, then one turn a step, as the radius moves slowly
    turns, zero = jnp.where(warm, 1, 20), jnp.zeros_like(y)
    return _Taken(jnp.where(warm, 1, 0), turns, f, direction, jnp.zeros((), y.dtype), y, y, zero)


def _wanted(h, radius):
    return jnp.ceil(jnp.sqrt(1 + 1.6 * h * 1.1 * radius))


def _evaluations(field, start: _Taken, y, h) -> _Taken:
    """The slope at y, turns of power iteration by differences, the stages, and the slope at their end.

    One loop with one call of the field: written one after the other they would be compiled four times.
    """
    size = 1e-7 * (1 + jnp.linalg.norm(y))
    coefficients = jnp.asarray(_TABLE, y.dtype)

    def stages(taken: _Taken):
        return jnp.clip(_wanted(h, taken.radius), 2, _STAGES).astype(int)

    def is_left(taken: _Taken):
        # at least up to the last turn, which says how many stages there are
        return (taken.number <= taken.turns) | (taken.number <= taken.turns + stages(taken))

    def evaluation(taken: _Taken) -> _Taken:
        number, turns, f, direction, radius, before, last, _ = taken
        is_first, is_turn = number == 0, (number > 0) & (number <= turns)
        found = field(jnp.where(is_first, y, jnp.where(is_turn, y + size * direction, last)))
        f = jnp.where(is_first, found, f)
        # any direction not orthogonal to the fastest one will do
        first = f + 1e-3 * (1 + jnp.linalg.norm(f)) * jnp.cos(jnp.arange(f.size) + 1.0)
        direction = jnp.where(is_first, first / jnp.linalg.norm(first), direction)
        image = (found - f) / size
        length = jnp.linalg.norm(image)
        radius = jnp.where(is_turn, length, radius)
        direction = jnp.where(is_turn & (length > 0), image / jnp.where(length > 0, length, 1), direction)
        table = coefficients[stages(taken._replace(radius=radius))]
        j = jnp.clip(number - turns + 1, 0, _STAGES)
        mu, nu, mu_tilde, gamma_tilde = table[j]
        new = (1 - mu - nu) * y + mu * last + nu * before + h * (mu_tilde * found + gamma_tilde * f)
        is_stage = (number > turns) & (number < turns + stages(taken))
        before = jnp.where(is_stage, last, before)
        last = jnp.where(is_stage, new, jnp.where(number == turns, y + table[1, 2] * h * f, last))
        return _Taken(number + 1, turns, f, direction, radius, before, last, found)

    return jax.lax.while_loop(is_left, evaluation, start)
