"""Claims F1 to F3 on small computations and on doctored ones."""

import numpy as np
import pytest
import xarray as xr

from judging import judged
from largeprompt.lab import Store
from largeprompt.paper import Choice
from largeprompt.paper.experiments import FIGURES
from largeprompt.paper.experiments.diversity import DIVERSITY, FITS, PHASES, Diversity

SMOKE = Choice("smoke")


def fits() -> xr.Dataset:
    """Risks 10/d above their limit, with a peak."""
    limit = np.array([[0.4, 0.6], [1.5, 3.0], [0.25, 0.55]])
    risk = np.stack([limit * (1 + 1 / 9), limit * (1 + 1 / 18)])
    coords = {"d": [9, 18], "tau": [0.4, 0.9, 3.0], "on": ["own", "fresh"]}
    parts = {"risk": (("d", "tau", "on"), risk), "stderr": (("d", "tau", "on"), 0.005 * risk)}
    return xr.Dataset(parts | {"limit": (("tau", "on"), limit)}, coords)


def tasks() -> xr.Dataset:
    """Gaps of ½ below as many tasks as dimensions, and of 1/α above."""
    alphas, m = np.array([10, 100]), np.array([10, 40])
    gap = np.stack([np.full(2, 0.5), 1 / alphas], axis=1)
    average = np.stack([np.full((2, 2), 0.1), 0.1 + gap], axis=2)
    dims = ("alpha", "m", "on")
    return xr.Dataset(
        {"average": (dims, average), "stderr": (dims, 1e-3 * np.ones((2, 2, 2)))},
        {"alpha": alphas, "m": m, "on": ["own", "fresh"]},
        {"d": 20},
    )


def phases() -> xr.Dataset:
    K = np.array([8, 24])
    times = {"frequent": 20.0 + K, "rare": 4.0 * K**2, "switch": 1.0 * K**2, "balanced": 1.3 * K**2}
    return xr.Dataset({name: ("K", value) for name, value in times.items()} | {"short": 1.02}, {"K": K}, {"length": 20})


MADE = {"F1": (FITS, fits), "F2": (DIVERSITY, tasks), "F3": (PHASES, phases)}


def verdict(key: str, data: xr.Dataset) -> str:
    experiment, _ = MADE[key]
    (need,) = experiment.needs(SMOKE)
    return judged(key, SMOKE, {need: data}).verdict


@pytest.mark.parametrize("key", MADE)
def test_what_is_published_holds_on_ideal_data(key):
    assert verdict(key, MADE[key][1]()) == "holds"


def doctored(key: str, name: str, where: dict, value: float) -> xr.Dataset:
    data = MADE[key][1]()
    if where:
        data[name].loc[where] = value
    else:
        data[name] = value
    return data


@pytest.mark.parametrize(
    ("key", "name", "where", "value"),
    [
        ("F1", "risk", {"d": 18, "tau": 3.0, "on": "own"}, 0.5),
        ("F1", "risk", {"tau": 0.9, "on": "fresh"}, 0.2),
        ("F2", "average", {"alpha": 100, "m": 10, "on": "fresh"}, 0.2),
        ("F2", "average", {"alpha": 100, "m": 40, "on": "fresh"}, 0.18),
        ("F3", "rare", {"K": 24}, 30.0),
        ("F3", "balanced", {"K": 24}, 100.0),
        ("F3", "short", {}, 1.3),
    ],
)
def test_one_number_that_is_off_decides(key, name, where, value):
    assert verdict(key, doctored(key, name, where, value)) == "does not hold"


def test_the_summary_of_phases_says_what_attends_to_what_from_when_on():
    data = phases()
    frequent, rare, switch = (float(data[name][-1]) for name in ("frequent", "rare", "switch"))
    assert PHASES.summary(data)[0] == (
        f"K = {int(data.K[-1])}: the frequent query puts 0.75 of its attention on its own covariate from "
        f"t = {frequent:.0f} on, a rare one from t = {rare:.0f} on; at t = {switch:.0f} what changes fastest for a "
        "rare query switches."
    )


def test_wide_errors_settle_nothing():
    data = fits()
    data["stderr"] = 0.5 * data.risk
    assert verdict("F1", data) == "not settled at this preset"


def test_risks_by_number_of_tasks_are_computed_kept_and_drawn(tmp_path):
    item = Diversity(2, 8, d=4, alphas=(10,), tasks=(2, 8))
    data = Store(tmp_path).save(item, item.compute(), {})
    assert dict(data.sizes) == {"alpha": 1, "m": 2, "on": 2}
    assert data.average.sel(on="fresh").values.min() > 0.05
    assert FIGURES["diversity"].chart(data).panels[0].series
    assert "tasks" in DIVERSITY.summary(data)[0]
