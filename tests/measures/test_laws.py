"""The laws that every measure obeys, over the whole catalogue."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from significance import assert_mean_is

each_measure = pytest.mark.parametrize("mu", catalogue.MEASURES.values(), ids=catalogue.MEASURES.keys())


def close(a, b, tolerance=1e-10):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@each_measure
def test_cgf_vanishes_at_zero(mu):
    close(mu.cgf(np.zeros(mu.dim)), 0.0, 1e-14)


@each_measure
def test_mean_and_cov_of_tilt_are_the_derivatives_of_cgf(mu):
    gradient, hessian = jax.jit(jax.grad(mu.cgf)), jax.jit(jax.hessian(mu.cgf))
    for size in (0.0, 1e-9, 0.7, 4.0):
        theta = catalogue.theta_for(mu, size=size)
        close(mu.tilt(theta).mean(), gradient(theta))
        close(mu.tilt(theta).cov(), hessian(theta))


@each_measure
def test_cgf_matches_the_integral_of_its_gradient(mu):
    """Gauss-Legendre along a ray, independent of `_cgf`."""
    theta = catalogue.theta_for(mu)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    means = jax.jit(jax.vmap(lambda theta: mu.tilt(theta).mean()))(np.outer((1 + nodes) / 2, theta))
    close(mu.cgf(theta), weights @ np.asarray(means) @ theta / 2, 1e-9)


@each_measure
def test_tilts_add(mu):
    first, second = catalogue.theta_for(mu, 1), catalogue.theta_for(mu, 2, size=1.1)
    twice, once = mu.tilt(first).tilt(second), mu.tilt(first + second)
    close(twice.mean(), once.mean())
    close(twice.cov(), once.cov())
    probe = catalogue.theta_for(mu, 3)
    close(twice.cgf(probe), once.cgf(probe))
    close(mu.tilt(first).cgf(second), mu.cgf(first + second) - mu.cgf(first))


@each_measure
def test_second_moment_is_the_second_derivative_of_the_moment_generating_function(mu):
    hessian = jax.jit(jax.hessian(lambda theta: jnp.exp(mu.cgf(theta))))
    close(mu.second_moment(), hessian(jnp.zeros(mu.dim)))


@each_measure
@pytest.mark.parametrize("size", [0.0, 1.5])
def test_samples_have_the_mean_and_covariance(mu, size):
    if isinstance(mu, lp.FromCGF) and size > 0:
        pytest.skip("a FromCGF knows no sampler for its tilts, and says so")
    tilted = mu.tilt(catalogue.theta_for(mu, 4, size)) if size else mu
    n = 20_000 if mu.dim < 10 else 2000
    samples = np.asarray(tilted.sample(jax.random.key(5), n))
    assert samples.shape == (n, mu.dim)
    own = np.sqrt(np.diag(tilted.mean_error())) if isinstance(tilted, lp.FromSampler) else 0.0
    assert_mean_is(samples, tilted.mean(), own)
    centred = samples - np.asarray(tilted.mean())
    products = np.einsum("ni,nj->nij", centred, centred)
    # the stand-in of a law known by its sampler has an error of its own, of the same kind as the sample's
    own = products.std(axis=0) / np.sqrt(tilted.effective_size()) if isinstance(tilted, lp.FromSampler) else 0.0
    assert_mean_is(products, tilted.cov(), own)


@pytest.mark.filterwarnings("ignore:.* tokens stand in for a law known by its sampler")
@each_measure
def test_the_subgaussian_bound_holds(mu):
    lengths = np.array([1e-3, 0.3, 1.0, 5.0, 50.0])
    thetas = np.stack([catalogue.theta_for(mu, seed, length) for seed in range(12) for length in lengths])
    cgfs = jax.jit(jax.vmap(lambda mu, theta: mu.cgf(theta), in_axes=(None, 0)))
    for size in (0.0, 2.0, 300.0):
        tilted = mu.tilt(catalogue.theta_for(mu, 6, size))
        sigma, along = float(tilted.subgaussian()), thetas @ np.asarray(tilted.mean())
        centred = np.asarray(cgfs(tilted, thetas)) - along
        rounding = 1e-11 + 1e-13 * np.abs(along) + 1e-13 * size * sigma
        assert (centred <= sigma**2 * np.sum(thetas**2, axis=1) / 2 * (1 + 1e-9) + rounding).all()


@each_measure
def test_a_measure_passes_through_jit_and_vmap(mu):
    thetas = jnp.stack([jnp.asarray(catalogue.theta_for(mu, seed)) for seed in range(3)])
    batched = jax.jit(jax.vmap(lambda mu, theta: mu.tilt(theta).mean(), in_axes=(None, 0)))(mu, thetas)
    close(batched, np.stack([mu.tilt(theta).mean() for theta in thetas]))


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


@each_measure
def test_a_prompt_of_infinite_length_is_the_measure_itself(mu):
    assert mu.prompt(jax.random.key(0), np.inf) is mu
    if not (isinstance(mu, lp.FromCGF) and mu.known_sample is None):
        prompt = mu.prompt(jax.random.key(0), 7)
        assert isinstance(prompt, lp.Empirical)
        assert prompt.size == 7


@each_measure
def test_the_support_lies_within_the_radius(mu):
    if isinstance(mu, lp.FromCGF) and mu.known_sample is None:
        return
    tokens = np.linalg.norm(mu.sample(jax.random.key(30), 2000), axis=1)
    assert tokens.max() <= mu.radius() * (1 + 1e-12)


@each_measure
def test_tails_are_the_growth_of_the_cgf(mu):
    """Λ(tθ)/t² tends to half the largest θᵀΓθ: at t = 1e5 the means and the constants are a few 1e-5 of it."""
    if (tails := mu.tails()) is None:
        return
    theta = catalogue.theta_for(mu, seed=31)
    growth = max(theta @ np.asarray(Gamma) @ theta for Gamma in tails) / 2
    t = 1e5
    np.testing.assert_allclose(mu.cgf(t * theta) / t**2, growth, rtol=1e-3, atol=1e-3)
