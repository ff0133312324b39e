"""The experiment on other lengths than in training: its numbers against formulas, its claims on doctored results."""

import math
from typing import Any

import numpy as np
import pytest

from judging import judged
from largeprompt.icl import LinearRegression, identity, linear_mismatch
from largeprompt.paper import Choice
from largeprompt.paper.choice import COVARIANCES
from largeprompt.paper.experiments import FIGURES

QUICK, FIGURE = Choice("quick"), FIGURES["generalise"]
CLAIMS = ("S1", "S2", "S3")


@pytest.fixture(scope="module")
def computed():
    """By computation; all of it is exact, and takes seconds."""
    needs: Any = FIGURE.needs(QUICK)
    return {need: need.compute() for need in needs}


@pytest.fixture
def results(computed):
    return {need: data.copy(deep=True) for need, data in computed.items()}


@pytest.mark.parametrize("key", CLAIMS)
def test_what_was_found_holds(key, results):
    assert judged(key, QUICK, results).verdict == "holds"


def test_the_excess_of_linear_attention_is_the_closed_form(results):
    data = FIGURE.dataset(QUICK, results).sel(attention="linear", covariance=COVARIANCES[0])
    task = LinearRegression.experiment(identity(5))
    for trained, tested in ((10, 1000), (1000, 10), (math.inf, 30), (100, math.inf)):
        found = float(data.excess.sel(trained_at=trained, tested_at=tested))
        np.testing.assert_allclose(found, linear_mismatch(task, trained, tested), rtol=1e-9)


@pytest.mark.parametrize(
    ("key", "name", "at", "value"),
    [
        ("S1", "leading", {"attention": "linear"}, 1.03),
        ("S1", "leading", {"attention": "softmax"}, 0.97),
        ("S2", "ratio", {"attention": "softmax", "trained_at": 1000, "tested_at": math.inf}, 1.0),
        ("S2", "ratio", {"attention": "linear", "trained_at": 100, "tested_at": 30}, 9.0),
        ("S2", "ratio", {"attention": "softmax", "trained_at": 10, "tested_at": 1000}, 9.0),
        ("S3", "decay", {"length": 10}, 1.0),
        ("S3", "decay", {"length": 1000}, 0.9),
    ],
)
def test_one_number_that_says_otherwise_refutes_a_claim(key, name, at, value, results):
    data = results[FIGURE.needs(QUICK)[-1]]
    data[name].loc[at] = value
    verdicts = {other: judged(other, QUICK, results).verdict for other in CLAIMS}
    assert verdicts == {other: "does not hold" if other == key else "holds" for other in CLAIMS}


def test_an_unknown_number_settles_nothing(results):
    results[FIGURE.needs(QUICK)[0]]["leading"][:] = math.nan
    assert judged("S1", QUICK, results).verdict == "not settled at this preset"


def test_the_figure_has_a_map_for_each_attention_and_covariance(results):
    data = FIGURE.dataset(QUICK, results)
    maps: Any = FIGURE.chart(data).panels
    assert [it.title.split(",")[0] for it in maps] == ["softmax", "linear"] * 2
    assert all(np.allclose(np.diag(it.values), 1) for it in maps)
    assert maps[0].rows == maps[0].columns == ("10", "30", "100", "300", "1000", "∞")
    assert "trained at 10, used at ∞: softmax 2.121, linear 2.552" in FIGURE.summary(data)[0]
