"""Arrays in files beside the settings, and tables within tables."""

import equinox as eqx
import numpy as np

from largeprompt import lab
from largeprompt.attention import SoftmaxAttention
from largeprompt.measures import Empirical, Gaussian
from refusals import refusal

TOKENS = [[1.0, 0.0], [0.0, 2.0], [-1.0, -2.0]]
DISC = {"kind": "sphere", "radius": 2.0, "dim": 2}


def test_arrays_come_from_files_beside_the_settings(tmp_path):
    np.savez(tmp_path / "laws.npz", cov=[[2.0, 1.0], [1.0, 2.0]], tokens=TOKENS, mean=[1.0, 0.0])
    np.savez(tmp_path / "prompt.npz", tokens=TOKENS, weights=[0.5, 0.25, 0.25])
    mixed = {"kind": "gaussian", "mean": "laws.npz", "cov": "laws.npz"}
    assert eqx.tree_equal(lab.measure_from(mixed, tmp_path), Gaussian([1.0, 0.0], [[2.0, 1.0], [1.0, 2.0]]), rtol=1e-15)
    assert eqx.tree_equal(
        lab.measure_from({"kind": "empirical", "tokens": "laws.npz"}, tmp_path), Empirical(TOKENS), rtol=1e-15
    )
    whole = lab.measure_from({"kind": "empirical", "file": "prompt.npz"}, tmp_path)
    assert eqx.tree_equal(whole, Empirical(TOKENS, [0.5, 0.25, 0.25]), rtol=1e-15)


def test_what_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path):
    np.savez(tmp_path / "other.npz", points=TOKENS)
    assert "other.npz has the arrays points; it must have one named tokens" in refusal(
        lab.measure_from, {"kind": "empirical", "tokens": "other.npz"}, tmp_path
    )
    np.savez(tmp_path / "objects.npz", tokens=np.asarray([None, {}], object))
    assert "objects.npz is not an .npz file of plain arrays" in refusal(
        lab.measure_from, {"kind": "empirical", "tokens": "objects.npz"}, tmp_path
    )
    np.savez(tmp_path / "twice.npz", tokens=TOKENS)
    assert "measure.tokens is given twice" in refusal(
        lab.measure_from, {"kind": "empirical", "tokens": TOKENS, "file": "twice.npz"}, tmp_path
    )
    np.savez(tmp_path / "words.npz", tokens=np.asarray([["a", "b"]]))
    assert "measure.tokens has entries of type <U1; they must be real numbers" in refusal(
        lab.measure_from, {"kind": "empirical", "tokens": "words.npz"}, tmp_path
    )


def test_an_npy_file_is_one_array_or_stacked_weights(tmp_path):
    np.save(tmp_path / "tokens.npy", TOKENS)
    mu = lab.measure_from({"kind": "empirical", "tokens": "tokens.npy"}, tmp_path)
    assert isinstance(mu, Empirical)
    np.testing.assert_array_equal(mu.points, TOKENS)
    U, V = np.eye(2), np.ones((2, 2))
    np.save(tmp_path / "uv.npy", np.stack([U, V]))
    layer = lab.layer_from({"file": "uv.npy"}, 2, tmp_path)
    assert isinstance(layer, SoftmaxAttention)
    np.testing.assert_array_equal(layer.U, U)
    np.testing.assert_array_equal(layer.V, V)
    assert "layer.scale is 0.5; a layer given by U and V has none" in refusal(
        lab.layer_from, {"file": "uv.npy", "scale": 0.5}, 2, tmp_path
    )
    assert "layer.file: " in (text := refusal(lab.layer_from, {"file": "tokens.npy"}, 2, tmp_path))
    assert "weights in it are stacked, U, V or K, Q, V" in text
    (tmp_path / "words.npy").write_text("no array")
    assert "words.npy is not an .npy file of one plain array" in refusal(
        lab.measure_from, {"kind": "empirical", "tokens": "words.npy"}, tmp_path
    )


def test_tables_without_end_are_refused():
    table = DISC
    for _ in range(40):
        table = {"kind": "product", "factors": [table]}
    assert "more than 32 tables deep" in refusal(lab.measure_from, table)
