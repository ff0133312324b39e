"""A real model, small enough for every run of the tests: an ALBERT that reads chemical reactions (rxnmapper)."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AlbertModel

from largeprompt import models
from largeprompt.models._statistics import attended, sinks_of
from largeprompt.models._tap import tap

FOLDER = "models/transformers/albert_heads_8_uspto_all_1310k"


@pytest.fixture(scope="module")
def model():
    package = importlib.util.find_spec("rxnmapper")  # found, not imported: it needs packages that we do not
    assert package is not None
    assert package.origin is not None
    return AlbertModel.from_pretrained(Path(package.origin).parent / FOLDER, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def reactions():
    rng = np.random.default_rng(0)
    return [torch.as_tensor(rng.integers(5, 400, (1, 256))) for _ in range(2)]


def naive(call, h):
    """Effective tokens and outputs by the plain softmax of the whole matrix."""
    head = call.head(h)
    scores = torch.as_tensor(head.queries @ head.keys.T * head.scale, dtype=torch.float64)
    weights = scores.softmax(dim=1).numpy()
    return 1 / np.sum(weights**2, axis=1), weights @ head.values


def test_its_outputs_come_back_from_its_measures_and_nothing_changes(model, reactions):
    calls = []
    with torch.no_grad():
        before = model(reactions[0])[0]
        with tap(model, calls.append, queries=16):
            during = model(reactions[0])[0]
    assert torch.equal(before, during)
    assert len(calls) == 12
    for call in calls[::4]:
        assert call.outputs is not None
        for h in range(8):
            _, outputs = naive(call, h)
            scale = np.abs(call.outputs[h]).max()
            np.testing.assert_allclose(outputs, call.outputs[h], atol=1e-5 * scale)
            head = call.head(h)
            rebuilt = np.asarray(head.layer(head.prompt(3), head.query(3)))
            np.testing.assert_allclose(rebuilt, call.outputs[h, 3], atol=1e-5 * scale)


def test_its_heads_are_inspected_with_errors_checked_on_other_tokens(model, reactions):
    found = models.inspect(model, reactions[0], unseen=reactions[1], queries=16)
    data = found.to_dataset()
    assert dict(data.sizes) == {"layer": 12, "head": 8}
    assert float(data["rebuilt"].max()) < 1e-5
    assert f" of {12 * 8} heads" in found.summary[0]
    ratios = data["measured_over_predicted"].values
    ratios = ratios[np.isfinite(ratios)]
    assert len(ratios) > 10
    assert 0.7 < np.median(ratios) < 1.4
    calls = []
    with torch.no_grad(), tap(model, calls.append, queries=16):
        model(reactions[0])
    effective, _ = naive(calls[7], 5)
    assert float(data["effective"][7, 5]) == pytest.approx(np.median(effective), rel=1e-5)


def test_a_mixture_of_gaussians_comes_nearer_to_its_outputs_than_one(model, reactions):
    """In most heads, by attention of the library itself on the law of the tokens that are no sinks."""
    calls = models.calls_of(model, reactions[0], queries=4)
    distances = []
    for call in calls[::4]:
        for h in range(8):
            head = call.head(h)
            found = attended(head)
            sinks = sinks_of(found.weights).tolist()
            limits = [head.layer(head.law(-1, sinks, components), head.query(-1)) for components in (1, 2, 4)]
            size = np.linalg.norm(found.output[-1])
            distances.append([np.linalg.norm(np.asarray(limit) - found.output[-1]) / size for limit in limits])
    one, two, four = np.array(distances).T
    assert np.mean(two < one) > 0.6
    assert np.mean(four < one) > 0.7
    assert np.median(four) < 0.8 * np.median(one)
