"""What the bounds ask of the laws of tokens and queries: centred, with a certified sub-Gaussian constant."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from largeprompt.measures import AbstractMeasure, Affine, Empirical, Gaussian, Mixture
from largeprompt.measures._from_sampler import sampled_parts

_CENTRED = 1e-6  # how far off 0 a mean may be, in units of the law's scale


def certified(name: str, mu: AbstractMeasure) -> AbstractMeasure:
    """`mu` itself, once its sub-Gaussian constant is that of the law and not of a stand-in."""
    if sampled_parts(mu):
        raise ValueError(
            f"{name} is known by its sampler only (FromSampler); a bound needs a law with a proven constant"
        )
    return mu


def is_centred(mu: AbstractMeasure) -> bool:
    """Whether the mean is 0, up to rounding."""
    mean, scale = np.asarray(mu.mean(), float), float(mu.subgaussian())
    return float(np.linalg.norm(mean)) <= _CENTRED * scale


def centred(mu: AbstractMeasure) -> AbstractMeasure:
    """The law of z - Ez, of the same kind where that is known."""
    return mu if is_centred(mu) else _shifted(mu, -mu.mean())


def _shifted(mu: AbstractMeasure, by) -> AbstractMeasure:
    if isinstance(mu, Gaussian):
        return Gaussian(mu.mean() + by, mu.cov())
    if isinstance(mu, Mixture):
        return Mixture(jnp.exp(mu.log_weights), [_shifted(part, by) for part in mu.components])
    if isinstance(mu, Empirical):
        return Empirical(mu.points + by, jnp.exp(mu.log_masses()))
    return Affine(jnp.eye(mu.dim), by, mu)


def fourth_moment_root(mu: AbstractMeasure, W: np.ndarray) -> float:
    """F = (E((z - Ez)ᵀW(z - Ez))²)^{1/2}, exactly, from the cumulants of the law."""
    return math.sqrt(max(float(_fourth(mu, jnp.asarray(W))), 0.0))


@eqx.filter_jit
def _fourth(mu: AbstractMeasure, W: jax.Array) -> jax.Array:
    return mu._fourth(jnp.zeros(mu.dim), W, W)
