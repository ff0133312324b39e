"""The Bayes risk against simulated ridge regression, closed forms, quadrature and its limits."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erfcx, exp1
from scipy.stats import binom

import largeprompt as lp
from catalogue import f
from icl_catalogue import FLAT, KMS, square_root
from largeprompt.icl import LinearRegression, RegressionOn, _bayes, _wishart, diagonal, identity, kms, spiked
from largeprompt.icl._bayes import bayes_prediction, bayes_risk, deterministic_equivalent, ridge_coefficients
from largeprompt.icl._wishart import bartlett, resolvent_trace
from significance import assert_close_in_sigmas, assert_mean_is

KEY = jax.random.key(3)
CUBE = RegressionOn(lp.Cube([1.0, 2.0, 0.5]), 0.2, diagonal([1.0, 0.5, 2.0]))
TASKS = {
    "isotropic": LinearRegression(identity(3), 0.3),
    "kms": LinearRegression(kms(3), 0.1, diagonal([1.0, 0.2, 0.5])),
    "singular Sigma": LinearRegression(diagonal([1.0, 2.0, 0.0]), 0.1, kms(3), query_Sigma=kms(3)),
    "singular Omega": LinearRegression(kms(3), 0.1, np.ones((3, 3))),
    "two targets": LinearRegression(kms(3), 0.2, targets=2),
    "other queries": LinearRegression(kms(3), 0.1, query_Sigma=spiked(3, 4.0, [1.0, 1.0, -1.0])),
    "no noise": LinearRegression(kms(3), 0.0, diagonal([1.0, 0.2, 0.5])),
    "no noise, isotropic": LinearRegression(identity(3), query_Sigma=kms(3)),
    "a cube": CUBE,
    "a cube without noise": RegressionOn(lp.Cube([1.0, 2.0, 0.5]), 0.0, kms(3)),
    "a shifted Gaussian": RegressionOn(lp.Gaussian([1.0, 0.0, 0.0], kms(3)), 0.1, queries=lp.Cube([1.0, 1.0, 3.0])),
}


def simulated(task, L: int, ridge: float | None = None, n: int = 20_000) -> np.ndarray:
    """Half the squared error at a query of ridge regression in NumPy, dual form, on `n` prompts of `L` pairs."""
    rng, d, k = np.random.default_rng(L), task.d, task.targets
    if isinstance(task, LinearRegression):
        X = rng.normal(size=(n, L, d)) @ square_root(task.Sigma)
        x = rng.normal(size=(n, d)) @ square_root(task.query_Sigma)
    else:
        X = np.asarray(task.covariates.sample(KEY, n * L)).reshape(n, L, d)
        x = np.asarray(task.queries.sample(jax.random.key(4), n))
    Omega, s = np.asarray(task.Omega), math.sqrt(float(task.noise))
    W = rng.normal(size=(n, k, d)) @ square_root(Omega)
    Y = X @ W.transpose(0, 2, 1) + s * rng.normal(size=(n, L, k))
    y = np.einsum("bkd,bd->bk", W, x) + s * rng.normal(size=(n, k))
    ridge = s**2 if ridge is None else ridge
    kernel = X @ Omega @ X.transpose(0, 2, 1) + ridge * np.eye(L)
    solved = np.linalg.solve(kernel, Y) if ridge else np.linalg.pinv(kernel, rcond=1e-13, hermitian=True) @ Y
    fitted = Omega @ X.transpose(0, 2, 1) @ solved
    return np.sum((np.einsum("bdk,bd->bk", fitted, x) - y) ** 2, 1) / 2


@pytest.mark.parametrize("L", [1, 3, 8])
@pytest.mark.parametrize("task", list(TASKS.values()), ids=list(TASKS))
def test_risk_is_that_of_simulated_ridge_regression(task, L):
    interpolates = float(task.noise) == 0 and L >= 3
    errors, risk = simulated(task, L, n=2_000 if interpolates else 10_000), bayes_risk(task, L, max_draws=2**13)
    if interpolates:
        assert risk.value == 0
        assert np.quantile(errors, 0.99) < 1e-12  # a few prompts are close to singular
    else:
        assert_mean_is(errors, float(risk.value), float(risk.stderr))


def test_risk_at_a_moderate_length_is_that_of_simulated_ridge_regression():
    assert_mean_is(simulated(KMS, 20, n=5_000), float(bayes_risk(KMS, 20).value))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_any_other_ridge_parameter_does_worse_on_the_same_prompts(factor):
    for L in (3, 8):
        gap = simulated(KMS, L, ridge=factor * 0.1) - simulated(KMS, L)
        assert gap.mean() > 5 * gap.std() / math.sqrt(len(gap))


TABLE = {5: 0.198478, 10: 0.097927, 20: 0.066979, 50: 0.055609, 100: 0.052645, 1000: 0.050251, 10**4: 0.050025}


@pytest.mark.parametrize(("L", "value"), TABLE.items())
def test_isotropic_risks_of_the_experiments(L, value):
    np.testing.assert_allclose(bayes_risk(FLAT, L).value, value, atol=6e-7)


@pytest.mark.parametrize(("L", "value"), [(5, 0.17459), (10, 0.09425), (20, 0.066579), (50, 0.055572)])
def test_kms_risks_of_the_experiments(L, value):
    np.testing.assert_allclose(bayes_risk(KMS, L).value, value, atol=5e-5 if L < 20 else 2e-6)  # were sampled: ± 3e-5


@pytest.mark.parametrize("D", [1e-24, 1e-6, 0.2, 40.0])
def test_mean_resolvent_in_one_dimension_is_a_special_function(D):
    one = np.ones(1)
    expected = math.sqrt(math.pi / (2 * D)) * erfcx(math.sqrt(D / 2))
    np.testing.assert_allclose(resolvent_trace(one, D * one, 1), expected, rtol=1e-13)
    np.testing.assert_allclose(resolvent_trace(one, D * one, 2), math.exp(D / 2) * exp1(D / 2) / 2, rtol=1e-13)
    # by parts, E 1/(χ²_{L+2} + D) = (1 - D E 1/(χ²_L + D)) / L
    for L in (1, 2, 9):
        longer = (1 - D * resolvent_trace(one, D * one, L)) / L
        np.testing.assert_allclose(resolvent_trace(one, D * one, L + 2), longer, rtol=1e-11)


@pytest.mark.parametrize(("n", "L"), [(2, 1), (4, 2), (4, 3), (4, 4), (4, 5), (4, 30), (20, 12), (20, 25), (60, 64)])
def test_mean_resolvent_is_that_of_sampled_wishart_matrices(n, L):
    D = np.geomspace(0.3, 3, n)
    T = bartlett(KEY, n, L, 40_000 if n < 10 else 4_000)
    inverse = np.linalg.inv(T @ T.transpose(0, 2, 1) + np.diag(D))
    for H in (np.ones(n), np.eye(n)[0], np.arange(n) / n):
        assert_mean_is(np.einsum("bii,i->b", inverse, H), resolvent_trace(H, D, L))


@pytest.mark.parametrize(("n", "L"), [(3, 2), (5, 9), (20, 7), (20, 10**4)])
def test_mean_resolvent_is_converged_in_its_quadrature(monkeypatch, n, L):
    D = np.geomspace(1e-12, 10, n)
    coarse = resolvent_trace(np.ones(n), D, L)
    monkeypatch.setattr(_wishart, "NODES", 22)
    monkeypatch.setattr(_wishart, "DEPTH", 55.0)
    np.testing.assert_allclose(coarse, resolvent_trace(np.ones(n), D, L), rtol=1e-13)


@pytest.mark.parametrize(("n", "L"), [(2, 1), (5, 3), (8, 8), (20, 6)])
def test_mean_resolvent_of_more_tokens_follows_from_the_same_in_fewer_dimensions(n, L):
    """The nonzero eigenvalues of Wishart_n(I, L) and Wishart_L(I, n) have one law."""
    tall = resolvent_trace(np.ones(n), np.full(n, 0.7), L)
    wide = resolvent_trace(np.ones(L), np.full(L, 0.7), n)
    np.testing.assert_allclose(tall, wide + (n - L) / 0.7, rtol=1e-13)


def test_mean_inverse_wishart_is_recovered_as_the_noise_vanishes():
    for n, L in ((1, 9), (5, 12), (20, 60)):
        np.testing.assert_allclose(resolvent_trace(np.ones(n), np.full(n, 1e-13), L), n / (L - n - 1), rtol=1e-10)


def test_risk_falls_with_every_token_and_from_the_prior_to_the_floor():
    for task in (FLAT, KMS, TASKS["singular Sigma"], TASKS["no noise"]):
        lengths = [*range(7), 11, 100, 10**8, math.inf]
        values = np.array([float(bayes_risk(task, L).value) for L in lengths])
        assert np.all(np.diff(values) <= 1e-15)
        prior = float(task.noise) + float(jnp.sum(task.query_Sigma * task.Omega))
        np.testing.assert_allclose(values[0], prior / 2, rtol=1e-14)
    assert float(bayes_risk(KMS, math.inf).value) == 0.05


def test_what_prompts_cannot_teach_stays_in_the_limit():
    task = LinearRegression(diagonal([1.0, 0.0]), 0.1, [[1.0, 0.5], [0.5, 1.0]], query_Sigma=identity(2))
    np.testing.assert_allclose(bayes_risk(task, math.inf).value, (0.1 + 0.75) / 2, rtol=1e-14)
    np.testing.assert_allclose(bayes_risk(task, 10**12).value, (0.1 + 0.75) / 2, rtol=1e-11)


@pytest.mark.parametrize("task", [FLAT, KMS])
def test_risk_of_long_prompts_is_its_expansion(task):
    d, s2 = 5, 0.1
    ridge = s2 * float(jnp.trace(jnp.linalg.inv(task.Omega @ task.Sigma)))
    for L in (10**3, 10**5, 10**7):
        two = d / (L - d - 1) - ridge * (L - 1) / ((L - d) * (L - d - 1) * (L - d - 3))
        excess = float(bayes_risk(task, L).value) / (s2 / 2) - 1
        assert abs(excess - two) < 30 * ridge**2 / L**3 + 1e-15
    np.testing.assert_allclose(bayes_risk(task, 10**12).value, s2 / 2 * (1 + d / 1e12), rtol=1e-15)


def test_sampled_prompts_agree_with_the_exact_mean():
    """A Gaussian written as an affine image is not recognised, and its prompts are drawn."""
    drawn = RegressionOn(lp.Affine(np.eye(5), np.zeros(5), lp.Gaussian(np.zeros(5), kms(5))), 0.1, np.eye(5) / 5)
    for L, method in (
        (2, "Monte Carlo"),
        (12, "Monte Carlo"),
        (10**4, "expansion in 1/L"),
        (10**12, "expansion in 1/L"),
    ):
        estimate, exact = bayes_risk(drawn, L, max_draws=2**13), bayes_risk(KMS, L)
        assert estimate.method == method
        assert exact.exact
        assert_close_in_sigmas(estimate.value, exact.value, estimate.stderr)


def test_a_centred_gaussian_is_recognised():
    task = RegressionOn(lp.Gaussian(np.zeros(5), kms(5)), 0.1, np.eye(5) / 5)
    for L in (3, 10):
        np.testing.assert_allclose(bayes_risk(task, L).value, bayes_risk(KMS, L).value, rtol=1e-14)
        assert bayes_risk(task, L).exact


@pytest.mark.parametrize("L", [3, 5, 30])
def test_high_ranks_are_sampled(monkeypatch, L):
    exact = bayes_risk(KMS, L)
    monkeypatch.setattr(_bayes, "EXACT_RANK", 4)
    estimate = bayes_risk(KMS, L, KEY, rtol=1e-3)
    assert 0 < float(estimate.stderr) < 1e-3 * float(exact.value - 0.05)
    assert_close_in_sigmas(estimate.value, exact.value, estimate.stderr)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("L", [5, 300])
def test_risk_of_two_rare_atoms_is_a_binomial_mean(L):
    p, s2 = 0.01, 0.1
    task = RegressionOn(lp.Empirical(np.eye(2), [1 - p, p]), s2)
    k = np.arange(L + 1)
    left = np.sum(binom.pmf(k, L, p) * (p / (s2 + k) + (1 - p) / (s2 + L - k)))
    risk = bayes_risk(task, L, rtol=5e-3 if L == 5 else 1e-2)
    assert_close_in_sigmas(risk.value, s2 / 2 * (1 + left), risk.stderr)


def test_more_draws_are_spent_until_the_error_is_asked_for():
    loose, tight = (bayes_risk(CUBE, 4, rtol=rtol) for rtol in (1e-2, 2e-3))
    for estimate, rtol in ((loose, 1e-2), (tight, 2e-3)):
        assert float(estimate.stderr) <= rtol * float(estimate.value - 0.1)
    assert_close_in_sigmas(loose.value, tight.value, loose.stderr)
    assert float(bayes_risk(CUBE, 4, rtol=1e-2).value) == float(loose.value)


def test_deterministic_equivalent_is_as_crude_as_documented():
    for task in (FLAT, KMS):
        ratio = [
            float(deterministic_equivalent(task, L).value / bayes_risk(task, L).value) for L in (1, 5, 10, 50, 10**6)
        ]
        assert 0.91 < min(ratio) < max(ratio) <= 1 + 1e-12
        assert ratio[3] > 0.997
    for L in (0, math.inf):
        assert float(deterministic_equivalent(KMS, L).value) == float(bayes_risk(KMS, L).value)
    assert float(deterministic_equivalent(TASKS["no noise"], 3).value) == 0
    np.testing.assert_allclose(deterministic_equivalent(TASKS["no noise, isotropic"], 2).value, 0.5, rtol=1e-12)


def test_prediction_is_ridge_regression():
    tokens = jax.random.normal(KEY, (7, 5))
    X, Y, x = np.asarray(tokens[:, :3]), np.asarray(tokens[:, 3:]), np.array([1.0, -2.0, 0.5])
    expected = np.linalg.solve(X.T @ X + 0.3 * np.linalg.inv(kms(3)), X.T @ Y).T
    task = LinearRegression(identity(3), 0.3, kms(3), targets=2)
    np.testing.assert_allclose(ridge_coefficients(task, tokens), expected, rtol=1e-11)
    np.testing.assert_allclose(bayes_prediction(task, tokens, x), expected @ x, rtol=1e-11)
    singular = LinearRegression(identity(3), 0.3, np.ones((3, 3)), targets=2)
    total = X.sum(1)  # the three coefficients are one
    expected = total @ Y / (total @ total + 0.3)
    np.testing.assert_allclose(bayes_prediction(singular, tokens, x), expected * x.sum(), rtol=1e-7)


def test_no_pairs_predict_zero():
    np.testing.assert_array_equal(bayes_prediction(KMS, np.zeros((0, 6)), np.ones(5)), [0.0])
    assert ridge_coefficients(KMS, jnp.zeros((0, 6))).shape == (1, 5)


def test_without_noise_the_prompt_is_interpolated_with_least_prior_norm():
    Omega = kms(4)
    task, tokens = LinearRegression(identity(4), 0.0, Omega), jax.random.normal(KEY, (2, 5))
    W = np.asarray(ridge_coefficients(task, tokens))
    X, y = np.asarray(tokens[:, :4]), np.asarray(tokens[:, 4])
    np.testing.assert_allclose(X @ W[0], y, rtol=1e-10)
    np.testing.assert_allclose(W[0], Omega @ X.T @ np.linalg.solve(X @ Omega @ X.T, y), rtol=1e-10)
    twice = ridge_coefficients(task, jnp.concatenate([tokens, tokens]))
    np.testing.assert_allclose(twice, W, rtol=1e-10)


def test_prediction_can_be_compiled_batched_and_differentiated():
    tokens, x = jax.random.normal(KEY, (6, 7, 6)), jnp.ones(5)
    batch = jax.jit(jax.vmap(bayes_prediction, (None, 0, None)))(KMS, tokens, x)
    np.testing.assert_allclose(batch[2], bayes_prediction(KMS, tokens[2], x), rtol=1e-12)
    slope = jax.grad(lambda x: bayes_prediction(KMS, tokens[0], x)[0])(x)
    np.testing.assert_allclose(slope, ridge_coefficients(KMS, tokens[0])[0], rtol=1e-12)


CASES = {
    "a negative length": (
        lambda: bayes_risk(KMS, -1),
        "L is -1; a prompt length is a whole number of at least 0, or math.inf",
    ),
    "half a length": (lambda: bayes_risk(KMS, 1.5), "L is 1.5; a prompt length is"),
    "a length NaN": (lambda: deterministic_equivalent(KMS, math.nan), "L is nan; a prompt length is"),
    "another loss": (
        lambda: bayes_risk(f(KMS.with_loss(lambda p, y: jnp.sum((p - y) ** 4))), 3),
        "task is WithLoss(...); the Bayes risk is known for LinearRegression and RegressionOn under squared error",
    ),
    "no task": (lambda: bayes_risk(f(3), 3), "task is of type int; it must be a task"),
    "an integer key": (lambda: bayes_risk(CUBE, 3, f(0)), "key is 0; it must be a JAX key"),
    "a negative tolerance": (lambda: bayes_risk(CUBE, 3, rtol=-1.0), "rtol is -1; it must be at least 0"),
    "a single draw": (lambda: bayes_risk(CUBE, 3, max_draws=1), "max_draws is 1; it must be at least 2"),
    "a traced task": (
        lambda: jax.jit(lambda s2: bayes_risk(LinearRegression(kms(2), s2), 3).value)(0.1),
        "the Bayes risk is not traced; call it outside of jit",
    ),
    "tokens of another task": (
        lambda: bayes_prediction(KMS, np.ones((3, 5)), np.ones(5)),
        "tokens has shape (3, 5); it must be (any, 6)",
    ),
    "a token NaN": (lambda: bayes_prediction(KMS, np.full((3, 6), np.nan), np.ones(5)), "tokens[0, 0] is nan"),
    "x with its target": (
        lambda: bayes_prediction(KMS, np.ones((3, 6)), np.ones(6)),
        "x has shape (6,); it must be (5)",
    ),
}


@pytest.mark.usefixtures("as_a_stranger")
@pytest.mark.parametrize(("call", "message"), list(CASES.values()), ids=list(CASES))
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["isotropic", "kms", "singular Sigma", "singular Omega", "two targets", "other queries"]
)
def test_a_prompt_of_any_length_has_a_risk_that_goes_on_from_shorter_ones(name):
    task = TASKS[name]
    floor = float(bayes_risk(task, math.inf).value)
    excess = [float(bayes_risk(task, L).value) - floor for L in (10**12, 10**13, 10**23, 10**100, 1e300)]
    assert all(math.isfinite(value) and value >= -1e-15 for value in excess)
    problem = _bayes._reduced(task)
    exact = resolvent_trace(np.diag(problem.K) * problem.D, problem.D, 10**13)
    assert _bayes._learned_exactly(problem, 10**13) == pytest.approx(exact, rel=1e-11)
