"""Averages along one direction: against sampling, closed forms and automatic differentiation, over all measures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.stats import norm

import catalogue
import largeprompt as lp
from largeprompt import measures
from significance import assert_close_in_sigmas

SIGMOID_BREAKS = (-16.0, -4.0, 4.0, 16.0)
each_measure = pytest.mark.parametrize("mu", catalogue.MEASURES.values(), ids=catalogue.MEASURES.keys())
EXACT = {name: mu for name, mu in catalogue.MEASURES.items() if mu._averages_exactly()}


@each_measure
@pytest.mark.parametrize("f", [jax.nn.sigmoid, jax.nn.relu])
def test_expectations_are_those_of_samples(mu, f):
    n, u = 40_000, catalogue.theta_for(mu)
    found = mu.expectation(f, u, (0.0,) if f is jax.nn.relu else SIGMOID_BREAKS)
    tokens = np.asarray(mu.sample(jax.random.key(1), n))
    values = np.asarray(f(jnp.asarray(tokens @ u)))
    rows = np.concatenate(
        [
            values[:, None],
            values[:, None] * tokens,
            values[:, None] * np.einsum("li,lj->lij", tokens, tokens).reshape(n, -1),
        ],
        axis=1,
    )
    expected = np.concatenate([np.atleast_1d(found.value), found.times_z, np.ravel(found.times_zz)])
    fixed = 1.0 if mu._averages_exactly() and found.stderr == 0 else np.sqrt(n / 2**14)
    stderr = rows.std(axis=0) / np.sqrt(n) * np.hypot(1, fixed)
    assert_close_in_sigmas(rows.mean(axis=0), expected, stderr + 1e-12)


@pytest.mark.parametrize("name", ["cube", "affine, tall", "product", "from cgf", "from sampler"])
def test_a_sampled_expectation_has_the_standard_error_of_its_sample(name):
    mu = catalogue.MEASURES[name]
    u = catalogue.theta_for(mu)
    found = mu.expectation(jax.nn.sigmoid, u)
    values = jax.nn.sigmoid(mu.sample(jax.random.key(2), 20_000) @ u)
    size = 30_000 if name == "from sampler" else 2**14
    np.testing.assert_allclose(found.stderr, values.std() / np.sqrt(size), rtol=0.1)


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.3, 0.8), (-2.0, 0.01), (1e-7, 1e-6), (3.0, 50.0), (0.4, 0.0), (-1.0, 0.3)]
)
def test_the_mean_of_a_rectified_gaussian_score_is_its_closed_form(mean, deviation):
    """E max(s, 0) = s̄Φ + σφ, and E max(s, 0)s = (s̄² + σ²)Φ + s̄σφ."""
    found = lp.Gaussian([mean], [[deviation**2]]).expectation(jax.nn.relu, [1.0], (0.0,))
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
    found = mu.expectation(lambda s: jnp.where(s > 0.4, 1.0, 0.0), u, (0.4,))
    mean, variance = u @ np.asarray(mu.m), u @ np.asarray(mu.Gamma) @ u
    np.testing.assert_allclose(found.value, norm.sf(0.4, mean, np.sqrt(variance)), rtol=1e-13)


@pytest.mark.parametrize("mu", EXACT.values(), ids=EXACT.keys())
def test_derivatives_along_u_are_expectations_of_the_slope(mu):
    """∂ E f(s) = E f'(s)z and ∂ E f(s)z = E f'(s)zzᵀ, at 0 too."""
    slope = lambda s: jax.nn.sigmoid(s) * jax.nn.sigmoid(-s)  # noqa: E731
    breaks = jnp.asarray(SIGMOID_BREAKS)

    @jax.jit
    def slopes(u):
        of = lambda u: mu._expectation(jax.nn.sigmoid, u, breaks)  # noqa: E731
        return jax.grad(lambda u: of(u).value)(u), jax.jacfwd(lambda u: of(u).times_z)(u)

    for u in (jnp.asarray(catalogue.theta_for(mu)), jnp.zeros(mu.dim)):
        there = mu._expectation(slope, u, breaks)
        gradient, jacobian = slopes(u)
        np.testing.assert_allclose(gradient, there.times_z, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(jacobian, there.times_zz, rtol=1e-9, atol=1e-12)


def test_derivatives_in_the_mean_and_covariance_of_a_gaussian_are_those_of_finite_differences():
    u, breaks = jnp.array([0.7, -1.1]), jnp.zeros(1)
    m, root = jnp.array([0.2, -0.1]), jnp.array([[1.0, 0.3], [-0.2, 0.5]])

    def value(m, root):
        return lp.Gaussian(m, root @ root.T)._expectation(jax.nn.relu, u, breaks).times_z[0]

    check_grads(value, (m, root), order=1, eps=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", [*EXACT, "cube", "product"])
def test_moments_of_fourth_order_are_those_of_samples(name):
    mu, n = catalogue.MEASURES[name], 100_000
    u = jnp.asarray(catalogue.theta_for(mu))
    A, B = (jnp.asarray(catalogue.covariance(seed, mu.dim + 1)) for seed in (20, 21))
    found = mu._quartic(jax.nn.sigmoid, u, jnp.asarray(SIGMOID_BREAKS), A, B)
    tokens = mu.sample(jax.random.key(3), n)
    x = jnp.concatenate([tokens, jnp.ones((n, 1))], axis=1)
    values = jax.nn.sigmoid(tokens @ u) * jnp.sum((x @ A) * x, axis=1) * jnp.sum((x @ B) * x, axis=1)
    fixed = 1.0 if mu._averages_exactly() else np.sqrt(n / 2**14)
    assert_close_in_sigmas(values.mean(), found, values.std() / np.sqrt(n) * np.hypot(1, fixed) + 1e-12)


def test_expectations_over_a_long_prompt_are_streamed():
    """Many directions at once over a hundred thousand tokens give what NumPy does."""
    tokens = catalogue.matrix(30, 100_003, 3)
    mu, directions = lp.Empirical(tokens).tilt([0.1, 0.0, -0.2]), catalogue.matrix(31, 5, 3)
    found = jax.vmap(lambda u: mu._expectation(jax.nn.relu, u, jnp.zeros(1)))(jnp.asarray(directions))
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
