r"""Averages along one direction: $E f(s)$, $E f(s)z$ and $E f(s)zz^\top$ with $s = \langle u, z\rangle$."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._streaming import token_sum

ScoreFunction = Callable[[Float[Array, " n"]], Float[Array, " n"]]

_NODES = 32  # of a panel
_WINDOW = 12.0  # standard deviations beyond which a Gaussian has no mass in float64
_CUTS = (-_WINDOW, -4.0, 0.0, 4.0, _WINDOW)  # panels on which a Gaussian density is a short polynomial
_NARROW = 0.1  # standard deviation below which derivatives replace divided differences


class Expectation(NamedTuple):
    r"""$E f(s)$, $E f(s)z$, $E f(s)zz^\top$, and the standard error of the first (0 where nothing is sampled)."""

    value: Float[Array, ""]
    times_z: Float[Array, " D"]
    times_zz: Float[Array, "D D"]
    stderr: Float[Array, ""]


def weighted_sum(weights: Float[Array, " k"], parts: list[Expectation]) -> Expectation:
    """The expectation under a mixture; a part of weight zero does not count, whatever its numbers are."""
    held = weights > 0

    def total(values: tuple[Array, ...]) -> Array:
        stacked = jnp.stack(values)
        shape = (-1,) + (1,) * (stacked.ndim - 1)
        return jnp.tensordot(weights, jnp.where(held.reshape(shape), stacked, 0), 1)

    value, times_z, times_zz = (total(column) for column in list(zip(*parts, strict=True))[:3])
    errors = jnp.where(held, jnp.stack([part.stderr for part in parts]), 0)
    return Expectation(value, times_z, times_zz, jnp.linalg.norm(weights * errors))


def panels(cuts: Float[Array, " k"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Nodes and weights of Gauss and Legendre on every interval between neighbouring cuts."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    cuts = jnp.sort(cuts)
    half = jnp.diff(cuts)[:, None] / 2
    middle = (cuts[1:] + cuts[:-1])[:, None] / 2
    x = middle + half * jnp.asarray(nodes, cuts.dtype)
    return x.ravel(), (half * jnp.asarray(weights, cuts.dtype)).ravel()


def normal_nodes(
    mean: Float[Array, ""], variance: Float[Array, ""], breaks: Float[Array, " b"]
) -> tuple[Float[Array, ""], Float[Array, " n"], Float[Array, " n"]]:
    """The standard deviation of a Gaussian score, and nodes t (in units of it) with the weights of N(0, 1)."""
    positive = variance > 0
    # where the variance is 0, the root of 1: that of 0 has an infinite derivative
    deviation = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0)
    places = (breaks - mean) / jnp.where(positive, deviation, 1.0)
    cuts = jnp.concatenate([jnp.asarray(_CUTS, places.dtype), jnp.clip(places, -_WINDOW, _WINDOW)])
    t, weights = panels(cuts)
    return deviation, t, weights * jnp.exp(-(t**2) / 2) / np.sqrt(2 * np.pi)


def normal_derivatives(
    f: ScoreFunction, mean: Float[Array, ""], variance: Float[Array, ""], breaks: Float[Array, " b"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    r"""$E f(s)$ for $s\sim N(\bar s,\nu)$ and two derivatives in $\bar s$, also where f has kinks or jumps."""
    deviation, t, weights = normal_nodes(mean, variance, breaks)
    s = mean + deviation * t
    values = weights * f(s)
    # For a smooth f these are E f' and E f''. Divided by a small deviation, the integrals would cancel; but where a
    # kink lies among the scores there is no cancellation, and f' and f'' would miss it.
    smooth = jnp.all(jnp.abs(breaks - mean) >= _WINDOW * deviation)
    by_slope = (deviation < _NARROW) & smooth | (deviation == 0)
    divisor = jnp.where(by_slope, 1.0, deviation)
    first, second = jnp.sum(values * t) / divisor, jnp.sum(values * (t**2 - 1)) / divisor**2
    slope = slope_of(f)
    return (
        values.sum(),
        jnp.where(by_slope, jnp.sum(weights * slope(s)), first),
        jnp.where(by_slope, jnp.sum(weights * slope_of(slope)(s)), second),
    )


def slope_of(f: ScoreFunction) -> ScoreFunction:
    """The derivative of a function that acts on each score by itself."""
    return lambda s: jax.jvp(f, (s,), (jnp.ones_like(s),))[1]


def token_expectation(
    points: Float[Array, "L D"],
    log_weights: Float[Array, " L"] | None,
    theta: Float[Array, " D"],
    f: ScoreFunction,
    u: Float[Array, " D"],
    *,
    sampled: bool = False,
) -> Expectation:
    """The expectation over tilted tokens, streamed; with its standard error where they are a sample of a law."""
    D = points.shape[1]

    def part(tokens, masses):
        values = f(tokens @ u)
        # one product for all moments: under a vmap over u, that of a matrix of scores with one matrix of tokens
        squares = (tokens[:, :, None] * tokens[:, None, :]).reshape(-1, D * D)
        sums = (masses * values) @ jnp.concatenate([jnp.ones_like(tokens[:, :1]), tokens, squares], axis=1)
        if not sampled:
            return sums, jnp.zeros(3, sums.dtype)
        return sums, jnp.stack([jnp.ones_like(values), values, values**2]) @ masses**2

    sums, (zeroth, first, second) = token_sum(points, log_weights, theta, 1 + D + D * D, part)
    value = sums[0]
    variance = second - 2 * value * first + value**2 * zeroth
    stderr = jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(variance, 0)))
    return Expectation(value, sums[1 : D + 1], sums[D + 1 :].reshape(D, D), stderr)


def token_quartic(
    points: Float[Array, "L D"],
    log_weights: Float[Array, " L"] | None,
    theta: Float[Array, " D"],
    f: ScoreFunction,
    u: Float[Array, " D"],
    A: Float[Array, "D1 D1"],
    B: Float[Array, "D1 D1"],
) -> Float[Array, ""]:
    """E f(s) (xᵀAx)(xᵀBx) over tilted tokens, for x = (z, 1), streamed."""

    def part(tokens, masses):
        x = jnp.concatenate([tokens, jnp.ones_like(tokens[:, :1])], axis=1)
        return masses @ (f(tokens @ u) * jnp.sum((x @ A) * x, axis=1) * jnp.sum((x @ B) * x, axis=1))

    return token_sum(points, log_weights, theta, 4 * points.shape[1], part)
