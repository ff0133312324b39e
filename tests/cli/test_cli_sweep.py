"""`largeprompt sweep` where it needs no cluster; with one, see tests/lab/test_cluster.py."""

import json
import sys
from pathlib import Path

import pytest

from largeprompt import lab
from largeprompt.cli import _sweep
from largeprompt.lab import _cluster

GRID = """
L = inf
d = 2
attention = "linear"
rate = 0.01
steps = 30
seeds = 4
engine = "reference"
record = {points = 4}
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEPROMPT_STORE", raising=False)
    Path("grid.toml").write_text(GRID)


@pytest.fixture
def runs(in_a_folder):
    return lab.runs_from(lab.read_toml("grid.toml"))


def test_a_finished_sweep_is_told_without_a_cluster(command, runs):
    lab.sweep(runs, lab.Store("runs"))
    code, out, err = command("sweep", "grid.toml")
    assert (code, err) == (0, "")
    assert "best linear" in out
    assert out.endswith("4 of 4 runs are finished, 4 were before; they are in runs\n")
    answer = json.loads(command("sweep", "grid.toml", "--json")[1])
    assert (answer["runs"], answer["found"], answer["finished"], answer["failed"]) == (4, 4, 4, [])
    assert [row["runs"] for row in answer["rows"]] == [4]


def test_of_very_many_runs_there_is_a_count(command, runs, monkeypatch):
    lab.sweep(runs, lab.Store("runs"))
    monkeypatch.setattr(_sweep, "_MANY", 3)
    assert command("sweep", "grid.toml")[1] == "4 of 4 runs are finished, 4 were before; they are in runs\n"


def test_status_counts_the_runs_of_a_grid_and_names_those_begun(command, runs):
    store = lab.Store("runs")
    lab.train(runs[0], store)
    store.fail(runs[1], "RuntimeError: [no]", "a machine")
    with store.claim(runs[2].key):
        code, out, err = command("sweep", "status", "grid.toml")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "4 runs in runs: 1 finished, 1 running, 1 failed, 1 not begun"
    assert "failed: RuntimeError: [no]" in out
    assert runs[1].key[:12] in out
    assert runs[3].key[:12] not in out
    answer = json.loads(command("sweep", "status", "grid.toml", "--json")[1])
    assert answer["counts"] == {"finished": 1, "failed": 1, "not begun": 2}
    assert [run["hash"] for run in answer["runs"]] == [run.key for run in runs]
    assert answer["runs"][1]["message"] == "RuntimeError: [no]"
    assert command("sweep", "status")[1].startswith("2 runs in runs: 1 finished, 1 failed\n")
    Path("empty").mkdir()
    assert command("sweep", "status", "--store", "empty")[1] == "0 runs in empty: none\n"


def test_a_long_status_is_cut_on_the_terminal_only(command, runs, monkeypatch):
    monkeypatch.setattr(_sweep, "_SHOWN", 1)
    for run in runs[:3]:
        lab.Store("runs").fail(run, "no", "")
    out = command("sweep", "status")[1]
    assert sum(run.key[:12] in out for run in runs) == 1
    assert out.endswith("and 2 more; --json prints them all\n")
    assert len(json.loads(command("sweep", "status", "--json")[1])["runs"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grid.toml", "other.toml"), "grid.toml other.toml was given; it must be one grid, or status and at most one"),
        (("grid.toml", "--workers", "0"), "--workers is 0; it must be at least 1"),
        (("grid.toml", "--workers", "2", "--scheduler", "tcp://x:1"), "goes with neither --scheduler nor status"),
        (("grid.toml", "--checkpoint", "-1"), "--checkpoint is -1.0; it must be at least 0"),
        (("none.toml",), "none.toml"),
        (
            ("grid.toml", "--scheduler", "nonsense"),
            "the scheduler is 'nonsense'; it must be an address such as tcp://HOST:8786",
        ),
        (("status", "--scheduler", "tcp://127.0.0.1:9"), "no Dask scheduler answers at 'tcp://127.0.0.1:9'"),
        (("grid.toml", "--store", "nonsense://x"), "Protocol not known: nonsense"),
    ],
)
def test_what_is_wrong_is_one_line(command, arguments, message, monkeypatch):
    monkeypatch.setattr(_cluster, "_CONNECT_SECONDS", 0.3)
    Path("runs").mkdir()
    code, out, err = command("sweep", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_without_dask_the_extra_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    code, _, err = command("sweep", "grid.toml")
    message = "largeprompt: a sweep on a cluster needs Dask: pip install 'largeprompt[cluster]'\n"
    assert (code, err) == (2, message)
