"""Runs with momentum and Adam: their keys, their settings, their tables, and that an interrupt changes no bit."""

import json
import threading
from typing import Any

import numpy as np
import pytest

from largeprompt import lab
from refusals import assert_refused

SMALL: dict[str, Any] = {"L": 4, "d": 2, "batch": 6, "rate": 1e-2, "steps": 40, "engine": "reference"}
RECORD = lab.Record(what=("parameters",), points=4, draws=64)


def run(optimiser: str, **settings) -> lab.Run:
    return lab.Run(**SMALL | {"attention": "linear", "record": RECORD, "optimiser": optimiser} | settings)


def test_plain_descent_is_no_part_of_a_key_and_others_are():
    assert "optimiser" not in json.loads(run("sgd").canonical)
    assert run("sgd") == lab.Run(**SMALL, attention="linear", record=RECORD)
    keys = [run(one).key for one in ("sgd", "momentum", "momentum:0.5", "adam", "adam:0.9,0.99", "adam:0.9,0.99,1e-4")]
    assert len(set(keys)) == 6
    assert run("momentum").key == run("momentum:0.90").key
    assert run("adam").optimiser == "adam:0.9,0.999,1e-08"
    assert run("adam").title == "linear, identity, L = 4, adam:0.9,0.999,1e-08, seed 0"


def test_a_run_with_another_optimiser_reads_back_as_itself(tmp_path):
    for optimiser in ("sgd", "momentum:0.5", "adam:0.5,0.7"):
        (tmp_path / "run.toml").write_text(lab.as_toml(run(optimiser)))
        assert lab.runs_from(lab.read_toml(tmp_path / "run.toml")) == (run(optimiser),)
        assert lab.runs_from(run(optimiser).as_dict()) == (run(optimiser),)
    assert [one.optimiser for one in lab.runs_from({"optimiser": ["sgd", "momentum"]})] == ["sgd", "momentum:0.9"]


@pytest.mark.usefixtures("as_a_stranger")
def test_a_wrong_optimiser_is_one_line():
    assert_refused(lambda: run("nesterov"), "optimiser is 'nesterov'; it must be sgd, momentum or momentum:BETA")
    assert_refused(lambda: run("adam:2"), "optimiser is 'adam:2': beta1 is 2; it must be at least 0 and below 1")


class StopAt(lab.Progress):
    def __init__(self, step: int):
        self.last, self.stop = step, threading.Event()

    def step(self, name, done, note=""):
        if done >= self.last:
            self.stop.set()


@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_a_run_goes_on_from_a_checkpoint_with_its_moments(optimiser, store, tmp_path):
    own = run(optimiser)
    whole = lab.train(own, lab.Store(tmp_path / "whole"))
    progress = StopAt(3)
    with pytest.raises(lab.Interrupted):
        lab.train(own, store, progress=progress, stop=progress.stop)
    kept = store.load_checkpoint(own.key)
    assert kept is not None
    assert 3 <= kept.header["step"] < own.steps
    assert np.any(kept.arrays["state 0 K moment 0"] != 0)
    assert ("state 0 K moment 1" in kept.arrays) == (optimiser == "adam")
    assert lab.train(own, store).identical(whole)
    assert whole.attrs["toml"].count(f'optimiser = "{own.optimiser}"') == 1


@pytest.mark.usefixtures("quick")
def test_a_table_names_the_optimiser_unless_all_runs_are_plain(store):
    rows = lab.summary(lab.sweep([run("sgd"), run("adam")], store, jobs=1))
    assert [row["optimiser"] for row in rows] == ["sgd", "adam:0.9,0.999,1e-08"]
    assert lab.summary(lab.sweep([run("adam")], store, jobs=1))[0]["optimiser"] == "adam:0.9,0.999,1e-08"
    assert "optimiser" not in lab.summary(lab.sweep([run("sgd")], store, jobs=1))[0]
