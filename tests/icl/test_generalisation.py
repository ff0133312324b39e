"""Layers of one length and task on prompts of another: formulas typed here, sampled prompts, and the leading order."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import largeprompt as lp
from icl_catalogue import mild
from largeprompt.icl import (
    LinearRegression,
    blocks,
    diagonal,
    generalisation,
    identity,
    kms,
    linear_mismatch,
    mismatch_rate,
    optimal_layers,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_rate,
)
from refusals import assert_refused
from significance import assert_close_in_sigmas

inf = math.inf
CUBIC: Any = "cubic"
THREE: Any = 3
PAPER = LinearRegression.experiment(identity(5))
CORRELATED = LinearRegression.experiment(kms(5, 0.5))
SMALL = LinearRegression(mild(7, 2), 0.3, mild(8, 2))
GENERAL = LinearRegression(kms(3, 0.5), 0.2, np.diag([1.0, 0.5, 2.0]), np.diag([2.0, 1.0, 0.3]))


def eigenvalues(task: LinearRegression) -> np.ndarray:
    return np.linalg.eigvals(np.asarray(task.Sigma) @ np.asarray(task.Omega)).real


def test_every_cell_is_the_risk_of_its_layer_and_the_diagonal_is_best():
    found = generalisation(optimal_layers(SMALL, [4, inf]), SMALL, [4, 20, inf])
    for i, optimum in enumerate((optimal_softmax, optimal_linear)):
        for j, trained in enumerate((4, inf)):
            for m, tested in enumerate((4, 20, inf)):
                expected = float(risk(optimum(SMALL, trained).attention, SMALL, tested).value)
                np.testing.assert_allclose(found.risk[i, j, 0, m], expected, rtol=1e-12)
                np.testing.assert_allclose(found.optimum[i, 0, m], optimum(SMALL, tested).risk.value, rtol=1e-12)
    assert (found.excess >= -1e-15).all()
    assert (found.ratio[:, [0, 1], 0, [0, 2]] == 1).all()
    assert not found.stderr.any()


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_cells_are_the_risks_of_sampled_prompts(kind):
    shifted = LinearRegression(diagonal([1.5, 0.4]), 0.6, mild(8, 2), diagonal([0.5, 1.0]))
    layers = optimal_layers(SMALL, [4, 30], [kind])
    found = generalisation(layers, shifted, [3, 12])
    sampled = [
        [risk(layer, shifted, L, jax.random.key(7 + L), method="sampled", rtol=0.02) for L in (3, 12)]
        for layer in layers[kind].values()
    ]
    values, errors = ([[float(getattr(one, name)) for one in row] for row in sampled] for name in ("value", "stderr"))
    assert_close_in_sigmas(values, found.risk[0, :, 0], errors)


@pytest.mark.parametrize(("trained", "tested"), [(10, 1000), (1000, 10), (1, inf), (inf, 1), (30, 31)])
def test_linear_attention_loses_the_square_of_the_difference_of_inverse_lengths(trained, tested):
    lam, rho = eigenvalues(CORRELATED), float(CORRELATED.tau1 + CORRELATED.noise)
    first, second = (lam + (lam + rho) / L for L in (trained, tested))
    expected = (1 / trained - 1 / tested) ** 2 * np.sum(lam**2 * (lam + rho) ** 2 / (first**2 * second)) / 2
    np.testing.assert_allclose(linear_mismatch(CORRELATED, trained, tested), expected, rtol=1e-10)
    found = generalisation(optimal_layers(CORRELATED, [trained], ["linear"]), CORRELATED, [tested])
    np.testing.assert_allclose(found.excess.item(), expected, rtol=1e-9)


@pytest.mark.parametrize(
    "task",
    [
        LinearRegression(SMALL.Sigma, 2.0, SMALL.Omega),
        LinearRegression(diagonal([3.0, 0.2]), 0.3, SMALL.Omega),
        LinearRegression(SMALL.Sigma, 0.3, diagonal([0.1, 4.0])),
        LinearRegression(SMALL.Sigma, 0.3, SMALL.Omega, diagonal([4.0, 0.1])),
        LinearRegression(diagonal([3.0, 0.0]), 0.0, SMALL.Omega),
    ],
    ids=["noise", "covariates", "coefficients", "queries", "singular and without noise"],
)
def test_the_mismatch_of_linear_attention_is_exact_on_every_shifted_task(task):
    found = generalisation(optimal_layers(SMALL, [8], ["linear"]), task, [20])
    np.testing.assert_allclose(linear_mismatch(task, 8, 20, SMALL), found.excess.item(), rtol=1e-9, atol=1e-14)


def test_queries_of_another_law_cost_linear_attention_nothing_and_softmax_attention_something():
    wide = LinearRegression(SMALL.Sigma, 0.3, SMALL.Omega, diagonal([4.0, 0.1]))
    found = generalisation(optimal_layers(SMALL, [20]), wide, [20])
    np.testing.assert_allclose(found.ratio[1], 1.0, rtol=1e-12)
    assert found.ratio[0].item() > 1.02


@pytest.mark.parametrize("task", [PAPER, CORRELATED], ids=["isotropic", "correlated"])
def test_the_rates_are_those_of_the_eigenvalues(task):
    lam, d, tau = eigenvalues(task), task.d, float(task.tau1)
    rho = tau + float(task.noise)
    np.testing.assert_allclose(mismatch_rate(task, "linear"), np.sum((lam + rho) ** 2 / lam) / 2, rtol=1e-10)
    parts = blocks(optimal_softmax(task, inf).attention, task)
    omega2 = 1 / float(parts.R[0, 0]) ** 2
    left = 1 - 2 * omega2
    kappa = left ** (-d / 2)
    a, b = 2 * kappa * omega2 / left**2, kappa * omega2 / left * (rho / omega2 + tau / left)
    np.testing.assert_allclose(mismatch_rate(task, "softmax"), np.sum((a * lam + b) ** 2 / lam) / 2, rtol=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("task", [PAPER, GENERAL], ids=["isotropic", "general"])
def test_long_prompts_lose_the_rate_times_the_square(task, kind):
    errors = []
    for trained, tested in ((10**4, inf), (10**5, inf)):
        found = generalisation(optimal_layers(task, [trained], [kind]), task, [tested])
        predicted = float(mismatch_rate(task, kind)) * (1 / trained - 1 / tested) ** 2
        errors.append(abs(found.excess.item() / predicted - 1))
    assert errors[1] < 0.05
    assert errors[1] < errors[0] / 2


def test_directions_without_variance_add_nothing_to_the_rates():
    flat = LinearRegression(diagonal([1.5, 0.7, 0.0]), 0.2, np.diag([1.0, 0.5, 2.0]))
    part = LinearRegression(diagonal([1.5, 0.7]), 0.2, np.diag([1.0, 0.5]))
    for kind in ("softmax", "linear"):
        np.testing.assert_allclose(mismatch_rate(flat, kind), mismatch_rate(part, kind), rtol=1e-6)


def test_two_targets_lose_twice_as_much():
    two = LinearRegression(SMALL.Sigma, 0.3, SMALL.Omega, targets=2)
    np.testing.assert_allclose(linear_mismatch(two, 5, 50), 2 * linear_mismatch(SMALL, 5, 50), rtol=1e-12)
    for kind in ("softmax", "linear"):
        np.testing.assert_allclose(mismatch_rate(two, kind), 2 * mismatch_rate(SMALL, kind), rtol=1e-6)


def test_in_high_dimension_softmax_is_linear_attention_on_e_times_fewer_tokens():
    """Least risks c₁/L and mismatches c₂/L²: the first constant is e times larger, the second e² times."""
    task = LinearRegression(identity(100), 0.1, identity(100) / 100)
    first = float(optimal_softmax(task, inf).rate) / ((1 + 100 * 1.1) / 2)
    second = float(mismatch_rate(task, "softmax") / mismatch_rate(task, "linear"))
    np.testing.assert_allclose([first, math.sqrt(second)], math.e, rtol=0.02)


def test_on_infinite_prompts_a_layer_keeps_what_it_shrinks():
    """R_∞ = s²/2 + ½ tr Ω(rΣA − I)Σ_q(rΣA − I)ᵀ: too small a gain in narrow directions, too large a one in wide."""
    task = LinearRegression.experiment(kms(5, 0.9))
    layer = optimal_softmax(task, 10).attention
    parts = blocks(layer, task)
    gains = parts.R[0, 0] * task.Sigma @ parts.A
    off = np.asarray(gains) - np.eye(5)
    expected = 0.05 + np.sum((np.asarray(task.Omega) @ off @ np.asarray(task.Sigma)) * off) / 2
    np.testing.assert_allclose(risk(layer, task, inf).value, expected, rtol=1e-12)
    values = np.linalg.eigvalsh(gains)
    assert values[0] < 0.1
    assert values[-1] > 1.3


def test_trained_on_too_short_prompts_softmax_comes_down_more_slowly_than_one_over_length():
    """Scores of variance θ²‖ξ‖² with θ² > ½ decay as L^{−c}, c = ½(√(1 + 4/θ²) − 1)."""
    for length, theta2, exponent in ((20, 0.851, 0.694), (100, 0.237, 1.0)):
        layer = optimal_softmax(CORRELATED, length).attention
        limit = risk(layer, CORRELATED, inf).value
        gaps = [float(risk(layer, CORRELATED, L).value - limit) for L in (10**9, 10**12)]
        np.testing.assert_allclose(math.log(gaps[0] / gaps[1]) / math.log(1e3), exponent, atol=0.02)
        assert bool(jnp.isinf(risk_rate(layer, CORRELATED).value)) == (theta2 > 0.5)


def test_short_prompts_teach_softmax_attention_more_and_long_ones_less():
    found = generalisation(optimal_layers(PAPER, [10, 100]), PAPER, [10, 30, 1000, inf])
    softmax, linear = found.ratio[:, :, 0]
    assert (softmax[0, 1:] < linear[0, 1:]).all()
    assert (softmax[1] > linear[1]).all()


def test_layers_by_name_leave_gaps_and_kinds_without_an_optimum_show_their_risk():
    head = lp.SigmoidAttention(0.3 * jnp.eye(3), jnp.asarray([[0.0, 0.0, 1.0]]))
    best = optimal_layers(SMALL, [4], ["linear"])
    layers = {"mine": {9: head}, **best}
    found = generalisation(layers, {"same": SMALL}, [4, 9], rtol=0.1)
    assert found.trained_at == (4, 9)
    assert np.isnan(found.risk[0, 0]).all()
    assert np.isnan(found.optimum[0]).all()
    assert (found.stderr[0, 1] > 0).all()
    data = found.to_dataset()
    assert dict(data.sizes) == {"attention": 2, "trained_at": 2, "test": 1, "tested_at": 2}
    assert float(data.ratio.sel(attention="linear", trained_at=4, tested_at=4, test="same")) == 1
    text = repr(found).splitlines()
    assert text[0] == "Generalisation (risk)"
    assert len(text) == 2 + 2  # no row of a layer that is not there
    figure, (left, right) = plt.subplots(1, 2)
    assert found.plot(left, "mine").get_title() == "mine, same"
    texts = [cell.get_text() for cell in found.plot(right, "linear").texts]
    assert texts[0] == "1.00"
    assert "–" in texts
    plt.close(figure)


def test_an_excess_over_nothing_is_infinite_and_no_excess_is_none():
    clean = LinearRegression(identity(2))
    found = generalisation(optimal_layers(clean, [5, inf], ["linear"]), clean, [inf])
    assert found.ratio.ravel().tolist() == [inf, 1.0]
    assert [cell.get_text() for cell in found.plot().texts] == ["∞", "1.00"]
    plt.close("all")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_layers(SMALL, [0]), "L is 0; a prompt length is a whole number of at least 1"),
        (lambda: optimal_layers(SMALL, [5], ["cubic"]), "attention is 'cubic'; it must be softmax or linear"),
        (lambda: generalisation(optimal_layers(SMALL, [5]), SMALL, [2.5]), "L is 2.5; a prompt length"),
        (lambda: generalisation(optimal_layers(SMALL, [5]), SMALL, []), "lengths is empty"),
        (lambda: generalisation({}, SMALL, [5]), "there are 0 names of layers and 1 tests"),
        (lambda: generalisation({"a": {}}, SMALL, [5]), "the lengths of training is empty"),
        (lambda: generalisation(optimal_layers(SMALL, [5]), PAPER, [5]), "tokens of dimension 3; the task has"),
        (lambda: generalisation(optimal_layers(SMALL, [5]), THREE, [5]), "tests is of type int; it must be a task"),
        (lambda: generalisation({"a": THREE}, SMALL, [5]), "layers['a'] is a int; it must map lengths"),
        (lambda: mismatch_rate(SMALL, CUBIC), "attention is 'cubic'"),
        (lambda: linear_mismatch(SMALL, 5, 0), "L is 0"),
        (lambda: linear_mismatch(SMALL, 5, 5, PAPER), "trained_on has d = 5 and 1 targets"),
        (lambda: generalisation(optimal_layers(SMALL, [5]), SMALL, [5]).plot(test="x"), "test is 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(call, message, as_a_stranger):
    assert_refused(call, message)


def test_layers_of_one_name_are_of_one_kind():
    best = optimal_layers(SMALL, [5])
    mixed = {"best": {5: best["linear"][5], 6: best["softmax"][5]}}
    with pytest.raises(ValueError, match="layers\\['best'\\] are of several kinds"):
        generalisation(mixed, SMALL, [5])
