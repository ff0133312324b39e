"""Bad files, folders, stores and lengths: one line that names them, before any work, and nothing half written."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import xarray as xr

from largeprompt import lab
from largeprompt.icl import risk
from largeprompt.paper.experiment import Computation

QUICK = ("--L", "inf", "--d", "2", "--steps", "30", "--points", "4", "--rate", "0.01", "--attention", "linear")
RUN = lab.Run(L="inf", d=2, steps=30, rate=0.01, attention="linear", record=lab.Record(points=4))  # pyrefly: ignore[bad-argument-type]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEPROMPT_STORE", raising=False)


@pytest.fixture
def path():
    """The file of a finished run in the store `runs`."""
    store = lab.Store("runs")
    lab.train(RUN, store)
    return store.path(RUN.resolved.key)


def flip(content):
    changed = bytearray(content)
    changed[len(content) // 3] ^= 1
    return bytes(changed)


def foreign(_):
    return bytes(xr.Dataset({"x": ("x", [1.0, 2.0])}).to_netcdf(engine="scipy"))


def without_its_run(_):
    return bytes(xr.Dataset({"x": ("x", [1.0])}, attrs={"digest": "0", "run": 3.0}).to_netcdf(engine="scipy"))


DAMAGES = {"flip": flip, "cut": lambda c: c[:-60], "empty": lambda c: b"", "text": lambda c: b"no", "foreign": foreign}
DAMAGES |= {"without its run": without_its_run}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_never_listed_as_finished(damage, path, command):
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    code, out, err = command("runs", "list")
    assert code == 0
    assert "0 runs in runs" in out
    assert "finished" not in out
    remedy = "; training it again sets this file aside, largeprompt runs rm deletes it\n"
    assert err.startswith(f"largeprompt: {path} is damaged")
    assert err.endswith(remedy)
    assert not any(internal in err for internal in ("digest", "KeyError", "NoneType", "Error"))
    for action in (("show",), ("export", "x.nc"), ("risk",)):
        assert command("runs", action[0], RUN.resolved.key, *action[1:]) == (2, "", err)
    assert not Path("x.nc").exists()


@pytest.mark.parametrize(("kind", "content"), [("checkpoint", b"no"), ("failed", b"no"), ("failed", b'{"run": 3}')])
def test_what_else_is_damaged_is_named_too(kind, content, path, command):
    path.unlink()
    other = path.with_suffix(f".{kind}")
    other.write_bytes(content)
    code, out, err = command("runs", "list")
    assert (code, "0 runs in runs" in out) == (0, True)
    assert err.startswith(f"largeprompt: {other} ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "action", [("runs", "list"), ("runs", "show", "ab"), ("runs", "export", "ab", "x.nc"), ("runs", "rm", "ab"),
               ("runs", "risk", "ab"), ("sweep", "status"), ("sweep", "status", "grid.toml")]
)  # fmt: skip
def test_a_store_that_is_not_there_is_an_error(action, command):
    Path("grid.toml").write_text("L = inf\n")
    code, out, err = command(*action, "--store", "typo")
    assert (code, out) == (2, "")
    other = "training makes one, --store or LARGEPROMPT_STORE names another"
    assert err == f"largeprompt: there is no store at 'typo'; {other}\n"


COMMANDS = {
    "train": QUICK,
    "optima": ("--L", "5"),
    "generalise": ("--L", "5"),
    "flows": ("--L", "10"),
    "concentration": ("--L", "10"),
    "reproduce": ("--preset", "smoke"),
    "figure": ("2", "--preset", "smoke"),
    "verify": ("--claims", "C1", "--preset", "smoke"),
}


@pytest.fixture
def no_work(monkeypatch):
    """Whatever takes time is a failure."""

    def fail(*_, **__):
        raise AssertionError("it began to work")

    monkeypatch.setattr(lab, "forecast", fail)
    monkeypatch.setattr(lab, "sweep", fail)
    monkeypatch.setattr(lab.Study, "run", fail)
    monkeypatch.setattr(Computation, "compute", fail)


@pytest.mark.parametrize("out", ["a-file", "a-file/below", "/proc/nothing"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_is_noticed_before_any_work(name, out, command, no_work):
    Path("a-file").touch()
    code, output, err = command(name, *COMMANDS[name], "--out", out)
    assert (code, output) == (2, "")
    assert err.startswith(f"largeprompt: --out is '{out}'; no file can be written there: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["a-file"]


def test_what_is_in_the_way_of_a_file_is_noticed_before_any_work(command, no_work):
    Path("results/training.svg").mkdir(parents=True)
    _, _, err = command("train", *QUICK)
    assert err == "largeprompt: --out is 'results'; results/training.svg is in the way, no file can be made there\n"
    Path("results/figures").touch()
    _, _, err = command("figure", "2", "--preset", "smoke")
    assert err == "largeprompt: --out is 'results'; results/figures is in the way, no folder can be made there\n"


@pytest.mark.parametrize("name", ["train", "reproduce"])
def test_a_store_that_cannot_be_written_is_noticed_before_any_work(name, command, no_work):
    Path("a-file").touch()
    code, _, err = command(name, *COMMANDS[name], "--store", "a-file")
    assert (code, err) == (2, "largeprompt: the store is 'a-file'; no file can be written there: it is no folder\n")


@pytest.mark.parametrize("name", ["train --config", "concentration --config", "sweep", "sweep status"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing.toml", "missing.toml: No such file or directory"),
        (".", ".: Is a directory"),
        ("/proc/self/mem", "/proc/self/mem: Input/output error"),
        ("bytes.toml", "bytes.toml is not TOML: it is not text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, file, message, command):
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    assert command(*name.split(), file) == (2, "", f"largeprompt: {message}\n")


@pytest.mark.parametrize("text", ["1e3", "1_000", "1000", "1000.0", " 1000"])
def test_every_command_reads_a_length_the_same_way(text, command, monkeypatch):
    asked = []

    def compute(self, progress):
        asked.append(self.lengths)
        raise ValueError("enough")

    def run(study, progress, device):
        asked.append(study.lengths)
        raise ValueError("enough")

    def forecast(runs, *_):
        asked.append(tuple(run.L for run in runs))
        raise ValueError("enough")

    monkeypatch.setattr(Computation, "compute", compute)
    monkeypatch.setattr(lab.Study, "run", run)
    monkeypatch.setattr(lab, "forecast", forecast)
    Path("run.toml").write_text(f'L = "{text}"\n')
    for name, more in (("optima", ()), ("flows", ()), ("concentration", ()), ("train", ("--d", "2"))):
        assert command(name, "--L", text, *more)[2] == "largeprompt: enough\n"
    for name in ("train", "concentration"):
        assert command(name, "--config", "run.toml")[2] == "largeprompt: enough\n"
    assert asked == [(1000,)] * 6


def test_lengths_of_training_may_be_a_range_or_infinite(command):
    _, out, _ = command("train", "--L", "10:30:10", *QUICK[2:], "--estimate", "--json")
    assert json.loads(out)["estimate"]["runs"] == 3
    runs = lab.runs_from({"L": "5,1e23,inf"})
    assert [run.L for run in runs] == [5, 10**23, float("inf")]


def test_a_large_dimension_is_said_to_take_long_before_it_does(command, monkeypatch):
    def compute(self, progress):
        raise ValueError("enough")

    monkeypatch.setattr(Computation, "compute", compute)
    first, _ = command("optima", "--d", "101", "--L", "5")[2].splitlines()
    assert first.startswith("largeprompt: d is 101: beyond 100 the Bayes risk is sampled")
    assert command("optima", "--d", "100", "--L", "5")[2] == "largeprompt: enough\n"


def test_risks_at_other_lengths_are_printed_drawn_and_told_as_json(path, command):
    key = RUN.resolved.key
    code, out, err = command("runs", "risk", key[:6], "--L", "10,1e2", "--plot", "risk.svg")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[-5:-2]] == ["10", "100", "trained"]
    assert out.endswith("written: risk.svg\n")
    assert Path("risk.svg").stat().st_size > 5000
    answer = json.loads(command("runs", "risk", key, "--L", "10,inf", "--noise", "0.3", "--json")[1])
    assert [(row["L"], row["trained"]) for row in answer["rows"]] == [(10, False), ("inf", True)]
    data = lab.Store("runs").load(key)
    assert data is not None
    noisy = risk(lab.layer_at(data, "linear"), dataclasses.replace(RUN, noise=0.3).task(), math.inf)
    assert answer["rows"][1]["risk"] == pytest.approx(float(noisy.value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--L", "ten"), "--L is 'ten'; it must be a whole number of at least 1, or inf"),
        (("--noise", "-1"), "noise is -1; it must be a number of at least 0"),
        (("--query-sigma", "round"), "the covariance is 'round'"),
        (("--query-sigma", "missing.npz"), "missing.npz: No such file or directory"),
        (("--plot", "risk.txt"), "--plot is 'risk.txt'; its name must end in .svg, .pdf, .png"),
        (("--plot", "/dev/null/risk.svg"), "the folder of --plot is '/dev/null'; no file can be written there"),
    ],
)
def test_a_test_that_cannot_be_is_one_line(path, command, options, message):
    code, out, err = command("runs", "risk", RUN.resolved.key, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
