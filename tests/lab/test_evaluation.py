"""What a run has trained, at lengths other than its own."""

import dataclasses
import math
import threading
from typing import Any

import jax
import numpy as np
import pytest

import significance
from largeprompt import lab
from largeprompt.icl import bayes_risk, optimal_linear, optimal_softmax, risk

pytestmark = pytest.mark.usefixtures("quick")
RUN = lab.Run(L=4, d=2, attention="linear", rate=1e-2, steps=300, record=lab.Record(points=12))
PAIR = dataclasses.replace(RUN, L=math.inf, attention="pair")


def test_risks_at_other_lengths_are_those_of_the_layer_there(store):
    lab.train(RUN, store)
    found = lab.trained(store, RUN.key)
    assert (found.run, found.step, list(found.layers)) == (RUN.resolved, 300, ["linear"])
    data = lab.risks_by_length(found, [50, math.inf])
    assert data.L.values.tolist() == [4, 50, math.inf]
    assert data.trained.values.tolist() == [True, False, False]
    recorded = store.load(RUN.key)
    assert float(data.risk[0, 0]) == pytest.approx(float(recorded.risk[0, -1]), rel=1e-12)
    assert float(data.optimum[0, 0]) == pytest.approx(float(recorded.optimum[0]))
    sampled = risk(found.layers["linear"], RUN.task(), 50, method="sampled", rtol=0.05)
    significance.assert_close_in_sigmas(sampled.value, float(data.risk[1, 0]), sampled.stderr)
    for i, L in enumerate(data.L.values):
        assert float(data.Bayes[i]) == pytest.approx(float(bayes_risk(RUN.task(), L).value))
        assert float(data.optimum[i, 0]) == pytest.approx(float(optimal_linear(RUN.task(), L).risk.value))


def test_the_members_of_a_pair_have_their_own_risks_and_optima(store):
    lab.train(PAIR, store)
    data = lab.risks_by_length(lab.trained(store, PAIR.key), "8")
    at_8 = data.sel(L=8)
    assert data.member.values.tolist() == ["softmax", "linear"]
    assert float(at_8.risk_stderr.sel(member="softmax")) > 0 == float(at_8.risk_stderr.sel(member="linear"))
    assert float(at_8.optimum.sel(member="softmax")) == pytest.approx(float(optimal_softmax(PAIR.task(), 8).risk.value))


def test_another_task_may_be_tested(store):
    lab.train(PAIR, store)
    found = lab.trained(store, PAIR.key)
    cases: dict[str, Any] = {"noise": 0.5, "query_sigma": "diagonal:4,1"}
    for name, value in cases.items():
        data = lab.risks_by_length(found, "inf", **{name: value})
        task = dataclasses.replace(PAIR, **{name: value}).task()
        for member, layer in found.layers.items():
            assert float(data.risk.sel(member=member)[0]) == pytest.approx(float(risk(layer, task, math.inf).value))
        assert float(data.optimum[0, 0]) == pytest.approx(float(optimal_softmax(task, math.inf).risk.value))


def test_an_interrupted_run_has_the_layers_of_its_checkpoint(store):
    stop = threading.Event()

    class Stopping(lab.Progress):
        def step(self, name, done, note=""):
            if done >= 10:
                stop.set()

    with pytest.raises(lab.Interrupted):
        lab.train(RUN, store, progress=Stopping(), stop=stop)
    found = lab.trained(store, RUN.key)
    kept = store.load_checkpoint(RUN.key)
    assert found.step == kept.header["step"] < 300
    np.testing.assert_array_equal(found.layers["linear"].K, kept.arrays["state 0 K"])
    assert float(lab.risks_by_length(found, "inf").risk[0, 0]) > 0


def test_several_linear_heads_have_exact_risks_at_every_length_and_softmax_heads_up_to_some(store):
    run = dataclasses.replace(RUN, heads=3, head_dim=None, steps=2, record=lab.Record(points=2, draws=64))
    lab.train(run, store)
    found = lab.trained(store, run.key)
    assert float(lab.risks_by_length(found, [3, 10**9]).risk_stderr.max()) == 0
    softmax = found._replace(run=dataclasses.replace(run, attention="softmax"))
    with pytest.raises(ValueError, match=r"L is 1000000000; the risk of several softmax heads is known up to L = 134"):
        lab.risks_by_length(softmax, 10**9)


def test_a_run_without_a_layer_is_refused(store):
    diverging = dataclasses.replace(PAIR, rate=5.0, steps=100)
    lab.train(diverging, store)
    with pytest.raises(ValueError, match=r"run \w{12} diverged at step \d+; no layer came out of it"):
        lab.trained(store, diverging.key)
    without = dataclasses.replace(RUN, record=lab.Record(what=(), points=2))
    lab.train(without, store)
    with pytest.raises(ValueError, match="did not record its parameters"):
        lab.trained(store, without.key)
    with pytest.raises(ValueError, match="has neither a result nor a checkpoint"):
        lab.trained(store, "0" * 64)


def test_float32_is_refused(store):
    lab.train(RUN, store)
    found = lab.trained(store, RUN.key)
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match="use_float64"):
            lab.risks_by_length(found, 3)
    finally:
        jax.config.update("jax_enable_x64", True)
