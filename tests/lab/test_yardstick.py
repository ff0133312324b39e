"""What runs are held against: exact where it is known, and bounds that hold where it is not."""

import math

import numpy as np
import pytest

import largeprompt as lp
from largeprompt import lab
from largeprompt.icl import (
    LinearRegression,
    identity,
    kms,
    optimal_heads,
    optimal_linear,
    optimal_softmax,
    predicted_excess,
    risk,
)
from largeprompt.lab import yardstick
from largeprompt.lab._yardstick import least_linear_risk
from significance import assert_mean_is

SIGMA, OMEGA, QUERY = np.asarray(kms(3, 0.6)), np.diag([1.0, 0.3, 0.1]), np.diag([0.5, 1.0, 2.0])
UNEVEN = LinearRegression(SIGMA, 0.1, OMEGA, QUERY)


@pytest.mark.parametrize("L", [10, 100, 10_000, 10**6])
def test_no_spurious_minimum_is_within_the_tolerance_at_any_length(L):
    run = lab.Run(L=L, attention="linear")
    stick = yardstick(run, "linear")
    assert stick.tolerance(0.0) <= float(predicted_excess(run.task(), L)) / 2
    assert stick.tolerance(0.0) <= 0.01 * 0.55
    assert stick.long_enough == pytest.approx(100)


def test_where_no_spurious_minima_are_known_a_share_of_the_trivial_risk_remains():
    flat = lab.Run(sigma="diagonal:1,0", d=2, attention="linear")
    assert yardstick(flat, "linear").tolerance(0.0) == pytest.approx(0.01 * 0.3)
    assert yardstick(lab.Run(d=2, L=math.inf), "linear").tolerance(0.0) == pytest.approx(0.01 * 0.55)


def test_where_nothing_can_be_learnt_no_run_is_long_enough_to_be_trapped():
    run = lab.Run(d=2, L=8, omega=((0.0, 0.0), (0.0, 0.0)), attention="linear", steps=20)
    assert yardstick(run, "linear").long_enough == math.inf


@pytest.mark.parametrize("L", [1, 5, 100, math.inf])
def test_linear_heads_that_are_wide_enough_have_the_optimum_of_one(L):
    for heads, head_dim in ((1, 4), (2, 2), (3, 1)):
        run = lab.Run(d=3, sigma="kms:0.6", L=L, attention="linear", heads=heads, head_dim=head_dim)
        assert yardstick(run, "linear").optimum == float(optimal_linear(run.task(), L).risk.value)


@pytest.mark.parametrize("L", [2, 30])
def test_no_linear_layer_of_low_rank_is_better_than_the_least_and_one_attains_it(L):
    least = [least_linear_risk(UNEVEN, L, rank) for rank in range(4)]
    assert least[0] == pytest.approx(yardstick_zero(UNEVEN))
    assert least == sorted(least, reverse=True)
    assert least[2] > least[3] + 1e-4

    # A bᵀ of rank one with p = c = 0: given b the best A is that of a least-squares problem, and the other way round
    G = (1 + 1 / L) * SIGMA @ OMEGA @ SIGMA + (float(UNEVEN.tau1) + 0.1) / L * SIGMA
    a, b = np.ones(3), np.ones(3)
    for _ in range(200):
        a = np.linalg.solve(G, SIGMA @ OMEGA @ QUERY @ b) / (b @ QUERY @ b)
        b = OMEGA @ SIGMA @ a / (a @ G @ a)
    best = rank_one(a, b, np.zeros(3), 0.0, 1.0)
    assert float(risk(best, UNEVEN, L).value) == pytest.approx(least[1], rel=1e-10)
    rng = np.random.default_rng(0)
    for size in np.repeat([1e-3, 0.1, 1.0], 10):
        other = rank_one(*(part + size * rng.normal(size=np.shape(part)) for part in (a, b, np.zeros(3), 0.0, 1.0)))
        assert float(risk(other, UNEVEN, L).value) > least[1]


def rank_one(a, b, p, c, r):
    """A layer whose U has rank one."""
    U, V = np.zeros((4, 4)), np.zeros((1, 4))
    U[:, :3], V[0] = np.outer(np.append(a, c), b), np.append(p, r)
    return lp.LinearAttention(U, V)


def yardstick_zero(task):
    return (float(np.sum(np.asarray(task.query_Sigma) * np.asarray(task.Omega))) + float(task.noise)) / 2


@pytest.mark.parametrize("L", [3, 8])
def test_two_narrow_softmax_heads_with_small_scores_have_the_risk_of_linear_attention_at_one_token_less(L):
    task, n, small = LinearRegression(identity(2), 0.1, np.eye(2) / 2), 100_000, 0.01
    rng = np.random.default_rng(0)
    w, x, query = rng.normal(size=(n, 2)) / math.sqrt(2), rng.normal(size=(n, L, 2)), rng.normal(size=(n, 2))
    y = np.einsum("ni,nli->nl", w, x) + math.sqrt(0.1) * rng.normal(size=(n, L))
    target = np.sum(w * query, axis=1)
    best = optimal_linear(task, L - 1).attention
    reading = float(best.V[0, -1]) * float(best.U[0, 0]) * L / (L - 1)
    prediction = 0.0
    for i, sign in ((0, 1.0), (1, -1.0)):  # one head a coordinate, of opposite values
        scores = sign * small * reading * x[:, :, i] * query[:, None, i]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        prediction = prediction + sign / small * np.sum(weights * y, axis=1) / weights.sum(axis=1)
    truth = float(optimal_linear(task, L - 1).risk.value)
    assert_mean_is((prediction - target) ** 2 / 2 + 0.05, truth, 0.002 * truth)  # scores are small, not 0
    run = lab.Run(d=2, L=L, attention="softmax", heads=2, head_dim=1)
    assert yardstick(run, "softmax").attainable == pytest.approx(truth)


def test_wide_softmax_heads_have_the_optimum_of_as_many_up_to_four():
    run = lab.Run(L=100, heads=2, head_dim=6)
    stick = yardstick(run, "softmax")
    assert stick.optimum == float(optimal_heads(run.task(), 100, 2).risk.value)
    assert float(optimal_linear(run.task(), 100).risk.value) < stick.optimum
    assert stick.optimum < float(optimal_linear(run.task(), 99).risk.value) < 0.081
    more = [yardstick(lab.Run(L=100, heads=heads, head_dim=6), "softmax").optimum for heads in (3, 4, 8)]
    assert float(optimal_linear(run.task(), 100).risk.value) < more[1] == more[2] < more[0] < stick.optimum
    assert yardstick(run, "linear").optimum == float(optimal_linear(run.task(), 100).risk.value)


def test_at_infinite_length_and_at_length_one_the_optimum_of_any_softmax_heads_is_known():
    for heads, head_dim in ((2, 3), (3, 1), (1, 2), (1, 6)):
        endless = lab.Run(d=5, L=math.inf, heads=heads, head_dim=head_dim)
        assert yardstick(endless, "softmax") == yardstick(endless, "linear")
        one_token = lab.Run(d=5, L=1, heads=heads, head_dim=head_dim)
        assert yardstick(one_token, "softmax").optimum == pytest.approx(0.55)


def test_the_optimum_of_one_narrow_softmax_head_is_known_where_covariances_have_a_common_basis():
    run = lab.Run(d=3, L=20, attention="softmax", head_dim=1)
    stick, wide = yardstick(run, "softmax"), float(optimal_softmax(run.task(), 20).risk.value)
    assert wide + 0.01 < stick.optimum < stick.zero - 0.01
    assert least_linear_risk(run.task(), 20, 1) < stick.optimum
    uneven = lab.Run(
        d=3, L=20, attention="softmax", head_dim=1, sigma="kms:0.6", omega=((1.0, 0, 0), (0, 2.0, 0), (0, 0, 0.5))
    )
    stick, wide = yardstick(uneven, "softmax"), float(optimal_softmax(uneven.task(), 20).risk.value)
    assert math.isnan(stick.optimum)
    assert stick.floor == wide < stick.attainable < stick.zero


def test_smaller_queries_take_longer():
    run = lab.Run(d=2, L=8, attention="linear", query_sigma=((0.01, 0.0), (0.0, 0.01)))
    assert yardstick(run, "linear").long_enough == pytest.approx(100 * yardstick(lab.Run(d=2), "linear").long_enough)
