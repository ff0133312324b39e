"""`largeprompt concentration` and `largeprompt prompt-length` as a user meets them, and how studies are told."""

import io
import json
import math
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from largeprompt import lab
from largeprompt.cli import _concentration
from largeprompt.cli._charts import concentration_chart
from largeprompt.cli._tables import concentration_tables, prompt_length_lines
from largeprompt.paper.drawing import draw, save

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
    """The study that a command line makes, which is not carried out."""
    found = []

    def stop(study, done, device):
        found.append(study)
        raise ValueError("stopped")

    monkeypatch.setattr(lab.Study, "carry_out", stop)
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


WRONG = [
    (
        ("--layer", "identity:0.3", "--score-scale", "0.5"),
        "--score-scale is '0.5'; identity:SCALE holds the scale already",
    ),
    (("--score-scale", "1/sqrt(-1)"), "--score-scale is '1/sqrt(-1)'; it must be a number, such as 0.25 or 1/sqrt(16)"),
    (
        ("--measure", "cauchy"),
        "--measure is 'cauchy'; it must be one of gaussian, rademacher, cube, sphere, regression",
    ),
    (("--sigma", "toeplitz"), "measure.cov: the covariance is 'toeplitz'; for d = 5"),
    (("--sigma", "missing.npz"), "missing.npz"),
    (("--d", "0"), "measure.dim is 0; it must be at least 1"),
    (("--d", "two"), "measure.dim is 'two'; it must be a whole number"),
    (("--noise", "0.1"), "--noise is '0.1'; tokens of kind 'gaussian' have no labels"),
    (("--measure", "regression", "--noise", "-1"), "measure.noise is -1; it must be at least 0"),
    (
        ("--measure", "regression", "--quantity", "output"),
        "quantity has 'output'; of a regression it must be among risk",
    ),
    (("--quantity", "loss"), "quantity has 'loss'; of a law of tokens it must be among output, V, U"),
    (("--quantity", "risk"), "quantity has 'risk'; of a law of tokens"),
    (("--quantity", "O", "--layer", "identity:1"), "quantity is 'O'; this layer has"),
    (("--quantity", ""), "quantity has ''; of a law of tokens"),
    (("--query-sigma", "kms:2"), "query.cov: rho is 2; it must lie between -1 and 1"),
    (
        ("--layer", "xavier"),
        "--layer is 'xavier'; it must be pytorch, pytorch:SEED, identity:SCALE, FILE.npz or FILE.npy",
    ),
    (("--layer", "identity"), "--layer is 'identity'; it must be"),
    (("--layer", "identity:big"), "layer.scale is 'big'; it must be a number"),
    (("--layer", "pytorch:-1"), "layer.seed is -1; it must be at least 0"),
    (("--layer", "missing.npz"), "missing.npz"),
    (("--attention", "cosine"), "layer.kind is 'cosine'; it must be one of softmax, linear"),
    (("--L", "100:10:log"), "L is '100:10:log'; it must be such as"),
    (("--L", "inf"), "L has 'inf'; prompt lengths are whole numbers"),
    (("--replicates", "1"), "replicates is 1; it must be at least 2"),
    (("--replicates", "many"), "replicates is 'many'; it must be a whole number"),
    (("--seed", "-1"), "seed is -1; it must be at least 0"),
    (("--seed", str(2**32)), "seed is 4294967296; it must be at most 4294967295"),
    (("--d", "1000000"), "measure.dim is 1000000; it must be at most 10000"),
    (("--replicates", "1e12"), "replicates is 1000000000000; it must be at most 10000000"),
    (("--config", "missing.toml"), "missing.toml"),
    (("--device", "tpu"), "device is 'tpu'; it must be one of 'auto', 'cpu', 'gpu'"),
    ((*SMALL, "--out", "/dev/null/here"), "/dev/null"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_a_user_did_wrong_is_one_line(command, options, message):
    code, out, err = command("concentration", *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


WRONG_FILES = [
    ("lenghts = [10]", "lenghts = [10] is not a setting; they are measure, query, layer, L, quantity"),
    ("bounds = 1", "bounds is 1; it must be true or false"),
    ("measure = 3", "measure is 3; it must be a table"),
    ("layer = 3", "layer is 3; it must be a table"),
    ("quantity = 3", "quantity is 3; it must be names such as output,gradient"),
    ('[query]\nkind = "sphere"\nradius = 1\ndim = 3', "query has tokens of dimension 3; they must be of dimension 5"),
    ('[measure]\nkind = "regression"\nd = 2\n[query]\nkind = "cube"', "a regression has its own"),
    ("L = = 3", "study.toml is not TOML"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES, ids=[message[:40] for _, message in WRONG_FILES])
def test_what_is_wrong_with_a_file_is_one_line(command, text, message):
    Path("study.toml").write_text(text + "\n")
    code, _, err = command("concentration", "--config", "study.toml")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_option_that_the_law_of_a_file_cannot_take_is_refused(command):
    Path("study.toml").write_text('[measure]\nkind = "empirical"\ntokens = [[1, 0], [0, 1]]\n')
    code, _, err = command("concentration", "--config", "study.toml", "--sigma", "kms:0.5")
    assert (code, err) == (2, "largeprompt: --sigma is 'kms:0.5'; a law of kind 'empirical' takes none\n")


def test_an_interrupt_leaves_no_file(monkeypatch, command):
    def interrupted(study, done, device):
        raise KeyboardInterrupt

    def leave(code):
        raise SystemExit(code)

    said = []
    monkeypatch.setattr(lab.Study, "carry_out", interrupted)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--epsilon", "0"), "--epsilon is '0'; it must be a positive number"),
        (("--epsilon", "nan"), "--epsilon is 'nan'; it must be a positive number"),
        (("--epsilon", "inf"), "--epsilon is 'inf'; it must be a positive number"),
        (("--epsilon", "small"), "--epsilon is 'small'; it must be a positive number"),
        (
            ("--epsilon", "1", "--quantity", "output,gradient"),
            "quantity is output, gradient; a prompt length is of one",
        ),
        (("--epsilon", "1", "--quantity", "U,V"), "quantity is U, V; a prompt length is of one, give --quantity"),
        (("--epsilon", "1", "--layer", "xavier"), "--layer is 'xavier'"),
        (("--epsilon", "1", "--device", "tpu"), "device is 'tpu'"),
    ],
)
def test_what_a_prompt_length_cannot_be_asked_for_is_one_line(command, options, message):
    code, out, err = command("prompt-length", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def dataset(quantities=("output",), lengths=(10, 100, 1000), **changes):
    """A study's result without a study."""
    L = np.asarray(lengths, float)
    count, size = len(quantities), len(L)
    curve = np.tile(2 / L, (count, 1))
    curves = {
        "measured": curve,
        "stderr": curve / 20,
        "low": 0.9 * curve,
        "high": 1.1 * curve,
        "q05": 0.1 * curve,
        "q50": 0.7 * curve,
        "q95": 4 * curve,
        "effective": np.full((count, size), 300.0),
        "needed": np.full((count, size), 200.0),
        "trusted": np.ones((count, size), bool),
        "predicted": curve / (1 + 3 / L),
        "predicted_stderr": 0 * curve,
        "bound_log10": np.tile(1 - np.log10(L) / 3, (count, 1)),
    }
    scalars = {"slope": -1.0, "slope_stderr": 0.03, "predicted_slope": -0.9, "ratio": 1.02, "ratio_stderr": 0.01}
    scalars |= {"constant": 2.0, "exponent": 1.0, "onset": 30.0}
    numbers = {
        **{name: np.full(count, value) for name, value in scalars.items()},
        "regime": np.full(count, "falls as 1/L [θ² = 0.2]"),
        "method": np.full(count, "delta method"),
        "note": np.full(count, ""),
        "exact": np.full(count, True),
        "bound_name": np.full(count, "Proposition 3.1"),
        "bound_refusal": np.full(count, ""),
    }
    for name, value in changes.items():
        target, shape = (numbers, count) if name in numbers else (curves, (count, size))
        target[name] = np.broadcast_to(np.asarray(value), shape)
    return xr.Dataset(
        {name: (("quantity", "L"), values) for name, values in curves.items()}
        | {name: ("quantity", values) for name, values in numbers.items()},
        coords={"quantity": list(quantities), "L": np.asarray(lengths, np.int32)},
        attrs={"replicates": 200, "seed": 0, "seconds": 1.0},
    )


DATASETS = {
    "plain": dataset(),
    "many quantities": dataset(("output", "V", "U", "K", "Q", "O", "gradient")),
    "one length": dataset(lengths=(50,), slope=math.nan, slope_stderr=math.nan, ratio=math.nan),
    "far bounds": dataset(("output", "V"), bound_log10=[20.0, 19.9, 19.8]),
    "bounds beyond floats": dataset(bound_log10=4000.0),
    "refused bounds": dataset(bound_log10=math.nan, bound_name="", bound_refusal="tokens have the mean [1, 2]"),
    "some untrusted": dataset(trusted=[True, False, False], needed=[100.0, 5e7, math.inf]),
    "none trusted": dataset(trusted=False, needed=math.inf, slope=math.nan, constant=math.inf, onset=math.nan),
    "no prediction": dataset(
        predicted=math.nan, predicted_stderr=math.nan, ratio=math.nan, constant=math.nan, exponent=math.nan
    ),
    "asymptote alone": dataset(exact=False, note="it may be infinite"),
    "no deviation": dataset(measured=0.0, stderr=0.0, low=0.0, high=0.0, q05=0.0, q50=0.0, q95=0.0, predicted=0.0),
    "risks": dataset(("risk", "risk-gradient"), gap=[[-0.1, 0.01, 0.001]], gap_stderr=0.002, bound_log10=30.0),
}


@pytest.mark.parametrize("data", DATASETS.values(), ids=DATASETS)
def test_every_result_is_drawn_and_told(data, tmp_path):
    files = [tmp_path / name for name in ("picture.svg", "again.svg")]
    for file in files:
        save(draw(concentration_chart(data)), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    console = Console(width=100, record=True, file=io.StringIO())
    for part in concentration_tables(data):
        console.print(part)
    text = console.export_text()
    assert text.count("effective") == data.sizes["quantity"]
    assert "nan" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_not_to_be_trusted_is_marked_with_what_would_do():
    lines = "\n".join(str(part) for part in concentration_tables(DATASETS["some untrusted"]))
    assert "* not to be trusted: 200 prompts are too few at L = 100; about 5.0e7 would do" in lines
    assert "* not to be trusted: no number of prompts would do at L = 1000" in lines
    assert "slope -1.000 ± 0.030, predicted -0.900 at these L, -1 for large L" in lines
    assert "measured over predicted 1.020 ± 0.010" in lines
    assert "falls as 1/L [θ² = 0.2]" in lines
    assert "no bound: tokens have the mean [1, 2]" in "\n".join(
        str(part) for part in concentration_tables(DATASETS["refused bounds"])
    )


def found(**changes):
    parts = {"epsilon": 0.01, "L": 1234, "method": "delta method", "checked": True, "measured": 1e-4}
    parts |= {"measured_stderr": 1e-6, "bound_log10_L": 23.45, "bound_refusal": "", "quantity": "U"}
    parts |= {"lasting": 1234, "unchecked_reason": ""}
    return SimpleNamespace(**parts | {"regime": SimpleNamespace(name="1/L", sentence="falls as 1/L")} | changes)


def test_a_prompt_length_is_told_with_its_measurement_and_its_bound():
    assert [str(line) for line in prompt_length_lines(found())] == [
        "L = 1234 tokens a prompt for a root mean square error of 0.01",
        "delta method; falls as 1/L",
        "measured at that length: 0.01 ± 5e-05",
        "the paper's bound asks for L = 10^23.4",
    ]
    (first, *_) = prompt_length_lines(found(quantity="risk"))
    assert str(first) == "L = 1234 tokens a prompt for a difference of risks of 0.01"
    again = [str(line) for line in prompt_length_lines(found(quantity="risk", lasting=5000))]
    assert (
        again[1] == "from L = 5000 on every longer prompt does too: in between the difference of risks is larger again"
    )
    far = found(L=math.inf, lasting=math.inf, checked=False, measured=math.nan, unchecked_reason="no finite length")
    far.bound_log10_L, far.bound_refusal = math.nan, "tokens are wild"
    assert [str(line) for line in prompt_length_lines(far)] == [
        "no length up to 1e60 for a root mean square error of 0.01",
        "delta method; falls as 1/L",
        "not measured: no finite length",
        "the paper's bound does not serve: tokens are wild",
    ]
