"""Claim S5 on made-up and doctored results, and its chart."""

import numpy as np
import pytest
import xarray as xr

from judging import judged
from largeprompt.paper import Choice
from largeprompt.paper.drawing import draw
from largeprompt.paper.experiments.spurious import SPURIOUS, EndsOfStarts
from largeprompt.paper.report.plots import panels

QUICK = Choice("quick")


def made_up(item: EndsOfStarts, missed: float, second: str) -> xr.Dataset:
    """An optimum and one more point, at which a share of the starts ends."""
    missing = round(missed * item.starts)
    columns = {
        "kind": ["global minimum", second],
        "risk": [0.08, 0.18],
        "excess": [0.0, 0.1],
        "count": [item.starts - missing, missing],
        "share": [1 - missed, missed],
        "low": [0.0, 0.0],
        "high": [1.0, 1.0],
        "lowest_curvature": [0.0, 0.0 if second == "local minimum" else -0.2],
    }
    facts = {"starts": item.starts, "elsewhere": 0, "time": 1000.0}
    return xr.Dataset({name: ("point", np.asarray(column)) for name, column in columns.items()}, attrs=facts)


def results(one: float = 0.45, two: float = 0.0, second: str = "saddle") -> dict:
    given = {1: (one, "local minimum"), 2: (two, second)}
    items = [item for item in SPURIOUS.needs(QUICK) if isinstance(item, EndsOfStarts)]
    return {item: made_up(item, *given[item.heads]) for item in items}


def test_the_claim_holds_where_a_second_head_finds_the_optimum():
    finding = judged("S5", QUICK, results())
    assert finding.verdict == "holds"
    assert len(finding.checks) == 4


@pytest.mark.parametrize(
    "doctored", [{"one": 0.0}, {"two": 0.3}, {"second": "local minimum"}], ids=["no failures", "failures", "minimum"]
)
def test_doctored_results_do_not_hold(doctored):
    assert judged("S5", QUICK, results(**doctored)).verdict == "does not hold"


def test_the_chart_shows_minima_saddles_and_shares():
    data = SPURIOUS.dataset(QUICK, results())
    levels, shares = SPURIOUS.chart(data).panels
    assert [series.label for series in levels.series] == [
        "global minimum", "1 output, local minimum", "1 output, saddle"
    ]  # fmt: skip
    np.testing.assert_allclose(shares.series[0].y, [0.45, 0.0])
    for ax in draw(SPURIOUS.chart(data)).axes:
        assert all(tick == round(tick) for tick in ax.get_xticks())
    assert all(panel["x"]["whole"] for panel in panels(SPURIOUS.chart(data)))
    assert "1 output, 1 head" in SPURIOUS.summary(data)[0]
