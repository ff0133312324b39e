"""Studies of prompt lengths: measured, predicted, bounded, and made again from their results."""

import dataclasses
import math
import tomllib
import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from largeprompt import concentration, lab
from largeprompt.measures import DoubtWarning, Gaussian

STUDY = """
L = [4, 12]
quantity = ["output", "U"]
replicates = 30
seed = 5
[measure]
kind = "mixture"
weights = [0.25, 0.75]
components = [{kind = "rademacher", scale = [1, 2]}, {kind = "gaussian", mean = "laws.npz", cov = "kms:0.5"}]
[query]
kind = "sphere"
radius = 1.5
[layer]
file = "laws.npz"
"""


def no_bound(*_, **__):
    raise ValueError("tokens are not centred")


@pytest.fixture
def study(tmp_path, monkeypatch):
    # every array of a file given as a whole must be one of the table's, so means have a file of their own
    np.savez(tmp_path / "means.npz", mean=[1.0, 0.0])
    np.savez(tmp_path / "laws.npz", U=[[0.2, 0.1], [0.0, 0.3]], V=[[1.0, -1.0]])
    text = STUDY.replace('mean = "laws.npz"', 'mean = "means.npz"')
    monkeypatch.setattr(concentration.bounds, "bound", no_bound)
    return lab.study_from(tomllib.loads(text), tmp_path)


class Notes(lab.Progress):
    def __init__(self, notes):
        self._notes = notes

    def step(self, name, done, note=""):
        self._notes.append(note)


def test_a_study_runs_and_can_be_run_again_from_its_result(study, tmp_path):
    notes = []
    data = study.run(Notes(notes))
    assert notes == ["measured L = 4", "measured L = 12", "predicted the output", "predicted the U"]
    assert data.measured.dims == ("quantity", "L")
    assert np.isfinite(data.measured).all()
    assert (data.measured > 0).all()
    assert (data.low < data.high).all()
    assert np.isnan(data.bound_log10).all()
    assert data.bound_refusal.values.tolist() == ["tokens are not centred"] * 2
    assert str(data.sel(quantity="output").method.values).startswith("c/L")
    again = lab.study_from(tomllib.loads(data.attrs["toml"])).run()
    xr.testing.assert_equal(again.drop_attrs(), data.drop_attrs())
    data.to_netcdf(tmp_path / "study.nc", engine="scipy")
    kept = xr.load_dataset(tmp_path / "study.nc", engine="scipy")
    xr.testing.assert_equal(kept, data)
    assert kept.trusted.dtype == bool
    assert {name: kept.attrs[name] for name in ("toml", "versions")} == {
        name: data.attrs[name] for name in ("toml", "versions")
    }


def test_a_study_without_a_slope_says_so_without_a_number(study):
    data = dataclasses.replace(study, lengths=[4], quantities="output", bounds=False).run()
    assert math.isnan(float(data.slope[0]))
    assert data.bound_refusal.values.tolist() == ["not asked for"]


def test_a_law_without_a_prediction_is_measured_all_the_same(study, monkeypatch):
    monkeypatch.setattr(concentration, "predict", no_bound)
    data = dataclasses.replace(study, lengths=[4], quantities="output").run()
    assert np.isnan(data.predicted).all()
    assert data.method.values.tolist() == ["none, tokens are not centred"]
    assert float(data.measured[0, 0]) > 0


def test_a_study_keeps_what_its_prediction_warns_of_and_nothing_of_other_libraries(study, monkeypatch):
    predict = concentration.predict

    def warning(*arguments, **options):
        for _ in range(2):
            warnings.warn("it may be infinite", DoubtWarning, stacklevel=2)
        warnings.warn("Error reading persistent compilation cache entry for 'jit_stage'", stacklevel=2)
        warnings.warn("a library will change", stacklevel=2)
        return predict(*arguments, **options)

    monkeypatch.setattr(concentration, "predict", warning)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", "Error reading persistent")  # as `keep_compiled` does
        data = dataclasses.replace(study, lengths=[4], quantities="output").run()
    assert [str(other.message) for other in others] == ["a library will change"]
    assert data.note.values.tolist() == ["it may be infinite"]


def test_the_defaults_of_a_study():
    study = lab.Study()
    assert study.quantities == ("output", "gradient")
    assert len(study.lengths) == 9
    assert eqx.tree_equal(study.tokens, Gaussian(jnp.zeros(5), jnp.eye(5)), rtol=1e-15)
    assert study.queries is None
    assert lab.Study({"kind": "regression", "d": 2}).quantities == ("risk", "risk-gradient")
