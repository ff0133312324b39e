"""Claims T1, T2, T5, T6 and T10 to T13 on small computations and on doctored ones."""

import math

import numpy as np
import pytest
import xarray as xr

from judging import judged
from largeprompt.lab import Store
from largeprompt.paper import Choice
from largeprompt.paper.experiment import Computation
from largeprompt.paper.experiments import CLAIMS
from largeprompt.paper.experiments.flow_limits import SINGULAR, Descents, FlowLimits

# One worker: they are computed once for all the tests of this file.
pytestmark = pytest.mark.xdist_group("claims of the theory")

SMOKE = Choice("smoke")
LIMITS = ("T1", "T2", "T5", "T6")
FLOWS = ("T10", "T11", "T12", "T13")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the claims about infinite prompts need, kept and read back."""
    store = Store(tmp_path_factory.mktemp("store"))
    needed = {need for key in LIMITS for need in CLAIMS[key].needs(SMOKE)}
    return {need: store.save(need, need.compute(), {}) for need in needed if isinstance(need, Computation)}


def followed(item) -> xr.Dataset:
    """Flows as they are recorded, of ideal behaviour."""
    if isinstance(item, FlowLimits):
        cases = [(covariance, noise) for covariance in item.covariances for noise in item.noise]
        noise = np.array([noise for _, noise in cases])
        return xr.Dataset(
            {
                "distance": (("flow", "time"), np.outer(np.ones(len(cases)), [1.0, 1e-7])),
                "risk": (("flow", "time"), noise[:, None] / 2 + np.array([0.5, 1e-12])),
                "completed": ("flow", np.ones(len(cases), int)),
            },
            {"covariance": ("flow", [covariance for covariance, _ in cases]), "noise": ("flow", noise)},
        )
    assert isinstance(item, Descents)
    lengths = [*item.lengths, math.inf] if item.infinite else item.lengths
    cases = [(L, start) for L in lengths for start in ("structured", "default")]
    return xr.Dataset(
        {
            "risk": (("flow", "time"), np.outer(np.ones(len(cases)), [0.55, 0.2, 0.1, 0.1])),
            "off_structure": (
                ("flow", "time"),
                np.array([[1e-13 if s == "structured" else 1.0] * 4 for _, s in cases]),
            ),
            "completed": ("flow", np.ones(len(cases), int)),
        },
        {"L": ("flow", [float(L) for L, _ in cases]), "start": ("flow", [start for _, start in cases])},
    )


def verdict(key, results) -> str:
    return judged(key, SMOKE, results).verdict


def test_every_claim_of_the_theory_is_in_the_ledger_with_all_its_words():
    for key in ("T1", "T2", "T5", "T6", "T10", "T11", "T12", "T13"):
        claim = CLAIMS[key]
        assert all((claim.place, claim.statement, claim.measured))
        assert claim.needs(SMOKE)


def test_claims_of_infinite_prompts_hold_but_for_the_remark_on_the_query(results):
    found = {key: judged(key, SMOKE, results) for key in LIMITS}
    assert all(math.isfinite(check.measured) for finding in found.values() for check in finding.checks)
    assert {key: finding.verdict for key, finding in found.items()} == {
        "T1": "holds",
        "T2": "holds",
        "T5": "does not hold",
        "T6": "holds",
    }
    wider, alike = found["T5"].checks
    assert (wider.verdict, alike.verdict) == ("does not hold", "holds")
    assert "G17" in found["T5"].remark


def test_the_remark_on_the_query_would_hold_if_wider_queries_did_no_harm(results):
    wider, alike = CLAIMS["T5"].needs(SMOKE)
    assert verdict("T5", results | {wider: results[alike]}) == "holds"


@pytest.mark.parametrize(
    ("key", "variable", "doctored"),
    [
        ("T1", "deviation", lambda x: x + 1e-6),
        ("T1", "mean", lambda x: x + 0.3),
        ("T1", "cov", lambda x: x - 0.3),
        ("T1", "kolmogorov", lambda x: x + 3),
        ("T2", "mean_square", lambda x: x * x["L"] ** 0.3),
        ("T2", "quadrature", lambda x: x + 1e-6),
        ("T2", "difference", lambda x: x / 100),
        ("T6", "moment", lambda x: x * 1.001),
    ],
)
def test_doctored_numbers_undo_the_claims_of_infinite_prompts(key, variable, doctored, results):
    (item,) = CLAIMS[key].needs(SMOKE)
    data = results[item].assign({variable: doctored(results[item][variable])})
    assert verdict(key, {item: data}) == "does not hold"


@pytest.mark.parametrize("key", FLOWS)
def test_ideal_flows_settle_the_claims_about_flows(key):
    needed = CLAIMS[key].needs(SMOKE)
    ideal = {item: followed(item) for item in needed}
    assert verdict(key, ideal) == "holds"
    for item in needed:
        lost = ideal[item].assign(completed=ideal[item]["completed"] * 0)
        assert verdict(key, ideal | {item: lost}) == "not settled at this preset"


@pytest.mark.parametrize(
    ("key", "variable", "change"),
    [("T10", "distance", 1e-3), ("T10", "risk", 1e-3), ("T11", "distance", 1e-3), ("T12", "off_structure", 1e-6)],
)
def test_a_flow_that_ends_elsewhere_undoes_its_claim(key, variable, change):
    for item in CLAIMS[key].needs(SMOKE):
        for flow in range(followed(item).sizes["flow"]):
            data = {other: followed(other) for other in CLAIMS[key].needs(SMOKE)}
            counts = key != "T12" or data[item]["start"].values[flow] == "structured"
            data[item][variable][flow, -1] += change
            assert verdict(key, data) == ("does not hold" if counts else "holds")


def test_one_rise_of_one_risk_undoes_the_claim_that_none_rises():
    for item in CLAIMS["T13"].needs(SMOKE):
        data = {other: followed(other) for other in CLAIMS["T13"].needs(SMOKE)}
        data[item]["risk"][-1, 2] = 0.21
        assert verdict("T13", data) == "does not hold"


def test_flows_reach_the_limits_of_the_appendix_and_keep_their_structure():
    (item,) = SINGULAR.needs(SMOKE)
    assert isinstance(item, FlowLimits)
    data = item.compute()
    assert verdict("T11", {item: data}) == "holds"
    assert float(data["distance"].isel(time=0).min()) > 0.1  # the start is somewhere else
    descents = Descents("linear", "UV", ("kms:0.5",), (10,), True, 1, time=20.0).compute()
    assert descents["start"].values.tolist() == ["structured", "default"] * 2
    structured = descents["start"].values == "structured"
    assert float(descents["off_structure"].isel(flow=structured).max()) < 1e-11
    assert float(descents["off_structure"].isel(flow=~structured).min()) > 0.1
    assert float(descents["risk"].diff("time").max()) < 1e-9
    assert bool((descents["risk"].isel(time=0) > 1.5 * descents["risk"].isel(time=-1)).any())
