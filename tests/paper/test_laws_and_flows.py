"""Convergence by law of tokens and flows by length: small computations, known charts, claims on doctored data."""

import math
import re

import numpy as np
import pytest
import xarray as xr

from judging import judged
from largeprompt.attention import Head
from largeprompt.cli._charts import optima_chart
from largeprompt.lab import Store
from largeprompt.paper import Choice
from largeprompt.paper.choice import COVARIANCES
from largeprompt.paper.experiments import CLAIMS
from largeprompt.paper.experiments.flows import FLOWS, Ladder, at_infinity
from largeprompt.paper.experiments.laws import LAWS_FIGURE, Laws, Weights, measured_laws
from significance import assert_close_in_sigmas

QUICK = Choice("quick")
KEYS = ("T3", "T4", "T7", "T8", "T9")
MEASURED = measured_laws(QUICK)


def converging(item: Laws | Weights) -> xr.Dataset:
    """Deviations that fall as 3/L on the predicted line, a hundred thousand times below their bounds."""
    names = item.laws if isinstance(item, Laws) else ("Gaussian",)
    quantities = ("output", "V", "U") if isinstance(item, Laws) else ("K", "Q")
    coords = {"law": list(names), "quantity": list(quantities), "L": np.asarray(item.lengths)}
    square = 3 / np.broadcast_to(coords["L"], (len(names), len(quantities), len(item.lengths))).astype(float)
    curves = {"measured": square, "stderr": 0.01 * square, "predicted": 1 * square, "bound_log10": np.log10(square) + 5}
    numbers = {"slope": -1.0, "slope_stderr": 0.01, "predicted_slope": -1.0, "ratio": 1.0, "ratio_stderr": 0.01}
    numbers |= {"exponent": 1.0, "onset": 1.0, "exact": True, "regime_name": "1/L", "regime": "1/L (below 0.5)"}
    return xr.Dataset(
        {name: (("law", "quantity", "L"), values) for name, values in curves.items()}
        | {name: (("law", "quantity"), np.full(square.shape[:2], value)) for name, value in numbers.items()}
        | {"trusted": (("law", "quantity", "L"), np.ones_like(square)), "prompts": ("law", [600] * len(names))},
        coords,
    )


def flowing(item: Ladder) -> xr.Dataset:
    """Flows whose distance is 3t/L up to t = 1 and whose risks end 2/L above the floor."""
    L, t = np.asarray(item.lengths), np.geomspace(item.time / 1e4, item.time, 41)
    decay = np.exp(-t)
    return xr.Dataset(
        {
            "distance": (("L", "t"), np.minimum(t, 1.0) * 3 / L[:, None]),
            "risk": (("L", "t"), 0.05 + 2 / L[:, None] + 0.4 * decay),
            "stderr": (("L", "t"), np.broadcast_to(1e-2 / L[:, None], (len(L), len(t)))),
            "infinite": ("t", 0.05 + 0.4 * decay),
            "floor": ((), 0.05),
        },
        {"L": L, "t": t},
        {"alpha": 0.3, "d": 5, "noise": 0.1},
    )


@pytest.fixture
def results():
    """Ideal data for all claims of this file, at the sizes of the quick preset."""
    needed = {item for key in KEYS for item in CLAIMS[key].needs(QUICK)}
    flows = {item: flowing(item) for item in needed if isinstance(item, Ladder)}
    return flows | {item: converging(item) for item in needed if isinstance(item, Laws | Weights)}


def verdict(key, results) -> str:
    return judged(key, QUICK, results).verdict


@pytest.mark.parametrize("key", KEYS)
def test_what_the_theory_predicts_holds(key, results):
    assert verdict(key, results) == "holds"


def doctor(data: xr.Dataset, quantity: str, **changes: float) -> None:
    """Change numbers of the last law, of curves at the first length."""
    for name, value in changes.items():
        at = {"law": data.law.values[-1], "quantity": quantity}
        data[name].loc[{**at, "L": data.L.values[0]} if "L" in data[name].dims else at] = value


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bound_log10": -9.0}, "does not hold"),
        ({"bound_log10": math.nan}, "not settled at this preset"),
        ({"stderr": 1e6}, "does not hold"),
        ({"slope": -0.2, "predicted_slope": -0.2}, "does not hold"),
        ({"slope": -1.2}, "does not hold"),
        ({"slope": -0.9, "slope_stderr": 0.05}, "holds within error"),
        ({"slope_stderr": 0.3}, "not settled at this preset"),
        ({"slope": math.nan}, "not settled at this preset"),
        ({"ratio": 1.4}, "does not hold"),
    ],
)
def test_one_law_that_breaks_the_bound_or_the_rate_decides(changes, expected, results):
    doctor(results[MEASURED], "output", **changes)
    assert verdict("T3", results) == expected
    assert verdict("T4", results) == "holds"


@pytest.mark.parametrize("quantity", ["V", "U", "K", "Q"])
def test_each_gradient_decides_about_proposition_3_4(quantity, results):
    (data,) = [data for data in results.values() if "quantity" in data and quantity in data.quantity.values]
    doctor(data, quantity, bound_log10=-9.0)
    assert verdict("T4", results) == "does not hold"
    assert verdict("T3", results) == "holds"


def test_a_law_without_a_sharp_rate_is_left_out_by_name_and_an_early_asymptote_too(results):
    data = results[MEASURED]
    unscaled, signs = {"law": "KMS, unscaled", "quantity": "output"}, {"law": "Rademacher", "quantity": "output"}
    data["predicted_slope"].loc[unscaled] = math.nan
    data["ratio"].loc[unscaled] = math.nan
    data["regime_name"] = data.regime_name.where(data.law != "KMS, unscaled", "slower than 1/L")
    for name, value in {"exact": False, "onset": 1e6, "ratio": 3.0}.items():
        data[name].loc[signs] = value
    finding = judged("T3", QUICK, results)
    assert finding.verdict == "holds"
    assert "output, Rademacher; output, KMS, unscaled" in finding.remark
    assert "KMS, unscaled: -1.000 ± 0.010, slower than 1/L" in finding.remark
    data["exact"].loc[signs] = True
    assert verdict("T3", results) == "does not hold"


def doctor_flows(results, change) -> None:
    for item in [item for item in results if isinstance(item, Ladder)][-1:]:
        change(results[item])


def test_risks_that_rise_with_the_length_refute_theorem_4_3(results):
    def rising(data):
        data["risk"].loc[{"L": 10_000}] += 0.01

    doctor_flows(results, rising)
    assert verdict("T7", results) == "does not hold"


def test_a_finite_flow_that_ends_lower_than_the_infinite_one_is_no_failure(results):
    def lower(data):
        data["risk"].loc[{"L": 10_000}] -= 0.001

    doctor_flows(results, lower)
    assert verdict("T7", results) == "holds"


def test_a_limit_off_the_bayes_risk_refutes_theorem_5_2_and_not_4_3(results):
    def off(data):
        data["risk"] += 0.005

    doctor_flows(results, off)
    assert verdict("T9", results) == "does not hold"
    assert verdict("T7", results) == "holds"


def test_flows_that_have_not_ended_settle_nothing_about_their_limits(results):
    def early(data):
        data["infinite"] += 0.1

    doctor_flows(results, early)
    assert [verdict(key, results) for key in ("T7", "T9", "T8")] == ["not settled at this preset"] * 2 + ["holds"]


def test_trajectories_that_part_as_prompts_grow_refute_lemma_e1_early_but_not_late(results):
    def apart(data, start):
        data["distance"].loc[{"L": 10_000}] = data.distance.sel(L=10_000).where(data.t < start, 5.0)

    doctor_flows(results, lambda data: apart(data, 500.0))
    assert verdict("T8", results) == "holds"
    doctor_flows(results, lambda data: apart(data, 50.0))
    assert verdict("T8", results) == "does not hold"


def test_extrapolation_is_exact_on_a_line_in_one_over_l_and_owns_up_to_a_bend():
    L, error = np.array([100, 1000, 10_000]), np.array([3e-4, 2e-4, 1e-4])
    value, off = at_infinity(L, 0.05 + 2 / L, error)
    assert value == pytest.approx(0.05, abs=1e-14)
    assert off == pytest.approx(math.hypot(10_000 * 1e-4, 1000 * 2e-4) / 9000, rel=1e-6)
    value, off = at_infinity(L, 0.05 + 2 / L + 30 / L**2, 0 * error)
    assert abs(value - 0.05) == pytest.approx(30 / (1000 * 10_000), rel=1e-6)
    assert off == pytest.approx(abs(value - 0.05), rel=1e-6)


def test_the_chart_of_laws_holds_points_with_bars_predictions_and_bounds(results):
    data = results[MEASURED]
    data["measured"].loc[{"law": "mixture", "quantity": "V", "L": 300}] = 0.5
    panels = LAWS_FIGURE.chart(LAWS_FIGURE.dataset(QUICK, results)).panels
    assert [panel.title for panel in panels] == ["output T", "gradient ∇_V T", "gradient ∇_U T"]
    assert all(len(panel.series) == 3 * len(MEASURED.laws) for panel in panels)
    (mixture,) = [series for series in panels[1].series if series.label == "mixture"]
    at = list(data.L.values).index(300)
    assert mixture.low is not None
    assert mixture.high is not None
    assert (mixture.y[at], mixture.role, mixture.line) == (0.5, "measured", False)
    assert (mixture.low[at], mixture.high[at]) == pytest.approx((0.5 - 2e-4, 0.5 + 2e-4))
    for series in panels[1].series:
        factor = {"predicted": 1.0, "the paper's bound": 1e5}.get(series.label)
        if factor:
            assert series.y == pytest.approx(factor * 3 / data.L.values)
            assert series.role == ("theory" if factor == 1.0 else "bound")
    summary = LAWS_FIGURE.summary(data)
    assert len(summary) == 4
    assert "Gaussian −1.000 ± 0.010 (predicted −1.000)" in summary[0]
    assert "bound over measured 10^5.0." in summary[0]


def test_the_chart_of_flows_has_two_panels_a_covariance_and_says_the_exponent(results):
    data = FLOWS.dataset(QUICK, results)
    assert tuple(data.covariance.values) == COVARIANCES
    panels = FLOWS.chart(data).panels
    assert len(panels) == 4
    assert panels[2].series[1].label == "L = 100"
    assert panels[2].series[1].y == pytest.approx(np.minimum(data.t.values, 1) * 0.03)
    assert [series.label for series in panels[1].series][-2:] == ["L = ∞", "noise floor s²/2"]
    assert panels[1].series[-1].y == pytest.approx([0.05, 0.05])
    summary = FLOWS.summary(data)
    assert "0.05020 at L = 10000, against 0.05000 of the infinite prompt" in summary[0]
    assert "falls like L^−1.00 at the end" in summary[0]


def test_the_chart_of_least_risks_holds_them():
    values = {"softmax": [0.4, 0.2], "linear": [0.3, 0.1], "Bayes": [0.2, 0.06]}
    data = xr.Dataset(
        {name: (("covariance", "L"), [row]) for name, row in values.items()} | {"floor": ((), 0.05)},
        {"covariance": ["identity"], "L": [5, 50]},
    )
    (panel,) = optima_chart(data).panels
    labels = ["best softmax attention", "best linear attention", "Bayes (ridge regression)", "noise floor s²/2"]
    assert [series.label for series in panel.series] == labels
    assert [list(series.y) for series in panel.series] == [*values.values(), [0.05, 0.05]]


def brute_force(rng, U, V, Q, scale, L, prompts):
    """Squared deviations of output, ∇_U and ∇_K, one query a prompt, tokens and queries standard normal."""
    found = []
    for _ in range(prompts):
        tokens, z = rng.standard_normal((L, U.shape[0])), rng.standard_normal(U.shape[0])
        weights = np.exp(tokens @ U @ z)
        weights /= weights.sum()
        mean = weights @ tokens
        slope = (tokens * weights[:, None]).T @ tokens - np.outer(mean, mean) - np.eye(len(z))
        jacobians = [np.outer(slope @ v, z) for v in V]
        of_K = sum(np.sum((scale * Q @ G.T) ** 2) for G in jacobians)
        found.append([np.sum((V @ (mean - U @ z)) ** 2), np.sum(np.square(jacobians)), of_K])
    return np.asarray(found)


def test_small_computations_agree_with_prompts_drawn_in_full_and_are_kept(tmp_path):
    store = Store(tmp_path)
    of_laws, of_weights = Laws((5, 20), 400, laws=("Gaussian",), dim=3), Weights((5, 20), 40, dim=3)
    data, own = (store.save(item, item.compute(), {}) for item in (of_laws, of_weights))
    assert 'kind = "gaussian"' in str(data.toml.sel(law="Gaussian").values)
    head = of_weights.studies["Gaussian"].attention
    assert isinstance(head, Head)
    merged = head.merged()
    U, V, Q = (np.asarray(part) for part in (merged.U, merged.V, head.Q))
    drawn = brute_force(np.random.default_rng(1), U, V, Q, head.scale, 20, 3000)
    truth, error = drawn.mean(axis=0), drawn.std(axis=0, ddof=1) / math.sqrt(len(drawn))
    points = [data.sel(law="Gaussian", quantity=name, L=20) for name in ("output", "U")]
    points.append(own.sel(law="Gaussian", quantity="K", L=20))
    for point, mean, off in zip(points, truth, error, strict=True):
        assert_close_in_sigmas(float(point.measured), mean, math.hypot(off, float(point.stderr)))
        assert float(point.bound_log10) > math.log10(float(point.measured))


def test_a_small_ladder_starts_at_the_exact_risk_and_parts_from_the_limit_as_one_over_l():
    item = Ladder("kms:0.5", (20, 200), 1.0, d=2, draws=2**8)
    data = item.compute()
    # (2.2) of a start αΘΘᵀ with Θ a multiple of I, α = 0.3, and tasks of covariance I/2
    sigma = np.array([[1.0, 0.5], [0.5, 1.0]])
    off = 0.3 * 0.3 / math.sqrt(2) * sigma - np.eye(2)
    at_start = (np.trace(off @ off.T @ sigma) / 2 + 0.1) / 2
    assert float(data.infinite[0]) == pytest.approx(at_start, rel=1e-3)
    assert float(data.infinite[-1]) < float(data.infinite[0])
    early = data.distance.isel(t=0)
    assert float(early.sel(L=20) / early.sel(L=200)) == pytest.approx(10, rel=0.15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ladder("identity", (100, 10), 1.0), "in increasing order"),
        (lambda: Ladder("identity", (10,), math.inf), "time is inf"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
