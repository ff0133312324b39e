"""A run is data: its settings in Python and TOML, their hash, and what is wrong with them in one line."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from largeprompt import lab
from largeprompt.attention import Head, MultiHead, SoftmaxAttention
from largeprompt.icl import kms
from largeprompt.lab._weights import matrices
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("as_a_stranger")
SMALL: dict[str, Any] = {"d": 2, "engine": "reference"}


def test_without_settings_a_run_is_the_paper_s():
    run = lab.Run()
    assert (run.d, run.noise, run.batch, run.rate, run.steps) == (5, 0.1, 128, 1e-3, 500_000)
    assert (run.parameters, run.start, run.score_scale, run.loss_factor) == ("KQVO", "pytorch", 1.0, 1.0)
    assert (run.heads, run.head_dim, run.outputs) == (1, 6, 6)
    np.testing.assert_array_equal(run.task().Omega, np.eye(5) / 5)
    softmax, linear = run.layers()
    drawn = Head.pytorch_default(jax.random.key(0), 6)
    for name in "KQVO":
        np.testing.assert_array_equal(getattr(softmax, name), getattr(drawn, name))
        np.testing.assert_array_equal(getattr(linear, name), getattr(drawn, name))
    assert (softmax.kind, linear.kind) == ("softmax", "linear")


def test_the_hash_of_a_run_is_the_same_on_every_machine():
    run = lab.Run(L=10, engine="reference")
    assert run.key == "29f7d272ef3aa4902b1ed6c0674743a7db56020ef1c51338daff15b678d07613"
    assert lab.Run(L=10.0, rate=0.001, d=5, steps=int(5e5), head_dim=6, engine="reference").key == run.key


@pytest.mark.parametrize(
    "other",
    [
        {"L": math.inf},
        {"attention": "softmax"},
        {"sigma": "kms:0.5"},
        {"noise": 0.2},
        {"omega": "identity"},
        {"query_sigma": "identity"},
        {"parameters": "UV"},
        {"heads": 3},
        {"outputs": 1},
        {"score_scale": 0.5},
        {"batch": 64},
        {"rate": 0.01},
        {"loss_factor": 2.0},
        {"steps": 7},
        {"weight_seed": 1},
        {"data_seed": 1},
        {"engine": "fused"},
        {"record": lab.Record(every=5)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_any_other_setting_has_another_hash(other):
    assert lab.Run(**{**SMALL, **other}).key != lab.Run(**SMALL).key


STARTS = {
    "pytorch": {},
    "infinite": {"L": math.inf},
    "structured": {"parameters": "UV", "start": "structured:0.2"},
    "Theta": {"parameters": "UV", "start": {"alpha": 0.3, "Theta": np.eye(2) / 2**0.25}},
    "given": {"parameters": "UV", "start": {"U": np.eye(3), "V": [[0.1, 0.2, 1 / 3]]}},
    "matrices": {"sigma": kms(2), "omega": [[2.0, 0.0], [0.0, 1.0]], "query_sigma": "identity"},
    "recorded": {"record": lab.Record(what=("circuits",), every=10, points=0)},
}


@pytest.mark.parametrize("settings", STARTS.values(), ids=STARTS)
def test_a_run_written_as_toml_reads_back_as_itself(settings, tmp_path):
    run = lab.Run(**{**SMALL, **settings})
    path = tmp_path / "run.toml"
    path.write_text(lab.as_toml(run))
    (back,) = lab.runs_from(lab.read_toml(path))
    assert back == run
    assert back.key == run.key
    assert lab.runs_from(run.as_dict()) == (run,)


def test_arrays_come_inline_or_from_a_file(tmp_path):
    K, Q, V, O = np.random.default_rng(0).normal(size=(4, 3, 3))
    np.savez(tmp_path / "start.npz", K=K, Q=Q, V=V, O=O)
    np.savez(tmp_path / "tasks.npz", sigma=np.asarray(kms(2)))
    path = tmp_path / "run.toml"
    path.write_text('sigma = "tasks.npz"\nengine = "reference"\n[start]\nfile = "start.npz"\n')
    (run,) = lab.runs_from(lab.read_toml(path))
    assert run.d == 2
    assert run == lab.Run(sigma=kms(2), start={"K": K, "Q": Q, "V": V, "O": O}, engine="reference")
    for layer in run.layers():
        np.testing.assert_array_equal(matrices(layer)["O"], O)


def test_nothing_is_ever_unpickled(tmp_path):
    np.savez(tmp_path / "start.npz", K=np.asarray([{}], object))
    with pytest.raises(ValueError, match=r"start\.npz is not an \.npz file of plain arrays"):
        lab.with_files({"start": "start.npz"}, tmp_path)


def test_lists_make_a_sweep():
    settings = {"L": [10, math.inf], "sigma": ["identity", kms(2).tolist()], "seeds": 3, "d": 2, "rate": [1e-3]}
    runs = lab.runs_from(settings)
    assert len(runs) == 12
    assert len({run.key for run in runs}) == 12
    assert {(run.weight_seed, run.data_seed) for run in runs} == {(0, 0), (1, 1), (2, 2)}
    apart = lab.runs_from({"weight_seed": [0, 1], "data_seed": 5})
    assert [(run.weight_seed, run.data_seed) for run in apart] == [(0, 5), (1, 5)]
    assert len(lab.runs_from({"sigma": [[1.0, 0.0], [0.0, 2.0]]})) == 1
    assert len(lab.runs_from({"L": [10, 10]})) == 1


def test_several_heads_split_the_token_where_they_can():
    (layer,) = lab.Run(heads=3, attention="softmax").layers()
    assert isinstance(layer, MultiHead)
    assert layer.heads[0].K.shape == (2, 6)
    assert lab.Run(heads=4).layers()[0].heads[0].K.shape == (6, 6)
    assert lab.Run(heads=4, head_dim=1).layers()[0].heads[0].K.shape == (1, 6)


def test_the_merged_form_starts_from_the_same_map():
    (merged,) = lab.Run(parameters="UV", attention="softmax", **SMALL).layers()
    (head,) = lab.Run(attention="softmax", **SMALL).layers()
    assert isinstance(merged, SoftmaxAttention)
    np.testing.assert_array_equal(merged.U, head.merged().U)
    np.testing.assert_array_equal(merged.V, head.merged().V)


def test_recorded_steps_are_the_ends_log_spaced_and_regular():
    assert lab.Record(points=4, every=300).steps(1000).tolist() == [0, 1, 10, 100, 300, 600, 900, 1000]
    assert lab.Record().steps(0).tolist() == [0]
    assert lab.Record(points=0).steps(9).tolist() == [0, 9]
    assert lab.Record().steps(1).tolist() == [0, 1]


WRONG = [
    ({"L": 0}, "L is 0; it must be a whole number of at least 1, or inf"),
    ({"L": "ten"}, "L is 'ten'; it must be a whole number of at least 1, or inf"),
    ({"L": []}, "L is an empty list"),
    ({"lenght": 5}, "lenght = 5 is not a setting; they are L, attention, sigma"),
    ({"attention": "both"}, "attention is 'both'; it must be one of "),
    ({"sigma": "toeplitz"}, "the covariance is 'toeplitz'; for d = 5"),
    ({"sigma": 3}, "sigma is 3; it must be a name such as kms:0.5, or a matrix"),
    ({"sigma": [[1.0, 2.0], [2.0, 1.0]]}, "sigma has the eigenvalue -1"),
    ({"sigma": [[1.0, 0.0], [0.0]]}, "sigma is not an array: its rows differ in length"),
    ({"sigma": [[1.0, 0.0], [0.0, 1.0]], "d": 3}, "sigma has shape (2, 2); it must be (3, 3)"),
    ({"omega": [[math.nan]], "d": 1}, "omega[0, 0] is nan; every entry must be finite"),
    ({"d": 0}, "d is 0; it must be at least 1"),
    ({"noise": -1}, "noise is -1; it must be a number of at least 0"),
    ({"noise": "much"}, "noise is 'much'; it must be a number of at least 0"),
    ({"rate": 0}, "rate is 0; it must be a number above 0"),
    ({"rate": math.inf}, "rate is inf; it must be a number above 0"),
    ({"batch": 2.5}, "batch is 2.5; it must be a whole number of at least 1"),
    ({"batch": True}, "batch is True; it must be a whole number"),
    ({"steps": -1}, "steps is -1; it must be at least 0"),
    ({"steps": 2**32}, "steps is 4294967296; it must be below 2**32"),
    ({"seed": -1}, "weight_seed is -1; it must be at least 0"),
    ({"seeds": 0}, "seeds is 0; it must be at least 1"),
    ({"seed": 1, "seeds": 2}, "seed is 1 and seeds is 2"),
    ({"outputs": 2}, "outputs is 2; it must be 1, or 6 of which the last counts"),
    ({"engine": "gpu"}, "engine is 'gpu'; it must be one of auto, fused, reference"),
    ({"parameters": "UV", "heads": 2}, "heads is 2; with parameters = 'UV' it must be 1"),
    ({"parameters": "UV", "score_scale": 0.4}, "score_scale is 0.4; with parameters = 'UV'"),
    ({"start": "zeros"}, "start is 'zeros'; it must be pytorch, structured:ALPHA"),
    ({"start": "structured:big"}, "start is 'structured:big'"),
    ({"start": "structured"}, "parameters is 'KQVO'; the start of Assumption 5.1 needs parameters = 'UV'"),
    ({"start": "structured:0", "parameters": "UV"}, "alpha is 0"),
    ({"start": {"K": [[1.0]]}}, "start has the arrays K; with parameters = 'KQVO' it must have K, Q, V, O"),
    ({"start": {"U": np.eye(3), "V": np.eye(6)}, "parameters": "UV"}, "start.U has shape (3, 3); it must be (6, 6)"),
    ({"start": {"U": np.eye(6), "V": np.eye(6)[:2]}, "parameters": "UV"}, "start.V has 2 rows; it must have 1, or 6"),
    ({"start": {"U": np.full((6, 6), np.nan), "V": np.eye(6)}, "parameters": "UV"}, "start.U[0, 0] is nan"),
    ({"start": {"U": np.eye(6), "V": np.eye(6)}, "parameters": "UV", "outputs": 1}, "outputs is 1; the arrays"),
    ({"start": {"file": 3}}, "start.file is 3; it must be the name of an .npz or .npy file"),
    ({"record": {"what": ["loss"]}}, "record.what is 'loss'; it must be among norms, distances"),
    ({"record": {"often": 1}}, "record.often = 1 is not a setting; they are what, points, every, draws"),
    ({"record": {"every": 0}}, "record.every is 0; it must be at least 1"),
    ({"record": 5}, "record is 5; it must be a table"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_setting_is_named_with_its_value(settings, message):
    assert_refused(lambda: lab.runs_from(lab.with_files(settings)), message)


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"L = = 3\xff")
    with pytest.raises(ValueError, match=r"run\.toml is not TOML"):
        lab.read_toml(path)
