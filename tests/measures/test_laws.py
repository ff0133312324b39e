"""The laws that every measure obeys, over the whole catalogue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from catalogue import MEASURES
from significance import assert_mean_is

each_measure = pytest.mark.parametrize("name", MEASURES)
SIZES = (0.0, 1e-9, 0.7, 4.0)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)


def close(a, b, tolerance=1e-10):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@jax.jit
def _tilted(mu, thetas, first, second):
    def derivatives(theta):
        value, gradient = jax.value_and_grad(mu.cgf)(theta)
        return gradient, {"cgf": value, "gradient": gradient}

    def at(theta):
        tilted, (hessian, known) = mu.tilt(theta), jax.jacfwd(derivatives, has_aux=True)(theta)
        there = {"mean": tilted.mean(), "cov": tilted.cov(), "cgf of second": tilted.cgf(second)}
        return there | known | {"hessian": hessian}

    twice = mu.tilt(first).tilt(second)
    moments = {"mean": twice.mean(), "cov": twice.cov(), "cgf of second": twice.cgf(second)}
    return jax.vmap(at)(thetas), moments, mu.second_moment()


@functools.cache
def tilted(name):
    """At tilts of SIZES, at the first of two tilts and at their sum, and at NODES of a ray; by both; without any."""
    mu = MEASURES[name]
    first, second = catalogue.theta_for(mu, 1), catalogue.theta_for(mu, 2, size=1.1)
    alone = [catalogue.theta_for(mu, size=size) for size in SIZES]
    ray = np.outer((1 + NODES) / 2, catalogue.theta_for(mu))
    return jax.tree.map(np.asarray, _tilted(mu, np.stack([*alone, first, first + second, *ray]), first, second))


@jax.jit
def _drawn(mu, key):
    return mu.sample(key, 20_000 if mu.dim < 10 else 2000), mu.mean(), mu.cov()


@functools.cache
def drawn(name, size=0.0):
    """A measure tilted that far, a sample of it, its mean and its covariance."""
    mu = MEASURES[name]
    tilted = mu.tilt(catalogue.theta_for(mu, 4, size)) if size else mu
    return tilted, *map(np.asarray, _drawn(tilted, jax.random.key(5)))


@each_measure
def test_cgf_vanishes_at_zero(name):
    at, _, _ = tilted(name)
    close(at["cgf"][0], 0.0, 1e-14)


@each_measure
def test_mean_and_cov_of_tilt_are_the_derivatives_of_cgf(name):
    at, _, _ = tilted(name)
    close(at["mean"], at["gradient"])
    close(at["cov"], at["hessian"])


@each_measure
def test_cgf_matches_the_integral_of_its_gradient(name):
    """Gauss-Legendre along a ray, independent of `_cgf`."""
    at, _, _ = tilted(name)
    close(at["cgf"][2], WEIGHTS @ at["mean"][6:] @ catalogue.theta_for(MEASURES[name]) / 2, 1e-9)


@each_measure
def test_tilts_add(name):
    at, twice, _ = tilted(name)
    for moment, value in twice.items():
        close(value, at[moment][5])
    close(at["cgf of second"][4], at["cgf"][5] - at["cgf"][4])


@each_measure
def test_second_moment_is_the_second_derivative_of_the_moment_generating_function(name):
    at, _, second_moment = tilted(name)
    close(second_moment, at["hessian"][0] + np.outer(at["gradient"][0], at["gradient"][0]))


@each_measure
@pytest.mark.parametrize("size", [0.0, 1.5])
def test_samples_have_the_mean_and_covariance(name, size):
    if isinstance(MEASURES[name], lp.FromCGF) and size > 0:
        pytest.skip("a FromCGF knows no sampler for its tilts, and says so")
    tilted, samples, mean, cov = drawn(name, size)
    assert samples.shape == (20_000 if tilted.dim < 10 else 2000, tilted.dim)
    own = np.sqrt(np.diag(tilted.mean_error())) if isinstance(tilted, lp.FromSampler) else 0.0
    assert_mean_is(samples, mean, own)
    centred = samples - mean
    products = np.einsum("ni,nj->nij", centred, centred)
    # the stand-in of a law known by its sampler has an error of its own, of the same kind as the sample's
    own = products.std(axis=0) / np.sqrt(tilted.effective_size()) if isinstance(tilted, lp.FromSampler) else 0.0
    assert_mean_is(products, cov, own)


@jax.jit
def _about_its_mean(mu, tilt, thetas):
    tilted = mu.tilt(tilt)
    return tilted.subgaussian(), tilted.mean(), jax.vmap(tilted.cgf)(thetas)


@each_measure
def test_the_subgaussian_bound_holds(name):
    mu, lengths = MEASURES[name], np.array([1e-3, 0.3, 1.0, 5.0, 50.0])
    thetas = np.stack([catalogue.theta_for(mu, seed, length) for seed in range(12) for length in lengths])
    for size in (0.0, 2.0, 300.0):
        sigma, mean, cgfs = map(np.asarray, _about_its_mean(mu, catalogue.theta_for(mu, 6, size), thetas))
        along = thetas @ mean
        rounding = 1e-11 + 1e-13 * np.abs(along) + 1e-13 * size * sigma
        assert (cgfs - along <= sigma**2 * np.sum(thetas**2, axis=1) / 2 * (1 + 1e-9) + rounding).all()


@each_measure
def test_a_measure_passes_through_jit_and_vmap(name):
    mu, (at, _, _) = MEASURES[name], tilted(name)
    for i, size in enumerate(SIZES):
        close(at["mean"][i], mu.tilt(catalogue.theta_for(mu, size=size)).mean())


def test_measures_and_layers_can_be_built_inside_jit():
    """From constants, whose values are judged there too, and from traced arrays, whose shapes are."""
    constant, theta = jnp.asarray(catalogue.covariance(17, 3)), jnp.asarray(catalogue.matrix(18, 3))
    points, weights = catalogue.matrix(19, 4, 3), np.full(4, 0.25)

    def outputs(Gamma, points, theta):
        laws = [
            lp.Gaussian(np.zeros(3), Gamma),
            lp.Empirical(points, weights),
            lp.Affine(Gamma, theta, lp.Mixture([0.5, 0.5], [lp.Cube(np.ones(3)), lp.Sphere(2.0, 3)])),
            lp.FromCGF(lambda t: t @ Gamma @ t, 3),
            lp.Product(lp.Rademacher(jnp.abs(theta[:1])), lp.Cube([1.0, 2.0])),
        ]
        layer = lp.SoftmaxAttention(Gamma, constant)
        return jnp.stack([layer(mu, theta) for mu in laws])

    expected = outputs(constant, points, theta)
    close(jax.jit(outputs)(constant, points, theta), expected)
    close(jax.jit(lambda: outputs(constant, points, theta))(), expected)
    with pytest.raises(ValueError, match="cov has the eigenvalue"):
        jax.jit(lambda: lp.Gaussian(np.zeros(3), -np.eye(3)).mean())()


@pytest.mark.parametrize("name", ["empirical", "sphere in 3", "from cgf", "from sampler"])
def test_a_prompt_of_infinite_length_is_the_measure_itself(name):
    mu = MEASURES[name]
    assert mu.prompt(jax.random.key(0), np.inf) is mu
    prompt = mu.prompt(jax.random.key(0), 7)
    assert isinstance(prompt, lp.Empirical)
    assert prompt.size == 7


@each_measure
def test_the_support_lies_within_the_radius(name):
    mu, samples, _, _ = drawn(name)
    assert np.linalg.norm(samples, axis=1).max() <= mu.radius() * (1 + 1e-12)


@each_measure
def test_tails_are_the_growth_of_the_cgf(name):
    """Λ(tθ)/t² tends to half the largest θᵀΓθ: at t = 1e5 the means and the constants are a few 1e-5 of it."""
    mu = MEASURES[name]
    if (tails := mu.tails()) is None:
        return
    theta = catalogue.theta_for(mu, seed=31)
    growth = max(theta @ np.asarray(Gamma) @ theta for Gamma in tails) / 2
    t = 1e5
    np.testing.assert_allclose(mu.cgf(t * theta) / t**2, growth, rtol=1e-3, atol=1e-3)
