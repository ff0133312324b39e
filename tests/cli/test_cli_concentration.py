"""`largeprompt concentration` and `largeprompt prompt-length` as a user meets them."""

import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from largeprompt import lab
from largeprompt.cli import _concentration

FILES = {f"concentration.{suffix}" for suffix in ("svg", "pdf", "png", "csv", "nc")}


SMALL = ("--d", "2", "--L", "4,16", "--replicates", "40", "--layer", "identity:0.3")


def strict(text):
    """JSON without NaN and Infinity, which are not JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_concentration_writes_its_files_and_prints_its_numbers(command):
    code, out, err = command("concentration", *SMALL, "--sigma", "kms:0.5", "--quantity", "output,gradient", "--json")
    assert (code, err) == (0, "")
    numbers = strict(out)
    assert {Path(file).name for file in numbers["files"]} == FILES
    assert {path.name for path in Path("results").iterdir()} == FILES
    rows = numbers["rows"]
    assert [(row["quantity"], row["L"]) for row in rows] == [
        (quantity, L) for quantity in ("output", "gradient") for L in (4, 16)
    ]
    for row in rows:
        assert 0 < row["low"] < row["measured"] < row["high"]
        assert row["q05"] < row["q50"] < row["q95"]
        assert isinstance(row["trusted"], bool)
    assert [part["quantity"] for part in numbers["quantities"]] == ["output", "gradient"]
    data = xr.load_dataset("results/concentration.nc", engine="scipy")
    np.testing.assert_array_equal(data.measured.values.ravel(), [row["measured"] for row in rows])
    assert data.trusted.dtype == bool
    assert str(data.regime.sel(quantity="output").values) == numbers["quantities"][0]["regime"]
    header = Path("results/concentration.csv").read_text().splitlines()[0].split(",")
    assert {"measured", "predicted", "bound_log10", "slope", "regime"} <= set(header)
    again = lab.study_from(tomllib.loads(numbers["settings"]["toml"])).run()
    np.testing.assert_array_equal(again.measured, data.measured)


def test_concentration_prints_its_tables(command):
    code, out, err = command("concentration", *SMALL, "--no-bounds", "--out", "deep/folder")
    assert (code, err) == (0, "")
    assert "output T: mean squared deviation from the infinite prompt" in out
    assert "gradient in all weights" in out
    assert "no bound: not asked for" in out
    assert "written: deep/folder/concentration.svg" in out
    assert {path.name for path in Path("deep/folder").iterdir()} == FILES


def test_a_regression_is_told_by_its_risks(command):
    options = ("--measure", "regression", "--d", "2", "--noise", "0.2", "--L", "8", "--replicates", "40", "--json")
    code, out, err = command("concentration", *options, "--layer", "identity:0.2", "--query-sigma", "kms:0.5")
    assert (code, err) == (0, "")
    numbers = strict(out)
    assert [part["quantity"] for part in numbers["quantities"]] == ["risk", "risk-gradient"]
    assert all(row["gap"] is not None for row in numbers["rows"])
    assert 'query_sigma = "kms:0.5"' in numbers["settings"]["toml"]
    assert "noise = 0.2" in numbers["settings"]["toml"]


def settings_of(monkeypatch, command, *arguments):
    """The study that a command line makes, which does not run."""
    found = []

    def stop(study, progress, device):
        found.append(study)
        raise ValueError("stopped")

    monkeypatch.setattr(lab.Study, "run", stop)
    code, _, err = command("concentration", *arguments)
    assert (code, err) == (2, "largeprompt: stopped\n")
    return found[0].settings


def test_defaults_are_gaussian_tokens_and_the_usual_start(monkeypatch, command):
    settings = settings_of(monkeypatch, command)
    assert settings == {
        "measure": {"kind": "gaussian", "dim": 5},
        "layer": {"init": "pytorch", "seed": 0},
        "L": (10, 24, 56, 133, 316, 750, 1778, 4217, 10000),
        "quantity": ("output", "gradient"),
        "replicates": 1000,
        "seed": 0,
        "query_in_prompt": False,
        "bounds": True,
    }


def test_options_override_the_file(monkeypatch, command):
    Path("laws").mkdir()
    np.savez("laws/weights.npz", U=np.eye(2), V=np.eye(2))
    Path("laws/study.toml").write_text(
        'L = "10:30:10"\nquantity = ["V"]\nreplicates = 50\nseed = 3\n'
        '[measure]\nkind = "sphere"\nradius = 2\ndim = 2\n[query]\nkind = "rademacher"\n[layer]\nfile = "weights.npz"\n'
    )
    config = ("--config", "laws/study.toml")
    plain = settings_of(monkeypatch, command, *config)
    assert plain["measure"] == {"kind": "sphere", "radius": 2, "dim": 2}
    assert plain["query"] == {"kind": "rademacher"}
    assert (plain["L"], plain["quantity"], plain["replicates"], plain["seed"]) == ((10, 20, 30), ("V",), 50, 3)
    np.testing.assert_array_equal(plain["layer"]["U"], np.eye(2))
    options = ("--sigma", "kms:0.5", "--L", "7", "--seed", "4", "--attention", "linear", "--no-bounds")
    changed = settings_of(monkeypatch, command, *config, *options, "--query-in-prompt", "--query-sigma", "identity")
    assert changed["measure"] == {"kind": "sphere", "cov": "kms:0.5", "dim": 2}
    assert changed["query"] == {"kind": "gaussian", "cov": "identity"}
    assert (changed["L"], changed["seed"], changed["bounds"], changed["query_in_prompt"]) == ((7,), 4, False, True)
    assert changed["layer"]["kind"] == "linear"
    named = settings_of(monkeypatch, command, *config, "--measure", "cube", "--d", "3", "--layer", "pytorch:5")
    assert (named["measure"], named["layer"]) == ({"kind": "cube", "dim": 3}, {"init": "pytorch", "seed": 5})


def test_covariances_and_weights_come_from_files(monkeypatch, command):
    np.savez("weights.npz", U=np.eye(3), V=np.ones((1, 3)))
    np.savez("sigma.npz", sigma=np.diag([1.0, 2.0, 3.0]))
    settings = settings_of(monkeypatch, command, "--sigma", "sigma.npz", "--layer", "weights.npz")
    np.testing.assert_array_equal(settings["measure"]["cov"], np.diag([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(settings["layer"]["V"], np.ones((1, 3)))


def test_weights_tokens_and_covariances_come_from_plain_arrays_too(monkeypatch, command):
    K, Q, V = np.random.default_rng(0).normal(size=(3, 2, 3))
    np.save("weights.npy", np.stack([K, Q, V]))
    np.save("tokens.npy", np.eye(3))
    np.save("sigma.npy", np.diag([1.0, 2.0, 3.0]))
    settings = settings_of(monkeypatch, command, "--measure", "tokens.npy", "--layer", "weights.npy")
    np.testing.assert_array_equal(settings["measure"]["tokens"], np.eye(3))
    for name, matrix in (("K", K), ("Q", Q), ("V", V)):
        np.testing.assert_array_equal(settings["layer"][name], matrix)
    settings = settings_of(monkeypatch, command, "--sigma", "sigma.npy", "--query-sigma", "sigma.npy")
    np.testing.assert_array_equal(settings["measure"]["cov"], np.diag([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(settings["query"]["cov"], np.diag([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(("scale", "number"), [((), 1.0), (("--score-scale", "1/sqrt(4)"), 0.5)])
def test_the_scale_of_the_scores_is_given_and_said(command, scale, number):
    np.savez("weights.npz", K=np.eye(2), Q=np.eye(2), V=np.ones((1, 2)))
    small = (
        "--d",
        "2",
        "--L",
        "4",
        "--replicates",
        "40",
        "--layer",
        "weights.npz",
        "--quantity",
        "output",
        "--no-bounds",
    )
    code, out, err = command("concentration", *small, *scale)
    said = f"softmax attention with K 2 × 2, Q 2 × 2, V 1 × 2; scores times {number:g}"
    assert (code, err) == (0, "")
    assert said + ("" if scale else " by default") in out
    code, out, err = command("concentration", *small, *scale, "--json")
    settings = strict(out)["settings"]
    assert (settings["score_scale"], settings["layer"].startswith(said)) == (number, True)
    if scale:
        assert "scale = 0.5" in settings["toml"]


def test_an_interrupt_leaves_no_file(monkeypatch, command):
    def interrupted(study, progress, device):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(code)

    said = []
    monkeypatch.setattr(lab.Study, "run", interrupted)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(os, "write", lambda handle, text: said.append(text))
    code, _, err = command("concentration", *SMALL)
    assert (code, err) == (130, "")
    assert said == [b"largeprompt: interrupted; files already written are whole\n"]
    assert list(Path("results").iterdir()) == []


def test_progress_is_in_proportion_to_the_length(monkeypatch, command):
    steps = []
    monkeypatch.setattr(_concentration.View, "step", lambda self, name, done, note="": steps.append((note, done)))
    assert command("concentration", *SMALL, "--quantity", "output", "--no-bounds")[0] == 0
    assert steps == [("measured L = 4", 1004), ("measured L = 16", 2020), ("predicted the output", 1)]


def test_prompt_length_names_a_length_and_measures_there(command):
    options = ("--d", "2", "--layer", "identity:0.3", "--replicates", "200", "--epsilon", "0.2")
    code, out, err = command("prompt-length", *options, "--json")
    assert (code, err) == (0, "")
    found = strict(out)
    assert (found["quantity"], found["epsilon"]) == ("output", 0.2)
    assert isinstance(found["L"], int)
    assert found["checked"]
    assert (found["unchecked_reason"], found["lasting"]) == ("", found["L"])
    assert abs(found["measured"] - 0.04) < 5 * found["measured_stderr"] + 0.004
    code, out, err = command("prompt-length", *options, "--quantity", "gradient")
    assert (code, err) == (0, "")
    assert "for a root mean square error of 0.2" in out
