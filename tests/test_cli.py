"""The command line as a user meets it: in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import xarray as xr

FILES = {"convergence.svg", "convergence.pdf", "convergence.png", "convergence.csv", "convergence.nc"}


def largeprompt(*arguments, **options):
    # a narrow terminal without colours, whatever the machine
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-c", "from largeprompt.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def test_reproduce_writes_its_files_and_prints_its_numbers(tmp_path):
    out = tmp_path / "deep" / "folder"
    run = largeprompt("reproduce", "--preset", "smoke", "--out", str(out), "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert {path.name for path in out.iterdir()} == FILES
    rows = json.loads(run.stdout)["deviations"]
    assert len(rows) == 3 * 3 * 3
    assert all(np.isfinite(row["mean_square"]) and row["stderr"] > 0 for row in rows)
    data = xr.load_dataset(out / "convergence.nc", engine="scipy")
    point = data.sel(law=rows[0]["law"], quantity=rows[0]["quantity"], L=rows[0]["L"])
    assert float(point.mean_square) == rows[0]["mean_square"]
    signs = data.sel(law="Rademacher", L=1000)
    z = (signs.mean_square - signs.predicted) / signs.stderr
    assert float(np.abs(z).max()) < 5
    assert "mean_square" in (out / "convergence.csv").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reproduce", "--preset", "huge"), "preset is 'huge'; it must be one of smoke, quick"),
        (("reproduce", "--preset", "smoke", "--seed", "-1"), "seed is -1; it must be at least 0"),
        (("reproduce", "--preset", "smoke", "--seed", str(2**64)), "it must be below 4294967296"),
        (("reproduce", "--preset", "smoke", "--out", "/dev/null/here"), "/dev/null"),
    ],
)
def test_what_a_user_did_wrong_is_one_line(arguments, message):
    run = largeprompt(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_an_unknown_option_is_refused_without_a_traceback():
    run = largeprompt("reproduce", "--lenghts", "3")
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert "--lenghts" in run.stderr


def test_help_and_version():
    assert "reproduce" in largeprompt("--help").stdout
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", largeprompt("--version").stdout)


def test_an_interrupt_ends_with_one_line_and_no_half_written_file(tmp_path):
    code = "from largeprompt.cli import main; main()"
    command = [sys.executable, "-c", code, "reproduce", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(12)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    assert list(tmp_path.iterdir()) == []
