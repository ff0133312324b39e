"""The command line as a user meets it: in a process of its own where that matters."""

import contextlib
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

FILES = {
    f"{stem}.{suffix}" for stem in ("convergence", "optima", "flows") for suffix in ("svg", "pdf", "png", "csv", "nc")
}


def largeprompt(*arguments, **options):
    # a narrow terminal without colours, whatever the machine; compiled as fast as in the other tests
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", "from largeprompt.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def test_reproduce_writes_its_files_and_prints_its_numbers(tmp_path):
    out = tmp_path / "deep" / "folder"
    run = largeprompt("reproduce", "--preset", "smoke", "--out", str(out), "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert {path.name for path in out.iterdir()} == FILES
    numbers = json.loads(run.stdout)
    rows = numbers["deviations"]
    assert len(rows) == 3 * 3 * 2
    assert all(np.isfinite(row["measured"]) and row["stderr"] > 0 for row in rows)
    data = xr.load_dataset(out / "convergence.nc", engine="scipy")
    point = data.sel(law=rows[0]["law"], quantity=rows[0]["quantity"], L=rows[0]["L"])
    assert float(point.measured) == rows[0]["measured"]
    signs = data.sel(law="Rademacher", L=60)
    z = (signs.measured - signs.predicted) / signs.stderr
    assert float(np.abs(z).max()) < 5
    assert "measured" in (out / "convergence.csv").read_text().splitlines()[0]
    for row in numbers["optima"]["rows"]:
        assert row["floor"] < row["Bayes"] < row["linear"] < row["softmax"]
    flows = xr.load_dataset(out / "flows.nc", engine="scipy")
    assert np.all(flows.distance.isel(t=0).diff("L") < 0)
    assert np.all(flows.risk.isel(t=-1) > flows.infinite.isel(t=-1))
    assert len(numbers["flows"]["rows"]) == flows.distance.size


def test_what_a_user_did_wrong_is_one_line():
    run = largeprompt("reproduce", "--preset", "huge")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == "largeprompt: preset is 'huge'; it must be one of smoke, quick\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reproduce", "--preset", "smoke", "--seed", "-1"), "seed is -1; it must be at least 0"),
        (("reproduce", "--preset", "smoke", "--seed", str(2**64)), "it must be below 4294967296"),
        (("reproduce", "--preset", "smoke", "--out", "/dev/null/here"), "/dev/null"),
        (("optima", "--sigma", "toeplitz"), "the covariance is 'toeplitz'; for d = 5 it must be identity, kms:RHO"),
        (("optima", "--sigma", "kms:2"), "rho is 2; it must lie between -1 and 1"),
        (("optima", "--sigma", "kms:x"), "has 'x' after its colon"),
        (("optima", "--sigma", "diagonal:1,2"), "for d = 5"),
        (("optima", "--d", "0"), "d is 0"),
        (("optima", "--noise", "-1"), "noise is -1; it must be at least 0"),
        (("optima", "--L", "0"), "L is 0"),
        (("optima", "--L", "10,5"), "lengths is (10, 5); it must be prompt lengths in increasing order"),
        (("optima", "--L", "ten"), "--L is 'ten'; it must be whole numbers separated by commas"),
        (("flows", "--time", "-1"), "time is -1.0; it must be positive and finite"),
        (("flows", "--alpha", "0"), "alpha is 0, a saddle"),
        (("flows", "--L", "inf"), "--L is 'inf'"),
        (("flows", "--out", "/dev/null/here"), "/dev/null"),
    ],
)
def test_wrong_tasks_and_lengths_are_one_line(arguments, message, command):
    code, output, errors = command(*arguments)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""


def test_an_unknown_option_is_refused_without_a_traceback(command):
    code, _, errors = command("reproduce", "--lenghts", "3")
    assert code == 2
    assert "Traceback" not in errors
    assert "--lenghts" in errors


def test_help_and_version(command):
    code, output, _ = command("--help")
    assert code == 0
    assert "reproduce" in output
    code, output, _ = command("--version")
    assert code == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", output)


def test_an_interrupt_ends_with_one_line_and_no_half_written_file(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from largeprompt.cli import main; main()", "reproduce", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not out.exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(1)  # now it measures
        while process.poll() is None:
            # again if need be: Python drops an interrupt that meets it inside a callback
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    assert list(out.iterdir()) == []
