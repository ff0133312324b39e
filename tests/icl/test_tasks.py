"""What a task draws, against simulation in NumPy; tasks of a user's own; one definition of R_L and R_∞."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from catalogue import matrix
from icl_catalogue import TASKS, attend, mild, simulated, token_covariance, weights
from largeprompt.icl import (
    AbstractTask,
    Instance,
    LinearRegression,
    RegressionOn,
    diagonal,
    identity,
    kms,
    risk,
    spiked,
)
from significance import assert_close_in_sigmas, assert_mean_is

SOFTMAX, LINEAR = lp.SoftmaxAttention, lp.LinearAttention
KMS = TASKS["anisotropic"]
ANY = 1.0  # a tolerance that the first draws meet


draw_many = eqx.filter_jit(lambda task, keys: jax.vmap(task.draw)(keys))


def moments(rows: np.ndarray) -> np.ndarray:
    """z zᵀ of each row."""
    return rows[:, :, None] * rows[:, None]


# What is drawn


@pytest.mark.parametrize("name", TASKS)
def test_tokens_have_the_covariance_of_the_regression(name):
    task = TASKS[name]
    W = matrix(1, task.targets, 2)
    rng = np.random.default_rng(2)
    values, vectors = np.linalg.eigh(np.asarray(task.Sigma))
    x = rng.normal(size=(100_000, 2)) * np.sqrt(values.clip(0)) @ vectors.T
    y = x @ W.T + math.sqrt(float(task.noise)) * rng.normal(size=(100_000, task.targets))
    assert_mean_is(moments(np.concatenate([x, y], axis=1)), task.token_covariance(jnp.asarray(W)))
    np.testing.assert_allclose(task.token_covariance(jnp.asarray(W)), token_covariance(task, W), atol=1e-12)


@pytest.mark.parametrize("name", TASKS)
def test_drawn_instances_have_the_laws_of_the_task(name):
    task, k = TASKS[name], TASKS[name].targets
    drawn = draw_many(task, jax.random.split(jax.random.key(0), 20_000))
    x, y, cov = np.asarray(drawn.query[:, :2]), np.asarray(drawn.target), np.asarray(drawn.measure._cov())
    assert not np.any(drawn.query[:, 2:])
    assert_mean_is(moments(x), task.query_Sigma)
    s2, total = float(task.noise), float(jnp.trace(task.query_Sigma @ task.Omega))
    assert_mean_is(moments(y), (total + s2) * np.eye(k))
    tau1 = float(np.trace(np.asarray(task.Sigma) @ np.asarray(task.Omega)))
    np.testing.assert_allclose(task.tau1, tau1, rtol=1e-12)
    assert_mean_is(cov[:, 2:, 2:], (tau1 + s2) * np.eye(k))
    np.testing.assert_allclose(cov[:, :2, :2], np.broadcast_to(task.Sigma, (20_000, 2, 2)), atol=1e-10)
    # the target goes with the prompt: E y xᵀ Σ (ΣW)ᵀ …, through the cross block
    if name != "singular":
        W = cov[:, 2:, :2] @ np.linalg.inv(np.asarray(task.Sigma))
        residual = y - np.einsum("bkd,bd->bk", W, x)
        assert_mean_is(moments(residual), s2 * np.eye(k))
        assert_mean_is(moments(W[:, 0]), task.Omega)


def test_rho2_is_half_the_variance_of_the_signal():
    w = np.random.default_rng(0).normal(size=(200_000, 2)) @ np.linalg.cholesky(np.asarray(KMS.Omega)).T
    signal = np.sum(w @ np.asarray(KMS.Sigma) * w, axis=1)
    assert_mean_is((signal - signal.mean()) ** 2, 2 * float(KMS.rho2))


def test_the_experiment_has_unit_signal_and_a_tenth_of_noise():
    for Sigma in (identity(5), kms(5)):
        task = LinearRegression.experiment(Sigma)
        np.testing.assert_allclose(task.tau1, 1.0, rtol=1e-12)
        assert task.noise == 0.1
        assert (task.dim, task.targets) == (6, 1)


def test_covariances_are_what_they_are_called():
    np.testing.assert_array_equal(identity(3), np.eye(3))
    for i in range(4):
        for j in range(4):
            assert kms(4, -0.3)[i, j] == pytest.approx((-0.3) ** abs(i - j), rel=1e-14)
    np.testing.assert_array_equal(diagonal([1.0, 0.0, 2.5]), np.diag([1.0, 0.0, 2.5]))
    np.testing.assert_allclose(np.linalg.eigvalsh(spiked(4, 2.5, [1.0, -2.0, 0.0, 3.0])), [1, 1, 1, 3.5], atol=1e-13)
    n = np.array([1.0, -2.0, 0.0, 3.0])
    np.testing.assert_allclose(spiked(4, 2.5, n) @ n, 3.5 * n, atol=1e-13)
    np.testing.assert_allclose(spiked(3, -1.0), np.diag([0.0, 1.0, 1.0]), atol=1e-15)
    np.testing.assert_array_equal(kms(3, 0.0), np.eye(3))


# Regression on any law


def test_regression_on_a_gaussian_is_linear_regression():
    one = TASKS["two targets, other queries"]
    two = RegressionOn(
        lp.Gaussian(np.zeros(2), one.Sigma),
        float(one.noise),
        queries=lp.Gaussian(np.zeros(2), one.query_Sigma),
        targets=2,
    )
    U, V = weights(3, one, size=0.3)
    layer = SOFTMAX(U, V)
    for L in (5, math.inf):
        exact, found = risk(layer, one, L, rtol=5e-3), risk(layer, two, L, rtol=ANY)
        assert_close_in_sigmas(found.value, exact.value, np.hypot(found.stderr, exact.stderr))


MIXED = [lp.Gaussian([1.0, 0.0], mild(4)), lp.Gaussian([-1.0, 0.5], mild(5))]
LAWS = {
    "cube, rademacher and sphere": lp.Product(lp.Cube(2.0), lp.Rademacher(0.5), lp.Sphere(1.5, 2)),
    "mixture": lp.Mixture([0.3, 0.7], MIXED),
}


def covariates(name: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """The same laws in NumPy."""
    if name == "mixture":
        first = rng.normal(size=(n, 2)) @ np.linalg.cholesky(mild(4)).T + [1.0, 0.0]
        second = rng.normal(size=(n, 2)) @ np.linalg.cholesky(mild(5)).T + [-1.0, 0.5]
        return np.where(rng.random(n)[:, None] < 0.3, first, second)
    angle = rng.uniform(0, 2 * np.pi, n)
    circle = 1.5 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return np.concatenate([rng.uniform(-2, 2, (n, 1)), rng.choice([-0.5, 0.5], (n, 1)), circle], axis=1)


@pytest.mark.parametrize("name", LAWS)
def test_regression_on_any_law_has_the_risk_of_simulated_prompts_and_tends_to_its_limit(name):
    d, L, n = LAWS[name].dim, 5, 60_000
    Omega = mild(6, d)
    task = RegressionOn(LAWS[name], 0.2, Omega)
    U, V = 0.15 * matrix(5, d + 1, d + 1), 0.5 * matrix(6, 1, d + 1)
    rng = np.random.default_rng(1)
    X = covariates(name, rng, n * (L + 1)).reshape(n, L + 1, d)
    w = rng.normal(size=(n, d)) @ np.linalg.cholesky(Omega).T
    Y = np.einsum("bld,bd->bl", X, w) + math.sqrt(0.2) * rng.normal(size=(n, L + 1))
    tokens = np.concatenate([X, Y[..., None]], axis=2)
    query = np.append(X[:, L], np.zeros((n, 1)), axis=1)
    losses = np.sum((attend(SOFTMAX, U, V, tokens[:, :L], query) - Y[:, L:]) ** 2, axis=1) / 2
    short = risk(SOFTMAX(U, V), task, L, rtol=ANY)
    assert_mean_is(losses, short.value, float(short.stderr))
    if name != "mixture":
        return
    # on common keys: one definition, applied to more and more tokens of a law and to the law itself
    long, limit = (risk(SOFTMAX(U, V), task, length, rtol=ANY) for length in (500, math.inf))
    assert abs(long.value - limit.value) < abs(short.value - limit.value) / 5
    np.testing.assert_allclose(long.value, limit.value, rtol=0.02)


# Tasks of a user's own


class Waves(AbstractTask):
    """y = sin(w·x) with x uniform on a square: nothing linear, nothing Gaussian."""

    @property
    def dim(self) -> int:
        return 3

    @property
    def targets(self) -> int:
        return 1

    def _draw(self, key):
        of_task, of_query, of_measure = jax.random.split(key, 3)
        w = jax.random.normal(of_task, (2,))

        def token(key, n):
            x = jax.random.uniform(key, (n, 2), minval=-1.0)
            return jnp.append(x, jnp.sin(x @ w)[:, None], axis=1)

        z = token(of_query, 1)[0]
        return Instance(lp.FromSampler(token, 3, of_measure, size=64), z.at[2].set(0.0), z[2:])


class Signs(AbstractTask):
    """Labels ±1 of a hidden coin, seen through Λ alone: y = tanh-like evidence of which of two sides x is on."""

    @property
    def dim(self) -> int:
        return 2

    @property
    def targets(self) -> int:
        return 1

    def _draw(self, key):
        of_side, of_query = jax.random.split(key)
        side = jax.random.rademacher(of_side, (), float)

        def cgf(theta):  # x = ±1 with y = side·x, smeared by a unit Gaussian in x
            return jnp.log(jnp.cosh(theta[0] + side * theta[1])) + theta[0] ** 2 / 2

        def sample(key, n):
            coin, blur = jax.random.split(key)
            x = jax.random.rademacher(coin, (n,), float)
            return jnp.stack([x + jax.random.normal(blur, (n,)), side * x], axis=1)

        z = sample(of_query, 1)[0]
        return Instance(lp.FromCGF(cgf, 2, sample), z.at[1].set(0.0), z[1:])


def test_a_nonlinear_task_of_ones_own_has_the_risk_of_simulated_prompts():
    U, V, L, n = matrix(7, 3, 3), matrix(8, 1, 3), 5, 60_000
    rng = np.random.default_rng(0)
    x, w = rng.uniform(-1, 1, size=(n, L + 1, 2)), rng.normal(size=(n, 2))
    tokens = np.concatenate([x, np.sin(np.einsum("bld,bd->bl", x, w))[..., None]], axis=2)
    output = attend(SOFTMAX, U, V, tokens[:, :L], tokens[:, L] * [1, 1, 0])
    found = risk(SOFTMAX(U, V), Waves(), L, rtol=ANY)
    assert_mean_is(np.sum((output - tokens[:, L, 2:]) ** 2, axis=1) / 2, found.value, float(found.stderr))


def test_a_task_given_by_its_cgf_has_both_risks():
    U, V = np.array([[0.8, 0.0], [0.3, 0.0]]), np.array([[0.1, 0.9]])
    n, L, rng = 60_000, 5, np.random.default_rng(0)
    side, coin = rng.choice([-1.0, 1.0], size=(n, 1)), rng.choice([-1.0, 1.0], size=(n, L + 1))
    tokens = np.stack([coin + rng.normal(size=(n, L + 1)), side * coin], axis=2)
    query, target = tokens[:, L] * [1, 0], tokens[:, L, 1:]
    found = risk(SOFTMAX(U, V), Signs(), L, rtol=ANY)
    output = attend(SOFTMAX, U, V, tokens[:, :L], query)
    assert_mean_is(np.sum((output - target) ** 2, axis=1) / 2, found.value, float(found.stderr))
    # the slope of Λ, by hand
    u = query @ U.T
    evidence = np.tanh(u[:, 0] + side[:, 0] * u[:, 1])
    limit = np.stack([evidence + u[:, 0], side[:, 0] * evidence], axis=1) @ V.T
    found = risk(SOFTMAX(U, V), Signs(), math.inf, rtol=ANY)
    assert_mean_is(np.sum((limit - target) ** 2, axis=1) / 2, found.value, float(found.stderr))


def logcosh(prediction, target):
    return jnp.sum(jnp.logaddexp(prediction - target, target - prediction) - jnp.log(2.0))


def test_another_loss_judges_the_same_prompts():
    U, V = weights(9, KMS)
    n, L = 60_000, 5
    errors = np.concatenate(
        [attend(SOFTMAX, U, V, batch.tokens, batch.queries) - batch.targets for batch in simulated(KMS, L, n)]
    )
    found = risk(SOFTMAX(U, V), KMS.with_loss(logcosh), L, rtol=ANY)
    assert_mean_is(np.log(np.cosh(errors)).sum(axis=1), found.value, float(found.stderr))


def test_the_squared_loss_given_by_hand_is_the_default_one():
    U, V = weights(9, KMS, size=0.3)
    given = KMS.with_loss(lambda prediction, target: jnp.sum((prediction - target) ** 2) / 2)
    exact, found = risk(LINEAR(U, V), KMS, 5), risk(LINEAR(U, V), given, 5, rtol=ANY)
    assert exact.exact
    assert not found.exact
    assert_close_in_sigmas(found.value, exact.value, found.stderr)


def test_an_instance_at_infinite_length_is_itself():
    drawn = KMS.draw(jax.random.key(0))
    assert drawn.prompt(jax.random.key(1), math.inf).measure is drawn.measure
    prompt = drawn.prompt(jax.random.key(1), 7)
    assert isinstance(prompt.measure, lp.Empirical)
    assert prompt.measure.points.shape == (7, 3)
    np.testing.assert_array_equal(prompt.target, drawn.target)
