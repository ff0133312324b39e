r"""A stabilised explicit solver for gradient flows: Runge-Kutta-Chebyshev of second order.

Near a minimum the flow's Jacobian is minus a Hessian, with real eigenvalues spread over orders of magnitude: an
ordinary explicit method takes a step per fastest time scale for ever, an implicit one needs Hessians. $s$ stages of
this family are stable up to $h\rho \approx \tfrac23s^2$ for a spectral radius $\rho$, so that the cost grows only like
the square root of the stiffness. (Sommeijer, Shampine and Verwer, J. Comput. Appl. Math. 88, 1998, with their choice of
$\varepsilon$ and of the error estimate.)
"""

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

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
        f0 = terms.vf(t0, y0, args)
        flat, _ = ravel_pytree(f0)
        # any direction not orthogonal to the fastest one will do
        direction = flat + 1e-3 * (1 + jnp.linalg.norm(flat)) * jnp.cos(jnp.arange(flat.size) + 1.0)
        return f0, direction / jnp.linalg.norm(direction), jnp.asarray(False)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        f0, direction, warm = solver_state
        h = jnp.asarray(t1 - t0)
        y_flat, unravel = ravel_pytree(y0)
        f_flat, _ = ravel_pytree(f0)

        def field(flat):
            return ravel_pytree(terms.vf(t0, unravel(flat), args))[0]

        radius, direction = _spectral_radius(field, y_flat, f_flat, direction, warm)
        wanted = jnp.ceil(jnp.sqrt(1 + 1.6 * h * 1.1 * radius))
        stages = jnp.clip(wanted, 2, _STAGES).astype(int)
        y1 = _stages(field, y_flat, f_flat, h, stages)
        f1 = field(y1)
        error = 0.8 * (y_flat - y1) + 0.4 * h * (f_flat + f1)
        # past the last stable step the error estimate must not be believed
        error = jnp.where(wanted > _STAGES, jnp.inf, error)
        ks = jax.tree.map(lambda *k: jnp.stack(k), unravel(jnp.asarray(h * f_flat)), unravel(jnp.asarray(h * f1)))
        info = {"y0": y0, "y1": unravel(y1), "k": ks}
        state = (unravel(f1), direction, jnp.asarray(True))
        return unravel(y1), unravel(error), info, state, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        return terms.vf(t0, y0, args)


def _spectral_radius(field, y, f, direction, warm):
    """Power iteration by differences: from scratch the first time, then one turn a step, as the radius moves slowly."""
    size = 1e-7 * (1 + jnp.linalg.norm(y))

    def turn(_, carry):
        _, v = carry
        image = (field(y + size * v) - f) / size
        radius = jnp.linalg.norm(image)
        return radius, jnp.where(radius > 0, image / jnp.where(radius > 0, radius, 1), v)

    return jax.lax.fori_loop(0, jnp.where(warm, 1, 20), turn, (jnp.zeros_like(size), direction))


def _stages(field, y, f, h, stages):
    table = jnp.asarray(_TABLE, y.dtype)[stages]
    first = y + table[1, 2] * h * f

    def stage(j, carry):
        before, last = carry
        mu, nu, mu_tilde, gamma_tilde = table[j]
        new = (1 - mu - nu) * y + mu * last + nu * before + h * (mu_tilde * field(last) + gamma_tilde * f)
        return last, new

    return jax.lax.fori_loop(2, stages + 1, stage, (y, first))[1]
