"""The executable paper from the command line: one smallest reproduction, and what can be asked of its folder."""

import json
import os
import subprocess
import sys

import pytest
import xarray as xr

from largeprompt.paper.claims import CLAIMS, VERDICTS
from largeprompt.paper.figures import FIGURES


def largeprompt(*arguments):
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", "from largeprompt.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("deep") / "folder"
    run = largeprompt("reproduce", "--preset", "smoke", "--out", str(out), "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    printed = json.loads(run.stdout)
    assert printed["ledger"] == json.loads((out / "ledger.json").read_text())
    assert all(os.path.exists(file) for file in printed["files"])
    return out


def test_every_figure_has_pictures_and_data(folder):
    for key, figure in FIGURES.items():
        for suffix in ("svg", "pdf", "csv"):
            assert (folder / "figures" / f"figure-{key}.{suffix}").stat().st_size > 500
        data = xr.load_dataset(folder / "figures" / f"figure-{key}.nc", engine="scipy")
        assert data.attrs["figure"] == key
        assert figure.chart(data).panels  # what is on disk is enough to draw it
        assert figure.told(data)


def test_every_claim_is_judged_and_the_theory_holds_at_the_smallest_preset(folder):
    entries = {entry["key"]: entry for entry in json.loads((folder / "ledger.json").read_text())["claims"]}
    assert list(entries) == list(CLAIMS)
    for entry in entries.values():
        assert entry["verdict"] in VERDICTS
        assert entry["statement"]
        assert entry["checks"] or entry["verdict"] == "not settled at this preset"
    for key in ("T1", "T2", "T6", "T10", "T11", "T12", "T13", "T15"):
        assert entries[key]["verdict"] == "holds"
    assert entries["T5"]["verdict"] == "does not hold"  # an erratum
    assert entries["C3"]["verdict"] == "not settled at this preset"  # two thousand steps


def test_the_report_names_all_of_it(folder):
    page, text = (folder / "report" / "index.html").read_text(), (folder / "report" / "report.md").read_text()
    for key in (*FIGURES, *CLAIMS):
        assert key in page
        assert key in text
    assert "largeprompt figure 2 --preset smoke" in text


def test_what_is_there_is_not_computed_again(folder, command):
    code, output, errors = command("reproduce", "--resume", "--out", str(folder))
    assert code == 0
    assert "nothing to compute" in output
    assert "not settled at the preset smoke: " in output
    assert str(folder / "report" / "index.html") in output.replace("\n", "")
    assert "Ctrl-C" in errors


def test_claims_can_be_verified_one_by_one(folder, command):
    code, output, _ = command("verify", "--claims", "T1, t12", "--preset", "smoke", "--out", str(folder), "--json")
    assert code == 0
    assert [entry["key"] for entry in json.loads(output)["claims"]] == ["T1", "T12"]
    code, output, _ = command("verify", "--claims", "T5", "--preset", "smoke", "--out", str(folder))
    assert code == 0
    assert "T5  does not hold" in output


def test_a_figure_tells_its_numbers(folder, command):
    code, output, _ = command("figure", "2", "--preset", "smoke", "--out", str(folder))
    assert code == 0
    assert "Figure 2. Risk at the end of training" in output
    assert "best 0.35446" in output
    assert "figure-2.svg" in output
