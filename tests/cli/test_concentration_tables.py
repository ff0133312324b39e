"""Studies and prompt lengths as tables, lines and charts."""

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from largeprompt.cli._charts import concentration_chart
from largeprompt.cli._tables import concentration_tables, prompt_length_lines
from largeprompt.paper.drawing import draw, save


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
