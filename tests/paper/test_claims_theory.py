"""Claims of the theory on small pieces, on doctored ones, and the rule that judges them."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from largeprompt.paper.claims import CLAIMS, VERDICTS, Check, Finding, _flow_limits, _limits, entries
from largeprompt.paper.errata import ERRATA, Comparison, Evidence
from largeprompt.paper.pieces import AbstractPiece, Descents, FlowLimits, Shelf
from largeprompt.paper.settings import PRESETS

# One worker: pieces are computed once for all the tests of this file.
pytestmark = pytest.mark.xdist_group("claims of the theory")

SMOKE = PRESETS["smoke"]
LIMITS = {claim.key: claim for claim in _limits.CLAIMS}
FLOWS = {claim.key: claim for claim in _flow_limits.CLAIMS}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the claims about infinite prompts need, kept and read back."""
    shelf = Shelf(tmp_path_factory.mktemp("pieces"))
    needed = {piece for claim in LIMITS.values() for piece in claim.needs(SMOKE)}
    return {piece: shelf.keep(piece, piece.compute()) for piece in needed if isinstance(piece, AbstractPiece)}


def followed(piece) -> xr.Dataset:
    """Flows as the pieces record them, of ideal behaviour."""
    if isinstance(piece, FlowLimits):
        cases = [(covariance, noise) for covariance in piece.covariances for noise in piece.noise]
        noise = np.array([noise for _, noise in cases])
        return xr.Dataset(
            {
                "distance": (("flow", "time"), np.outer(np.ones(len(cases)), [1.0, 1e-7])),
                "risk": (("flow", "time"), noise[:, None] / 2 + np.array([0.5, 1e-12])),
                "completed": ("flow", np.ones(len(cases), int)),
            },
            {"covariance": ("flow", [covariance for covariance, _ in cases]), "noise": ("flow", noise)},
        )
    assert isinstance(piece, Descents)
    lengths = [*piece.lengths, math.inf] if piece.infinite else piece.lengths
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


def verdict(claim, results) -> str:
    return claim.judge(SMOKE, results).verdict


@pytest.mark.parametrize(
    ("measured", "relation", "target", "error", "tolerance", "expected"),
    [
        (2.0, ">", 1.0, 0.3, 0.0, "holds"),
        (2.0, ">", 1.0, 0.4, 0.0, "not settled at this preset"),
        (0.0, ">", 1.0, 0.4, 0.0, "not settled at this preset"),
        (0.0, ">", 1.0, 0.3, 0.0, "does not hold"),
        (0.0, "<", 1.0, 0.3, 0.0, "holds"),
        (2.0, "<", 1.0, 0.3, 0.0, "does not hold"),
        (1.0, "<", 1.0, 0.0, 0.0, "not settled at this preset"),
        (1.0, "=", 1.0, 0.0, 0.0, "holds"),
        (1.1, "=", 1.0, 0.01, 0.2, "holds"),
        (0.7, "=", 1.0, 0.01, 0.2, "does not hold"),
        (0.7, "=", 1.0, 0.1, 0.2, "holds within error"),
        (math.nan, "=", 1.0, 0.0, 0.2, "not settled at this preset"),
        (1.0, "<", math.inf, 0.0, 0.0, "not settled at this preset"),
        (1.0, "<", 2.0, math.nan, 0.0, "not settled at this preset"),
    ],
)
def test_a_check_is_decided_by_margin_and_error(measured, relation, target, error, tolerance, expected):
    assert Check("x", measured, relation, target, error, tolerance).verdict == expected


def test_an_error_above_the_resolution_settles_nothing():
    assert Check("x", 2.0, ">", 1.0, 0.1, resolution=0.05).verdict == "not settled at this preset"
    assert Check("x", 2.0, ">", 1.0, 0.1, resolution=0.2).verdict == "holds"


def test_a_finding_is_as_bad_as_its_worst_check():
    checks = [
        Check("x", 2.0, ">", 1.0),
        Check("x", 2.0, "=", 1.0, 1.0),
        Check("x", math.nan, ">", 1.0),
        Check("x", 0.0, ">", 1.0),
    ]
    assert [Finding((check,)).verdict for check in checks] == list(VERDICTS)
    for i, worst in enumerate(VERDICTS):
        assert Finding(tuple(checks[: i + 1])).verdict == Finding(tuple(checks[i::-1])).verdict == worst
    assert Finding(()).verdict == "not settled at this preset"


def test_every_claim_of_the_theory_is_in_the_ledger_with_all_its_words():
    for key in ("T1", "T2", "T5", "T6", "T10", "T11", "T12", "T13"):
        claim = CLAIMS[key]
        assert all((claim.place, claim.statement, claim.measured))
        assert claim.needs(SMOKE)


def test_claims_of_infinite_prompts_hold_but_for_the_remark_on_the_query(results):
    found = {key: claim.judge(SMOKE, results) for key, claim in LIMITS.items()}
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
    wider, alike = LIMITS["T5"].needs(SMOKE)
    assert verdict(LIMITS["T5"], results | {wider: results[alike]}) == "holds"


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
    (piece,) = LIMITS[key].needs(SMOKE)
    data = results[piece].assign({variable: doctored(results[piece][variable])})
    assert verdict(LIMITS[key], {piece: data}) == "does not hold"


@pytest.mark.parametrize("key", FLOWS)
def test_ideal_flows_settle_the_claims_about_flows(key):
    needed = FLOWS[key].needs(SMOKE)
    ideal = {piece: followed(piece) for piece in needed}
    assert verdict(FLOWS[key], ideal) == "holds"
    for piece in needed:
        lost = ideal[piece].assign(completed=ideal[piece]["completed"] * 0)
        assert verdict(FLOWS[key], ideal | {piece: lost}) == "not settled at this preset"


@pytest.mark.parametrize(
    ("key", "variable", "change"),
    [("T10", "distance", 1e-3), ("T10", "risk", 1e-3), ("T11", "distance", 1e-3), ("T12", "off_structure", 1e-6)],
)
def test_a_flow_that_ends_elsewhere_undoes_its_claim(key, variable, change):
    for piece in FLOWS[key].needs(SMOKE):
        for flow in range(followed(piece).sizes["flow"]):
            data = {other: followed(other) for other in FLOWS[key].needs(SMOKE)}
            counts = key != "T12" or data[piece]["start"].values[flow] == "structured"
            data[piece][variable][flow, -1] += change
            assert verdict(FLOWS[key], data) == ("does not hold" if counts else "holds")


def test_one_rise_of_one_risk_undoes_the_claim_that_none_rises():
    for piece in FLOWS["T13"].needs(SMOKE):
        data = {other: followed(other) for other in FLOWS["T13"].needs(SMOKE)}
        data[piece]["risk"][-1, 2] = 0.21
        assert verdict(FLOWS["T13"], data) == "does not hold"


def test_flows_reach_the_limits_of_the_appendix_and_keep_their_structure():
    piece = _flow_limits._singular(SMOKE)
    data = piece.compute()
    assert verdict(FLOWS["T11"], {piece: data}) == "holds"
    assert float(data["distance"].isel(time=0).min()) > 0.1  # the start is somewhere else
    descents = Descents("linear", "UV", ("kms:0.5",), (10,), True, 1, time=20.0).compute()
    assert descents["start"].values.tolist() == ["structured", "default"] * 2
    structured = descents["start"].values == "structured"
    assert float(descents["off_structure"].isel(flow=structured).max()) < 1e-11
    assert float(descents["off_structure"].isel(flow=~structured).min()) > 0.1
    assert float(descents["risk"].diff("time").max()) < 1e-9
    assert bool((descents["risk"].isel(time=0) > 1.5 * descents["risk"].isel(time=-1)).any())


def test_entries_of_errata_say_what_the_evidence_says(tmp_path):
    def evidence(against_holds: bool) -> dict:
        against = Comparison("x", 1.0, "<" if against_holds else ">", 2.0, "y")
        found = Evidence("Σ = I,\n        d = 1", (against,), (Comparison("z", 3.0, "=", 3.0, ""),))
        return {
            "setting": found.setting,
            **{role: [vars(c) for c in getattr(found, role)] for role in ("against", "repair")},
        }

    kept = {erratum.key: evidence(erratum.key != "E1") for erratum in ERRATA}
    path = tmp_path / "errata.nc"
    xr.Dataset(attrs={"evidence": json.dumps(kept, ensure_ascii=False)}).to_netcdf(path, engine="scipy")
    found = entries(xr.load_dataset(path, engine="scipy"))
    assert [entry["key"] for entry in found] == [erratum.key for erratum in ERRATA]
    assert [entry["key"] for entry in found if not entry["confirmed"]] == ["E1"]
    first = found[0]
    assert first["setting"] == "Σ = I, d = 1"
    assert first["against"] == [{"left": "x", "x": 1.0, "relation": ">", "y": 2.0, "right": "y", "holds": False}]
    assert set(first) == {
        "key", "kind", "place", "summary", "printed", "why", "correction", "setting", "against", "repair", "confirmed",
    }  # fmt: skip
    assert json.dumps(found)
