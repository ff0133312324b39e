"""The 1/L constant of the risk for any task, loss and kind of attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ive

import largeprompt as lp
from icl_catalogue import TASKS, aligned, mild, sphere_rate, weights
from largeprompt.icl import LinearRegression, RegressionOn, risk, risk_expansion, risk_rate
from significance import assert_close_in_sigmas

D = 3
U = np.zeros((D, D))
U[:2, :2] = [[0.5, 0.2], [-0.1, 0.4]]
V = np.array([[0.3, -0.2, 1.2]])


def logistic(prediction, target):
    return jnp.sum(jax.nn.softplus(-target * prediction))


def measured_gap(layer, task, L: int, n: int) -> np.ndarray:
    """L times the change of the loss by a finite prompt, less its first order, whose mean is 0."""

    def of_key(key):
        of_instance, of_prompt = jax.random.split(key)
        one = task.draw(of_instance)
        tokens = one.measure._sample(of_prompt, L)

        def loss(prediction):
            return task._loss(prediction, one.target)

        limit = layer._output(one.measure, one.query)
        change = loss(layer._output(lp.Empirical(tokens), one.query)) - loss(limit)
        first = layer.V @ layer.influence(one.measure, layer.U @ one.query, tokens).mean(axis=0)
        return L * (change - jax.grad(loss)(limit) @ first)

    keys = jax.random.split(jax.random.key(11), n)
    return np.asarray(jax.jit(lambda keys: jax.lax.map(of_key, keys, batch_size=64))(keys))


GAPS = {
    "softmax on a sphere": (lp.SoftmaxAttention(U, V), RegressionOn(lp.Sphere(1.4, 2), 0.2)),
    "softmax on a cube, logistic loss": (
        lp.SoftmaxAttention(U, V),
        RegressionOn(lp.Cube([1.5, 1.0]), 0.2).with_loss(logistic),
    ),
    "linear on signs": (lp.LinearAttention(U, V), RegressionOn(lp.Rademacher([1.0, 1.2]), 0.2)),
    "sigmoid on Gaussian tokens": (lp.SigmoidAttention(U, V), LinearRegression(np.eye(2), 0.2)),
}


@pytest.mark.parametrize("name", GAPS)
def test_the_gap_to_infinite_prompts_is_the_rate_over_L_for_any_task_and_kind(name):
    layer, task = GAPS[name]
    rate, gaps = risk_rate(layer, task, draws=2**11), measured_gap(layer, task, 300, 2**11)
    error = math.hypot(gaps.std() / math.sqrt(len(gaps)), float(rate.stderr))
    # the next order leaves a few per cent at this length
    assert error < 0.1 * rate.value
    assert_close_in_sigmas(gaps.mean(), rate.value, error + 0.01 * float(rate.value))


@pytest.mark.parametrize("kind", [lp.SoftmaxAttention, lp.LinearAttention])
def test_on_gaussian_covariates_the_average_over_instances_is_the_closed_form(kind):
    task = TASKS["anisotropic"]
    layer = kind(*aligned(mild(23) / 8, 1.2, task))
    same = RegressionOn(lp.Gaussian(np.zeros(2), task.Sigma), float(task.noise), task.Omega)
    exact, sampled = risk_rate(layer, task), risk_rate(layer, same, draws=2**12)
    assert exact.exact
    assert_close_in_sigmas(sampled.value, exact.value, sampled.stderr)


def test_the_rate_of_linear_attention_is_its_gap_at_every_length():
    task = TASKS["other queries"]
    layer = lp.LinearAttention(*weights(3, task))
    limit, rate = risk(layer, task, math.inf).value, risk_rate(layer, task)
    np.testing.assert_allclose(rate.value, 7 * (risk(layer, task, 7).value - limit), rtol=1e-9)
    np.testing.assert_allclose(risk_expansion(layer, task, 7).value, risk(layer, task, 7).value, rtol=1e-12)


def test_on_a_sphere_isotropic_softmax_predicts_a_multiple_of_the_label_and_has_a_rate_in_closed_form():
    d, rho, kappa, r, noise = 2, 1.5, 1.7, 1.1, 0.3
    task = RegressionOn(lp.Sphere(rho, d), noise)
    layer = lp.SoftmaxAttention(*aligned(kappa / rho**2 * np.eye(d), r, LinearRegression(np.eye(d))))
    one = task.draw(jax.random.key(3))
    image = np.asarray(one.measure.A)  # pyrefly: ignore[missing-attribute]  # (x, η) → (x, y)
    factor = r * ive(1, kappa) / ive(0, kappa)
    np.testing.assert_allclose(layer(one.measure, one.query)[0], factor * image[2, :2] @ one.query[:2], rtol=1e-12)
    found, expected = risk_rate(layer, task), sphere_rate(d, kappa, r, rho**2, noise)
    assert_close_in_sigmas(found.value, expected, found.stderr)
    limit = ((factor - 1) ** 2 * rho**2 + noise) / 2
    expansion = risk_expansion(layer, task, 50)
    assert_close_in_sigmas(expansion.value, limit + expected / 50, expansion.stderr)


def test_a_rate_that_few_instances_carry_is_reported_with_a_warning():
    task = RegressionOn(lp.Gaussian(np.zeros(2), np.eye(2)), 0.1)
    layer = lp.SoftmaxAttention(*aligned(1.5 * np.eye(2), 1.0, LinearRegression(np.eye(2))))
    with pytest.warns(UserWarning, match="carry the 1/L constant"):
        risk_rate(layer, task, draws=2**12)
