"""The whole engine of the GPU, and sweeps on it, in Numba's simulator: against the processor's engine and itself."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpu_in_simulation as simulation
from engine_catalogue import flat
from gpu_in_simulation import Findings
from gpu_trials import DIVERGING, DIVERGING_MARKS, DIVERGING_STOP, RUNS, TRIALS, Trial, unlike
from largeprompt import lab
from largeprompt._device import gpu_refusal
from largeprompt.engine import FusedTrainer

reason = gpu_refusal("cuda") or ""
if "numba-cuda" in reason:  # it is not installed, or cannot be imported without CUDA's libraries, simulated or not
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, environment):
    """What a process with simulated GPUs has left."""
    folder = tmp_path_factory.mktemp("simulated")
    environment = environment | {"NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1"}
    environment["PYTHONWARNINGS"] = f"error,{environment['PYTHONWARNINGS']}"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, simulation.__file__, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder):
    with np.load(folder / "found.npz") as file:
        return Findings(file)


def assert_is_that_of_the_processor(row: np.ndarray, trial: Trial, stop: int) -> None:
    start = trial.start
    end = FusedTrainer(trial.training, trial.layers).advance(start, stop)
    sizes = [len(flat(layer)) for layer in start.layers]
    for one, before, after in zip(np.split(row, np.cumsum(sizes)[:-1]), start.layers, end.layers, strict=True):
        np.testing.assert_allclose(
            one, flat(after), rtol=0, atol=trial.rounding * np.abs(flat(after) - flat(before)).max()
        )


@pytest.mark.parametrize("name", TRIALS)
def test_after_a_step_and_after_three_both_engines_are_at_the_same_place(found, name):
    trial, own = TRIALS[name], found.of(f"trial/{name}")
    assert tuple(own["steps"]) == trial.stops
    for stop, row in zip(trial.stops, own["kept"], strict=True):
        assert_is_that_of_the_processor(row, trial, stop)
    np.testing.assert_array_equal(own["end"], own["kept"][-1])
    assert not np.array_equal(own["kept"][0], own["kept"][1])
    assert all(own["diverged"] == -1)


def test_trials_are_of_the_kinds_that_their_names_say(found):
    def kind(name):
        return dict(zip(simulation.KIND, found[f"trial/{name}/kind"].tolist(), strict=True))

    assert kind("more prompts than threads")["prompts"] < TRIALS["more prompts than threads"].training.batch
    assert kind("linear alone")["parts"] == 1
    assert kind("four threads a prompt")["parts"] == 4
    assert kind("four threads a prompt")["helped"]
    assert kind("threads without a token")["parts"] > (TRIALS["threads without a token"].training.L + 1) / 2
    assert not kind("one thread draws all of a prompt")["helped"]
    assert kind("one thread draws all of a prompt")["parts"] == 4
    assert kind("correlated")["on_chip"]
    assert kind("correlated")["staged"] == kind("correlated")["prompts"]
    assert not kind("weights in the card's memory")["on_chip"]
    assert not kind("weights in the card's memory, two heads")["on_chip"]
    assert kind("one prompt at a time shares its readings")["staged"] == 1
    assert kind("few prompts at a time share their readings")["staged"] == 3


@pytest.mark.parametrize("name", DIVERGING)
def test_a_layer_that_diverges_stays_and_the_other_goes_on(found, name):
    trial, own = DIVERGING[name], found.of(f"diverging/{name}")
    trainer = FusedTrainer(trial.training, trial.layers)
    end = trainer.advance(trial.start, DIVERGING_STOP)
    gone = {"linear": [True, False], "softmax": [True, False], "both": [True, True]}[name]
    assert [at is not None for at in end.diverged] == gone
    assert [None if at < 0 else at for at in own["diverged"]] == list(end.diverged)
    assert tuple(own["steps"]) == DIVERGING_MARKS
    assert own["way"].tolist() == [DIVERGING_STOP]
    for stop, row in zip(DIVERGING_MARKS, own["kept"], strict=True):
        assert_is_that_of_the_processor(row, trial, stop)


def test_states_kept_on_the_way_are_those_reached_by_stopping_there(found):
    whole, stopping = found.of("pieces/whole"), found.of("pieces/stopping")
    assert whole["steps"].tolist() == [1, 2, 4, 5, 8]
    assert whole["launches"] == 1
    np.testing.assert_array_equal(whole["kept"], stopping["kept"])
    np.testing.assert_array_equal(whole["end"], stopping["end"])
    assert len({row.tobytes() for row in (*whole["kept"], whole["end"])}) == 6


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("launches of one step", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("launches of four steps", [4, 8, 9]),
        ("room for two marks", [2, 5, 9]),
    ],
)
def test_launches_cut_anywhere_end_at_the_same_bits(found, name, way):
    whole, cut = found.of("pieces/whole"), found.of(f"pieces/{name}")
    assert cut["way"].tolist() == way
    for part in ("steps", "kept", "end", "beside"):
        np.testing.assert_array_equal(cut[part], whole[part])


def test_a_block_that_begins_after_the_deadline_leaves_its_run_for_the_next_launch(found):
    whole, late = found.of("pieces/whole"), found.of("pieces/blocks in turn")
    assert (whole["launches"], late["launches"]) == (1, 2)
    assert (late["way"].tolist(), late["way beside"].tolist()) == ([9], [3])
    for part in ("steps", "kept", "end", "beside"):
        np.testing.assert_array_equal(late[part], whole[part])


@pytest.mark.parametrize("i", range(len(unlike())))
@pytest.mark.parametrize("how", ["together", "cut"])
def test_unlike_trainings_together_end_where_each_does_alone(found, how, i):
    alone, beside = found.of(f"batch/alone/{i}"), found.of(f"batch/{how}/{i}")
    for part in ("steps", "kept", "end", "diverged"):
        np.testing.assert_array_equal(beside[part], alone[part])
    run = unlike()[i]
    assert tuple(alone["steps"]) == tuple(run.marks)
    every = list(range(run.state.step + 1, run.stop + 1))
    assert beside["way"].tolist() == (every if how == "cut" else every[-1:])


@pytest.fixture(scope="module")
def of_processor(tmp_path_factory):
    """The same runs on a processor."""
    return lab.sweep(RUNS, lab.Store(tmp_path_factory.mktemp("runs")))


def assert_same_results(found, expected):
    """To rounding, and where a run has diverged nothing in both."""
    assert set(found) == set(expected)
    for name in found:
        one, other = found[name].values, expected[name].values
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=str(name))
        else:
            np.testing.assert_array_equal(one, other, err_msg=str(name))


def test_a_sweep_on_a_gpu_records_what_one_on_a_processor_does(found, folder, of_processor):
    store = lab.Store(folder / "whole")
    for run, expected in zip(RUNS, of_processor, strict=True):
        data = store.load(run.key)
        assert data is not None
        assert data.step.values.tolist() == run.record.steps(run.steps).tolist()
        assert_same_results(data, expected)
        assert store.log(run.key)["device"] == "gpu"
        assert store.log(run.key)["sittings"] == 1
    assert not found["sweep/whole/found"].any()
    spent = [store.log(run.key)["seconds"] for run in RUNS]
    assert spent[-1] == 0.0  # of no step
    assert 0.0 < sum(spent) <= found["sweep/whole/seconds"]
    for shown, data in zip(found["sweep/whole/risks"], of_processor[:3], strict=True):
        np.testing.assert_allclose(shown, [6, *data.risk.values[:, -1]], rtol=5e-4)  # of four digits
    assert [str(end) for end in of_processor[3].verdict.values] == ["diverged", "diverged"]
    assert np.isnan(of_processor[3].risk.values[:, -1]).all()


def test_a_result_that_is_there_is_not_made_again_on_a_gpu(found):
    assert found["sweep/again/found"].tolist() == [True] * len(RUNS)


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_a_sweep_interrupted_on_a_gpu_goes_on_on_a_processor(found, folder, of_processor, how):
    """So does one that a failure ended."""
    assert "sweep/interrupted/not" not in found
    assert found["sweep/failed/said"] == "the terminal is gone"
    store = lab.Store(folder / how)
    under_way = [run for run in RUNS if not store.finished(run.key)]
    assert RUNS[:3] == under_way
    for run in under_way:
        kept = store.load_checkpoint(run.key)
        assert kept is not None
        assert kept.header["step"] == 4
    for run, data, expected in zip(RUNS, lab.sweep(RUNS, store), of_processor, strict=True):
        assert_same_results(data, expected)
        on_both, log = run in under_way, store.log(run.key)
        assert log["sittings"] == 1 + on_both
        assert log["device"] == ("cpu" if on_both else "gpu")
        assert (0 < log["gpu_seconds"] < log["seconds"]) if on_both else log["gpu_seconds"] == log["seconds"]


def test_a_result_that_cannot_be_written_ends_a_sweep_on_a_gpu_and_the_others_are_kept(found, folder):
    assert str(found["sweep/full/said"]).startswith(f"No space left on device: run {RUNS[-1].key[:12]} is kept up to")
    store = lab.Store(folder / "full")
    kept = store.load_checkpoint(RUNS[0].key)
    assert kept is not None
    assert 1 <= kept.header["step"] < RUNS[0].steps


def test_a_risk_that_cannot_be_evaluated_ends_a_sweep_on_a_gpu_and_the_others_are_kept(found, folder):
    assert found["sweep/no risk/said"] == "too many nodes"
    store = lab.Store(folder / "no risk")
    kept = [store.load_checkpoint(run.key) for run in RUNS[:3]]
    assert [one and one.header["step"] for one in kept] == [6, 6, 0]


def test_a_run_that_another_process_is_at_is_left_to_it(found, folder):
    assert found["sweep/claimed/mine"].tolist() == [False, True]
    store = lab.Store(folder / "claimed")
    assert [store.finished(run.key) for run in RUNS[:2]] == [False, True]
    assert not list(Path(store.folder).glob("*.lock"))


def test_the_command_line_says_that_runs_go_side_by_side(found):
    assert found["command line/code"] == 0
    assert str(found["command line/said"]).startswith("1 run to do, side by side on the GPU: about ")


def test_a_trainer_is_that_of_the_gpu_unless_it_is_refused(found):
    assert found["choice"].tolist() == ["GpuTrainer", "GpuTrainer", "FusedTrainer"]
