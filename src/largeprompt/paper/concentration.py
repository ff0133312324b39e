"""How near finite prompts are to their limit, told: tables, a figure, and the prompt length that an error asks for."""

import math
from collections.abc import Iterator
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

from largeprompt.paper.drawing import COLOURS, STYLE

NAMES = {
    "output": "output T",
    "V": "gradient in V",
    "U": "gradient in U",
    "K": "gradient in K",
    "Q": "gradient in Q",
    "O": "gradient in O",
    "gradient": "gradient in all weights",
    "risk": "risk R",
    "risk-gradient": "gradient of the risk",
}
_TITLES = {
    "output": r"output  $T[\hat\mu_L]$",
    **{name: rf"gradient  $\nabla_{name} T[\hat\mu_L]$" for name in "VUKQO"},
    "gradient": r"gradient  $\nabla_\theta T[\hat\mu_L]$ in all weights",
    "risk": r"risk  $R_L$",
    "risk-gradient": r"gradient of the risk  $\nabla_\theta R_L$",
}
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
    yield Text(f"{data.replicates} prompts a length, seed {data.seed}, {data.seconds:.0f} s")


def _table(name: str, curve: xr.Dataset) -> Table:
    what = f"{NAMES.get(name, name)}: mean squared deviation from the infinite prompt"
    table = Table(title=what, box=box.SIMPLE_HEAD)
    gap = [f"{'R_L − R_∞' if name == 'risk' else '‖∇R_L − ∇R_∞‖'}"] if _has_gap(curve) else []
    bound = f"bound/{'|gap|' if gap else 'measured'}"
    for heading in ("L", "measured", "predicted", "ratio", *gap, bound, "effective"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in _points(curve):
        mark = "" if point["trusted"] else "*"
        gaps = [_with_error(point["gap"], point["gap_stderr"])] if gap else []
        measured = _with_error(point["measured"], point["stderr"])
        predicted = "–" if math.isnan(point["predicted"]) else f"{point['predicted']:.3e}"
        table.add_row(
            f"{mark}{point['L']:.0f}",
            measured,
            predicted,
            _ratio(point),
            *gaps,
            _excess(point),
            f"{point['effective']:.0f}",
        )
    return table


def _points(curve: xr.Dataset) -> list[dict[str, float]]:
    """The numbers at each length, by name."""
    names = [str(name) for name, values in curve.items() if values.dims == ("L",)]
    return [{name: float(curve[name][i]) for name in ("L", *names)} for i in range(curve.sizes["L"])]


def _has_gap(curve: xr.Dataset) -> bool:
    return "gap" in curve and bool(np.isfinite(curve.gap).any())


def _with_error(value: float, stderr: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3e} ± {stderr:.0e}"


def _ratio(point: dict[str, float]) -> str:
    predicted = point["predicted"]
    if not predicted > 0 or math.isinf(predicted):
        return "–"
    ratio = point["measured"] / predicted
    error = math.hypot(point["stderr"], ratio * point["predicted_stderr"]) / predicted
    return f"{ratio:.3f} ± {error:.3f}"


def _excess(point: dict[str, float]) -> str:
    """By how many powers of ten the bound exceeds what it bounds."""
    decades = _decades(point)
    return "–" if math.isnan(decades) else f"10^{decades:.1f}"


def _decades(point: dict[str, float]) -> float:
    bounded = abs(point["gap"]) if not math.isnan(point.get("gap", math.nan)) else point["measured"]
    return point["bound_log10"] - math.log10(bounded) if bounded > 0 else math.nan


def _remarks(curve: xr.Dataset, replicates: int) -> Iterator[str]:
    doubtful = curve.isel(L=np.flatnonzero(~curve.trusted.values.astype(bool)))
    within = doubtful.isel(L=np.flatnonzero(np.isfinite(doubtful.needed.values)))
    beyond = doubtful.isel(L=np.flatnonzero(~np.isfinite(doubtful.needed.values)))
    if within.sizes["L"]:
        enough = f"about {_count(float(within.needed.max()))} would do"
        yield f"* not to be trusted: {replicates} prompts are too few at L = {_listed(within)}; {enough}"
    if beyond.sizes["L"]:
        yield f"* not to be trusted: no number of prompts would do at L = {_listed(beyond)}, the tail is too heavy"
    if math.isfinite(float(curve.slope)):
        exponent = float(curve.exponent)
        predicted = f", predicted {exponent:g}" if math.isfinite(exponent) else ""
        yield f"slope {float(curve.slope):.3f} ± {float(curve.slope_stderr):.3f}{predicted}"
    constant = float(curve.constant)
    if math.isfinite(constant):
        onset = float(curve.onset)
        begins = f", within 10 % from L = {_count(onset)} on" if math.isfinite(onset) else ""
        yield f"asymptote {constant:.4g}/L{begins}"
    for text in (str(curve.regime.values), str(curve.method.values)):
        if text:
            yield text
    refusal = str(curve.bound_refusal.values)
    name = str(curve.bound_name.values)
    if name:
        yield f"bound: {name}"
    if refusal:
        yield f"no bound: {refusal}"


def _listed(curve: xr.Dataset) -> str:
    lengths = [str(int(L)) for L in curve.L.values]
    return ", ".join(lengths) if len(lengths) <= 6 else f"{lengths[0]}, {lengths[1]}, ..., {lengths[-1]}"


def _count(number: float) -> str:
    return f"{number:.0f}" if number < 1e6 else f"{number:.1e}".replace("e+0", "e").replace("e+", "e")


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
            panel.set_title(_TITLES.get(str(name), str(name)))
            panel.set_xlabel("prompt length $L$")
        for panel in panels[:, 0]:
            panel.set_ylabel("mean squared deviation\nfrom the infinite prompt")
        shown = [panel.get_legend_handles_labels() for panel in panels.flat[:count]]
        unique = {label: handle for handles, labels in shown for handle, label in zip(handles, labels, strict=True)}
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _panel(panel: Axes, curve: xr.Dataset) -> None:
    L, measured = curve.L.values.astype(float), curve.measured.values
    panel.set(xscale="log", yscale="log")
    panel.grid(True, which="major", linewidth=0.3, alpha=0.5)
    blue, orange, green = COLOURS[:3]
    lower = np.where(curve.q05 > 0, curve.q05, np.nan)
    panel.fill_between(L, lower, curve.q95.values, color=blue, alpha=0.15, linewidth=0, label="5 to 95 % of prompts")
    trusted = curve.trusted.values.astype(bool)
    for chosen, fill, label in ((trusted, "white", "measured"), (~trusted, "none", "measured, not to be trusted")):
        seen = chosen & (measured > 0)
        if seen.any():
            off = np.abs(np.stack([curve.low.values, curve.high.values]) - measured)[:, seen]
            style = {"color": blue if chosen is trusted else "0.5", "markerfacecolor": fill, "elinewidth": 0.8}
            marker = "o" if chosen is trusted else "X"
            panel.errorbar(L[seen], measured[seen], yerr=off, fmt=marker, label=f"{label} (95 %)", zorder=3, **style)
    predicted = curve.predicted.values
    if np.any(predicted > 0):
        panel.plot(L, np.where(predicted > 0, predicted, np.nan), color=orange, linewidth=1.2, label="predicted")
    asymptote = float(curve.constant) / L
    if np.all(np.isfinite(asymptote)) and np.any(~(np.abs(asymptote / predicted - 1) <= _APART)):
        panel.plot(L, asymptote, color=orange, linewidth=1, linestyle="--", label="its asymptote $c/L$")
    _draw_bound(panel, curve, green)


def _draw_bound(panel: Axes, curve: xr.Dataset, colour: str) -> None:
    """The bound as a curve where it lies near the data, else in words how far above it lies."""
    known = np.flatnonzero(np.isfinite(curve.bound_log10.values))
    L, decades = curve.L.values[known].astype(float), curve.bound_log10.values[known]
    # of a risk the bound is one of the gap, not of its square
    if len(known) and not _has_gap(curve) and decades.max() <= math.log10(panel.get_ylim()[1]) + _REACH:
        panel.plot(L, 10**decades, color=colour, linewidth=1.2, linestyle="-.", label="the paper's bound")
    elif len(known):
        _say_excess(panel, curve, colour)


def _say_excess(panel: Axes, curve: xr.Dataset, colour: str) -> None:
    decades = [found for found in map(_decades, _points(curve)) if not math.isnan(found)]
    if not decades:
        return
    least, most = min(decades), max(decades)
    power = rf"$10^{{{least:.0f}}}$" if round(least) == round(most) else rf"$10^{{{least:.0f}}}$ to $10^{{{most:.0f}}}$"
    # room above the data, where nothing is covered
    low, high = (math.log10(end) for end in panel.get_ylim())
    panel.set_ylim(10**low, 10 ** (low + (high - low) / (1 - _HEADROOM)))
    text = f"{curve.bound_name.values!s} (↑):\n{power} times as large"
    panel.text(0.98, 1.0, text, transform=panel.transAxes, ha="right", va="top", color=colour, fontsize=7)


def prompt_length_lines(found: Any) -> Iterator[Text]:
    """The prompt length that an error asks for, how it is known, and what the paper's bound would ask for."""
    yield from map(Text, _prompt_length(found))


def _prompt_length(found: Any) -> Iterator[str]:
    error = f"a root mean square error of {found.epsilon:g}"
    if math.isfinite(found.L):
        yield f"L = {int(found.L)} tokens a prompt for {error}"
    else:
        yield f"no prompt length that can be named is enough for {error}"
    yield f"{found.method}; {found.regime.sentence}" if found.regime.sentence else str(found.method)
    if found.checked and found.measured > 0:
        root = math.sqrt(found.measured)
        yield f"measured at that length: {root:.4g} ± {found.measured_stderr / (2 * root):.1g}"
    elif not found.checked:
        yield "not measured: prompts of that length are too long to draw"
    if math.isfinite(found.bound_log10_L):
        yield f"the paper's bound asks for L = 10^{found.bound_log10_L:.1f}"
    else:
        yield f"the paper's bound asks for no finite length: {found.bound_refusal}"
