"""Flows of attention scores on orthonormal covariates: closed form, phases, and the general flow."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from largeprompt.dynamics import attention_flow, time_to_attend
from largeprompt.icl import RegressionOn, risk, risk_gradient
from refusals import assert_refused

K = 6


def on_features(p=None) -> RegressionOn:
    return RegressionOn(lp.Empirical(np.eye(K), p))


@pytest.fixture(scope="module")
def imbalanced():
    """One covariate in every other token, the rest rare."""
    task = on_features(np.r_[0.5, np.full(K - 1, 0.5 / (K - 1))])
    return attention_flow(task, math.inf, np.append(0.0, np.geomspace(1, 3000, 120)))


def test_balanced_covariates_are_attended_to_at_the_times_of_the_closed_form():
    levels = [0.2, 0.5, 0.9, 0.97]
    flow = attention_flow(on_features(), math.inf, [time_to_attend(a, K) for a in levels])
    np.testing.assert_allclose(flow.own, np.tile(np.array(levels)[:, None], K), rtol=1e-6)
    a = np.array(levels)
    np.testing.assert_allclose(flow.risk, (1 - a) ** 2 * K / (K - 1) / 2, rtol=1e-5)


def test_attention_takes_about_K_squared_and_then_K_over_two_epsilon_squared():
    for many in (10**3, 10**5):
        assert time_to_attend(0.5, many) / many**2 == pytest.approx(1, rel=10 * math.log(many) / many)
    late = time_to_attend(1 - 1e-4, 10) - time_to_attend(0.5, 10)
    assert late == pytest.approx(0.9**2 * 10 / (2 * 1e-8), rel=1e-3)


def test_at_finite_length_the_flow_is_that_of_the_risk_of_the_layer():
    task, times = on_features(np.r_[0.4, np.full(K - 1, 0.6 / (K - 1))]), [0.0, 40.0]
    flow = attention_flow(task, 12, times)
    V = jnp.append(jnp.zeros(K), 1.0)[None]
    for i in (0, 1):
        U = jnp.zeros((K + 1, K + 1)).at[:K, :K].set(flow.A[i])
        layer = lp.SoftmaxAttention(U, V)
        np.testing.assert_allclose(flow.risk[i], risk(layer, task, 12).value, rtol=1e-12)
        np.testing.assert_allclose(flow.velocity[i], -risk_gradient(layer, task, 12).layer.U[:K, :K], atol=1e-14)
    fine = attention_flow(task, 12, [20.0, 40.0], rtol=1e-10)
    np.testing.assert_allclose(fine.A[1], flow.A[1], atol=1e-6)
    assert flow.risk[1] < flow.risk[0]


def test_the_frequent_covariate_is_learned_first_and_the_rare_ones_later(imbalanced):
    half, late = imbalanced.first(0.6), imbalanced.first(0.9)
    assert half[0] < half[1] / 5
    assert late[0] < late[1] / 5
    np.testing.assert_allclose(half[1:], half[1], rtol=1e-3)
    assert np.all(np.diff(imbalanced.risk) < 0)


def test_a_rare_query_first_unlearns_the_frequent_covariate_then_learns_its_own(imbalanced):
    falling, rising = -np.asarray(imbalanced.velocity[:, 0, 1]), np.asarray(imbalanced.velocity[:, 1, 1])
    assert falling[0] > rising[0] > 0
    ahead = rising > falling
    switch = int(np.argmax(ahead))
    assert np.all(ahead[switch:])
    # the score of its own covariate grows fastest after the switch, and then all slows down
    assert switch < np.argmax(rising) < len(rising) - 30
    assert rising[-1] < 0.01 * rising.max()
    assert imbalanced.times[switch] < imbalanced.first(0.5)[1]


def test_levels_that_are_not_reached_are_at_infinity(imbalanced):
    assert np.all(np.isinf(imbalanced.first(0.9999)))
    assert imbalanced.first(0.4)[0] == 0
    assert "least_attention" in repr(imbalanced)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attention_flow(RegressionOn(lp.Cube([1.0, 1.0])), 5, [1.0]), "RegressionOn(Empirical"),
        (lambda: attention_flow(on_features(), 5, [2.0, 1.0]), "times must increase"),
        (lambda: attention_flow(on_features(), 5, [1.0], start=np.eye(2)), "start has shape (2, 2)"),
        (lambda: time_to_attend(0.05, 10), "attention is 0.05"),
        (lambda: time_to_attend(0.5, 1), "K is 1"),
    ],
)
def test_bad_input_is_named(call, words, as_a_stranger):
    assert_refused(call, words)
