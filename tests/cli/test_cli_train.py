"""`largeprompt train` and `largeprompt runs` as a user meets them, with a trainer that compiles nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from largeprompt import engine, lab
from largeprompt.engine._choice import trainer_for

QUICK = ("--L", "inf", "--d", "2", "--steps", "30", "--points", "4", "--rate", "0.01")
FILES = {f"training.{suffix}" for suffix in ("svg", "pdf", "png", "csv", "nc")}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEPROMPT_STORE", raising=False)


def test_train_runs_a_sweep_once_and_tells_it_as_json(command):
    options = ("train", *QUICK, "--sigma", "identity,kms:0.5", "--seeds", "2", "--attention", "pair", "--json")
    code, out, err = command(*options)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["estimate"]["to_do"] == 4
    assert {Path(file).name for file in answer["files"]} == FILES
    assert {path.name for path in Path("results").iterdir()} == FILES
    assert [(row["sigma"], row["attention"]) for row in answer["rows"]] == [
        ("identity", "softmax"),
        ("identity", "linear"),
        ("kms:0.5", "softmax"),
        ("kms:0.5", "linear"),
    ]
    assert all(row["L"] == "inf" and row["runs"] == 2 for row in answer["rows"])
    assert len(answer["runs"]) == 4
    store = lab.Store("runs")
    assert store.run_keys() == sorted(run["hash"] for run in answer["runs"])
    kept = xr.load_dataset("results/training.nc", engine="scipy")
    assert kept.risk.values.tolist() == [row["risk"] for row in answer["rows"]]
    again = json.loads(command(*options)[1])
    assert again["estimate"]["to_do"] == 0
    assert again["rows"] == answer["rows"]


def test_train_prints_its_estimate_and_its_table(command):
    code, out, err = command("train", *QUICK, "--attention", "linear", "--store", "kept")
    assert (code, err) == (0, "")
    assert out.startswith("1 run to do, 1 at a time: about 0 s, ")
    assert "best softmax" in out
    assert "written: results/training.svg" in out
    assert len(lab.Store("kept").run_keys()) == 1
    assert command("train", *QUICK, "--attention", "linear", "--store", "kept")[1].startswith("1 run, all in the store")


@pytest.mark.parametrize(
    ("command_name", "more"), [("train", QUICK), ("reproduce", ("--preset", "smoke", "--figures", "2"))]
)
def test_without_a_gpu_one_line_says_so_and_the_processor_does_it(command, monkeypatch, command_name, more):
    monkeypatch.setattr("largeprompt._device.gpu_refusal", lambda library: "CUDA finds no device and driver")
    options = (command_name, *more, "--estimate", "--device")
    line = "largeprompt: no GPU: CUDA finds no device and driver; the CPU does the work\n"
    for device, said in (("gpu", line), ("auto", ""), ("cpu", "")):
        code, out, err = command(*options, device)
        assert (code, err) == (0, said)
        assert "GPU" not in out


def test_training_that_asked_for_a_gpu_ends_as_on_the_processor(command, monkeypatch):
    monkeypatch.setattr("largeprompt._device.gpu_refusal", lambda library: "numba-cuda is not installed")
    code, out, err = command("train", *QUICK, "--attention", "linear", "--device", "gpu", "--json")
    assert (code, err) == (0, "largeprompt: no GPU: numba-cuda is not installed; the CPU does the work\n")
    (answer,) = json.loads(out)["runs"]
    assert lab.Store("runs").log(answer["hash"])["device"] == "cpu"
    assert command("train", *QUICK, "--attention", "linear")[1].startswith("1 run, all in the store")


@pytest.mark.parametrize("command_name", ["train", "reproduce", "figure", "verify"])
def test_a_device_that_is_none_is_refused_in_one_line(command, command_name):
    of_figure = ("2",) if command_name == "figure" else ()
    code, out, err = command(command_name, *of_figure, "--device", "tpu")
    assert (code, out) == (2, "")
    assert err == "largeprompt: device is 'tpu'; it must be one of 'auto', 'cpu', 'gpu'\n"
    assert not Path("results").exists()


def test_an_estimate_alone_runs_nothing(command, monkeypatch):
    monkeypatch.setenv("LARGEPROMPT_STORE", "elsewhere")
    code, out, _ = command("train", *QUICK, "--seeds", "3", "--estimate")
    assert code == 0
    assert out.startswith("3 runs to do")
    assert not Path("elsewhere").exists()
    assert not Path("results").exists()


def test_options_override_the_file_and_arrays_come_from_files(command):
    np.savez("start.npz", U=np.eye(3), V=np.ones((1, 3)))
    Path("run.toml").write_text(
        'L = inf\nd = 2\nsteps = 7\nparameters = "UV"\nattention="linear"\nstart = "start.npz"\n[record]\npoints = 2\n'
    )
    code, _, err = command("train", "--config", "run.toml", "--steps", "9", "--every", "4")
    assert (code, err) == (0, "")
    store = lab.Store("runs")
    (address,) = store.run_keys()
    data = store.load(address)
    assert data is not None
    assert data.step.values.tolist() == [0, 1, 4, 8, 9]
    np.testing.assert_array_equal(data.U.values[0, 0], np.eye(3))


def test_a_seed_as_option_stands_for_all_seeds_of_the_file(command):
    Path("run.toml").write_text("weight_seed = 5\ndata_seed = 6\n")
    code, _, err = command("train", "--config", "run.toml", "--seed", "3", *QUICK, "--attention", "linear")
    assert (code, err) == (0, "")
    (address,) = lab.Store("runs").run_keys()
    data = lab.Store("runs").load(address)
    assert data is not None
    run = lab.run_of(data)
    assert (run.weight_seed, run.data_seed) == (3, 3)


def test_lengths_beyond_32_bits_are_written(command):
    options = ("--L", "3000000000", "--d", "2", "--steps", "3", "--attention", "linear")
    code, _, err = command("train", *options)
    assert (code, err) == (0, "")
    assert xr.load_dataset("results/training.nc", engine="scipy").L.values.tolist() == [3e9]


def test_a_record_that_is_no_table_is_one_line(command):
    Path("run.toml").write_text('record = "norms"\n')
    code, _, err = command("train", "--config", "run.toml", "--points", "3")
    assert code == 2
    assert "record is 'norms'" in err


WRONG = [
    (("--L", "ten"), "L is 'ten'; it must be a whole number of at least 1, or inf"),
    (("--L", "10,0"), "L is 0; it must be a whole number of at least 1, or inf"),
    (("--sigma", "kms:2"), "sigma: rho is 2; it must lie between -1 and 1"),
    (("--query-sigma", "kms:2"), "query_sigma: rho is 2; it must lie"),
    (("--sigma", "toeplitz"), "sigma: the covariance is 'toeplitz'; for d = 5"),
    (("--sigma", "diagonal:1,2"), "for d = 5"),
    (("--rate", "-1"), "rate is -1; it must be a number above 0"),
    (("--seeds", "0"), "seeds is 0; it must be at least 1"),
    (("--optimiser", "adagrad"), "optimiser is 'adagrad'; it must be sgd, momentum or momentum:BETA, adam or"),
    (("--optimiser", "sgd,adam:0.9,1"), "optimiser is 'adam:0.9,1': beta2 is 1; it must be at least 0 and below 1"),
    (("--record", "loss"), "record.what is 'loss'"),
    (("--jobs", "0"), "--jobs is 0; it must be at least 1"),
    (("--config", "missing.toml"), "missing.toml"),
    (("--start", "missing.npz"), "missing.npz"),
    (("--store", "/dev/null/here", *QUICK, "--attention", "linear"), "/dev/null"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_a_user_did_wrong_is_one_line(command, options, message):
    code, out, err = command("train", *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in out + err


def test_optimisers_are_swept_and_named_in_the_table(command):
    options = ("--attention", "linear", "--optimiser", "sgd,momentum:0.8,adam:0.9,0.99", "--json")
    code, out, err = command("train", *QUICK, *options)
    assert (code, err) == (0, "")
    names = [row["optimiser"] for row in json.loads(out)["rows"]]
    assert names == ["sgd", "momentum:0.8", "adam:0.9,0.99,1e-08"]


def test_an_unknown_setting_of_a_file_is_named(command):
    Path("run.toml").write_text("lenght = 10\n")
    code, _, err = command("train", "--config", "run.toml")
    assert code == 2
    assert err.startswith("largeprompt: lenght = 10 is not a setting; they are L, attention,")


def test_runs_are_listed_shown_exported_and_removed(command):
    command("train", *QUICK, "--attention", "linear", "--seeds", "2")
    code, out, err = command("runs", "list", "--json")
    assert (code, err) == (0, "")
    listed = json.loads(out)["runs"]
    assert [run["status"] for run in listed] == ["finished", "finished"]
    assert {run["weight_seed"] for run in listed} == {0, 1}
    first, second = (run["hash"] for run in listed)
    assert first[:12] in command("runs", "list")[1]
    shown = command("runs", "show", first[:8])[1]
    assert 'attention = "linear"' in shown
    assert "status: finished" in shown
    assert json.loads(command("runs", "show", first, "--json")[1])["linear"]["verdict"] == "unfinished"
    for name in ("run.nc", "run.csv", "run.toml"):
        assert command("runs", "export", first, name)[0] == 0
    assert xr.load_dataset("run.nc", engine="scipy").attrs["hash"] == first
    assert "risk" in Path("run.csv").read_text().splitlines()[0]
    (run,) = lab.runs_from(lab.read_toml("run.toml"))
    assert run.key == first
    assert command("runs", "export", first, "run.txt") == (
        2,
        "",
        "largeprompt: the file is 'run.txt'; its name must end in .nc, .csv, .toml\n",
    )
    assert command("runs", "rm", second)[0] == 0
    assert lab.Store("runs").run_keys() == [first]


@pytest.mark.parametrize("action", [("show", "abc"), ("rm", "abc"), ("export", "abc", "x.nc"), ("rm", "")])
def test_a_run_that_is_not_there_is_one_line(command, action):
    Path("runs").mkdir()
    code, _, err = command("runs", *action)
    assert code == 2
    assert "has a hash that begins with" in err
    assert len(err.strip().splitlines()) == 1


def test_an_ambiguous_hash_removes_nothing(command):
    Path("runs").mkdir()
    for letter in "bc":
        Path("runs", "a" + letter + "0" * 62 + ".nc").touch()
    code, _, err = command("runs", "rm", "a")
    assert code == 2
    assert "2 runs in runs have a hash that begins with 'a': ab0000000000, ac0000000000" in err
    assert len(list(Path("runs").iterdir())) == 2


def test_a_damaged_file_is_named_in_the_list(command):
    Path("runs").mkdir()
    Path("runs", "a" * 64 + ".nc").write_text("nothing")
    code, out, err = command("runs", "list")
    assert code == 0
    assert "0 runs in runs" in out
    assert f"runs/{'a' * 64}.nc is damaged" in err


@pytest.mark.parametrize("L", ["1000000000000", "1e12", "100000000000000000000000"])
def test_a_length_that_no_engine_can_read_is_one_line_before_anything_is_written(command, monkeypatch, L):
    monkeypatch.setattr(engine, "trainer_for", trainer_for)
    code, out, err = command("train", "--L", L, "--attention", "softmax", "--store", "kept")
    assert (code, out) == (2, "")
    assert err.startswith(f"largeprompt: L is {float(L):.4g}; a prompt of that many tokens takes ")
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("L", ["100000000000000000000000"])
def test_linear_attention_is_trained_recorded_and_told_at_any_length(command, L):
    options = ("train", *QUICK[2:], "--L", L, "--attention", "linear", "--json")
    code, out, err = command(*options)
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert row["L"] == int(L)
    assert row["linear_optimum"] == pytest.approx(0.05)
    assert json.loads(command(*options)[1])["estimate"]["to_do"] == 0


def test_any_kind_of_attention_is_trained_by_its_name(command):
    code, out, err = command("train", *QUICK, "--attention", "sigmoid", "--draws", "64", "--json")
    assert code == 0
    assert err.startswith(
        "largeprompt: 1 of 1 runs take the slower reference engine: a layer is of type Head (sigmoid)"
    )
    (row,) = json.loads(out)["rows"]
    assert (row["attention"], row["runs"]) == ("sigmoid", 1)


def test_auto_says_so_where_it_takes_the_reference(command, monkeypatch):
    monkeypatch.setattr(engine, "refusal", lambda training, layers: "L is too long")
    line = "largeprompt: 2 of 2 runs take the slower reference engine: L is too long\n"
    for name, said in (("auto", line), ("reference", "")):
        code, _, err = command("train", *QUICK, "--seeds", "2", "--engine", name, "--estimate")
        assert (code, err) == (0, said)


def test_several_softmax_heads_are_told_with_what_they_can_attain(command):
    options = ("train", "--L", "100", "--d", "2", "--heads", "3", "--head-dim", "1", "--draws", "16")
    code, out, _ = command(*options, "--steps", "2", "--points", "0", "--attention", "softmax")
    assert code == 0  # on a busy machine progress is printed too: the risk of heads takes seconds to compile
    attainable = lab.yardstick(lab.Run(L=100, d=2, heads=3, head_dim=1), "softmax").attainable
    assert f"≤ {attainable:.5f}" in out
