"""Regression on finitely many covariates: prompts are counts, and risks are exact at every length."""

import itertools
import math

import jax
import numpy as np
import pytest

import largeprompt as lp
from catalogue import matrix
from largeprompt.icl import RegressionOn, risk, risk_function, risk_gradient
from largeprompt.icl._risk._over_counts import OverCounts
from significance import assert_close_in_sigmas

POINTS, P = 0.8 * matrix(1, 3, 2), np.array([0.5, 0.3, 0.2])
OMEGA = np.array([[1.0, 0.3], [0.3, 0.5]])
TASK = RegressionOn(lp.Empirical(POINTS, P), 0.3, OMEGA)
U, V = np.zeros((3, 3)), np.array([[0.0, 0.0, 1.3]])
U[:2, :2] = matrix(2, 2, 2)
LAYER = lp.SoftmaxAttention(U, V)


def enumerated(A: np.ndarray, r: float, L: int) -> float:
    """The risk as a sum over all vectors of counts."""
    total = 0.0
    for N in itertools.product(range(L + 1), repeat=3):
        if sum(N) != L:
            continue
        chance = math.factorial(L) * math.prod(p**n / math.factorial(n) for p, n in zip(P, N, strict=True))
        for x, p in zip(POINTS, P, strict=True):
            weight = np.array(N) * np.exp(POINTS @ A @ x)
            a = weight / weight.sum()
            off = r * POINTS.T @ a - x
            noise = sum(a[i] ** 2 / N[i] for i in range(3) if N[i])
            total += chance * p * (off @ OMEGA @ off + 0.3 * (1 + r**2 * noise)) / 2
    return total


@pytest.mark.parametrize("L", [1, 2, 7])
def test_the_risk_is_the_sum_over_all_counts(L):
    found = risk(LAYER, TASK, L)
    assert found.exact
    assert found.method == "exact over counts, one-dimensional quadrature"
    np.testing.assert_allclose(found.value, enumerated(U[:2, :2], 1.3, L), rtol=1e-12)


def test_the_gradient_is_the_slope_of_that_sum():
    found, step = risk_gradient(LAYER, TASK, 7).layer, 1e-5
    for i, j in itertools.product(range(2), repeat=2):
        off = np.zeros((2, 2))
        off[i, j] = step
        slope = (enumerated(U[:2, :2] + off, 1.3, 7) - enumerated(U[:2, :2] - off, 1.3, 7)) / (2 * step)
        np.testing.assert_allclose(found.U[i, j], slope, rtol=1e-7)
    slope = (enumerated(U[:2, :2], 1.3 + step, 7) - enumerated(U[:2, :2], 1.3 - step, 7)) / (2 * step)
    np.testing.assert_allclose(found.V[0, 2], slope, rtol=1e-7)
    np.testing.assert_array_equal([found.V[0, :2], found.U[2, :2]], 0)


def test_prompts_of_the_package_have_this_risk_and_gradient():
    sampled, exact = risk(LAYER, TASK, 7, method="sampled", rtol=1.0), risk(LAYER, TASK, 7)
    assert_close_in_sigmas(sampled.value, exact.value, sampled.stderr)
    sampled, exact = risk_gradient(LAYER, TASK, 7, method="sampled", rtol=1.0), risk_gradient(LAYER, TASK, 7)
    for name in ("U", "V"):
        assert_close_in_sigmas(getattr(sampled.layer, name), getattr(exact.layer, name), getattr(sampled.stderr, name))


def test_the_risk_of_long_prompts_tends_to_that_of_the_law():
    limit = float(risk(LAYER, TASK, math.inf).value)
    a = np.exp(POINTS @ U[:2, :2] @ POINTS.T) * P[:, None]
    off = 1.3 * POINTS.T @ (a / a.sum(axis=0)) - POINTS.T
    np.testing.assert_allclose(limit, (P @ np.sum(off * (OMEGA @ off), axis=0) + 0.3) / 2, rtol=1e-12)
    gaps = [float(risk(LAYER, TASK, L).value) - limit for L in (10**4, 10**6, 10**8)]
    np.testing.assert_allclose([gaps[0] / gaps[1], gaps[1] / gaps[2]], 100, rtol=1e-2)


def test_strong_scores_and_rare_covariates_lose_no_digits():
    p = np.array([0.9, 0.1 - 1e-6, 1e-6])
    task = RegressionOn(lp.Empirical(np.eye(3), p))
    function = risk_function(lp.SoftmaxAttention(np.diag([30.0, 30.0, 30.0, 0.0]), [[0.0, 0.0, 0.0, 1.0]]), task, 5)
    assert isinstance(function, OverCounts)
    layer = lp.SoftmaxAttention(np.diag([30.0, 30.0, 30.0, 0.0]), [[0.0, 0.0, 0.0, 1.0]])
    # a query is answered where its covariate was seen, and otherwise by the mean of the others
    own = np.diagonal(function.attention(layer))
    np.testing.assert_allclose(own, 1 - (1 - p) ** 5, rtol=1e-9)


def test_other_layers_laws_and_queries_in_the_prompt_are_sampled():
    general = lp.SoftmaxAttention(0.3 * matrix(3, 3, 3), V)
    for found in (
        risk_function(general, TASK, 5),
        risk_function(LAYER, TASK, 5, query_in_prompt=True),
        risk_function(LAYER, RegressionOn(lp.Cube([1.0, 1.0])), 5),
    ):
        assert found.method.startswith("Monte Carlo")


def test_weights_of_0_take_no_part():
    more = lp.Empirical(np.append(POINTS, [[100.0, -50.0]], axis=0), np.append(P, 0.0))
    task = RegressionOn(more, 0.3, OMEGA)
    np.testing.assert_allclose(risk(LAYER, task, 7).value, risk(LAYER, TASK, 7).value, rtol=1e-12)
    assert np.all(np.isfinite(jax.tree.leaves(risk_gradient(LAYER, task, 7).layer)[0]))
