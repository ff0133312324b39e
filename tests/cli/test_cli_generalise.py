"""`largeprompt generalise`: tables, maps, JSON, stored runs, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from largeprompt import lab
from largeprompt.icl import LinearRegression, identity, linear_mismatch, optimal_linear

SMALL = ("generalise", "--d", "2", "--L", "4,inf", "--test-L", "4,9")
TINY: Any = {
    "d": 2,
    "attention": "linear",
    "steps": 3,
    "batch": 2,
    "engine": "reference",
    "record": lab.Record(points=2, draws=64),
}


def test_numbers_are_exact_risks_and_files_hold_them(command):
    code, out, err = command(*SMALL, "--attention", "linear", "--test-noise", "0.5", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    task, test = (LinearRegression(identity(2), noise, identity(2) / 2) for noise in (0.1, 0.5))
    rows = found["generalise"]["rows"]
    assert [(row["trained_at"], row["tested_at"]) for row in rows] == [(4, 4), (4, 9), ("inf", 4), ("inf", 9)]
    for row in rows:
        trained = math.inf if row["trained_at"] == "inf" else row["trained_at"]
        np.testing.assert_allclose(row["optimum"], optimal_linear(test, row["tested_at"]).risk.value, rtol=1e-12)
        np.testing.assert_allclose(row["excess"], linear_mismatch(test, trained, row["tested_at"], task), rtol=1e-9)
    assert found["generalise"]["settings"]["test"] == "noise 0.5"
    assert [Path(file).suffix for file in found["files"]] == [".svg", ".pdf", ".png", ".csv", ".nc"]
    assert all(Path(file).stat().st_size > 100 for file in found["files"])


def test_the_table_has_the_least_risks_and_the_leading_order(command):
    code, out, _ = command(*SMALL, "--sigma", "diagonal:1,2")
    assert code == 0
    assert "softmax, diagonal:1,2, d = 2, noise 0.1: risk over" in " ".join(out.split())
    assert out.count("least risk ") >= 2
    assert out.count("(1/L₁ − 1/L₂)²") == 2
    _, shifted, _ = command(*SMALL, "--attention", "linear", "--test-query-sigma", "diagonal:3,1")
    assert "(1/L₁ − 1/L₂)²" not in shifted  # the law holds of one task
    assert "test with query sigma diagonal:3,1" in " ".join(shifted.split())


def test_stored_runs_are_rows_of_their_lengths(command):
    store = lab.Store("toy")
    runs = [lab.Run(L=L, **TINY) for L in (4, 7)]
    for run in runs:
        lab.train(run, store)
    keys = [part for run in runs for part in ("--run", run.key[:12])]
    code, out, _ = command("generalise", *keys, "--store", "toy", "--test-L", "4", "--json")
    assert code == 0
    rows = json.loads(out)["generalise"]["rows"]
    assert [(row["attention"], row["trained_at"]) for row in rows] == [("linear", 4), ("linear", 7)]
    tested = lab.risks_by_length(lab.trained(store, runs[1].key), [4])
    np.testing.assert_allclose(rows[1]["risk"], tested.risk.sel(member="linear", L=4), rtol=1e-12)
    code, _, err = command("generalise", *keys[:2], *keys[:2], "--store", "toy")
    assert code == 2
    assert "two of the runs trained linear attention at L = 4; give one of them" in err
    other = lab.Run(L=4, noise=0.3, **TINY)
    lab.train(other, store)
    code, _, err = command("generalise", *keys[:2], "--run", other.key, "--store", "toy")
    assert code == 2
    assert "has another task than run" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--L", "0"), "--L is 0; it must be a whole number of at least 1, or inf"),
        (("--test-L", "2.5"), "--test-L is 2.5; it must be a whole number of at least 1, or inf"),
        (("--sigma", "toeplitz"), "the covariance is 'toeplitz'"),
        (("--test-sigma", "kms:2"), "rho is 2; it must lie between -1 and 1"),
        (("--test-omega", "diagonal:1,2"), "for d = 5"),
        (("--noise", "-1"), "noise is -1.0; it must be a number of at least 0"),
        (("--test-noise", "loud"), "noise is 'loud'; it must be a number of at least 0"),
        (("--attention", "cubic"), "attention is 'cubic'; it must be softmax or linear"),
        (("--d", "0"), "d is 0; it must be at least 1"),
        (("--run", "ab"), "there is no store at 'runs'"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments, message, command):
    code, out, err = command("generalise", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
