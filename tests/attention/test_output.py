"""Softmax and linear attention on measures against the textbook formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from significance import assert_close_in_sigmas

D = 3
U, V = 0.5 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D)
Z, z = catalogue.matrix(2, 17, D), catalogue.matrix(3, D)
three_dimensional = {name: mu for name, mu in catalogue.MEASURES.items() if mu.dim == D}
each_measure = pytest.mark.parametrize("mu", three_dimensional.values(), ids=three_dimensional.keys())


def test_softmax_attention_on_a_prompt_is_the_textbook_softmax():
    weights = np.exp(Z @ U @ z)
    expected = V @ (weights @ Z / weights.sum())
    np.testing.assert_allclose(lp.SoftmaxAttention(U, V)(lp.Empirical(Z), z), expected, rtol=1e-13)


def test_linear_attention_on_a_prompt_is_the_textbook_sum():
    expected = sum((U @ z @ token) * (V @ token) for token in Z) / len(Z)
    np.testing.assert_allclose(lp.LinearAttention(U, V)(lp.Empirical(Z), z), expected, rtol=1e-13)


def test_softmax_attention_on_a_gaussian_is_affine():
    """Lemma 2.1, singular covariance included."""
    for rank in (1, 3):
        m, Gamma = catalogue.matrix(4, D), catalogue.covariance(5, D, rank)
        out = lp.SoftmaxAttention(U, V)(lp.Gaussian(m, Gamma), z)
        np.testing.assert_allclose(out, V @ m + V @ Gamma @ U @ z, rtol=1e-13)


@each_measure
def test_the_limit_of_linear_attention_is_the_second_moment(mu):
    """Appendix B.2, the second moment made of mean and covariance, derivatives of Λ as tests of measures show."""

    @jax.jit
    def found_and_moments(mu):
        return lp.LinearAttention(U, V)(mu, z), mu.mean(), mu.cov()

    found, mean, cov = map(np.asarray, found_and_moments(mu))
    np.testing.assert_allclose(found, V @ (cov + np.outer(mean, mean)) @ U @ z, rtol=1e-10)


def test_softmax_and_linear_agree_on_centred_gaussians_only():
    """Appendix B.2; otherwise they differ by V m (1 - m·Uz)."""
    Gamma = catalogue.covariance(6, D)
    softmax, linear = lp.SoftmaxAttention(U, V), lp.LinearAttention(U, V)
    centred = lp.Gaussian(np.zeros(D), Gamma)
    np.testing.assert_allclose(softmax(centred, z), linear(centred, z), rtol=1e-13)
    m = catalogue.matrix(7, D)
    shifted = lp.Gaussian(m, Gamma)
    gap = softmax(shifted, z) - linear(shifted, z)
    np.testing.assert_allclose(gap, V @ m * (1 - m @ U @ z), rtol=1e-12)
    assert np.abs(gap).max() > 0.1


@each_measure
def test_long_prompts_tend_to_the_measure(mu):
    if isinstance(mu, lp.FromCGF):
        pytest.skip("cannot be sampled")
    attention, L, replicates = lp.SoftmaxAttention(U, V), 3000, 60
    sample = jax.jit(lambda key: attention._output(lp.Empirical(mu.sample(key, L)), jnp.asarray(z)))
    outputs = np.stack([sample(key) for key in jax.random.split(jax.random.key(8), replicates)])
    truth = np.asarray(attention(mu, z))
    spread = outputs.std(axis=0, ddof=1)
    # the bias is of the order of the variance, 1/L: allow it beside five standard errors of the mean
    allowance = 10 * spread**2 / (np.abs(truth) + spread + 1e-300)
    own = lp.output_stderr(attention, mu, z) if isinstance(mu, lp.FromSampler) else 0.0
    excess = np.maximum(np.abs(outputs.mean(axis=0) - truth) - allowance, 0)
    assert_close_in_sigmas(excess, 0.0, np.hypot(spread / np.sqrt(replicates), own))


@each_measure
def test_map_is_the_layer_at_each_query(mu):
    queries = catalogue.matrix(9, 5, D)
    layers = lp.SoftmaxAttention(U, V), lp.LinearAttention(U, V)
    alone = jax.jit(lambda q: [layer(mu, q) for layer in layers])
    together = jax.jit(lambda queries: [layer.map(mu, queries) for layer in layers])(queries)
    for one_by_one, outputs in zip(zip(*map(alone, queries), strict=True), together, strict=True):
        np.testing.assert_allclose(outputs, np.stack(one_by_one), rtol=1e-11, atol=1e-14)


def test_the_query_in_the_prompt_is_one_more_token():
    """Remark 3.2 on a prompt: the same as appending the query."""
    attention = lp.SoftmaxAttention(U, V)
    appended = attention(lp.Empirical(np.vstack([Z, z])), z)
    np.testing.assert_allclose(attention(lp.with_query(lp.Empirical(Z), z), z), appended, rtol=1e-13)
    linear = lp.LinearAttention(U, V)
    appended = linear(lp.Empirical(np.vstack([Z, z])), z)
    np.testing.assert_allclose(linear(lp.with_query(lp.Empirical(Z), z), z), appended, rtol=1e-13)


def test_the_query_loses_its_weight_as_the_prompt_grows():
    attention, mu = lp.SoftmaxAttention(U, V), lp.Gaussian(np.zeros(D), catalogue.covariance(10, D))
    limit = attention(mu, z)
    assert lp.with_query(mu, z, np.inf) is mu
    gaps = [np.linalg.norm(attention(lp.with_query(mu, z, L), z) - limit) for L in (10**3, 10**4, 10**5)]
    np.testing.assert_allclose(np.divide(gaps[:-1], gaps[1:]), 10, rtol=0.05)


@pytest.mark.filterwarnings("ignore:[34]000 tokens stand in")
def test_the_layer_error_on_a_sampled_law_is_the_spread_over_stand_ins():
    truth, attention = lp.Gaussian(np.zeros(D), np.eye(D)), lp.SoftmaxAttention(U, V)
    laws = [lp.FromSampler(truth.sample, D, key, size=3000) for key in jax.random.split(jax.random.key(11), 200)]
    spread = np.std([attention(mu, z) for mu in laws], axis=0, ddof=1)
    reported = np.mean([lp.output_stderr(attention, mu, z) for mu in laws], axis=0)
    np.testing.assert_allclose(spread, reported, rtol=5 / np.sqrt(2 * 200))


def test_nonlinearity_vanishes_for_gaussians_and_not_for_others():
    theta = np.array([0.5, -1.0, 2.0])
    for rank in (1, 3):
        mu = lp.Gaussian(catalogue.matrix(12, D), catalogue.covariance(13, D, rank))
        np.testing.assert_array_equal(lp.nonlinearity(mu, theta), np.zeros(D))
    mu = lp.Rademacher([1.0, 2.0, 0.5])
    h = np.array([1.0, 2.0, 0.5])
    np.testing.assert_allclose(lp.nonlinearity(mu, theta), h * np.tanh(h * theta) - h**2 * theta, rtol=1e-13)


def test_relative_nonlinearity_is_scale_free_and_grows_with_the_scores():
    queries = catalogue.matrix(14, 50, D)
    mu = lp.Rademacher(np.ones(D))

    def index(size, values=V):
        return float(lp.relative_nonlinearity(lp.SoftmaxAttention(size * U, values), mu, queries))

    assert index(0.1) < 0.05 < 0.2 < index(1.0)
    np.testing.assert_allclose(index(0.7, 5 * V), index(0.7), rtol=1e-12)
    # tanh x = x - x³/3 + …: a quarter when the scores are halved, where they are small
    np.testing.assert_allclose(index(0.02) / index(0.01), 4, rtol=0.01)
    gaussian = lp.Gaussian(np.ones(D), catalogue.covariance(15, D))
    assert float(lp.relative_nonlinearity(lp.SoftmaxAttention(U, V), gaussian, queries)) == 0.0
