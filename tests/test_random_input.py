"""Over random shapes and scales: a right answer or a ValueError, never NaN."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import largeprompt as lp

pytestmark = pytest.mark.usefixtures("as_a_stranger")

fixed = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scales = st.floats(-8, 8).map(lambda exponent: 10.0**exponent) | st.sampled_from([0.0, 1e-300, 1e150, 1e300])
seeds = st.integers(0, 2**32 - 1)
# few shapes: each new one is compiled again
shapes = st.sampled_from([(1, 1), (1, 3), (2, 1), (7, 3)])


def right_or_refused(compute):
    """The values, or None after a ValueError."""
    try:
        values = [np.asarray(value) for value in compute()]
    except ValueError:
        return None
    assert all(np.isfinite(value).all() for value in values)
    return values


@fixed
@given(shapes, scales, scales, seeds)
def test_empirical_measures(shape, token_scale, tilt_scale, seed):
    rng = np.random.default_rng(seed)
    points, theta = token_scale * rng.normal(size=shape), tilt_scale * rng.normal(size=shape[1])
    weights = rng.dirichlet(np.ones(shape[0]))

    def compute():
        tilted = lp.Empirical(points, weights).tilt(theta)
        return tilted.mean(), tilted.cov(), lp.Empirical(points).cgf(theta)

    values = right_or_refused(compute)
    if values is not None:
        mean = values[0]
        slack = 1e-9 * np.abs(points).max()
        assert (mean >= points.min(axis=0) - slack).all()
        assert (mean <= points.max(axis=0) + slack).all()
        scores = points @ theta
        slack = 1e-9 * (np.abs(points) @ np.abs(theta)).max() + 1e-300  # XLA flushes subnormal numbers to zero
        assert scores.max() - np.log(shape[0]) - slack <= values[2] <= scores.max() + slack


@fixed
@given(shapes, scales, scales, seeds)
def test_gaussian_measures(shape, scale, tilt_scale, seed):
    rng = np.random.default_rng(seed)
    D = shape[1]
    root = np.sqrt(scale) * rng.normal(size=(D, D))
    theta = tilt_scale * rng.normal(size=D)

    def compute():
        mu = lp.Gaussian(np.zeros(D), root @ root.T)
        return mu.tilt(theta).mean(), mu.cgf(theta), mu.subgaussian()

    values = right_or_refused(compute)
    if values is not None:
        np.testing.assert_allclose(values[0], root @ (root.T @ theta), rtol=1e-6, atol=1e-6 * np.abs(values[0]).max())
        assert values[1] >= 0


@fixed
@given(st.sampled_from([1, 3]), scales, scales, seeds)
def test_bounded_measures(D, scale, tilt_scale, seed):
    theta = tilt_scale * np.random.default_rng(seed).normal(size=D)
    for mu, radius in ((lp.Sphere(scale, D), scale), (lp.Cube(np.full(D, scale)), scale * np.sqrt(D))):

        def compute(mu=mu):
            tilted = mu.tilt(theta)
            return tilted.mean(), tilted.cov(), mu.cgf(theta)

        values = right_or_refused(compute)
        if values is not None:
            assert np.linalg.norm(values[0]) <= radius * (1 + 1e-9)
            assert np.trace(values[1]) <= radius**2 * (1 + 1e-9)
            bound = float(np.hypot.reduce(theta)) * radius
            assert -1e-9 * (1 + bound) <= values[2] <= bound * (1 + 1e-9)


@fixed
@given(shapes, scales, scales, seeds)
def test_attention(shape, prompt_scale, weight_scale, seed):
    rng = np.random.default_rng(seed)
    points, z = prompt_scale * rng.normal(size=shape), rng.normal(size=shape[1])
    U, V = weight_scale * rng.normal(size=(shape[1], shape[1])), rng.normal(size=(2, shape[1]))

    def compute():
        layer, prompt = lp.SoftmaxAttention(U, V), lp.Empirical(points)
        return layer(prompt, z), layer.jacobian(prompt, z).U, lp.LinearAttention(U, V)(prompt, z)

    values = right_or_refused(compute)
    if values is not None:
        scores = np.asarray(points @ (U @ z), np.longdouble)
        masses = np.exp(scores - scores.max())
        expected = (masses / masses.sum()) @ points @ V.T
        # a score of size s is known to s times the rounding of a number, and weights move by as much
        slack = (1e-12 + 1e-15 * np.abs(scores).max()) * np.abs(points).max() * np.abs(V).sum() + 1e-300
        assert np.abs(values[0] - expected).max() <= slack
