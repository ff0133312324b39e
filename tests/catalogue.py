"""Every kind of measure and of layer, so that each test is one law over all of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import largeprompt as lp

lp.use_float64()  # before any array below is made, whoever imports this first


def f(x: Any) -> Any:
    """Anything that the type checker would refuse too."""
    return x


def matrix(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def covariance(seed: int, D: int, rank: int | None = None) -> np.ndarray:
    root = matrix(seed, D, rank or D)
    return root @ root.T / D


def three_point_cgf(theta):
    """Λ of a uniform three-point law on {-1, 0, 2} in each of two coordinates."""
    return jax.nn.logsumexp(theta[:, None] * jnp.array([-1.0, 0.0, 2.0]), axis=1).sum() - 2 * jnp.log(3.0)


def three_point_sample(key, n):
    return jax.random.choice(key, jnp.array([-1.0, 0.0, 2.0]), (n, 2))


@functools.partial(jax.jit, static_argnums=1)
def skewed_sample(key, n):
    uniform = jax.random.uniform(key, (n, 3))
    return jnp.stack([uniform[:, 0], uniform[:, 0] * uniform[:, 1], uniform[:, 2] ** 3], axis=1)


def all_measures() -> dict[str, lp.AbstractMeasure]:
    gaussian = lp.Gaussian(matrix(0, 3), covariance(1, 3))
    weights = np.array([0.1, 0.4, 0.0, 0.3, 0.2])
    measures: dict[str, lp.AbstractMeasure] = {
        "empirical": lp.Empirical(matrix(2, 40, 3)),
        "empirical, weighted": lp.Empirical(matrix(3, 5, 3), weights),
        "empirical, one token": lp.Empirical(matrix(4, 1, 3)),
        "empirical, streamed": lp.Empirical(matrix(5, 20_011, 3)),
        "gaussian": gaussian,
        "gaussian, singular": lp.Gaussian(matrix(6, 4), covariance(7, 4, rank=2)),
        "gaussian, point": lp.Gaussian(matrix(8, 2), np.zeros((2, 2))),
        "rademacher": lp.Rademacher([1.0, 0.3, 2.0]),
        "rademacher, one coordinate": lp.Rademacher(1.5),
        "cube": lp.Cube([1.0, 0.5, 3.0, 0.0]),
        "sphere in 1": lp.Sphere(1.3, 1),
        "sphere in 2": lp.Sphere(0.7, 2),
        "sphere in 3": lp.Sphere(2.0, 3),
        "sphere in 60": lp.Sphere(3.0, 60),
        "affine, tall": lp.Affine(matrix(9, 4, 2), matrix(10, 4), lp.Cube([1.0, 2.0])),
        "affine, wide": lp.Affine(matrix(11, 2, 3), matrix(12, 2), lp.Sphere(1.0, 3)),
        "product": lp.Product(lp.Sphere(1.0, 2), lp.Gaussian([1.0], [[0.5]]), lp.Rademacher(0.5)),
        "from cgf": lp.FromCGF(three_point_cgf, 2, three_point_sample, subgaussian=1.5),
        "from sampler": lp.FromSampler(skewed_sample, 3, jax.random.key(13), size=30_000),
    }
    measures["mixture of Gaussians"] = lp.Mixture([0.3, 0.7], [gaussian, lp.Gaussian(matrix(14, 3), covariance(15, 3))])
    measures["mixture of kinds"] = lp.Mixture(
        [0.2, 0.0, 0.5, 0.3],
        [lp.Cube([1.0, 2.0, 0.5]), gaussian, measures["empirical"], lp.Sphere(1.0, 3)],
    )
    measures["tilted cube"] = lp.Cube([1.0, 2.0]).tilt(np.array([1.5, -0.4]))
    measures["tilted sphere"] = lp.Sphere(1.5, 4).tilt(matrix(16, 4))
    measures["tilted rademacher"] = lp.Rademacher([1.0, 2.0]).tilt(np.array([0.6, -1.0]))
    return measures


MEASURES = all_measures()


def all_layers() -> dict[str, lp.attention.AbstractLayer]:
    """Every kind in its (U, V) form, and heads of some, on tokens of three coordinates."""
    U, V = 0.4 * matrix(0, 3, 3), matrix(1, 2, 3)
    K, Q, W, O = (matrix(seed, *shape) for seed, shape in ((2, (4, 3)), (3, (4, 3)), (4, (2, 3)), (5, (3, 2))))
    return {
        "softmax": lp.SoftmaxAttention(U, V),
        "linear": lp.LinearAttention(U, V),
        "sigmoid": lp.SigmoidAttention(U, V),
        "sigmoid, normalised": lp.SigmoidAttention(U, V, normalised=True),
        "relu": lp.ReLUAttention(U, V),
        "relu, normalised": lp.ReLUAttention(U, V, normalised=True),
        "head": lp.Head(K, Q, W, O, scale=0.3),
        "head without O": lp.Head(K, Q, W, scale=0.3),
        "linear head": lp.Head(K, Q, W, O, scale=0.3, kind="linear"),
        "normalised relu head": lp.Head(K, Q, W, O, scale=0.3, kind="normalised-relu"),
        "two heads": lp.MultiHead([lp.Head(K, Q, W, O, 0.3), lp.Head(Q, K, 2 * W, -O, 0.2, kind="linear")]),
        "two kinds of heads": lp.MultiHead([lp.Head(K, Q, W, O, 0.3), lp.Head(Q, K, W, -O, 0.2, kind="sigmoid")]),
    }


LAYERS = all_layers()


def theta_for(mu: lp.AbstractMeasure, seed: int = 0, size: float = 0.7) -> np.ndarray:
    """A direction of the size given."""
    direction = matrix(100 + seed, mu.dim)
    return size * direction / np.linalg.norm(direction)
