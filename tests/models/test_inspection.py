"""What is said of a head is what the library's own measures say, and what a plain computation gives."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from largeprompt import models
from largeprompt.concentration import predict
from largeprompt.measures._worth import tail_index, tail_indices
from largeprompt.models import AttentionCall
from largeprompt.models._inspection import Inspector
from largeprompt.models._redraws import redrawn_errors
from largeprompt.models._statistics import attended, explained_by_position, lags, product, query_statistics, sinks_of

H, N, L, K, V = 4, 6, 300, 5, 3


def call(seed=0, causal=True, sink=True, size=0.6, tokens=L):
    """Four heads on two sets of keys; the first token takes weight from every query, if it is a sink."""
    rng = np.random.default_rng(seed)
    queries, keys = rng.normal(size=(H, N, K)) + 0.5, size * rng.normal(size=(2, tokens, K))
    values = rng.normal(size=(2, tokens, V)) + 1.0
    if sink:
        keys[:, 0] = 6.0
    positions = np.linspace(tokens // 2, tokens - 1, N).astype(int)
    hidden = np.where(np.arange(tokens) <= positions[:, None], 0.0, -np.inf)[None] if causal else None
    projections = rng.normal(size=(H, V, 7))
    queries, keys, values = (array.astype(np.float32) for array in (queries, keys, values))
    return AttentionCall("layer", queries, keys, values, 0.4, hidden, positions, None, projections)


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_weights_and_errors_are_those_of_a_plain_computation(causal):
    head = call(causal=causal).head(1)
    found = attended(head)
    sinks = sinks_of(found.weights)
    numbers = query_statistics(head, found, sinks)
    assert list(sinks) == [0]
    for i in range(N):
        scores = 0.4 * head.keys.astype(float) @ head.queries[i]
        seen = np.ones(L, bool) if head.log_weights is None else np.isfinite(head.log_weights[i])
        w = np.where(seen, np.exp(scores), 0.0)
        w /= w.sum()
        output = w @ head.values
        rest = seen & (np.arange(L) > 0)
        parts = w[rest, None] * (head.values[rest] - output)
        variance = np.sum(parts**2) - np.sum(parts.sum(axis=0) ** 2) / rest.sum()
        in_stream = parts @ head.projection
        of_stream = np.sum(in_stream**2) - np.sum(in_stream.sum(axis=0) ** 2) / rest.sum()
        np.testing.assert_allclose(found.output[i], output, rtol=1e-5)
        np.testing.assert_allclose(numbers.effective[i], 1 / np.sum(w**2), rtol=1e-5)
        np.testing.assert_allclose(numbers.entropy[i], -np.sum(w[seen] * np.log(w[seen])), rtol=1e-5)
        np.testing.assert_allclose(numbers.error[i], math.sqrt(variance), rtol=1e-5)
        np.testing.assert_allclose(numbers.residual_error[i], math.sqrt(of_stream), rtol=1e-5)
        np.testing.assert_allclose(numbers.score_variance[i], scores[rest].var(), rtol=1e-5)
        assert numbers.first[i] == pytest.approx(w[0], rel=1e-5)
        assert numbers.seen[i] == seen.sum()


@pytest.mark.parametrize("causal", [True, False])
def test_a_head_is_attention_on_its_prompt_and_its_limits_are_those_of_its_laws(causal):
    head = call(causal=causal).head(2)
    found = attended(head)
    numbers = query_statistics(head, found, np.array([0]))
    for i in (0, N - 1):
        query = head.query(i)
        np.testing.assert_allclose(head.layer(head.prompt(i), query), found.output[i], rtol=1e-6)
        size = np.linalg.norm(found.output[i])
        for law, value in ((head.law(i), numbers.linear[i]), (head.law(i, [0]), numbers.linear_beside_sinks[i])):
            limit = np.asarray(head.layer(law, query))
            np.testing.assert_allclose(np.linalg.norm(limit - found.output[i]) / size, value, rtol=1e-5)


def test_the_error_without_sinks_is_the_one_that_the_library_predicts():
    """Its constant over the length, at the measure of the prompt."""
    head = call(causal=False, sink=False).head(0)
    numbers = query_statistics(head, attended(head), np.array([], int))
    queries = np.stack([head.query(i) for i in range(N)])
    found = predict(head.layer, head.prompt(), queries, [10**6], "output")
    expected = np.sqrt(np.mean(numbers.error**2) * L / 10**6)
    np.testing.assert_allclose(np.sqrt(np.asarray(found.mean_square))[0], expected, rtol=1e-3)


def test_a_bias_on_the_scores_is_a_weight_of_the_tokens():
    plain = call(causal=False)
    bias = np.random.default_rng(5).normal(size=(H, N, L))
    biased = AttentionCall("layer", plain.queries, plain.keys, plain.values, 0.4, bias)
    head = biased.head(3)
    scores = 0.4 * head.keys.astype(float) @ head.queries[2] + bias[3, 2]
    w = np.exp(scores - scores.max())
    np.testing.assert_allclose(head.layer(head.prompt(2), head.query(2)), w @ head.values / w.sum(), rtol=1e-6)


def test_errors_predicted_are_those_of_redraws():
    """Independent tokens: redraws in blocks of another prompt of the same law vary as predicted."""
    ratios = []
    for seed in range(4):
        own, other = call(seed, tokens=2000), call(seed + 10, tokens=2000)
        for h in range(H):
            head = own.head(h)
            found = attended(head)
            sinks = sinks_of(found.weights)
            numbers = query_statistics(head, found, sinks)
            measured = redrawn_errors(head, other.head(h), sinks, np.array([0.25, 1.0]), seed)
            ratios.append(measured * [0.5, 1.0] / np.sqrt(np.mean(numbers.error**2)))
    np.testing.assert_allclose(np.median(ratios, axis=0), 1, atol=0.08)


def test_position_explains_what_depends_on_the_lag_alone():
    one = call(causal=True, sink=False)
    assert one.positions is not None
    by_lag = lags(one.positions, L)
    found = attended(one.head(0))
    falling = -0.02 * np.abs(one.positions[:, None] - np.arange(L))
    assert explained_by_position(found._replace(scores=falling), by_lag) > 0.98
    assert explained_by_position(found, by_lag) < 0.25
    assert math.isnan(explained_by_position(found, None))


def test_tails_of_rows_with_other_values_are_those_of_their_samples():
    rng = np.random.default_rng(6)
    sizes, rows = np.array([10, 60, 200, 300]), np.zeros((4, 300))
    for row, size in zip(rows, sizes, strict=True):
        row[rng.permutation(300)[:size]] = rng.pareto(2.0, size)
    expected = [tail_index(row[row > 0]) for row in rows]
    np.testing.assert_allclose(tail_indices(rows, sizes), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(64, 512, 33), (30, 32, 700), (128, 600, 128), (3, 5000, 40)])
def test_products_in_tiles_are_products(shape):
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=shape[:2]), rng.normal(size=shape[1:])
    np.testing.assert_allclose(product(a, b), np.einsum("nm,mp->np", a, b), rtol=1e-9, atol=1e-9)


def test_heavy_tails_are_refused_and_light_ones_are_not():
    light, heavy = (models.inspect_calls([call(size=size, sink=False)]).data for size in (0.3, 4.0))
    assert bool((light["trusted"] == 1).all())
    assert bool((heavy["trusted"] == 0).all())
    assert bool(heavy["relative_error"].isnull().all())
    assert bool(light["length"].notnull().all())


def test_an_inspection_prints_plots_and_is_a_dataset(tmp_path):
    inspector = Inspector([call(3), call(4)])
    inspector(call(1))
    inspector(call(2))
    found = inspector.finished(model="test")
    assert dict(found.data.sizes) == {"layer": 2, "head": H}
    assert list(found.data["name"].values) == ["layer (1)", "layer (2)"]
    assert " of 8 heads are in the large-prompt regime" in repr(found)
    assert "On unseen text" in repr(found)
    assert "<table" in found._repr_html_()
    found.plot("position").figure.savefig(tmp_path / "map.png")
    with pytest.raises(ValueError, match="there is no number 'size'"):
        found.plot("size")
    found.to_dataset().to_netcdf(tmp_path / "x.nc", engine="scipy")
    assert found.details[1, 2].measured is not None
    assert list(found.details[0, 0].sinks) == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.zeros((2, 9, 4))}, "keys must have the heads and tokens of values and the dimension of queries"),
        ({"queries": np.zeros((3, N, K))}, "layer has 3 heads of queries and 2 of keys"),
        ({"values": np.full((2, L, V), np.nan)}, "values of layer are not all finite"),
        ({"values": np.zeros((L, V))}, r"values of layer have shape \(300, 3\)"),
        ({"log_weights": np.zeros((1, 2, L))}, r"log_weights of layer have shape \(1, 2, 300\)"),
        ({"log_weights": np.full((1, N, L), -np.inf)}, "the mask of layer hides every token from query 0"),
    ],
)
def test_a_call_that_cannot_be_is_refused_in_one_line(change, message):
    one = call()
    parts = {name: getattr(one, name) for name in ("queries", "keys", "values", "log_weights")} | change
    with pytest.raises(ValueError, match=message) as refused:
        AttentionCall("layer", parts["queries"], parts["keys"], parts["values"], 0.4, parts["log_weights"])
    assert "\n" not in str(refused.value)


def test_no_call_at_all_is_refused():
    with pytest.raises(ValueError, match="the model made no attention call"):
        models.inspect_calls([])


def tiny():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


@pytest.mark.parametrize("length", [1, 2, 30])
def test_prompts_of_any_length_are_inspected_and_short_ones_are_not_believed(length):
    tokens = torch.arange(2 * length).reshape(2, 1, length) % 50
    data = models.inspect(tiny(), tokens[0], unseen=tokens[1]).to_dataset()
    assert length == 30 or not data["trusted"].any()
    assert float(data["rebuilt"].max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_it_is(dtype):
    data = models.inspect(tiny().to(dtype), torch.arange(40)).to_dataset()
    assert float(data["rebuilt"].max()) < 2e-2


def test_a_model_in_training_is_used_without_it_and_stays_in_training():
    model = tiny().train()
    models.inspect(model, torch.arange(30))
    assert model.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt2"}, "model is of type str; it must be a PyTorch module"),
        ({"model": torch.nn.Linear(30, 3), "tokens": torch.ones(1, 30)}, "the model made no attention call"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, r"tokens have shape \(1, 0\)"),
        ({"tokens": torch.zeros(2, 9, dtype=torch.long)}, "the batch has 2 prompts"),
        ({"unseen": torch.zeros(1, 7, dtype=torch.long)}, r"unseen has shape \(1, 7\) and tokens \(30,\)"),
        ({"queries": 0}, "queries is 0"),
    ],
)
def test_what_cannot_be_inspected_is_refused_in_one_line(change, message):
    options: dict[str, Any] = {"model": tiny(), "tokens": torch.arange(30)} | change
    with pytest.raises(ValueError, match=message) as refused:
        models.inspect(**options)
    assert "\n" not in str(refused.value)
