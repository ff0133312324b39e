"""Each kind of measure against something that knows nothing of it: brute-force sums, quadrature, mpmath, scipy."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

import catalogue
import largeprompt as lp
from largeprompt.measures._bessel import bessel_ratio, log_bessel_increment
from significance import assert_close_in_sigmas


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 20, 50, 51, 300, 1001])
def test_bessel_ratio_and_logarithm_match_mpmath(dim):
    kappas, nu, expected = [1e-6, 0.1, 1.0, 9.0, 40.0, 1e3, 1e6], mpmath.mpf(dim) / 2 - 1, []
    with mpmath.workdps(40):
        for k in map(mpmath.mpf, kappas):
            low, high = mpmath.besseli(nu, k), mpmath.besseli(nu + 1, k)
            logarithm = mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / k) + mpmath.log(low)
            expected.append((float(high / low / k), float(logarithm)))

    @jax.jit
    @jax.vmap
    def found(q):
        return bessel_ratio(dim / 2 - 1, q), log_bessel_increment(dim / 2 - 1, 0 * q, q)

    ratios, logarithms = found(jnp.asarray(kappas) ** 2)
    np.testing.assert_allclose(ratios, [ratio for ratio, _ in expected], rtol=2e-14)
    np.testing.assert_allclose(logarithms, [logarithm for _, logarithm in expected], rtol=1e-14, atol=1e-14)


def test_a_cube_matches_quadrature():
    h, theta = 1.7, -0.9
    mu = lp.Cube(h).tilt([theta])

    def moment(k):
        return scipy.integrate.quad(lambda x: x**k * np.exp(theta * x), -h, h, epsabs=1e-14)[0]

    mean = moment(1) / moment(0)
    np.testing.assert_allclose(mu.mean(), [mean], rtol=1e-12)
    np.testing.assert_allclose(mu.cov(), [[moment(2) / moment(0) - mean**2]], rtol=1e-12)
    np.testing.assert_allclose(lp.Cube(h).cgf([theta]), np.log(moment(0) / (2 * h)), rtol=1e-12)


def test_rademacher_matches_the_sum_over_its_corners():
    h, theta = np.array([1.0, 0.4, 2.0]), np.array([0.3, -2.0, 0.8])
    corners = np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1).T * h
    brute = lp.Empirical(corners)
    exact = lp.Rademacher(h)
    np.testing.assert_allclose(exact.cgf(theta), brute.cgf(theta), rtol=1e-13)
    np.testing.assert_allclose(exact.tilt(theta).mean(), brute.tilt(theta).mean(), rtol=1e-13)
    np.testing.assert_allclose(exact.tilt(theta).cov(), brute.tilt(theta).cov(), atol=1e-14)


def test_the_sphere_in_three_dimensions_is_langevin():
    theta = np.array([0.5, -1.0, 0.3])
    kappa = 2 * np.linalg.norm(theta)
    expected = 2 * (1 / np.tanh(kappa) - 1 / kappa) * theta / np.linalg.norm(theta)
    np.testing.assert_allclose(lp.Sphere(2.0, 3).tilt(theta).mean(), expected, rtol=1e-13)


def test_tilted_sphere_samples_follow_von_mises_fisher():
    direction = np.array([2.0, 1.0, -1.0]) / np.sqrt(6)
    samples = np.asarray(lp.Sphere(1.0, 3).tilt(4 * direction).sample(jax.random.key(0), 20_000))
    # in three dimensions the height along the pole has the distribution function (e^{κx} - e^{-κ}) / (e^κ - e^{-κ})
    p = scipy.stats.kstest(
        samples @ direction, lambda x: (np.exp(4 * x) - np.exp(-4)) / (np.exp(4) - np.exp(-4))
    ).pvalue
    assert p > 6e-7


def test_tilting_a_gaussian_moves_its_mean_by_the_covariance():
    m, Gamma, theta = catalogue.matrix(0, 4), catalogue.covariance(1, 4, rank=2), catalogue.matrix(2, 4)
    tilted = lp.Gaussian(m, Gamma).tilt(theta)
    np.testing.assert_allclose(tilted.mean(), m + Gamma @ theta, rtol=1e-14)
    np.testing.assert_allclose(tilted.cov(), Gamma, rtol=1e-14)


def test_a_singular_gaussian_stays_on_its_subspace():
    Gamma = np.diag([1.0, 0.0, 2.0])
    samples = lp.Gaussian([0.0, 3.0, 0.0], Gamma).sample(jax.random.key(1), 100)
    np.testing.assert_allclose(samples[:, 1], 3.0)


def test_a_mixture_of_point_masses_is_the_empirical_measure():
    points, weights, theta = catalogue.matrix(3, 4, 2), [0.1, 0.2, 0.3, 0.4], np.array([0.4, -2.0])
    mixture = lp.Mixture(weights, [lp.Empirical(z[None]) for z in points])
    empirical = lp.Empirical(points, weights)
    np.testing.assert_allclose(mixture.tilt(theta).mean(), empirical.tilt(theta).mean(), rtol=1e-13)
    np.testing.assert_allclose(mixture.tilt(theta).cov(), empirical.tilt(theta).cov(), rtol=1e-12)


def test_an_affine_image_of_a_gaussian_is_the_gaussian_of_that_mean_and_covariance():
    A, b, theta = catalogue.matrix(4, 2, 3), catalogue.matrix(5, 2), catalogue.matrix(6, 2)
    inner = lp.Gaussian(catalogue.matrix(7, 3), catalogue.covariance(8, 3))
    image, expected = lp.Affine(A, b, inner), lp.Gaussian(A @ inner.m + b, A @ inner.Gamma @ A.T)
    np.testing.assert_allclose(image.cgf(theta), expected.cgf(theta), rtol=1e-13)
    np.testing.assert_allclose(image.tilt(theta).mean(), expected.tilt(theta).mean(), rtol=1e-13)


def test_repeated_tokens_weigh_as_weights_do():
    points = catalogue.matrix(9, 3, 2)
    repeated = lp.Empirical(np.repeat(points, [1, 2, 5], axis=0))
    weighted = lp.Empirical(points, np.array([1, 2, 5]) / 8)
    np.testing.assert_allclose(repeated.cov(), weighted.cov(), rtol=1e-13)


def test_the_error_of_a_sampled_law_covers_the_truth():
    """A Gaussian known only by its sampler, against itself, with the error that the stand-in reports."""
    truth = lp.Gaussian([0.3, -0.2], [[1.0, 0.4], [0.4, 0.7]])
    known = lp.FromSampler(truth.sample, 2, jax.random.key(2), size=50_000)
    theta = np.array([0.8, -0.5])
    tilted = known.tilt(theta)
    stderr = np.sqrt(np.diag(tilted.mean_error()))
    assert_close_in_sigmas(tilted.mean(), truth.tilt(theta).mean(), stderr)
    assert_close_in_sigmas(known.cgf(theta), truth.cgf(theta), known.cgf_stderr(theta))
    assert 1 < tilted.effective_size() < 50_000
    np.testing.assert_allclose(known.effective_size(), 50_000, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:[34]000 tokens stand in")
def test_the_reported_error_of_a_sampled_law_is_the_spread_over_stand_ins():
    truth, theta = lp.Gaussian([0.0, 0.0], np.eye(2)), np.array([0.9, 0.3])

    @jax.jit
    @jax.vmap
    def mean_and_error(key):
        mu = lp.FromSampler(truth.sample, 2, key, size=4000).tilt(theta)
        return mu.mean(), mu.mean_error()

    found = mean_and_error(jax.random.split(jax.random.key(3), 400))
    means, errors = (np.asarray(each) for each in found)
    spread, reported = np.cov(means.T), errors.mean(axis=0)
    np.testing.assert_allclose(np.diag(spread), np.diag(reported), rtol=5 * np.sqrt(2 / 400))


def test_the_subgaussian_constant_of_a_mixture_remembers_components_tilted_away():
    """A weight of e^{-2000} is zero in float64, and yet the tilt that undoes it brings its component back."""
    mixture = lp.Mixture([0.5, 0.5], [lp.Empirical([[0.0]]), lp.Empirical([[2000.0]])]).tilt([-1.0])
    centred = float(mixture.cgf([1.001]) - mixture.mean()[0] * 1.001)
    assert 2 < centred <= float(mixture.subgaussian()) ** 2 * 1.001**2 / 2


def test_a_component_of_weight_zero_does_not_count():
    cube = lp.Cube([1.0])
    mixture = lp.Mixture([1.0, 0.0], [cube, lp.Gaussian([0.0], [[1e300]])]).tilt([1e10])
    np.testing.assert_allclose(mixture.mean(), cube.tilt([1e10]).mean())
    np.testing.assert_allclose(mixture.cov(), cube.tilt([1e10]).cov())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reverse_mode_through_a_cube_is_finite_far_out(dtype):
    mu = lp.Cube(np.ones(2, dtype))
    theta = jnp.asarray([50.0, 0.5], dtype)

    @jax.jit
    def slopes_and_moments(theta):
        slopes = jax.grad(mu.cgf)(theta), jax.jacrev(lambda theta: mu.tilt(theta).mean())(theta)
        return slopes, (mu.tilt(theta).mean(), mu.tilt(theta).cov())

    (gradient, slope), (mean, cov) = slopes_and_moments(theta)
    np.testing.assert_allclose(gradient, mean, rtol=1e-5)
    np.testing.assert_allclose(slope, cov, rtol=1e-4, atol=1e-7)


def test_half_precision_tokens_are_summed_in_single_precision():
    mean = lp.Empirical(np.full((100_000, 2), 0.1, np.float16)).mean()
    np.testing.assert_allclose(mean, np.float16(0.1), rtol=1e-3)


@pytest.mark.parametrize("dim", [3, 200, 1000])
def test_third_derivatives_on_the_sphere_match_mpmath(dim):
    """A'' = -2AA' - (D-1)(A/κ)', the third cumulant along the tilt."""
    kappas, nu, thirds = [0.5, 0.99, 1.01, 20.0], mpmath.mpf(dim) / 2 - 1, []
    with mpmath.workdps(60):
        for k in map(mpmath.mpf, kappas):
            A = mpmath.besseli(nu + 1, k) / mpmath.besseli(nu, k)
            slope = 1 - A**2 - (dim - 1) * A / k
            thirds.append(float(-2 * A * slope - (dim - 1) * (slope / k - A / k**2)))
    mu = lp.Sphere(1.0, dim)

    def along(t):
        return mu.cgf(jnp.zeros(dim).at[0].set(t))

    found = jax.jit(jax.vmap(jax.grad(jax.grad(jax.grad(along)))))(jnp.asarray(kappas))
    np.testing.assert_allclose(found, thirds, rtol=1e-8)


def test_a_covariance_negative_by_rounding_is_projected():
    mu = lp.Gaussian(np.zeros(2), np.diag([1.0, -1e-9]))
    assert float(mu.cgf([0.0, 1e6])) >= 0
    assert float(mu.cov()[1, 1]) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    "mu",
    [
        lp.Sphere(np.float32(1.5), 3),
        lp.Sphere(np.float32(1.5), 80),
        lp.Cube(np.ones(3, np.float32)),
        lp.Rademacher(np.ones(3, np.float32)),
        lp.Gaussian(np.zeros(3, np.float32), np.eye(3, dtype=np.float32)),
        lp.Empirical(np.eye(3, dtype=np.float32)),
    ],
    ids=lambda mu: f"{type(mu).__name__} in {mu.dim}",
)
def test_single_precision_stays_single_precision(mu):
    """Even where double precision is on."""

    def numbers(mu, theta, key):
        tilted = mu.tilt(theta)
        return mu.cgf(theta), tilted.mean(), tilted.cov(), tilted.sample(key, 3), jax.grad(mu.cgf)(theta)

    shapes = jax.eval_shape(numbers, mu, jnp.full(mu.dim, 0.3, jnp.float32), jax.random.key(0))
    assert {shape.dtype for shape in shapes} == {jnp.dtype(jnp.float32)}
