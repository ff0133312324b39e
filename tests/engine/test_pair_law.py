"""Batch gradients of the fused engine have the law of the reference's: a softmax and a linear layer, and linear alone.

A softmax layer alone has the very gradients it has beside a linear one. Some 90,000 comparisons at
five standard errors: a false alarm in twenty sets of keys if all were normal; the keys are fixed.
"""

import functools

import numpy as np
import numpy.typing as npt
import pytest

import largeprompt as lp
from engine_catalogue import CASES, Case, flat, fused_gradients, reference_gradients
from largeprompt.dynamics import Training
from largeprompt.icl import risk_gradient
from significance import assert_mean_is, assert_same_moments

N = 1500
ALONE = ["one token", "two tokens", "three tokens", "other queries", "twenty covariates", "two heads"]


def training(case: Case, batch: int = 4) -> Training:
    return Training(case.task, case.L, batch=batch, rate=1.0)


@functools.cache
def reference(name: str) -> np.ndarray:
    case = CASES[name]
    return reference_gradients(training(case), case.layers, N if case.task.d < 20 else N // 3)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_pair_have_the_mean_and_the_covariances_of_the_reference(name):
    case = CASES[name]
    assert_same_moments(fused_gradients(training(case), case.layers, N), reference(name))


@pytest.mark.parametrize("name", CASES)
def test_softmax_attention_has_the_same_gradients_alone_and_beside_a_linear_layer(name):
    case = CASES[name]
    alone = fused_gradients(training(case, 70), case.layers[:1], 2)
    beside = fused_gradients(training(case, 70), case.layers, 2)[:, : alone.shape[1]]
    np.testing.assert_allclose(beside, alone, rtol=1e-5, atol=1e-5 * np.abs(alone).max())


@pytest.mark.parametrize("name", ALONE)
def test_gradients_of_linear_attention_alone_have_the_mean_and_the_covariances_of_the_reference(name):
    case = CASES[name]
    found = fused_gradients(training(case), case.layers[1:], N)
    assert_same_moments(found, reference(name)[:, -found.shape[1] :])


@pytest.mark.parametrize("name", [name for name in CASES if isinstance(CASES[name].layers[1], lp.LinearAttention)])
def test_the_mean_gradient_of_linear_attention_is_that_of_its_risk(name):
    """Alone and in a pair; the gradient of the risk is in closed form."""
    case = CASES[name]
    exact = risk_gradient(case.layers[1], case.task, case.L)
    assert not flat(exact.stderr).any()
    of_pair = fused_gradients(training(case, 1000), case.layers, 200)[:, -len(flat(exact.layer)) :]
    alone = fused_gradients(training(case, 1000), case.layers[1:], 200)
    for found in (of_pair, alone):
        assert_means_are(found, flat(exact.layer))


def test_the_mean_gradient_of_softmax_attention_is_that_of_its_risk():
    """Beside a linear layer; the gradient of the risk is exact over prompts."""
    case = CASES["other queries"]
    exact = risk_gradient(case.layers[0], case.task, case.L, rtol=0.01)
    found = fused_gradients(training(case, 1000), case.layers, 200)[:, : len(flat(exact.layer))]
    assert_means_are(found, flat(exact.layer), flat(exact.stderr))


def assert_means_are(samples: np.ndarray, truth: np.ndarray, error: npt.ArrayLike = 0.0) -> None:
    """Up to the rounding of float32 as well, where there is no noise."""
    assert_mean_is(samples, truth, error + 1e-7 * (np.abs(truth).max() + samples.std(axis=0).max()))
