"""Regression on finitely many tasks: exact risks, few tasks, few prompts, and what Lu et al. (2025) publish."""

import math

import jax
import numpy as np
import pytest

import largeprompt as lp
from catalogue import matrix
from largeprompt.icl import (
    FiniteTasks,
    LinearRegression,
    asymptotic_risks,
    bayes_risk,
    discrete_prediction,
    discrete_risk,
    diversity_risk,
    kms,
    marchenko_pastur,
    optimal_linear,
    pretraining_risk,
    ridge_pretrained,
    risk,
    risk_gradient,
)
from refusals import assert_refused
from significance import assert_close_in_sigmas, assert_mean_is

REGRESSION = LinearRegression(kms(3), 0.1)
TASKS = FiniteTasks.drawn(jax.random.key(1), REGRESSION, 4)
GENERAL = lp.LinearAttention(0.3 * matrix(1, 4, 4), matrix(2, 1, 4))


def isotropic(d: int) -> LinearRegression:
    return LinearRegression.experiment(np.eye(d), 0.1)


def values(risks) -> np.ndarray:
    return np.array([float(each.value) for each in risks])


def test_a_linear_layer_has_the_risk_and_gradient_of_sampled_prompts():
    exact, sampled = risk(GENERAL, TASKS, 6), risk(GENERAL, TASKS, 6, method="sampled", rtol=1.0)
    assert exact.exact
    assert exact.reason == "linear attention on finitely many tasks"
    assert_close_in_sigmas(sampled.value, exact.value, sampled.stderr)
    exact, sampled = risk_gradient(GENERAL, TASKS, 6), risk_gradient(GENERAL, TASKS, 6, method="sampled", rtol=1.0)
    for name in ("U", "V"):
        found, error = getattr(sampled.layer, name), getattr(sampled.stderr, name)
        assert_close_in_sigmas(found, getattr(exact.layer, name), error)


def test_softmax_attention_at_infinite_length_has_the_risk_of_linear_attention():
    softmax = lp.SoftmaxAttention(GENERAL.U, GENERAL.V)
    np.testing.assert_allclose(risk(softmax, TASKS, math.inf).value, risk(GENERAL, TASKS, math.inf).value, rtol=1e-12)


def test_a_layer_that_reads_labels_sees_the_tasks_through_their_second_moment():
    U, V = np.zeros((4, 4)), np.array([[0.0, 0.0, 0.0, 0.7]])
    U[:3, :3] = matrix(3, 3, 3)
    layer = lp.LinearAttention(U, V)
    for L in (6, math.inf):
        np.testing.assert_allclose(risk(layer, TASKS, L).value, risk(layer, TASKS.gaussian, L).value, rtol=1e-12)
        assert abs(risk(GENERAL, TASKS, L).value - risk(GENERAL, TASKS.gaussian, L).value) > 0.01
    best = optimal_linear(TASKS.gaussian, 6)
    np.testing.assert_allclose(risk(best.attention, TASKS, 6).value, best.risk.value, rtol=1e-12)
    slope = risk_gradient(best.attention, TASKS, 6).layer
    np.testing.assert_allclose(slope.U[:3, :3], 0, atol=1e-12)


def test_few_tasks_lower_the_risk_on_them_and_raise_it_on_fresh_ones():
    best = float(optimal_linear(REGRESSION, 20).risk.value)
    found = [diversity_risk(REGRESSION, 20, m, draws=16) for m in (1, 3, 3000)]
    own, fresh = (np.array([float(getattr(each, name).value) for each in found]) for name in ("own", "fresh"))
    assert np.all(np.diff(own) > 0)
    assert np.all(np.diff(fresh) < 0)
    assert own[0] < best < fresh[0]
    np.testing.assert_allclose([own[-1], fresh[-1]], best, rtol=0.01)


def test_the_limit_is_the_number_that_the_authors_print():
    # their notebook, for τ = α = ½, κ = 0.1 and noise 0.1; a mean square without the factor ½
    found = asymptotic_risks(0.5, 0.1, 0.5, 0.1)
    np.testing.assert_allclose(2 * found.fresh.value, 1.4898956781741148, rtol=1e-13)


@pytest.mark.parametrize(("alpha", "kappa", "tau", "noise"), [(2.0, 0.5, 1.5, 0.01), (10.0, 2.0, 1.2, 0.1)])
def test_past_the_threshold_the_limit_is_result_1_of_the_authors(alpha, kappa, tau, noise):
    x, rest = (1 + noise) / alpha, 1 / (tau - 1)
    m = marchenko_pastur(x, kappa)[0]
    own = tau * rest * (noise + x * (1 - x * m))
    c = 1 / (1 - kappa * (m / (kappa + m)) ** 2)
    fresh = (c - rest) * (1 + x) * (x * m) ** 2 + (3 - 2 * tau) * rest * m * x**2
    fresh += ((1 + noise) * rest * m + 1) * x + noise * m * rest + noise
    np.testing.assert_allclose(2 * values(asymptotic_risks(alpha, kappa, tau, noise)), [own, fresh], rtol=1e-12)


def test_the_resolvent_and_its_slope_are_those_of_large_wishart_matrices():
    w = np.random.default_rng(0).normal(size=(1000, 500))
    r = np.linalg.eigvalsh(w.T @ w / 1000)
    M, slope = marchenko_pastur(0.3, 2.0)
    np.testing.assert_allclose([M, slope], [np.mean(1 / (r + 0.3)), -np.mean((r + 0.3) ** -2.0)], rtol=5e-3)


def test_with_all_prompts_the_average_over_tasks_tends_to_the_limit():
    limit = values(asymptotic_risks(2.0, 0.5, math.inf, 0.1))
    off = []
    for d in (10, 20):
        found = diversity_risk(isotropic(d), 2 * d, d // 2, draws=100)
        off.append(values(found) - limit)
        error = np.array([float(each.stderr) for each in found])
    # the error falls as 1/d
    assert_close_in_sigmas(2 * off[1], off[0], 2 * error * math.sqrt(2))
    np.testing.assert_allclose(off[1], 0, atol=0.02)


def test_with_all_prompts_the_fit_is_the_best_layer():
    found = pretraining_risk(TASKS, 6, math.inf)
    best = optimal_linear(TASKS.gaussian, 6)
    expected = [float(best.risk.value), float(risk(best.attention, REGRESSION, 6).value)]
    np.testing.assert_allclose(values(found), expected, rtol=1e-10)


def test_the_risk_is_infinite_at_the_threshold_and_falls_on_both_sides():
    risks = np.array([values(asymptotic_risks(10.0, 0.5, tau, 0.01)) for tau in (0.5, 0.9, 0.98, 1.02, 1.1, 2.0)])
    assert np.all(np.diff(risks[:3], axis=0) > 0)
    assert np.all(np.diff(risks[3:], axis=0) < 0)
    assert np.all(np.isinf(values(asymptotic_risks(10.0, 0.5, 1.0, 0.01))))
    assert np.all(np.isinf(values(pretraining_risk(TASKS, 6, 9))))


def test_the_gap_to_fresh_tasks_closes_at_as_many_tasks_as_dimensions():
    # long prompts, τ ∝ α: below κ = 1 the gap stays, above it falls with the length of prompts
    gaps = {k: [np.diff(values(asymptotic_risks(a, k, math.inf, 0.01)))[0] for a in (10.0, 1000.0)] for k in (0.5, 2.0)}
    assert gaps[0.5][1] > 0.8 * gaps[0.5][0]
    assert gaps[2.0][1] < 0.02 * gaps[2.0][0] + 1e-4
    np.testing.assert_allclose(gaps[0.5][1], (1 - 0.5) / 2, rtol=0.02)


@pytest.mark.parametrize("tau", [0.5, 1.5])
def test_fits_with_a_ridge_have_the_risks_predicted(tau):
    d = 24
    L, m, n, ridge = 2 * d, d // 2, int(tau * d * d), 0.5 / d
    off, expected = [], np.zeros(2)
    for key in jax.random.split(jax.random.key(0), 10):
        of_tasks, of_prompts = jax.random.split(key)
        tasks = FiniteTasks.drawn(of_tasks, isotropic(d), m)
        layer = ridge_pretrained(tasks, L, n, of_prompts, ridge=ridge)
        expected = values(pretraining_risk(tasks, L, n, ridge))
        found = [float(risk(layer, task, L).value) for task in (tasks, tasks.regression)]
        off.append(np.array(found) / expected - 1)
    assert_mean_is(np.array(off), 0.0, 0.005)  # features that are not Gaussian cost some 1/d²
    limit = values(asymptotic_risks(2.0, 0.5, tau, 0.1, 0.5))
    np.testing.assert_allclose(expected, limit, rtol=0.1)


def test_without_ridge_what_the_prediction_misses_falls_as_one_over_d():
    off = {}
    for d, draws in ((8, 80), (16, 30)):
        rows = []
        for key in jax.random.split(jax.random.key(d), draws):
            tasks = FiniteTasks.drawn(key, isotropic(d), d)
            layer = ridge_pretrained(tasks, 2 * d, 2 * d * d, key)
            rows.append(
                float(risk(layer, tasks, 2 * d).value) / values(pretraining_risk(tasks, 2 * d, 2 * d * d))[0] - 1
            )
        off[d] = np.mean(rows), np.std(rows, ddof=1) / math.sqrt(draws)
    (coarse, error), (fine, fine_error) = off[8], off[16]
    assert coarse > 5 * error
    assert_close_in_sigmas(2 * fine, coarse, math.hypot(2 * fine_error, error))


def test_the_discrete_posterior_weighs_tasks_by_their_likelihood():
    tokens, x = matrix(5, 6, 4), matrix(6, 3, 1)[:, 0]
    likelihood = [np.exp(-np.sum((tokens[:, 3] - tokens[:, :3] @ w) ** 2) / 0.2) for w in np.asarray(TASKS.tasks)]
    expected = np.average(np.asarray(TASKS.tasks) @ x, weights=likelihood)
    np.testing.assert_allclose(discrete_prediction(TASKS, tokens, x), expected, rtol=1e-10)
    silent = FiniteTasks(LinearRegression(kms(3)), TASKS.tasks)
    X = matrix(7, 5, 3)
    shown = np.append(X, X @ np.asarray(TASKS.tasks[2])[:, None], axis=1)
    np.testing.assert_allclose(discrete_prediction(silent, shown, x), TASKS.tasks[2] @ x, rtol=1e-12)


def test_knowing_the_tasks_helps_on_them_and_hurts_on_fresh_ones():
    own, fresh = discrete_risk(TASKS, 6), discrete_risk(TASKS, 6, on=REGRESSION)
    assert 0.05 < own.value < bayes_risk(TASKS.gaussian, 6).value < optimal_linear(TASKS.gaussian, 6).risk.value
    assert fresh.value > bayes_risk(REGRESSION, 6).value + 5 * fresh.stderr
    alone = discrete_risk(FiniteTasks(REGRESSION, TASKS.tasks[:1]), 6)
    np.testing.assert_allclose(alone.value, 0.05, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FiniteTasks(REGRESSION, np.ones((2, 4))), "tasks has shape (2, 4)"),
        (lambda: FiniteTasks(LinearRegression(np.eye(2), targets=2), np.ones((2, 2))), "2 targets"),
        (lambda: FiniteTasks.drawn(jax.random.key(0), REGRESSION, 0), "m is 0"),
        (lambda: asymptotic_risks(1.0, 0.0, 1.0), "kappa is 0"),
        (lambda: asymptotic_risks(math.inf, 1.0, 1.0), "alpha is inf"),
        (lambda: asymptotic_risks(1.0, 1.0, 1.0, ridge=-1.0), "ridge is -1"),
        (lambda: pretraining_risk(REGRESSION, 5, 10), "type LinearRegression"),  # pyrefly: ignore[bad-argument-type]
        (lambda: pretraining_risk(TASKS, 5, 0), "n is 0"),
        (lambda: ridge_pretrained(TASKS, 5, 2**28), "n is 268435456"),
        (lambda: discrete_risk(TASKS, 5, on=LinearRegression(np.eye(2))), "on has 2 covariates"),
    ],
)
def test_bad_input_is_named(call, words, as_a_stranger):
    assert_refused(call, words)
