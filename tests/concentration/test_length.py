"""Prompt lengths for an error: exact, as c/L, by measuring; for risks; and what cannot be reached."""

import math

import jax
import numpy as np
import pytest

import largeprompt as lp
from largeprompt import icl
from largeprompt.cli._tables import prompt_length_lines
from largeprompt.concentration import _length, deviation, predict, prompt_length_for
from largeprompt.concentration._length import lengths_for_a_gap
from significance import assert_close_in_sigmas

MU = lp.Gaussian(np.zeros(2), np.eye(2))
LAYER = lp.SoftmaxAttention(0.4 * np.eye(2), np.eye(2))
PAST = lp.SoftmaxAttention(0.9 * np.eye(2), np.eye(2))  # θ² = 0.81


@pytest.mark.parametrize("epsilon", [1.0, 0.3, 0.05])
def test_the_length_is_the_least_with_an_exact_error_below_the_one_asked_for(epsilon):
    found = prompt_length_for(epsilon, LAYER, MU, key=jax.random.key(1), replicates=4000)
    L = int(found.L)
    at, before = predict(LAYER, MU, None, [L, max(1, int(L * (1 - 1e-4)) - 1)], "output").mean_square
    assert at <= epsilon**2 < before
    assert found.checked
    assert_close_in_sigmas(found.measured, at, found.measured_stderr)
    assert found.bound_log10_L > math.log10(L)
    assert found.bound_refusal == ""


def test_smaller_errors_take_longer_prompts_and_large_ones_one_token():
    Ls = [prompt_length_for(epsilon, LAYER, MU, replicates=0).L for epsilon in (10.0, 3e-29, 1e-100)]
    assert Ls[0] == 1
    assert Ls[0] < Ls[1] < Ls[2] == math.inf
    constant = predict(LAYER, MU, None, 1, "output").constant
    np.testing.assert_allclose(float(Ls[1]), constant / 9e-58, rtol=2e-3)


def test_where_c_over_L_holds_the_length_is_c_over_the_square():
    found = prompt_length_for(0.1, LAYER, MU, quantity="U", key=jax.random.key(2), replicates=400)
    assert math.ceil(predict(LAYER, MU, None, 1, "U").constant / 0.01) == found.L
    assert found.regime.onset < found.L
    assert_close_in_sigmas(found.measured, 0.01, np.hypot(found.measured_stderr, 1e-4))


def test_where_it_has_not_set_in_the_length_is_measured():
    """Four tokens and scores of 30: c/L is 1e-51/L, but a prompt may lack the token that the query looks for."""
    layer, mu = lp.SoftmaxAttention(30 * np.eye(2), np.eye(2)), lp.Rademacher([1.0, 1.0])
    found = prompt_length_for(0.3, layer, mu, key=jax.random.key(3))
    assert found.method == "measured"
    assert found.measured <= 0.09
    # it lacks it with the probability (3/4)^L, and then the square is from 2, between the two nearest others, to 8
    assert 2 * 0.75 ** int(found.L) < 0.09 + 5 * found.measured_stderr
    assert found.L <= 20


def test_past_the_threshold_the_length_for_gradients_is_measured():
    found = prompt_length_for(0.7, PAST, MU, quantity="gradient", key=jax.random.key(4))
    assert found.method == "measured"
    assert found.regime.name == "slower than 1/L"
    fresh = deviation(PAST, MU, None, [int(found.L)], "gradient", jax.random.key(5), replicates=4000)
    slack = 0.05 * 0.49 / 5  # of the search
    assert_close_in_sigmas(fresh.mean_square[0], 0.49, math.hypot(slack, found.measured_stderr, fresh.stderr[0]))


def test_beyond_what_can_be_drawn_the_exponent_extrapolates(monkeypatch):
    monkeypatch.setattr(_length, "_SEARCHED", 2**18)
    found = prompt_length_for(1e-6, PAST, MU, quantity="U", replicates=1000)
    assert "measured up to L = 256, beyond by the exponent 0.718" in found.method
    assert 1e13 < found.L < 1e19
    assert not found.checked
    assert math.isnan(found.measured)


TASK = icl.LinearRegression(np.eye(3), noise=0.3)


@pytest.mark.parametrize("quantity", ["risk", "risk-gradient"])
@pytest.mark.parametrize("optimum", [icl.optimal_linear, icl.optimal_softmax])
def test_lengths_for_risks_have_the_gap_asked_for(optimum, quantity):
    """Which falls like 1/L, its square like 1/L²."""
    layer, epsilon = optimum(TASK, 30).attention, 0.02
    found = prompt_length_for(epsilon, layer, TASK, quantity=quantity, replicates=0)
    L = int(found.L)
    at, before = predict(layer, TASK, None, [L, int(L * 0.99) - 1], quantity).mean_square
    assert at <= epsilon**2 < before


GAPS = {
    "falling": lambda L: 3 / L,
    "through 0": lambda L: 20 / L**2 - 0.5 * L**-0.7,
    "through 0 between two lengths": lambda L: 5 - 2 * L if L < 4 else -3 / L,
    "through 0 twice": lambda L: (math.log(L) - 1.5) * (math.log(L) - 4) / L**0.8,
    "a dip": lambda L: 1.1 / L**0.3 - 0.42 * math.exp(-((math.log(L / 37) / 0.25) ** 2)),
    "a rise": lambda L: 0.5 / L + 0.3 * math.exp(-((math.log(L / 300) / 0.5) ** 2)),
    "of nan at first": lambda L: math.nan if L < 3 else 2 / L,
}


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("epsilon", [1.0, 0.25, 0.0625])
def test_lengths_for_a_gap_are_those_of_a_search_through_all_lengths(name, epsilon):
    gap, longest = GAPS[name], 20_000
    small = np.array([abs(gap(L)) <= epsilon for L in range(1, longest)])
    first, lasting = lengths_for_a_gap(gap, epsilon)
    assert first == np.argmax(small) + 1
    assert lasting == (np.flatnonzero(~small).max() + 2 if (~small).any() else 1)


def test_a_gap_that_never_gets_small_has_no_length():
    assert lengths_for_a_gap(lambda L: 1 + 1 / L, 0.5) == (math.inf, math.inf)
    assert lengths_for_a_gap(lambda L: 2.0 if L != 16 else 0.1, 0.5) == (16, math.inf)


def test_where_a_gap_of_risks_changes_sign_the_length_is_the_least_and_the_one_that_lasts_is_given():
    """A layer that predicts the negative: at first its variance counts, then that it shrinks."""
    task = icl.LinearRegression(np.eye(4), noise=0.05)
    U = np.diag([-0.4, -0.4, -0.4, -0.4, 0.0])
    layer = lp.SoftmaxAttention(U, [[0.0, 0.0, 0.0, 0.0, 1.0]])
    found = prompt_length_for(0.06, layer, task, quantity="risk", replicates=0)
    gaps = predict(layer, task, None, range(1, 41), "risk").gap
    assert gaps is not None
    small = np.abs(gaps) <= 0.06
    assert gaps[0] > 0 > gaps[1]
    assert found.L == np.argmax(small) + 1 == 2
    assert found.lasting == np.flatnonzero(~small).max() + 2 == 12
    text = "\n".join(str(line) for line in prompt_length_lines(found))
    assert "L = 2 tokens" in text
    assert "from L = 12 on" in text


def test_a_length_that_is_not_measured_says_why(monkeypatch):
    none = prompt_length_for(0.3, LAYER, MU, replicates=0)
    assert not none.checked
    assert none.unchecked_reason == "replicates is 0, and a measurement takes at least 2"
    assert prompt_length_for(1.0, LAYER, MU, replicates=50).unchecked_reason == ""
    assert _length._unchecked(math.inf, 10) == "no finite length was found"
    monkeypatch.setattr(_length, "_AFFORDABLE", 2**12)
    long = prompt_length_for(0.1, LAYER, MU)
    assert long.unchecked_reason == "1000 prompts are drawn of up to 4 tokens each, and L is longer"
    assert f"not measured: {long.unchecked_reason}" in [str(line) for line in prompt_length_lines(long)]


def test_the_bound_is_refused_with_its_reason_where_it_does_not_hold():
    found = prompt_length_for(0.5, LAYER, MU, [1.0, 2.0], replicates=0)
    assert math.isnan(found.bound_log10_L)
    assert "for centred queries" in found.bound_refusal
    within = prompt_length_for(0.5, LAYER, MU, query_in_prompt=True, replicates=400)
    assert "outside of its prompt" in within.bound_refusal
    assert within.measured <= 0.25 + 5 * within.measured_stderr
