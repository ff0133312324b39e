"""The house style of figures, and how a chart is drawn with it."""

import math
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MultipleLocator, NullLocator

from largeprompt._display import cell_text, heat_map
from largeprompt.paper.chart import GREY, INK, Chart, HeatMap, Panel, Series, heat_limits

_HUES = {INK: "#000000", GREY: "#777777"}
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
}
_DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (4, 2)), "dot": (0, (1, 1.5))}
_REACH = 3.0  # decades above all else up to which a bound is drawn on the same scale
_BREAK = (1.0, 3.2)  # heights of the two parts of a broken axis
_WIDTH = 7.2  # inches, of a page
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path; the same data give the same file."""
    options: dict[str, Any] = {".svg": {"metadata": {"Date": None}}, ".pdf": {"metadata": {"CreationDate": None}}}
    with matplotlib.rc_context({"svg.hashsalt": "largeprompt"}):
        figure.savefig(path, **options.get(path.suffix, {"dpi": 200}))


def draw(chart: Chart) -> Figure:
    """A chart on paper: panels in rows, one legend for all.

    A bound far above all else is drawn past a break of the axis; beside other panels there is no room, and it is left
    out.
    """
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    with matplotlib.rc_context(STYLE):
        size = (_WIDTH, 0.8 + 2.4 * rows) if columns > 1 else (5.4, 4.2)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        broken = len(chart.panels) == 1 and bool(_far(chart.panels[0]))
        if broken:
            axes = figure.subplots(2, 1, squeeze=False, sharex=True, height_ratios=_BREAK)
        else:
            axes = figure.subplots(rows, columns, squeeze=False, sharey="row" if chart.share_y else False)
        for unused in axes.flat[len(chart.panels) + broken :]:
            unused.set_visible(False)
        limits, image, scale = heat_limits(chart), None, ""
        for i, (ax, panel) in enumerate(zip(axes.flat[broken:], chart.panels, strict=False)):
            if isinstance(panel, HeatMap):
                image, scale = heat_map(ax, panel.values, panel.rows, panel.columns, limits), panel.scale
                ax.set(title=_scripts(panel.title), xlabel=_scripts(panel.x_label))
                ax.spines[:].set_visible(False)
            else:
                _panel(ax, panel)
            first = i % columns == 0
            if first or not chart.share_y or panel.y_label != chart.panels[i - 1].y_label:
                ax.set_ylabel(_scripts(panel.y_label))
        if broken:
            _break(axes[0, 0], axes[1, 0], chart.panels[0])
        if image is not None:
            _colour_bar(figure, image, axes, scale)
        shown = [ax.get_legend_handles_labels() for ax in axes.flat]
        unique = {label: handle for handles, labels in shown for handle, label in zip(handles, labels, strict=True)}
        if unique:
            fits = max(1, (130 if columns > 1 else 100) // (max(map(len, unique)) + 8))
            figure.legend(
                unique.values(), unique.keys(), loc="outside lower center", ncols=min(fits, len(unique)), frameon=False
            )
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # laid out once: each format that is saved would do it twice again
    return figure


def _colour_bar(figure: Figure, image: Any, axes: Any, scale: str) -> None:
    """One bar of colours for all heat maps, with plain numbers."""
    bar = figure.colorbar(image, ax=axes, label=_scripts(scale), fraction=0.04, pad=0.02)
    low, high = image.get_clim()
    ticks = np.geomspace(low, high, 5)
    bar.set_ticks(ticks.tolist(), labels=[cell_text(tick) for tick in ticks])
    bar.ax.yaxis.set_minor_locator(NullLocator())


class _PlainPowers(LogFormatterSciNotation):
    """Powers of ten as plain text: mathematics would be parsed for every format, which takes a third of the time."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        text = super().__call__(x, pos).removeprefix(r"$\mathdefault{").removesuffix("}$").replace(r"\times", "×")
        return re.sub(r"\^{(.*?)}", lambda found: found[1].translate(_RAISED), text)


def _scripts(text: str) -> str:
    """Plain mathematics with its sub- and superscripts set: θ_soft, 0.5^|i−j|."""
    text = re.sub(r"_(\w+|∞)", lambda found: rf"$_{{\mathrm{{{found[1]}}}}}$".replace("∞", r"\infty"), text)
    return re.sub(r"\^(\S+)", lambda found: rf"$^{{{found[1].replace('−', '-')}}}$", text)


def _panel(ax: Axes, panel: Panel) -> None:
    _scales(ax, panel)
    if panel.whole:
        ax.xaxis.set_major_locator(MultipleLocator(1))
    ax.set(title=_scripts(panel.title), xlabel=_scripts(panel.x_label))
    far, order = _far(panel), {"bound": 0, "seed": 1, "theory": 3, "measured": 2}
    for series in sorted(panel.series, key=lambda series: order[series.role]):
        if series not in far:
            _series(ax, series)
    for i, remark in enumerate(panel.remarks):
        ax.text(0.97, 0.97 - 0.08 * i, remark, transform=ax.transAxes, ha="right", va="top", fontsize=6.5, color="0.3")


def _scales(ax: Axes, panel: Panel | HeatMap) -> None:
    ax.set(xscale="log" if panel.x_log else "linear", yscale="log" if panel.y_log else "linear")
    for axis in [*[ax.xaxis] * panel.x_log, *[ax.yaxis] * panel.y_log]:
        axis.set_major_formatter(_PlainPowers())
        axis.set_minor_formatter(_PlainPowers())
    ax.grid(True, which="major", linewidth=0.3, alpha=0.5)


def _far(panel: Panel | HeatMap) -> list[Series]:
    """The bounds that would press all else together."""
    top = max((_top(series) for series in panel.series if series.role != "bound"), default=math.inf)
    return [series for series in panel.series if series.role == "bound" and _top(series) > top * 10**_REACH]


def _break(upper: Axes, lower: Axes, panel: Panel | HeatMap) -> None:
    """Far bounds above a break of the y-axis, with a scale of their own."""
    _scales(upper, panel)
    for series in _far(panel):
        _series(upper, series)
    lower.set_title("")
    upper.set_title(_scripts(panel.title))
    upper.spines.bottom.set_visible(False)
    upper.tick_params(axis="x", which="both", bottom=False)
    if panel.y_log:
        # whole decades, few of them named; matplotlib's own choice of ticks overflows near the largest numbers
        ends = np.log10(upper.get_ylim())
        low, high = math.floor(ends[0]), min(math.ceil(ends[1]), 308)
        upper.set_ylim(10.0**low, 10.0**high)
        upper.set_yticks([10.0**power for power in range(low, high + 1, -(-(high - low) // 3))])
        upper.yaxis.set_minor_locator(NullLocator())
    stroke: dict[str, Any] = {"marker": [(-1, -0.6), (1, 0.6)], "markersize": 7, "color": "black", "clip_on": False}
    for ax, end in ((upper, 0), (lower, 1)):
        ax.plot([0], [end], transform=ax.transAxes, linestyle="none", markeredgewidth=0.8, **stroke)


def _top(series: Series) -> float:
    finite = series.y[np.isfinite(series.y)]
    return float(finite.max()) if len(finite) else -math.inf


def _series(ax: Axes, series: Series) -> None:
    colour = _HUES.get(series.colour, series.colour)
    faint = series.role == "seed"
    style: dict[str, Any] = {
        "color": colour,
        "linestyle": _DASHES[series.dash] if series.line else "none",
        "linewidth": 0.6 if faint else series.width,
        "marker": series.mark or None,
        "markerfacecolor": colour if series.mark in ("x", "+") else "white",
        "alpha": 0.45 if faint else 1.0,
        "zorder": {"seed": 1.5, "theory": 2.5}.get(series.role, 3),
        "label": series.label if series.in_legend else None,
    }
    limits = series.low is not None and series.high is not None
    if limits and not series.line:
        off = np.clip(np.stack([series.y - series.low, series.high - series.y]), 0, None)
        ax.errorbar(series.x, series.y, yerr=off, elinewidth=0.8, **style)
        return
    ax.plot(series.x, series.y, **style)
    if limits:
        ax.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)  # pyrefly: ignore[bad-argument-type]
