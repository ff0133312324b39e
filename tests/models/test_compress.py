"""Keys and values compressed: errors as predicted on other queries, memory within budgets, Gaussians where allowed."""

import numpy as np
import pytest

from largeprompt import models
from largeprompt.measures import Empirical, Mixture
from largeprompt.models.compression import _atoms, compress

K, V, L = 6, 5, 500


def tokens(seed: int, scale: float = 1.0, heads: int = 2):
    """Gaussian keys, values that are a smooth function of them, and two sets of queries of the same law."""
    rng = np.random.default_rng(seed)
    keys = scale * rng.normal(size=(heads, L, K))
    values = np.tanh(keys @ rng.normal(size=(K, V))) + 0.1 * rng.normal(size=(heads, L, V))
    return keys, values, rng.normal(size=(2 * heads, 400, K)), rng.normal(size=(2 * heads, 40, K))


def outputs(keys, values, queries, log_weights=0.0):
    """Plain softmax attention in float64."""
    scores = queries @ keys.T * K**-0.5 + log_weights
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ values / weights.sum(axis=1, keepdims=True)


def measured(head, keys, values, queries) -> float:
    """The relative error of attention on the measure, by the library's own layer, over queries."""
    call = models.HeadCall(queries, keys, values, K**-0.5, None, None)
    found = np.array([call.layer(head.measure, call.query(i)) for i in range(len(queries))])
    wanted = outputs(keys, values, queries)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("budget", [0.5, 0.1, 30])
def test_errors_on_other_queries_are_those_predicted_and_memory_is_within_the_budget(budget):
    keys, values, queries, others = tokens(0)
    allowed = (budget if budget >= 1 else budget * L) * (K + V)
    for g, head in enumerate(compress(keys, values, queries, budget=budget)):
        assert head.memory <= allowed
        assert head.memory > 0.8 * allowed
        for r in range(2):
            found = measured(head, keys[g], values[g], others[2 * g + r])
            assert found == pytest.approx(float(head.errors[r]), rel=0.5)


def test_a_gaussian_stands_for_the_rest_of_gaussian_tokens_and_beats_atoms_alone():
    keys, values, queries, _ = tokens(1)
    beside, alone = (compress(keys, values, queries, budget=0.1, gaussian=on)[0] for on in (True, False))
    assert beside.gaussian is not None
    assert isinstance(beside.measure, Mixture)
    assert isinstance(alone.measure, Empirical)
    assert beside.errors.max() < 0.5 * alone.errors.max()
    assert beside.mass == pytest.approx(L, rel=0.05)
    left = np.setdiff1d(np.arange(L), beside.kept)
    rest = np.concatenate([keys[0], values[0]], axis=1)[left]
    assert beside.gaussian_weight == len(left)
    np.testing.assert_allclose(beside.gaussian.mean(), rest.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(beside.gaussian.cov(), np.cov(rest.T, bias=True), rtol=1e-3, atol=1e-4)


def test_past_the_threshold_the_gaussian_is_refused():
    keys, values, queries, _ = tokens(2, scale=6.0)
    assert np.median(np.var(6.0 * queries[0] @ keys[0].T / 6.0 * K**-0.5, axis=1)) > 2 * np.log(L)
    assert all(head.gaussian is None for head in compress(keys, values, queries, budget=0.2))


def test_a_tolerance_is_kept_on_other_queries_with_less_memory_the_larger_it_is():
    keys, values, queries, others = tokens(3)
    memory = []
    for tolerance in (0.16, 0.08, 0.04):
        heads = compress(keys, values, queries, tolerance=tolerance)
        for g, head in enumerate(heads):
            assert head.errors.max() <= tolerance
            assert measured(head, keys[g], values[g], others[2 * g]) <= 1.5 * tolerance
        memory.append([head.memory for head in heads])
    assert np.all(np.diff(memory, axis=0) > 0)


def test_a_tolerance_out_of_reach_keeps_every_token():
    keys, values, queries, others = tokens(4)
    head = compress(keys, values, queries, tolerance=1e-6)[0]
    np.testing.assert_array_equal(head.kept, np.arange(L))
    assert measured(head, keys[0], values[0], others[0]) < 1e-5


def test_weights_and_values_solve_the_least_squares_problem(monkeypatch):
    """Fitted to the end, against normal equations in float64: a ridge holds atoms near their tokens."""
    monkeypatch.setattr(_atoms, "ROUNDS", 300)
    monkeypatch.setattr(_atoms, "RIDGE", 0.1)
    keys, values, queries, _ = tokens(5, heads=1)
    queries = queries[:1]
    head = compress(keys, values, queries, budget=40, gaussian=False)[0]
    used = queries[0, ::2]
    scores = used @ keys[0].T * K**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    X, centre = weights[:, head.kept], values[0].mean(axis=0)
    plain = np.concatenate([values[0][head.kept] - centre, np.ones((len(head.kept), 1))], axis=1)
    target = np.concatenate([weights @ (values[0] - centre), np.ones((len(used), 1))], axis=1) - X @ plain
    ridge = 0.1 * np.sum(X**2) / len(X)
    moved = plain + np.linalg.solve(X.T @ X + ridge * np.eye(X.shape[1]), X.T @ target)
    np.testing.assert_allclose(head.weights, np.maximum(moved[:, -1], 0.05), rtol=1e-3)
    np.testing.assert_allclose(head.values, moved[:, :-1] / head.weights[:, None] + centre, rtol=1e-2, atol=1e-3)


def test_one_token_and_its_repr():
    head = compress(np.ones((1, 1, 3)), np.ones((1, 1, 2)), np.ones((1, 1, 3)), budget=8)[0]
    assert "1 tokens as 1 atoms" in repr(head)
    np.testing.assert_allclose(head.values, 1.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": None}, "exactly one"),
        ({"tolerance": 0.1}, "exactly one"),
        ({"budget": 3}, "budget is 3; it must be a whole number of at least 8"),
        ({"budget": -0.5}, "above 0"),
        ({"budget": float("nan")}, "must be a number"),
        ({"keys": np.full((2, L, K), np.inf)}, "keys are not all finite"),
        ({"keys": np.zeros((2, L, K + 1))}, "dimension of queries"),
        ({"values": np.zeros((2, 0, V))}, r"shape \(2, 0, 5\)"),
        ({"queries": np.zeros((3, 4, K))}, "divide their heads"),
        ({"projections": np.zeros((2, V, 7))}, "projections have shape"),
    ],
)
def test_bad_input_is_named(change, said):
    keys, values, queries, _ = tokens(6)
    given = {"keys": keys, "values": values, "queries": queries, "budget": 0.2} | change
    with pytest.raises(ValueError, match=said):
        compress(**given)
