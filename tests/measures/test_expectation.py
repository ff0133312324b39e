"""Averages along one direction: against sampling, closed forms and automatic differentiation, over all measures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.stats import norm

import catalogue
import largeprompt as lp
from catalogue import MEASURES
from largeprompt import measures
from significance import assert_close_in_sigmas

SIGMOID_BREAKS = (-16.0, -4.0, 4.0, 16.0)
FUNCTIONS = {"sigmoid": SIGMOID_BREAKS, "relu": (0.0,) * 4}
EXACT = [name for name, mu in MEASURES.items() if mu._averages_exactly()]


@functools.cache
def expectations_and_tokens(name):
    """Those of each function, and tokens."""
    found, tokens = _expectations_and_tokens(MEASURES[name], catalogue.theta_for(MEASURES[name]), jax.random.key(1))
    each = (jax.tree.map(lambda values, i=i: np.asarray(values)[i], found) for i in range(len(FUNCTIONS)))
    return dict(zip(FUNCTIONS, each, strict=True)), np.asarray(tokens)


@jax.jit
def _expectations_and_tokens(mu, u, key):
    def of(which):  # one after the other: the integral is compiled once
        is_relu, breaks = which
        return mu._expectation(lambda s: jnp.where(is_relu, jax.nn.relu(s), jax.nn.sigmoid(s)), u, breaks)

    which = jnp.array([name == "relu" for name in FUNCTIONS]), jnp.array(list(FUNCTIONS.values()))
    return jax.lax.map(of, which), mu.sample(key, 40_000 if mu.dim < 10 else 4000)


def of_scores(f, tokens, u):
    scores = tokens @ u
    return np.maximum(scores, 0) if f == "relu" else 1 / (1 + np.exp(-scores))


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_expectations_are_those_of_samples(name, f):
    mu, (found, tokens) = MEASURES[name], expectations_and_tokens(name)
    values, found, N = of_scores(f, tokens, catalogue.theta_for(mu)), found[f], len(tokens)
    # f(s)xxᵀ for x = (1, z), its mean and its mean square
    x = np.concatenate([np.ones((N, 1)), tokens], axis=1)
    mean, square = (x.T * values) @ x / N, (x.T**2 * values**2) @ x**2 / N
    column = np.concatenate([np.atleast_1d(found.value), found.times_z])
    expected = np.block([[column[None]], [column[1:, None], found.times_zz]])
    fixed = 1.0 if mu._averages_exactly() and found.stderr == 0 else np.sqrt(N / 2**14)
    stderr = np.sqrt(np.maximum(square - mean**2, 0) / N) * np.hypot(1, fixed)
    assert_close_in_sigmas(mean, expected, stderr + 1e-12)


@pytest.mark.parametrize("name", ["cube", "affine, tall", "product", "from cgf", "from sampler"])
def test_a_sampled_expectation_has_the_standard_error_of_its_sample(name):
    found, tokens = expectations_and_tokens(name)
    values = of_scores("sigmoid", tokens, catalogue.theta_for(MEASURES[name]))
    size = 30_000 if name == "from sampler" else 2**14
    np.testing.assert_allclose(found["sigmoid"].stderr, values.std() / np.sqrt(size), rtol=0.1)


@jax.jit
def rectified(mu):
    return mu.expectation(jax.nn.relu, [1.0], (0.0,))


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.3, 0.8), (-2.0, 0.01), (1e-7, 1e-6), (3.0, 50.0), (0.4, 0.0), (-1.0, 0.3)]
)
def test_the_mean_of_a_rectified_gaussian_score_is_its_closed_form(mean, deviation):
    """E max(s, 0) = s̄Φ + σφ, and E max(s, 0)s = (s̄² + σ²)Φ + s̄σφ."""
    found = rectified(lp.Gaussian([mean], [[deviation**2]]))
    if deviation == 0:
        expected = np.array([max(mean, 0.0), max(mean, 0.0) * mean])
    else:
        Phi, phi = norm.cdf(mean / deviation), norm.pdf(mean / deviation)
        expected = [mean * Phi + deviation * phi, (mean**2 + deviation**2) * Phi + mean * deviation * phi]
    scale = max(abs(mean), deviation)
    np.testing.assert_allclose([found.value, found.times_z[0]], expected, rtol=1e-12, atol=1e-14 * scale)


def test_a_step_is_integrated_across_its_jump():
    mu = lp.Gaussian([0.2, -0.1], [[1.0, 0.3], [0.3, 0.5]])
    u = np.array([0.7, -1.1])
    found = jax.jit(lambda mu: mu.expectation(lambda s: jnp.where(s > 0.4, 1.0, 0.0), u, (0.4,)))(mu)
    mean, variance = u @ np.asarray(mu.m), u @ np.asarray(mu.Gamma) @ u
    np.testing.assert_allclose(found.value, norm.sf(0.4, mean, np.sqrt(variance)), rtol=1e-13)


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_along_u_are_expectations_of_the_slope(name):
    """∂ E f(s) = E f'(s)z and ∂ E f(s)z = E f'(s)zzᵀ, at 0 too."""
    mu, breaks = MEASURES[name], jnp.asarray(SIGMOID_BREAKS)
    slope = lambda s: jax.nn.sigmoid(s) * jax.nn.sigmoid(-s)  # noqa: E731

    @jax.jit
    def slopes(u):
        of = lambda u: mu._expectation(jax.nn.sigmoid, u, breaks)  # noqa: E731
        there = mu._expectation(slope, u, breaks)
        return there, jax.grad(lambda u: of(u).value)(u), jax.jacfwd(lambda u: of(u).times_z)(u)

    for u in (jnp.asarray(catalogue.theta_for(mu)), jnp.zeros(mu.dim)):
        there, gradient, jacobian = slopes(u)
        np.testing.assert_allclose(gradient, there.times_z, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(jacobian, there.times_zz, rtol=1e-9, atol=1e-12)


def test_derivatives_in_the_mean_and_covariance_of_a_gaussian_are_those_of_finite_differences():
    u, breaks = jnp.array([0.7, -1.1]), jnp.zeros(1)
    m, root = jnp.array([0.2, -0.1]), jnp.array([[1.0, 0.3], [-0.2, 0.5]])

    @jax.jit
    def value(m, root):
        return lp.Gaussian(m, root @ root.T)._expectation(jax.nn.relu, u, breaks).times_z[0]

    check_grads(value, (m, root), order=1, eps=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", [*EXACT, "cube", "product"])
def test_moments_of_fourth_order_are_those_of_samples(name):
    mu, (_, tokens) = MEASURES[name], expectations_and_tokens(name)
    u, N = catalogue.theta_for(mu), len(tokens)
    A, B = (catalogue.covariance(seed, mu.dim + 1) for seed in (20, 21))
    found = jax.jit(lambda *args: mu._quartic(jax.nn.sigmoid, *args))(u, jnp.asarray(SIGMOID_BREAKS), A, B)
    x = np.concatenate([tokens, np.ones((N, 1))], axis=1)
    values = of_scores("sigmoid", tokens, u) * np.sum((x @ A) * x, axis=1) * np.sum((x @ B) * x, axis=1)
    fixed = 1.0 if mu._averages_exactly() else np.sqrt(N / 2**14)
    assert_close_in_sigmas(values.mean(), found, values.std() / np.sqrt(N) * np.hypot(1, fixed) + 1e-12)


def test_expectations_over_a_long_prompt_are_streamed():
    """Many directions at once over a hundred thousand tokens give what NumPy does."""
    tokens = catalogue.matrix(30, 100_003, 3)
    mu, directions = lp.Empirical(tokens).tilt([0.1, 0.0, -0.2]), catalogue.matrix(31, 5, 3)
    found = jax.jit(jax.vmap(lambda u: mu._expectation(jax.nn.relu, u, jnp.zeros(1))))(jnp.asarray(directions))
    masses = np.exp(tokens @ [0.1, 0.0, -0.2])
    masses /= masses.sum()
    for k, u in enumerate(directions):
        values = masses * np.maximum(tokens @ u, 0)
        np.testing.assert_allclose(found.value[k], values.sum(), rtol=1e-11)
        np.testing.assert_allclose(found.times_zz[k], (values[:, None] * tokens).T @ tokens, rtol=1e-10, atol=1e-12)


def test_an_expectation_of_a_law_without_a_sampler_is_refused_in_one_line():
    mu = measures.FromCGF(catalogue.three_point_cgf, 2)
    with pytest.raises(ValueError, match="this FromCGF has no sampler") as refused:
        mu.expectation(jax.nn.sigmoid, [0.1, 0.2])
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="u has shape"):
        mu.expectation(jax.nn.sigmoid, [0.1])
