"""Risks averaged over lengths, as under a causal mask, and exact ones with the query in the prompt."""

import math

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import largeprompt as lp
from icl_catalogue import FLAT, TASKS, aligned, attend, excess, simulated, weights, zero_risk
from largeprompt.dynamics import gradient_flow
from largeprompt.icl import (
    LinearRegression,
    best_reading,
    optimal_linear,
    optimal_softmax,
    prefix_risks,
    risk,
    risk_function,
    risk_gradient,
)
from refusals import assert_refused
from significance import assert_close_in_sigmas, assert_mean_is

SOFTMAX, LINEAR = lp.SoftmaxAttention, lp.LinearAttention
TASK = TASKS["anisotropic"]
LAW = lp.Lengths([0, 1, 3, 8], [0.1, 0.3, 0.2, 0.4])
ISOTROPIC = LinearRegression(1.3 * np.eye(3), 0.2, 0.7 * np.eye(3), query_Sigma=0.9 * np.eye(3))


@eqx.filter_jit
def value_and_gradient(function, layer):
    return function.value_and_gradient(layer)


def leaves(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# The query in the prompt


@pytest.mark.parametrize(
    ("name", "L"), [("anisotropic", 1), ("anisotropic", 7), ("anisotropic", 30), ("two targets, other queries", 2)]
)
def test_softmax_with_the_query_in_the_prompt_has_the_risk_of_simulated_prompts(name, L):
    task = TASKS[name]
    U, V = weights(L, task)
    for parameters in ((U, V), aligned(U[: task.d, : task.d], V[:, task.d :], task)):
        found = risk(SOFTMAX(*parameters), task, L, query_in_prompt=True, max_draws=2**12, rtol=1)
        assert found.method.startswith("exact over prompts")
        samples = excess(SOFTMAX, *parameters, task, L, 2**21 // (L + 20), inside=True)
        assert_mean_is(samples, found.value - zero_risk(task), found.stderr)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_with_the_query_in_the_prompt_are_slopes_of_the_risk(whole):
    U, V = weights(3, TASK)
    layer = SOFTMAX(*((U, V) if whole else aligned(U[:2, :2], V[:, 2:], TASK)))
    function = risk_function(layer, TASK, 7, query_in_prompt=True, draws=2**8)
    _, gradient = value_and_gradient(function, layer)
    flat, unravel = ravel_pytree(layer)
    changes = np.random.default_rng(0).normal(size=(3, len(flat)))
    if not whole:  # the function holds of P = C = 0 only
        changes *= leaves(jax.tree.map(lambda leaf: leaf != 0, layer))
    for change in changes:
        ahead, behind = (value_and_gradient(function, unravel(flat + h * change))[0] for h in (1e-5, -1e-5))
        np.testing.assert_allclose(leaves(gradient) @ change, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)


def test_isotropic_layers_with_the_query_in_the_prompt_are_integrated_over_the_norm_of_the_query():
    for size in (0.4, 30.0):
        exact, near = (SOFTMAX(*aligned(size * np.diag([1, 1, x]), 1.1, ISOTROPIC)) for x in (1, 1 + 1e-13))
        found, other = (risk(layer, ISOTROPIC, 7, query_in_prompt=True) for layer in (exact, near))
        assert (found.exact, other.exact, "quadrature" in found.method) == (True, False, True)
        assert_close_in_sigmas(other.value, found.value, other.stderr)
    slope = risk_gradient(exact, ISOTROPIC, 7, query_in_prompt=True).layer.U[:3, :3]
    np.testing.assert_allclose(slope, slope[0, 0] * np.eye(3), atol=1e-12)


def test_in_a_long_prompt_the_query_does_not_count():
    layer = SOFTMAX(*weights(3, TASK, 0.3))
    inside, outside = (
        value_and_gradient(risk_function(layer, TASK, 10**9, query_in_prompt=query, draws=2**8), layer)[0]
        for query in (True, False)
    )
    np.testing.assert_allclose(inside, outside, rtol=1e-7)


# Laws of lengths


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [SOFTMAX, LINEAR])
def test_a_law_of_lengths_has_the_average_risk_and_gradient(kind, inside):
    layer = kind(*weights(5, TASK))

    def at(L):
        return value_and_gradient(risk_function(layer, TASK, L, query_in_prompt=inside, draws=2**8), layer)

    (value, gradient), each = at(LAW), [at(L) for L in LAW.values[1:]]
    if inside:  # the query answers an empty prompt by P x, or by P x xᵀAx
        alone = 2 * at(lp.Lengths([0, 1]))[0] - each[0][0]
        batch = next(simulated(TASK, 1, 50_000))
        output = attend(kind, layer.U, layer.V, batch.queries[:, None], batch.queries)[:, -1:]
        assert_mean_is(np.sum((output - batch.targets) ** 2, axis=1) / 2, alone, 1e-3 * float(alone))
    else:
        alone = zero_risk(TASK)
    parts = np.array([alone, *(found[0] for found in each)])
    np.testing.assert_allclose(value, LAW.probabilities @ parts, rtol=1e-3 if kind is SOFTMAX else 1e-12)
    if not inside:
        slopes = np.stack([leaves(found[1]) for found in each])
        np.testing.assert_allclose(leaves(gradient), LAW.probabilities[1:] @ slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("inside", [False, True])
def test_any_layer_is_sampled_at_random_lengths(inside):
    layer = SOFTMAX(*weights(5, TASK))
    found, sampled = (
        risk(layer, TASK, LAW, query_in_prompt=inside, method=method, rtol=0.03) for method in ("auto", "sampled")
    )
    assert sampled.method.startswith("Monte Carlo")
    assert_close_in_sigmas(sampled.value, found.value, sampled.stderr)


def test_linear_attention_sees_the_harmonic_mean_of_lengths():
    law = lp.Lengths.prefixes(100)
    harmonic = 99 / np.sum(1 / np.arange(1, 100))
    np.testing.assert_allclose(law.harmonic_mean, harmonic, rtol=1e-14)
    values = np.linalg.eigvalsh(np.asarray(FLAT.Sigma) @ np.asarray(FLAT.Omega))
    epsilon = (values + float(FLAT.tau1 + FLAT.noise)) / values
    np.testing.assert_allclose(best_reading(FLAT, law), np.diag(1 / (1 + epsilon / harmonic)), atol=1e-13)
    optimum = optimal_linear(FLAT, law)
    np.testing.assert_allclose(risk(optimum.attention, FLAT, law).value, optimum.risk.value, rtol=1e-12)
    assert float(risk_gradient(optimum.attention, FLAT, law).norm()) < 1e-13
    # what training on all positions costs at the last one
    lost = values * (1 + epsilon / 100) * (1 / (1 + epsilon / harmonic) - 1 / (1 + epsilon / 100)) ** 2 / 2
    cost = risk(optimum.attention, FLAT, 100).value - optimal_linear(FLAT, 100).risk.value
    np.testing.assert_allclose(cost, lost.sum(), rtol=1e-10)


def test_the_best_softmax_layer_for_all_positions_is_stationary_and_no_flow_ends_below():
    law = lp.Lengths.prefixes(8)
    optimum = optimal_softmax(TASK, law)
    np.testing.assert_allclose(risk(optimum.attention, TASK, law).value, optimum.risk.value, rtol=1e-12)
    assert float(risk_gradient(optimum.attention, TASK, law).norm()) < 1e-6
    assert float(optimal_softmax(TASK, 7).risk.value) < float(optimum.risk.value) < zero_risk(TASK)
    flow = gradient_flow(SOFTMAX(*aligned(0.5 * np.eye(2), 0.5, TASK)), TASK, law, [0.0, 10.0])
    assert float(flow.risk[0]) > float(flow.risk[-1]) > float(optimum.risk.value)


def test_prefixes_have_the_risks_of_their_lengths():
    layer = LINEAR(*weights(5, TASK))
    found = prefix_risks(layer, TASK, [1, 4, math.inf])
    np.testing.assert_allclose(found.risk, [risk(layer, TASK, L).value for L in (1, 4, math.inf)])
    assert list(found.to_dataset().L.values) == [1, 4, math.inf]
    assert "closed form" in repr(found)
    assert len(found.plot().lines) == 2


def test_refusals_name_the_value():
    layer = LINEAR(*weights(5, TASK))
    assert_refused(lambda: prefix_risks(layer, TASK, []), "lengths is []")
    assert_refused(lambda: prefix_risks(layer, TASK, [0]), "L is 0")
    assert_refused(lambda: risk(layer, TASK, 0), "L is 0")
