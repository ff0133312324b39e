import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._bessel import bessel_ratio, log_bessel, log_bessel_increment
from ._empirical import Empirical
from ._expectation import Expectation, panels
from ._measure import AbstractMeasure, linearised

_NEAR = 1e-6  # scores so small that a function of them is linear
_EDGE = 1e-12  # of an angle, whose logarithm is taken


class Sphere(AbstractMeasure):
    r"""Uniform on the sphere of radius $\rho$ in $\mathbb R^D$; its tilts are the von Mises-Fisher laws.

    With $\kappa = \rho\|\theta\|$ and $\nu = D/2-1$: $\Lambda(\theta) = \log[\Gamma(D/2)(2/\kappa)^\nu I_\nu(\kappa)]$,
    $\nabla\Lambda = \rho^2 B(\kappa^2)\theta$ with $B(\kappa^2) = I_{\nu+1}(\kappa)/(\kappa I_\nu(\kappa))$, and
    $\nabla^2\Lambda = \rho^2 B I + 2\rho^4 B'\theta\theta^\top$.
    """

    rho: Float[Array, ""]
    theta: Float[Array, " D"]

    def __init__(self, radius: Numbers, dim: int):
        self.rho = checks.number("radius", radius, at_least=0)
        self.theta = jnp.asarray(np.zeros(checks.count("dim", dim)), self.rho.dtype)

    @property
    def dim(self) -> int:
        return self.theta.shape[0]

    @property
    def _order(self) -> float:
        return self.dim / 2 - 1

    def _q(self):
        return _square_and_step(self.rho, self.theta, self.theta)[0]

    def _cgf(self, theta):
        return log_bessel_increment(self._order, *_square_and_step(self.rho, self.theta, theta))

    def _tilt(self, theta):
        tilted = eqx.tree_at(lambda mu: mu.theta, self, self.theta + theta)
        checks.result("the tilt of a sphere", tilted._q())
        return tilted

    def _mean(self):
        return self.rho**2 * bessel_ratio(self._order, self._q()) * self.theta

    @eqx.filter_jit  # one program, not twenty
    def _cov(self):
        # In q = κ², where the ratio is analytic: smooth at 0, unlike the form with the unit vector of θ.
        ratio, slope = jax.value_and_grad(lambda q: bessel_ratio(self._order, q))(self._q())
        around = jnp.eye(self.dim, dtype=self.theta.dtype) * ratio
        return self.rho**2 * (around + 2 * self.rho**2 * slope * jnp.outer(self.theta, self.theta))

    def _atoms(self):
        if self.dim > 1:
            return None
        points = self.rho * jnp.array([[-1.0], [1.0]], self.theta.dtype)
        return Empirical.from_log_weights(points, jax.nn.log_sigmoid(2 * points[:, 0] * self.theta[0]))

    def _expectation(self, f, u, breaks):
        r"""Over the angle α between z and u: given it, the rest of z is a tilted sphere of radius $\rho\sin\alpha$."""
        if self.dim == 1:
            return super()._expectation(f, u, breaks)
        length = jnp.linalg.norm(jnp.where(jnp.any(u != 0), u, 1.0))
        pole = u / length
        across = self.theta - (self.theta @ pole) * pole
        alpha, weights = self._angles(pole, across, breaks / (self.rho * length))
        height, radius = self.rho * jnp.cos(alpha), self.rho * jnp.sin(alpha)
        ratio, slope = _ratio_and_slope((self.dim - 3) / 2, radius**2 * (across @ across))
        F = weights * f(height * length)
        # moments of z: along the pole, along `across`, and around both
        first, second = jnp.sum(F * height), jnp.sum(F * radius**2 * ratio)
        cross = jnp.sum(F * height * radius**2 * ratio) * jnp.outer(pole, across)
        beyond = jnp.sum(F * radius**4 * (2 * slope + ratio**2)) * jnp.outer(across, across)
        square = jnp.sum(F * height**2) * jnp.outer(pole, pole) + cross + cross.T + beyond
        around = second * (jnp.eye(self.dim, dtype=u.dtype) - jnp.outer(pole, pole))
        there = Expectation(F.sum(), first * pole + second * across, square + around, jnp.zeros((), u.dtype))
        # at 0 there is no pole; near it the first two terms of f are all of it
        near = jnp.linalg.norm(jnp.where(jnp.any(u != 0), u, 0.0)) * self.rho < _NEAR
        return jax.tree.map(lambda x, y: jnp.where(near, x, y), linearised(self, f, u), there)

    def _angles(self, pole, across, heights) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """Nodes and weights in α, dense where its law is and cut where the score, in units of its largest, is given."""
        order, kappa = (self.dim - 3) / 2, self.rho * jnp.linalg.norm(self.theta)

        def log_density(alpha):
            q = (self.rho * jnp.sin(alpha)) ** 2 * (across @ across)
            bent = jax.vmap(functools.partial(log_bessel, order))(q)
            around = (self.dim - 2) * jnp.log(jnp.sin(alpha)) if self.dim > 2 else 0.0
            return around + self.rho * (self.theta @ pole) * jnp.cos(alpha) + bent

        grid = jnp.linspace(0, jnp.pi, 258)[1:-1]
        target = jnp.arctan2(jnp.linalg.norm(across), self.theta @ pole)  # where a far tilt points
        modes = jax.lax.stop_gradient(jnp.stack([grid[jnp.argmax(log_density(grid))], target]))
        width = 1 / jnp.sqrt(kappa + self.dim - 1)
        dense = jnp.clip(modes[:, None] + width * jnp.array([-12.0, -4.0, 0.0, 4.0, 12.0]), 0, jnp.pi).ravel()
        inside = jnp.abs(heights) < 1
        breaks = jnp.where(inside, jnp.arccos(jnp.where(inside, heights, 0.0)), 0.0)
        alpha, weights = panels(jnp.concatenate([jnp.array([0.0, jnp.pi]), jax.lax.stop_gradient(dense), breaks]))
        logs = log_density(jnp.clip(alpha, _EDGE, jnp.pi - _EDGE))
        masses = weights * jnp.exp(logs - jax.lax.stop_gradient(logs.max()))
        return alpha, masses / masses.sum()

    @eqx.filter_jit  # one program, not twenty
    def _sample(self, key: PRNGKeyArray, n: int):
        kappa = self.rho * jnp.linalg.norm(self.theta)
        pole = jnp.zeros(self.dim, self.theta.dtype).at[0].set(1)
        pole = jnp.where(kappa == 0, pole, self.theta / jnp.where(kappa == 0, 1.0, jnp.linalg.norm(self.theta)))
        if self.dim == 1:
            up = jax.random.uniform(key, (n, 1), pole.dtype) < jax.nn.sigmoid(2 * kappa)
            return self.rho * jnp.where(up, pole, -pole)
        height_key, turn_key = jax.random.split(key)
        drop = _drops(height_key, kappa, self.dim, n)
        turn = jax.random.normal(turn_key, (n, self.dim), pole.dtype)
        turn = turn - jnp.outer(turn @ pole, pole)
        turn = turn / jnp.linalg.norm(turn, axis=1, keepdims=True)
        return self.rho * ((1 - drop)[:, None] * pole + jnp.sqrt(drop * (2 - drop))[:, None] * turn)

    def _subgaussian(self):
        """σ² = ρ²/D: both eigenvalues of the Hessian of Λ are largest at 0, whatever the tilt."""
        return self.rho / math.sqrt(self.dim)

    def _radius(self):
        return self.rho

    def _tails(self):
        return (jnp.asarray(np.zeros((self.dim, self.dim)), float),)


@jax.jit
def _square_and_step(
    rho: Float[Array, ""], theta: Float[Array, " D"], by: Float[Array, " D"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """κ² at a tilt θ, and what a further tilt adds to it."""
    return rho**2 * (theta @ theta), rho**2 * (2 * theta + by) @ by


def _ratio_and_slope(order: float, q: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """B(q) and B'(q)."""
    return jax.vmap(jax.value_and_grad(lambda q: bessel_ratio(order, q)))(q)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _drops(key: PRNGKeyArray, kappa: Float[Array, ""], dim: int, n: int) -> Float[Array, " n"]:
    """1 - ⟨z, pole⟩ for von Mises-Fisher z on the unit sphere, by Wood's rejection (1994).

    Written for the drop below the pole, not for the height: the drop is of size 1/κ and must keep its digits.
    """
    m = dim - 1.0
    b = m / (2 * kappa + jnp.hypot(2 * kappa, m))
    x0 = (1 - b) / (1 + b)

    def propose(state):
        key, drop, accepted = state
        key, beta_key, accept_key = jax.random.split(key, 3)
        # Beta(m/2, m/2) from two uniforms (Ulrich 1984; Devroye 1986, IX.3), exact, without a gamma generator
        u, v = jax.random.uniform(beta_key, (2, n), kappa.dtype)
        radius = jnp.sqrt(-jnp.expm1(2 / (m - 1) * jnp.log(u))) if m > 1 else 1.0
        beta = (1 + radius * jnp.cos(2 * jnp.pi * v)) / 2
        proposal = 2 * b * beta / (1 - (1 - b) * beta)
        # log of the density ratio, with 1 - x0·height and 1 - x0² written without cancellation
        from_pole = 2 * b / (1 + b) + x0 * proposal
        log_ratio = kappa * (2 * b / (1 + b) - proposal) + m * jnp.log(from_pole * (1 + b) ** 2 / (4 * b))
        fits = log_ratio >= jnp.log(jax.random.uniform(accept_key, (n,), kappa.dtype))
        return key, jnp.where(accepted, drop, proposal), accepted | fits

    start = (key, jnp.zeros(n, kappa.dtype), jnp.zeros(n, bool))
    return jax.lax.while_loop(lambda state: ~state[2].all(), propose, start)[1]
