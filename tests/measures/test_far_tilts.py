"""Tilts of size 10³ and 10⁶ neither overflow nor lose the answer."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import catalogue
import largeprompt as lp

FAR = pytest.mark.parametrize("size", [1e3, 1e6])


@pytest.mark.filterwarnings("ignore:.* tokens stand in for a law known by its sampler")
@pytest.mark.parametrize("mu", catalogue.MEASURES.values(), ids=catalogue.MEASURES.keys())
@FAR
def test_every_number_stays_finite(mu, size):
    theta = catalogue.theta_for(mu, size=size)
    tilted = mu.tilt(theta)
    m, C = np.asarray(tilted.mean()), np.asarray(tilted.cov())
    assert np.isfinite(float(mu.cgf(theta)))
    assert np.isfinite(m).all()
    assert np.isfinite(C).all()
    assert np.linalg.eigvalsh(C)[0] >= -1e-9 * max(1.0, np.abs(C).max())
    # Λ is convex with Λ(0) = 0, so it lies under its tangent
    assert float(mu.cgf(theta)) <= m @ theta * (1 + 1e-12) + 1e-6


@pytest.mark.filterwarnings("ignore:.* tokens stand in for a law known by its sampler")
@FAR
def test_tilting_there_and_back_is_the_identity(size):
    for name, mu in catalogue.MEASURES.items():
        theta = catalogue.theta_for(mu, size=size)
        back = mu.tilt(theta).tilt(-theta)
        # the weights of a mixture go through Λ, of size 1e12 for Gaussians, and keep what its rounding leaves
        rounding = np.finfo(float).eps * abs(float(mu.cgf(theta)))
        scale = 1.0 + float(np.abs(mu.cov()).max())
        np.testing.assert_allclose(back.mean(), mu.mean(), atol=(1e-8 + 10 * rounding) * scale, err_msg=name)


@FAR
def test_the_softmax_becomes_the_maximum(size):
    points = catalogue.matrix(0, 50, 3)
    theta = catalogue.theta_for(lp.Empirical(points), size=size)
    tilted = lp.Empirical(points).tilt(theta)
    np.testing.assert_allclose(tilted.mean(), points[np.argmax(points @ theta)], rtol=1e-12)


@FAR
def test_the_cube_leans_on_its_face_at_distance_one_over_the_tilt(size):
    mu = lp.Cube([2.0]).tilt([size])
    np.testing.assert_allclose(2.0 - mu.mean(), [1 / size], rtol=1e-9)
    np.testing.assert_allclose(mu.cov(), [[1 / size**2]], rtol=1e-12)
    np.testing.assert_allclose(mu.cgf([0.5]), 2.0 * 0.5 + np.log(size / (size + 0.5)), rtol=1e-14)


@FAR
def test_rademacher_keeps_the_odds_of_the_rare_sign(size):
    mu = lp.Rademacher([1.0]).tilt([size])
    # undone up to 3: the probability of the rare sign went through e^{-2 size} and back
    np.testing.assert_allclose(mu.tilt([3.0 - size]).mean(), [np.tanh(3.0)], rtol=1e-9)


@pytest.mark.parametrize("dim", [2, 3, 6, 40])
@FAR
def test_the_sphere_keeps_its_radial_and_tangential_variance(dim, size):
    with mpmath.workdps(50):
        nu, k = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(size)
        A = mpmath.besseli(nu + 1, k) / mpmath.besseli(nu, k)
        radial, tangential, drop = float(1 - A**2 - (dim - 1) * A / k), float(A / k), float(1 - A)
    theta = np.zeros(dim)
    theta[0] = size
    mu = lp.Sphere(1.0, dim).tilt(theta)
    C = np.asarray(mu.cov())
    np.testing.assert_allclose(1 - mu.mean()[0], drop, rtol=1e-9)
    np.testing.assert_allclose(C[0, 0], radial, rtol=1e-8)
    np.testing.assert_allclose(C[1, 1], tangential, rtol=1e-12)


@FAR
def test_far_tilted_samples_agree_with_their_mean(size):
    for mu in (lp.Sphere(1.0, 5), lp.Cube([1.0, 2.0]), lp.Rademacher([1.0, 1.0])):
        tilted = mu.tilt(catalogue.theta_for(mu, size=size))
        samples = np.asarray(tilted.sample(jax.random.key(0), 4000))
        spread = np.sqrt(np.maximum(np.diag(tilted.cov()), 0) / 4000)
        np.testing.assert_array_less(np.abs(samples.mean(axis=0) - tilted.mean()), 5 * spread + 1e-12)


def test_float32_survives_scores_past_88():
    points = jnp.asarray(catalogue.matrix(1, 30, 2), jnp.float32)
    tilted = lp.Empirical(points).tilt(jnp.array([1e4, -3e4], jnp.float32))
    assert tilted.mean().dtype == jnp.float32
    assert bool(jnp.isfinite(tilted.mean()).all())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("L", [1, 2, 256, 257])
def test_equal_tokens_are_their_own_mean_at_every_tilt(L, dtype):
    prompt = lp.Empirical(np.ones((L, 2), dtype))
    for size in (1e3, 1e6, 1e8):
        tilted = prompt.tilt(np.full(2, size, dtype))
        np.testing.assert_allclose(tilted.mean(), np.ones(2), rtol=1e-6)
        np.testing.assert_allclose(tilted.cov(), np.zeros((2, 2)), atol=1e-10)
        np.testing.assert_allclose(jnp.exp(tilted.log_masses()).sum(), 1, rtol=1e-5)


def test_a_far_tilt_and_its_opposite_are_none():
    prompt = lp.Empirical([[0.0], [1.0]], [0.9, 0.1])
    np.testing.assert_allclose(prompt.tilt([-1e17]).cgf([1e17]), -np.log(0.9), rtol=1e-12)
