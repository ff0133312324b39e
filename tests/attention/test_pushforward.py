"""Lemma 2.1 and what follows from applying it layer after layer."""

import jax
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from significance import assert_mean_is

D = 4
MU = lp.Gaussian(0.5 * catalogue.matrix(0, D), catalogue.covariance(1, D, rank=3))
LAYERS = {
    "softmax": lp.SoftmaxAttention(0.3 * catalogue.matrix(2, D, D), 0.5 * catalogue.matrix(3, D, D)),
    "linear": lp.LinearAttention(0.3 * catalogue.matrix(2, D, D), 0.5 * catalogue.matrix(3, D, D)),
    "heads": lp.MultiHead.pytorch_default(jax.random.key(4), D, 2),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


def test_the_pushforward_is_the_formula_of_the_lemma():
    layer = LAYERS["softmax"]
    U, V, m, Gamma = layer.U, layer.V, MU.m, MU.Gamma
    law = lp.pushforward(layer, MU)
    A = V @ Gamma @ U
    np.testing.assert_allclose(law.mean(), V @ (np.eye(D) + Gamma @ U) @ m, rtol=1e-12)
    np.testing.assert_allclose(law.cov(), A @ Gamma @ A.T, rtol=1e-12, atol=1e-15)


@each_layer
def test_pushed_samples_have_the_pushforward_law(layer):
    queries = lp.Gaussian(catalogue.matrix(5, D), catalogue.covariance(6, D))
    law = lp.pushforward(layer, MU, queries)
    outputs = np.asarray(layer.map(MU, queries.sample(jax.random.key(7), 20_000)))
    assert_mean_is(outputs, law.mean())
    centred = outputs - np.asarray(law.mean())
    assert_mean_is(np.einsum("ni,nj->nij", centred, centred), law.cov())


@each_layer
def test_one_layer_of_depth_is_the_pushforward(layer):
    laws = lp.depth([layer], MU)
    np.testing.assert_allclose(laws[1].cov(), lp.pushforward(layer, MU).cov(), rtol=1e-13)
    assert laws[0] is MU


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("name", "residual"), [("softmax", False), ("softmax", True), ("linear", True), ("heads", False)]
)
def test_depth_agrees_with_particles(name, residual):
    """Three layers; moments over independent swarms of particles, within five standard errors and the 1/n bias."""
    layer, n, swarms = LAYERS[name], 2000, 24
    law = lp.depth([layer] * 3, MU, residual=residual)[-1]
    ends = [
        lp.particles([layer] * 3, MU, key, n, residual=residual)[-1]
        for key in jax.random.split(jax.random.key(8), swarms)
    ]
    covariances = np.stack([end.cov() for end in ends])
    bias = 40 / n * np.abs(law.cov()).max()
    assert_mean_is(covariances, law.cov(), bias / 5)
    means = np.stack([end.mean() for end in ends])
    assert_mean_is(means, law.mean(), 40 / n / 5 * (1 + np.abs(law.mean()).max()))


def test_depth_says_which_layer_overflows():
    huge = lp.SoftmaxAttention(1e60 * np.eye(D), 1e60 * np.eye(D))
    with pytest.raises(ValueError, match=r"layers\[1\].*inf|layers\[1\].*overflow"):
        lp.depth([huge] * 3, MU)


def test_depth_refuses_a_layer_that_changes_the_dimension():
    layer = lp.SoftmaxAttention(np.eye(D), np.ones((2, D)))
    with pytest.raises(ValueError, match=r"layers\[0\] sends dimension 4 to 2"):
        lp.depth([layer], MU)
    with pytest.raises(ValueError, match=r"layers\[0\] sends dimension 4 to 2"):
        lp.particles([layer], MU, jax.random.key(0), 10)


@pytest.mark.usefixtures("as_a_stranger")
def test_only_gaussians_have_a_closed_pushforward():
    with pytest.raises(ValueError, match="mu is of type Cube; only Gaussians"):
        lp.pushforward(LAYERS["softmax"], lp.Cube(np.ones(D)))
