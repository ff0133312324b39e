"""Single-index tasks, logistic labels, and the best layer of a family on them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.optimize import minimize_scalar
from scipy.special import expit, ive, softmax

import largeprompt as lp
from icl_catalogue import FLAT, sphere_rate
from largeprompt.dynamics import gradient_flow
from largeprompt.icl import (
    LabelledTokens,
    LogisticLabel,
    NoisyLink,
    SingleIndex,
    aligned_blocks,
    from_blocks,
    optimal_in_family,
    optimal_softmax,
    risk,
)
from significance import assert_close_in_sigmas, assert_mean_is

W = np.array([1.0, -0.7])
GAUSSIAN, CIRCLE = lp.Gaussian(np.zeros(2), np.array([[1.0, 0.3], [0.3, 0.8]])), lp.Sphere(1.5, 2)
LAWS = {
    "ReLU on a circle": LabelledTokens(CIRCLE, jnp.asarray(W), NoisyLink(jax.nn.relu, 0.1, [0.0])),
    "signs on Gaussian covariates": LabelledTokens(GAUSSIAN, jnp.asarray(W), LogisticLabel()),
}
THETA = jnp.array([0.4, 0.2, 0.5])


def reader(scale, d: int = 2) -> lp.SoftmaxAttention:
    """Scores covariates by covariates, and averages labels."""
    U = jnp.zeros((d + 1, d + 1)).at[:d, :d].set(scale * jnp.eye(d))
    return lp.SoftmaxAttention(U, jnp.zeros((1, d + 1)).at[0, d].set(1.0))


@pytest.mark.parametrize("name", LAWS)
def test_labelled_tokens_obey_the_laws_of_measures(name):
    mu = LAWS[name]

    @jax.jit
    def numbers(theta):
        tilted = mu.tilt(theta)
        mean, cov = tilted.mean(), tilted.cov()
        pairs = [(mean, jax.grad(mu._cgf)(theta)), (cov, jax.jacfwd(lambda theta: mu.tilt(theta).mean())(theta))]
        pairs += [(tilted.tilt(-0.5 * theta).mean(), mu.tilt(0.5 * theta).mean())]
        return pairs, mu.cgf(theta), mu.sample(jax.random.key(1), 40_000)

    pairs, cgf, tokens = numbers(THETA)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-12)
    tokens, mean = np.asarray(tokens), pairs[0][0]
    importance = np.exp(tokens @ np.asarray(THETA) - float(cgf))
    assert_mean_is(importance, 1.0)
    assert_mean_is(importance[:, None] * (tokens - np.asarray(mean)), 0.0)


def test_the_limit_on_signs_is_the_mean_of_tanh_under_the_tilt():
    mu, x = LAWS["signs on Gaussian covariates"], np.array([0.7, -0.4])
    nodes, shares = hermegauss(80)
    Sigma = np.asarray(GAUSSIAN.Gamma)
    t = W @ Sigma @ (0.6 * x) + math.sqrt(W @ Sigma @ W) * nodes
    expected = shares @ np.tanh(t / 2) / shares.sum()
    found = jax.jit(lambda z: reader(0.6)(mu, z)[0])(np.append(x, 0.0))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def simulated(L: int, n: int) -> np.ndarray:
    """Logistic losses of `reader(0.6)` on prompts of signs, in NumPy alone."""
    rng = np.random.default_rng(5)
    root = np.linalg.cholesky(np.asarray(GAUSSIAN.Gamma))
    w, x, xq = rng.normal(size=(n, 2)), rng.normal(size=(n, L, 2)) @ root.T, rng.normal(size=(n, 2)) @ root.T
    y = np.where(rng.random((n, L)) < expit(np.einsum("nld,nd->nl", x, w)), 1.0, -1.0)
    yq = np.where(rng.random(n) < expit(np.sum(w * xq, axis=1)), 1.0, -1.0)
    shares = softmax(0.6 * np.einsum("nld,nd->nl", x, xq), axis=1)
    return np.logaddexp(0.0, -yq * np.sum(shares * y, axis=1))


SIGNS = SingleIndex(LogisticLabel(), GAUSSIAN, lp.Gaussian(np.zeros(2), np.eye(2)))


def test_the_logistic_risk_is_that_of_simulated_prompts():
    found = risk(reader(0.6), SIGNS, 20, rtol=0.02)
    assert_mean_is(simulated(20, 20_000), float(found.value), float(found.stderr))


def test_no_prompt_beats_one_who_knows_the_direction():
    covariates = lp.Sphere(1.3, 2)
    task = SingleIndex(LogisticLabel(), covariates, lp.Gaussian(np.zeros(2), np.eye(2)))
    nodes, shares = hermegauss(80)
    t = 1.3 * nodes  # w·x is N(0, 1.3²) for every x
    exact = shares @ (np.logaddexp(0, -t) * expit(t) + np.logaddexp(0, t) * expit(-t)) / shares.sum()
    found = task.oracle_risk()
    assert_close_in_sigmas(found.value, exact, found.stderr)
    noisy = SingleIndex(NoisyLink(jnp.cos, 0.4), covariates, covariates).oracle_risk()
    assert_close_in_sigmas(noisy.value, 0.2, noisy.stderr)


def test_a_flow_on_infinite_prompts_lowers_the_logistic_risk():
    flow = gradient_flow(reader(0.3), SIGNS, math.inf, [0.0, 1.0, 4.0], draws=2**5, rtol=1e-3, atol=1e-4)
    assert (np.diff(flow.risk) < 0).all()


# The best layer of a family


def test_the_best_of_a_family_on_gaussian_regression_is_the_optimal_softmax():
    found = optimal_in_family(
        lambda p: from_blocks(aligned_blocks(jnp.exp(p[0]) * jnp.eye(5), p[1], FLAT), lp.SoftmaxAttention),
        [-1.0, 2.0],
        FLAT,
        100,
    )
    best = optimal_softmax(FLAT, 100)
    np.testing.assert_allclose(found.risk.value, best.risk.value, rtol=1e-9)
    np.testing.assert_allclose(found.parameters[1], best.attention.V[0, -1], rtol=1e-4)
    assert not np.any(found.stderr)


def test_the_best_scale_on_a_sphere_is_that_of_the_expansion():
    """Averages of labels on the unit sphere, for y = w·x + noise: R_∞ + rate/L has a closed form."""
    d, L, slope, noise = 3, 150, 2.0, 0.1
    tau = slope**2 / d
    task = SingleIndex(NoisyLink(lambda t: t, noise), lp.Sphere(1.0, d), lp.Sphere(slope, d))
    found = optimal_in_family(lambda p: reader(jnp.exp(p[0]), d), [2.0], task, L, draws=2**11)

    def expanded(log_kappa):
        kappa = math.exp(log_kappa)
        limit = ((ive(d / 2, kappa) / ive(d / 2 - 1, kappa) - 1) ** 2 * tau + noise) / 2
        return limit + sphere_rate(d, kappa, 1.0, tau, noise) / L

    search: Any = minimize_scalar(expanded, bounds=(0, 6), method="bounded")
    assert 0 < found.stderr[0] < 0.1
    assert_close_in_sigmas(found.parameters[0], search.x, found.stderr[0])
