"""How near finite prompts are to their limit, told: tables, a figure, and the prompt length that an error asks for."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from largeprompt.paper.drawing import COLOURS, STYLE, TITLES

NAMES = {
    "output": "output T",
    **{name: f"gradient in {name}" for name in "VUKQO"},
    "gradient": "gradient in all weights",
    "risk": "risk",
    "risk-gradient": "gradient of the risk",
}
_DIFFERENCES = {"risk": "R_L − R_∞, R_∞ that of the infinite prompt", "risk-gradient": "‖∇R_L − ∇R_∞‖"}
_REACH = 3.0  # decades above the data up to which a bound is drawn in the same axes
_HEADROOM = 0.17  # of the height of a panel, for words
_APART = 0.03  # relative difference from which the asymptote is drawn beside the prediction


def tables(data: xr.Dataset) -> Iterator[Table | Text]:
    """A table a quantity: the measurement by length beside its prediction and its bound; then what they amount to."""
    for name in data.quantity.values:
        curve = data.sel(quantity=name)
        yield _table(str(name), curve)
        yield from map(Text, _remarks(curve, int(data.replicates)))
        yield Text()
    if "layer" in data.attrs:
        yield Text(f"layer: {data.layer}")
    yield Text(
        f"{data.replicates} prompts a length, seed {data.seed}, {data.seconds:.0f} s; "
        "slopes and mean ratios over the longer half of the lengths"
    )


def _table(name: str, curve: xr.Dataset) -> Table:
    difference = _DIFFERENCES.get(name, "mean squared deviation from the infinite prompt")
    table = Table(title=f"{NAMES.get(name, name)}: {difference}", box=box.SIMPLE_HEAD)
    predicted = "asymptote" if _is_asymptote(curve) else "predicted"
    for heading in ("L", "measured", predicted, "ratio", "bound/measured", "effective"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in map(_compared, _points(curve)):
        length = f"{'' if point['trusted'] else '*'}{point['L']:.0f}"
        predicted = f"{point['predicted']:.3e}" if math.isfinite(point["predicted"]) else "–"
        decades = _decades(point)
        excess = "–" if math.isnan(decades) else f"10^{decades:.1f}"
        table.add_row(length, _with_error(point), predicted, _ratio(point), excess, f"{point['effective']:.0f}")
    return table


def _points(curve: xr.Dataset) -> list[dict[str, float]]:
    """The numbers at each length, by name."""
    names = [str(name) for name, values in curve.items() if values.dims == ("L",)]
    return [{name: float(curve[name][i]) for name in ("L", *names)} for i in range(curve.sizes["L"])]


def _compared(point: dict[str, float]) -> dict[str, float]:
    """Of risks the difference itself in place of its square: it is what is bounded, and it has a sign."""
    if math.isnan(point.get("gap", math.nan)):
        return point
    predicted = math.sqrt(point["predicted"]) if point["predicted"] >= 0 else math.nan
    error = point["predicted_stderr"] / (2 * predicted) if predicted > 0 else math.nan
    own = {"measured": point["gap"], "stderr": point["gap_stderr"], "high": math.sqrt(point["high"])}
    return {**point, **own, "predicted": predicted, "predicted_stderr": error}


def _has_gap(curve: xr.Dataset) -> bool:
    return "gap" in curve and bool(np.isfinite(curve.gap).any())


def _asymptote(curve: xr.Dataset) -> np.ndarray:
    return float(curve.constant) * curve.L.values.astype(float) ** -float(curve.exponent)


def _is_asymptote(curve: xr.Dataset) -> bool:
    """Whether the prediction is no more than the law at large lengths."""
    return not bool(curve.exact) and np.allclose(_asymptote(curve), curve.predicted.values, rtol=1e-6, atol=0)


def _with_error(point: dict[str, float]) -> str:
    if point["measured"] == 0 < point["high"]:
        return f"below {point['high']:.1e}"
    return f"{point['measured']:.3e} ± {point['stderr']:.0e}"


def _ratio(point: dict[str, float]) -> str:
    measured, predicted = abs(point["measured"]), point["predicted"]
    if not predicted > 0 or math.isinf(predicted) or measured == 0:
        return "–"
    ratio = measured / predicted
    error = math.hypot(point["stderr"], ratio * point["predicted_stderr"]) / predicted
    return _uncertain(ratio, error)


def _uncertain(ratio: float, error: float) -> str:
    return f"{ratio:.3f} ± {error:.3f}" if 0.05 <= ratio < 100 else f"{ratio:.2e} ± {error:.0e}"


def _decades(point: dict[str, float]) -> float:
    """By how many powers of ten the bound exceeds what it bounds."""
    measured = abs(point["measured"])
    return point["bound_log10"] - math.log10(measured) if measured > 0 else math.nan


def _remarks(curve: xr.Dataset, replicates: int) -> Iterator[str]:
    doubtful = curve.isel(L=np.flatnonzero(~curve.trusted.values.astype(bool)))
    within = doubtful.isel(L=np.flatnonzero(np.isfinite(doubtful.needed.values)))
    beyond = doubtful.isel(L=np.flatnonzero(~np.isfinite(doubtful.needed.values)))
    if within.sizes["L"]:
        enough = f"about {_count(float(within.needed.max()))} would do"
        yield f"* not to be trusted: {replicates} prompts are too few at L = {_listed(within)}; {enough}"
    if beyond.sizes["L"]:
        yield f"* not to be trusted: no number of prompts would do at L = {_listed(beyond)}, the tail is too heavy"
    square, exponent = " of the square" if _has_gap(curve) else "", float(curve.exponent)
    if math.isfinite(float(curve.slope)):
        here = float(curve.predicted_slope)
        at_these = [f"{here:.3f} at these L"] if math.isfinite(here) and not abs(here + exponent) < 0.005 else []
        at_large = [f"{-exponent:.3g} for large L"] if math.isfinite(exponent) else []
        predicted = ", ".join(at_these + at_large) or "none"
        yield f"slope{square} {float(curve.slope):.3f} ± {float(curve.slope_stderr):.3f}, predicted {predicted}"
    if math.isfinite(float(curve.ratio)):
        told = "the asymptote" if _is_asymptote(curve) else "predicted"
        yield f"measured over {told}{square} {_uncertain(float(curve.ratio), float(curve.ratio_stderr))}"
    if math.isfinite(float(curve.constant)):
        onset, power = float(curve.onset), "" if exponent == 1 else f"^{exponent:.3g}"
        begins = f", within 10 % from L = {_count(onset)} on" if math.isfinite(onset) else ""
        yield f"asymptote{square} {float(curve.constant):.4g}/L{power}{begins}"
    named = {name: str(curve[name].values) for name in ("regime", "method", "note", "bound_name", "bound_refusal")}
    some = " at some lengths" if named["bound_name"] else ""
    said = ("law: ", "prediction: ", "but ", "bound: ", f"no bound{some}: ")
    yield from (f"{what}{text}" for what, text in zip(said, named.values(), strict=True) if text)


def _listed(curve: xr.Dataset) -> str:
    lengths = [str(int(L)) for L in curve.L.values]
    return ", ".join(lengths) if len(lengths) <= 6 else f"{lengths[0]}, {lengths[1]}, ..., {lengths[-1]}"


def _count(number: float, large: float = 1e6) -> str:
    return f"{number:.0f}" if number < large else f"{number:.1e}".replace("e+0", "e").replace("e+", "e")


def picture(data: xr.Dataset) -> Figure:
    """A panel a quantity: the measurement with its intervals and the spread of prompts, prediction and bound."""
    count = data.sizes["quantity"]
    columns = min(count, 2 if count in (2, 4) else 3)
    rows = math.ceil(count / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2 if columns > 1 else 4.8, 0.7 + 2.6 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False)
        for panel in panels.flat[count:]:
            panel.set_visible(False)
        for panel, name in zip(panels.flat, data.quantity.values, strict=False):
            _panel(panel, data.sel(quantity=name))
            panel.set_title(TITLES[str(name)])
            panel.set_xlabel("prompt length $L$")
        label = "difference" if "gap" in data else "mean squared deviation"
        for panel in panels[:, 0]:
            panel.set_ylabel(f"{label}\nfrom the infinite prompt")
        shown = [panel.get_legend_handles_labels() for panel in panels.flat[:count]]
        unique = {label: handle for handles, labels in shown for handle, label in zip(handles, labels, strict=True)}
        figure.legend(
            unique.values(), unique.keys(), loc="outside lower center", ncols=3 if columns > 1 else 2, frameon=False
        )
    return figure


def _panel(panel: Axes, curve: xr.Dataset) -> None:
    # of risks the difference itself, which is what is bounded
    root = 0.5 if _has_gap(curve) else 1.0
    L = curve.L.values.astype(float)
    names = ("measured", "low", "high", "q05", "q95", "predicted")
    measured, low, high, q05, q95, predicted = (np.maximum(curve[name].values, 0) ** root for name in names)
    panel.set(xscale="log", yscale="log")
    panel.grid(True, which="major", linewidth=0.3, alpha=0.5)
    blue, orange, green = COLOURS[:3]
    band = (*_line(L, np.where(q05 > 0, q05, np.nan)), _line(L, q95)[1])
    panel.fill_between(*band, color=blue, alpha=0.15, linewidth=0, label="5 to 95 % of prompts")
    trusted = curve.trusted.values.astype(bool)
    for chosen, label in ((trusted, "measured"), (~trusted, "measured, not to be trusted")):
        seen = chosen & (measured > 0)
        if seen.any():
            off = np.abs(np.stack([low, high]) - measured)[:, seen]
            style = {"color": blue if chosen is trusted else "0.5", "markerfacecolor": "white", "elinewidth": 0.8}
            marker = "o" if chosen is trusted else "X"
            panel.errorbar(L[seen], measured[seen], yerr=off, fmt=marker, label=f"{label} (95 %)", zorder=3, **style)
    below = (measured <= 0) & (high > 0)
    if below.any():  # nothing but noise: how far up it may reach
        panel.plot(L[below], high[below], "v", color="0.5", markerfacecolor="none", label="below (95 %)")
    finite, asymptote = (predicted > 0) & np.isfinite(predicted), _asymptote(curve) ** root
    alone = _is_asymptote(curve)
    if finite.any() and not alone:
        panel.plot(*_line(L, np.where(finite, predicted, np.nan)), color=orange, linewidth=1.2, label="predicted")
    apart = np.any(~(np.abs(asymptote - predicted) <= _APART * predicted))
    if np.all(np.isfinite(asymptote) & (asymptote > 0)) and (apart or alone):
        panel.plot(*_line(L, asymptote), color=orange, linewidth=1, linestyle="--", label="predicted for large $L$")
    _draw_bound(panel, curve, green)


def _line(L: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve; of one length, a line about it."""
    return (L, values) if len(L) > 1 else (L * np.array([0.8, 1.25]), np.repeat(values, 2))


def _draw_bound(panel: Axes, curve: xr.Dataset, colour: str) -> None:
    """The bound as a curve where it lies near the data, else in words how far above it lies."""
    known = np.flatnonzero(np.isfinite(curve.bound_log10.values))
    L, decades = curve.L.values[known].astype(float), curve.bound_log10.values[known]
    if len(known) and decades.max() <= math.log10(panel.get_ylim()[1]) + _REACH:
        panel.plot(*_line(L, 10**decades), color=colour, linewidth=1.2, linestyle="-.", label="the paper's bound")
    elif len(known):
        _say_excess(panel, curve, colour)


def _say_excess(panel: Axes, curve: xr.Dataset, colour: str) -> None:
    decades = [found for found in map(_decades, map(_compared, _points(curve))) if not math.isnan(found)]
    if not decades:
        return
    power = " to ".join(dict.fromkeys(f"$10^{{{end:.0f}}}$" for end in (min(decades), max(decades))))
    # room above the data, where nothing is covered
    low, high = (math.log10(end) for end in panel.get_ylim())
    panel.set_ylim(10**low, 10 ** (low + (high - low) / (1 - _HEADROOM)))
    text = f"{curve.bound_name.values!s} (↑):\n{power} times as large"
    panel.text(0.98, 1.0, text, transform=panel.transAxes, ha="right", va="top", color=colour, fontsize=7)


def prompt_length_lines(found: Any, notes: Sequence[str] = (), layer: str = "") -> Iterator[Text]:
    """The prompt length that an error asks for, how it is known, and what the paper's bound would ask for."""
    kind = {"risk": "difference of risks", "risk-gradient": "difference of gradients"}.get(found.quantity)
    error = f"a {kind or 'root mean square error'} of {found.epsilon:g}"
    length = f"L = {_count(found.L, 1e12)} tokens a prompt" if math.isfinite(found.L) else "no length up to 1e60"
    yield Text(f"{length} for {error}")
    if found.lasting > found.L:
        later = f"from L = {_count(found.lasting, 1e12)} on" if math.isfinite(found.lasting) else "at no length on"
        yield Text(f"{later} every longer prompt does too: in between the {kind or 'error'} is larger again")
    yield Text("; ".join(part for part in (found.method, found.regime.sentence) if part))
    yield from (Text(f"but {note}") for note in notes)
    if found.checked and found.measured > 0:
        root = math.sqrt(found.measured)
        yield Text(f"measured at that length: {root:.4g} ± {found.measured_stderr / (2 * root):.1g}")
    elif not found.checked:
        yield Text(f"not measured: {found.unchecked_reason}")
    if found.bound_refusal:
        yield Text(f"the paper's bound does not serve: {found.bound_refusal}")
    else:
        yield Text(f"the paper's bound asks for L = 10^{found.bound_log10_L:.1f}")
    if layer:
        yield Text(f"layer: {layer}")
