"""A chart as the page draws it: plain data for Plotly, with colours that the page resolves for light and dark paper."""

from typing import Any

import numpy as np

from largeprompt._display import cell_text
from largeprompt.paper.chart import Chart, HeatMap, Panel, Role, Series, heat_limits
from largeprompt.paper.report.words import prose

MARKS = {
    "o": ("circle", "M16 7m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0"),
    "s": ("square", "M13 4h6v6h-6z"),
    "D": ("diamond", "M16 3.2l3.8 3.8l-3.8 3.8l-3.8 -3.8z"),
    "^": ("triangle-up", "M16 3.5l3.5 6.5h-7z"),
    "v": ("triangle-down", "M16 10.5l3.5 -6.5h-7z"),
    "x": ("x-thin", "M13 4l6 6M19 4l-6 6"),
    "+": ("cross-thin", "M16 3.2v7.6M12.2 7h7.6"),
    "_": ("line-ew", "M11.5 7h9"),
    "1": ("y-down", "M16 7v4M16 7l-3.5 -3M16 7l3.5 -3"),
    ".": ("circle", "M16 7m-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0"),
}
"""Of matplotlib's marks: the symbols of Plotly, and as SVG for the legend."""
DASHES = {"solid": "", "dash": "5 3", "dot": "1.5 2.5"}  # as SVG
ORDER: tuple[Role, ...] = ("bound", "seed", "theory", "measured")  # from the back to the front
FULL = ("x", "+", "_", "1", ".")  # marks of one colour, within and without


def panels(chart: Chart) -> list[dict[str, Any]]:
    """Each panel's traces and axes; panels of one `row` have the y-axis in common where the chart shares it.

    A heat map is its cells instead.
    """
    limits = np.log10(heat_limits(chart)).tolist()
    return [
        {"cells": _cells(panel, limits)}
        if isinstance(panel, HeatMap)
        else {
            "row": i // max(1, chart.columns) if chart.share_y else None,
            "x": {"log": panel.x_log, "whole": panel.whole},
            "y": {"log": panel.y_log},
            "traces": _traces(panel),
        }
        for i, panel in enumerate(chart.panels)
    ]


def _cells(panel: HeatMap, limits: list[float]) -> dict[str, Any]:
    """A trace of cells coloured by the logarithm of their numbers."""
    with np.errstate(divide="ignore", invalid="ignore"):
        colours = np.clip(np.log10(panel.values), limits[0], limits[1])
    return {
        "type": "heatmap",
        "x": list(panel.columns),
        "y": list(panel.rows),
        "z": [_numbers(row) for row in colours],
        "zmin": limits[0],
        "zmax": limits[1],
        "text": [[cell_text(value) for value in row] for row in panel.values],
        "texttemplate": "%{text}",
        "colorscale": "Viridis",
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "meta": [prose(text) for text in (panel.x_label, panel.y_label, panel.scale)],
        "hovertemplate": "%{meta[1]}: %{y}<br>%{meta[0]}: %{x}<br>%{meta[2]}: %{text}<extra></extra>",
    }


def roles(chart: Chart) -> list[Role]:
    """The roles that the chart has."""
    there = {series.role for panel in chart.panels for series in panel.series}
    return [role for role in ORDER if role in there]


def legend(chart: Chart) -> list[Series]:
    """One series for each label of the legend."""
    shown: dict[str, Series] = {}
    for panel in chart.panels:
        for series in panel.series:
            if series.in_legend:
                shown.setdefault(series.label, series)
    return list(shown.values())


def _traces(panel: Panel) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for series in sorted(panel.series, key=lambda series: ORDER.index(series.role)):
        if series.line and series.low is not None and series.high is not None:
            traces.append(_band(series, series.low, series.high))
        traces.append(_trace(series, panel))
    return traces


def _trace(series: Series, panel: Panel) -> dict[str, Any]:
    faint = series.role == "seed"
    limits = series.low is not None and series.high is not None
    mode = "+".join(part for part, there in (("lines", series.line), ("markers", series.mark)) if there)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": mode or "markers",
        "name": prose(series.label),
        "x": _numbers(series.x),
        "y": _numbers(series.y),
        "opacity": 0.5 if faint else 1.0,
        "line": {"color": series.colour, "width": 0.9 if faint else 1.25 * series.width, "dash": series.dash},
        "meta": [prose(text) for text in (series.label, panel.x_label, panel.y_label)],
        "hovertemplate": "<b>%{meta[0]}</b><br>%{meta[1]}: %{x:,.5~g}<br>%{meta[2]}: %{y:.4~g}"
        + ("<br>from %{customdata[0]:.4~g} to %{customdata[1]:.4~g}" if limits else "")
        + "<extra></extra>",
        "role": series.role,
        "label": series.label,
    }
    if "markers" in trace["mode"]:
        trace["marker"] = {
            "symbol": MARKS.get(series.mark, MARKS["o"])[0],
            "size": 3 if series.mark == "." else 4 if faint else 6.5,
            "color": series.colour if series.mark in FULL else "paper",
            "line": {"color": series.colour, "width": 0 if series.mark == "." else 1.4},
        }
    if series.low is not None and series.high is not None:
        trace["customdata"] = [list(pair) for pair in zip(_numbers(series.low), _numbers(series.high), strict=True)]
        if not series.line:
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": _numbers(np.clip(series.high - series.y, 0, None)),
                "arrayminus": _numbers(np.clip(series.y - series.low, 0, None)),
                "color": series.colour,
                "thickness": 1,
                "width": 2,
            }
    return trace


def _band(series: Series, low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """The band as closed polygons, one for each part without a gap."""
    there = np.isfinite(series.x) & np.isfinite(low) & np.isfinite(high)
    x: list[float | None] = []
    y: list[float | None] = []
    for part in np.split(np.arange(len(there)), np.flatnonzero(~there)):
        part = part[there[part]]
        if len(part) > 1:
            x += [*_numbers(series.x[part]), *_numbers(series.x[part[::-1]]), None]
            y += [*_numbers(high[part]), *_numbers(low[part[::-1]]), None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"width": 0, "color": series.colour},
        "fill": "toself",
        "fillcolor": series.colour,
        "opacity": 0.16,
        "hoverinfo": "skip",
        "role": series.role,
        "label": series.label,
        "band": True,
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """As JSON has them: six digits, and nothing where there is no number."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
