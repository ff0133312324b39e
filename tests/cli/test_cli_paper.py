"""The executable paper from the command line: some figures at the smallest preset, and what their folder answers."""

import json
import os
import subprocess
import sys

import pytest
import xarray as xr

from largeprompt.paper.experiments import CLAIMS, FIGURES

KEYS = ("3", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, environment):
    out = tmp_path_factory.mktemp("deep") / "folder"
    options = ["--preset", "smoke", "--figures", "3,4", "--out", str(out), "--json"]
    command = [sys.executable, "-c", "from largeprompt.cli import main; main()", "reproduce", *options]
    environment = {**environment, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert all(" % done after " in line for line in run.stderr.splitlines())  # where it takes long
    printed = json.loads(run.stdout)
    assert printed["ledger"] == json.loads((out / "ledger.json").read_text())
    assert all(os.path.exists(file) for file in printed["files"])
    return out


def test_every_figure_has_pictures_and_data(folder):
    for key in KEYS:
        for suffix in ("svg", "pdf", "csv"):
            assert (folder / "figures" / f"figure-{key}.{suffix}").stat().st_size > 500
        data = xr.load_dataset(folder / "figures" / f"figure-{key}.nc", engine="scipy")
        assert data.attrs["figure"] == key
        assert FIGURES[key].chart(data).panels  # what is on disk is enough to draw it
        assert FIGURES[key].summary(data)


def test_the_claims_that_they_decide_are_judged(folder):
    ledger = json.loads((folder / "ledger.json").read_text())
    assert [entry["key"] for entry in ledger["claims"]] == ["C5", "C6"]
    for entry in ledger["claims"]:
        assert entry["statement"] == CLAIMS[entry["key"]].statement
        assert entry["verdict"] == "not settled at this preset"  # two thousand steps
    assert ledger["errata"] == []


def test_the_report_names_all_of_it(folder):
    page, text = (folder / "report" / "index.html").read_text(), (folder / "report" / "report.md").read_text()
    for key in (*KEYS, "C5", "C6"):
        assert key in page
        assert key in text
    assert f"largeprompt figure 4 --preset smoke --out {folder}" in text


def test_what_is_there_is_not_computed_again(folder, command):
    code, output, errors = command("reproduce", "--resume", "--out", str(folder))
    assert code == 0
    assert "nothing to compute" in output
    assert "not settled at the preset smoke: C5" in output
    assert str(folder / "report" / "index.html") in output.replace("\n", "")
    assert "Ctrl-C" in errors


def test_claims_can_be_verified_one_by_one(folder, command):
    code, output, _ = command("verify", "--claims", "T1, t15", "--preset", "smoke", "--out", str(folder), "--json")
    assert code == 0
    assert {entry["key"]: entry["verdict"] for entry in json.loads(output)["claims"]} == {"T1": "holds", "T15": "holds"}
    code, output, _ = command("verify", "--claims", "C5", "--preset", "smoke", "--out", str(folder))
    assert code == 0
    assert "C5  not settled at this preset" in output


def test_resuming_takes_no_other_settings(folder, command):
    code, _, errors = command("reproduce", "--resume", "--seeds", "4", "--out", str(folder))
    assert code == 2
    assert f"--resume takes all settings from {folder}; leave out --seeds" in errors


def test_a_figure_of_other_settings_is_not_reported_as_one_of_these(folder, command):
    code, _, _ = command("figure", "3", "--preset", "smoke", "--seeds", "1", "--out", str(folder))
    assert code == 0
    code, _, errors = command("report", str(folder))
    assert code == 2
    assert "figure-3.nc was made with other settings" in errors
    code, _, _ = command("reproduce", "--resume", "--out", str(folder))
    assert code == 0
    assert command("report", str(folder))[0] == 0


def test_a_figure_prints_its_numbers(folder, command):
    code, output, _ = command("figure", "4", "--preset", "smoke", "--out", str(folder))
    assert code == 0
    assert "Figure 4. Risk along training" in output
    assert "L = 10, final risk of each seed: softmax " in output
    assert ", least 0.35" in output  # in as many digits as the error of the last risks
    assert "figure-4.svg" in output
