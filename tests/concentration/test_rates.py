"""The 1/L laws against brute force, closed forms and measured deviations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from largeprompt.concentration import deviation, output_bias, output_covariance, rates
from significance import assert_close_in_sigmas, assert_mean_is

D = 3
ATTENTION = lp.SoftmaxAttention(0.3 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D))
z = catalogue.matrix(2, D)
SMOOTH = {
    name: mu
    for name, mu in catalogue.MEASURES.items()
    if mu.dim == D and not isinstance(mu, lp.FromCGF | lp.FromSampler) and name != "empirical, one token"
}
each_law = pytest.mark.parametrize("mu", SMOOTH.values(), ids=SMOOTH.keys())


@each_law
def test_the_fourth_moment_is_that_of_samples(mu):
    """Against the sum over the tokens of a large sample; exactly, where the law is itself a finite prompt."""
    b, W, A = 0.3 * catalogue.matrix(3, D), catalogue.covariance(4, D), catalogue.covariance(5, D)
    ours = float(jax.jit(lambda b: mu._fourth(b, jnp.asarray(A), jnp.asarray(W)))(b))
    exact = isinstance(mu, lp.Empirical)
    y = np.asarray(mu.points if exact else mu.sample(jax.random.key(5), 200_000)) - np.asarray(mu.mean()) + b
    values = np.einsum("ni,ij,nj->n", y, A, y) * np.einsum("ni,ij,nj->n", y, W, y)
    if exact:
        np.testing.assert_allclose(ours, np.exp(mu.log_masses()) @ values, rtol=1e-9)
    else:
        assert_mean_is(values, ours)


def test_gaussian_rates_are_the_closed_forms():
    """e^ν(a + b²) for the output and ‖z‖²e^ν[(a+b²)(‖Γu‖²+trΓ)+‖Γv‖²+2b uᵀΓ²v] for ∇_U, ν = uᵀΓu, one output v."""
    Gamma = catalogue.covariance(6, D)
    v, U = catalogue.matrix(7, D), np.asarray(ATTENTION.U)
    u = U @ z
    nu, a, b = u @ Gamma @ u, v @ Gamma @ v, v @ Gamma @ u
    one = lp.SoftmaxAttention(U, v[None])
    for m in (np.zeros(D), catalogue.matrix(8, D)):
        constants = rates(one, lp.Gaussian(m, Gamma), z)
        np.testing.assert_allclose(constants.output, np.exp(nu) * (a + b**2), rtol=1e-12)
        bracket = (a + b**2) * (u @ Gamma @ Gamma @ u + np.trace(Gamma)) + v @ Gamma @ Gamma @ v
        bracket += 2 * b * u @ Gamma @ Gamma @ v
        np.testing.assert_allclose(constants.U, z @ z * np.exp(nu) * bracket, rtol=1e-10)
        np.testing.assert_allclose(constants.V, np.exp(nu) * (np.trace(Gamma) + u @ Gamma @ Gamma @ u), rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in SMOOTH if name != "mixture of kinds"])  # slow to compile
def test_measured_deviations_are_the_rate_over_the_length(name):
    mu = SMOOTH[name]
    L, names = 1000, ("output", "V", "U")
    measured = deviation(ATTENTION, mu, z, L, names, jax.random.key(9), replicates=400)
    predicted = rates(ATTENTION, mu, z)
    for name in names:
        constant = float(getattr(predicted, name))
        # the next order, measured to be below 40/L of the first for these laws
        stderr = np.hypot(L * measured[name].stderr[0], 40 / L * constant / 5)
        assert_close_in_sigmas(L * measured[name].mean_square[0], constant, stderr)


def test_the_covariance_and_bias_of_the_output_are_predicted():
    """On a law that is not Gaussian, at a query far enough for the bias to be seen; prompts are NumPy's."""
    mu, query = lp.Product(lp.Sphere(1.5, 2), lp.Rademacher(1.0)), 8 * z
    L, n, rng = 300, 40_000, np.random.default_rng(10)
    U, V = np.asarray(ATTENTION.U), np.asarray(ATTENTION.V)

    def outputs(prompts):
        angle, sign = 2 * np.pi * rng.random((prompts, L)), rng.choice([-1.0, 1.0], (prompts, L))
        tokens = np.stack([1.5 * np.cos(angle), 1.5 * np.sin(angle), sign], axis=2)
        weights = np.exp(tokens @ (U @ query))
        return (weights[:, None] @ tokens)[:, 0] / weights.sum(axis=1, keepdims=True) @ V.T

    errors = np.concatenate([outputs(n // 20) for _ in range(20)]) - np.asarray(ATTENTION(mu, query))
    covariance, bias = output_covariance(ATTENTION, mu, query), output_bias(ATTENTION, mu, query)
    # five times these is 20/L of the first order, which the next order stays below for this law
    assert_mean_is(L * np.einsum("ni,nj->nij", errors, errors), covariance, 4 / L * np.abs(covariance).max())
    assert_mean_is(L * errors, bias, 4 / L * np.abs(bias).max())
    np.testing.assert_allclose(np.trace(covariance), rates(ATTENTION, mu, query).output, rtol=1e-12)
    stderr = L * errors.std(axis=0) / np.sqrt(n)
    assert np.max(np.abs(bias) / stderr) > 5  # so that a prediction of no bias would have failed


def test_output_error_decays_as_one_over_length():
    mu = lp.Rademacher(np.ones(D))
    queries = catalogue.matrix(11, 8, D)
    found = deviation(ATTENTION, mu, queries, [300, 1000, 3000, 10_000], "output", jax.random.key(12), replicates=200)
    fit = found.fit()
    assert_close_in_sigmas(fit.slope, -1, fit.stderr)
    assert fit.stderr < 0.03
