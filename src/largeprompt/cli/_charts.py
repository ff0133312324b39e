"""Results as pictures."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from largeprompt.lab import Run, run_of, setting, varying
from largeprompt.paper.chart import GREEN, GREY, OF_ATTENTION, Chart, Panel, Series, level
from largeprompt.paper.drawing import COLOURS, STYLE

from ._tables import asymptote_of, compared, decades_above, has_gap, in_text, is_asymptote, points

TITLES = {
    "output": r"output  $T[\hat\mu_L]$",
    **{name: rf"gradient  $\nabla_{name} T[\hat\mu_L]$" for name in "VUKQO"},
    "gradient": r"gradient  $\nabla_\theta T[\hat\mu_L]$ in all weights",
    "risk": r"risk  $R_L$",
    "risk-gradient": r"gradient of the risk  $\nabla_\theta R_L$",
}
_REACH = 3.0  # decades above the data up to which a bound is drawn in the same axes
_HEADROOM = 0.17  # of the height of a panel, for words
_APART = 0.03  # relative difference from which the asymptote is drawn beside the prediction


def concentration_figure(data: xr.Dataset) -> Figure:
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
            _concentration_panel(panel, data.sel(quantity=name))
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


def _concentration_panel(panel: Axes, curve: xr.Dataset) -> None:
    # of risks the difference itself, which is what is bounded
    root = 0.5 if has_gap(curve) else 1.0
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
    finite, asymptote = (predicted > 0) & np.isfinite(predicted), asymptote_of(curve) ** root
    alone = is_asymptote(curve)
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
    decades = [found for found in map(decades_above, map(compared, points(curve))) if not math.isnan(found)]
    if not decades:
        return
    power = " to ".join(dict.fromkeys(f"$10^{{{end:.0f}}}$" for end in (min(decades), max(decades))))
    # room above the data, where nothing is covered
    low, high = (math.log10(end) for end in panel.get_ylim())
    panel.set_ylim(10**low, 10 ** (low + (high - low) / (1 - _HEADROOM)))
    text = f"{curve.bound_name.values!s} (↑):\n{power} times as large"
    panel.text(0.98, 1.0, text, transform=panel.transAxes, ha="right", va="top", color=colour, fontsize=7)


def training_figure(results: Sequence[xr.Dataset]) -> Figure:
    """A panel for each setting: seeds as thin lines, the mean of the good ones thick, trapped ones dotted."""
    runs = [run_of(data) for data in results]
    names = varying(runs)
    panels: dict[tuple, list[tuple[Run, xr.Dataset]]] = {}
    for run, data in zip(runs, results, strict=True):
        panels.setdefault(tuple(getattr(run, name) for name in names), []).append((run, data))
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        width = 7.2 if columns > 1 else 4.8
        figure = Figure(figsize=(width, 0.8 + 2.3 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for panel in axes.flat[len(panels) :]:
            panel.set_visible(False)
        for panel, group in zip(axes.flat, panels.values(), strict=False):
            _training_panel(panel, group)
            run = group[0][0]
            title = ", ".join(f"{_label(name)}{in_text(setting(run, name))}" for name in names)
            panel.set_title(title)
        for panel in axes[:, 0]:
            panel.set_ylabel(r"risk  $\frac{1}{2}E(\hat y - y)^2$")
        for panel in axes[-1]:
            panel.set_xlabel("step")
        found = [panel.get_legend_handles_labels() for panel in axes.flat]
        unique = {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _label(name: str) -> str:
    return "" if name == "sigma" else f"{name.replace('_', ' ')} = "


def _training_panel(panel: Axes, group: list[tuple[Run, xr.Dataset]]) -> None:
    members = dict.fromkeys(member for run, _ in group for member in run.members)
    for member in members:
        curves = [data.sel(member=member) for run, data in group if member in run.members]
        good = [curve for curve in curves if str(curve.verdict.values) not in ("trapped", "diverged")]
        for curve in curves:
            end = str(curve.verdict.values)
            style = {"trapped": ":", "diverged": "--"}.get(end, "-")
            label = f"{member}, {end}" if end in ("trapped", "diverged") else None
            _draw(panel, curve, color=OF_ATTENTION[member], linestyle=style, linewidth=0.7, alpha=0.6, label=label)
        if good:
            steps = good[0].step.values
            same = [curve for curve in good if np.array_equal(curve.step.values, steps)]
            mean = np.mean([curve.risk.values for curve in same], axis=0)
            panel.plot(np.maximum(steps, 1), mean, color=OF_ATTENTION[member], linewidth=1.8, label=f"{member}, mean")
        known = not math.isnan(float(curves[0].optimum))
        label = f"best {member}" if known else f"{member}, attainable"
        dashes = (0, (6, 2)) if known else (0, (6, 2, 1, 2))
        panel.axhline(float(curves[0].attainable), color=OF_ATTENTION[member], linestyle=dashes, linewidth=0.9, label=label)
    panel.axhline(float(group[0][1].Bayes), color="0.3", linestyle=(0, (1, 1)), linewidth=0.9, label="Bayes")
    panel.set(xscale="log", yscale="log")
    panel.grid(True, which="major", linewidth=0.3, alpha=0.5)


def _draw(panel: Axes, curve: xr.Dataset, **style: Any) -> None:
    risk = curve.risk.values
    panel.plot(np.maximum(curve.step.values, 1), risk, **style)
    seen = np.flatnonzero(np.isfinite(risk))
    if len(seen) < len(risk) and len(seen):  # the last that is known of a run that diverged
        last = seen[-1]
        panel.plot(max(float(curve.step[last]), 1), risk[last], marker="x", color=style["color"], markersize=4)


def optima_chart(data: xr.Dataset) -> Chart:
    """One panel a covariance: the least risks of softmax and linear attention, the Bayes risk and the noise floor."""
    curves = {
        "softmax": ("best softmax attention", OF_ATTENTION["softmax"], "o"),
        "linear": ("best linear attention", OF_ATTENTION["linear"], "s"),
        "Bayes": ("Bayes (ridge regression)", GREEN, "D"),
    }
    L, panels = data.L.values, []
    for covariance in data.covariance.values:
        series = [
            Series(label, L, data[name].sel(covariance=covariance).values, "theory", colour, mark=mark)
            for name, (label, colour, mark) in curves.items()
        ]
        series.append(level("noise floor s²/2", float(data.floor), L, colour=GREY, dash="dot"))
        panels.append(Panel(str(covariance), "prompt length L", "least risk  ½E(ŷ−y)²", tuple(series)))
    return Chart(tuple(panels), columns=max(1, min(2, len(panels))))


def length_chart(data: xr.Dataset) -> Chart:
    """Risks of trained layers against the length, beside the optima; those of the infinite prompt as levels."""
    finite = data.isel(L=np.flatnonzero(np.isfinite(data.L.values)))
    infinite = data.isel(L=np.flatnonzero(~np.isfinite(data.L.values)))
    x = finite.L.values if len(finite.L) else np.asarray([1.0, 10.0])
    series = []
    for member in (str(name) for name in data.member.values):
        colour, one = OF_ATTENTION[member], finite.sel(member=member)
        band = {"low": one.risk - one.risk_stderr, "high": one.risk + one.risk_stderr}
        series += [Series(f"{member}, trained", x, one.risk, colour=colour, mark="o", **band)] if len(one.L) else []
        series += [Series(f"best {member}", x, one.optimum, "theory", colour, dash="dash")] if len(one.L) else []
        for risk in infinite.sel(member=member).risk.values:
            series.append(level(f"{member}, trained, at ∞", risk, x, colour=colour, dash="dot"))
    if len(finite.L):
        series.append(Series("Bayes", x, finite.Bayes, "theory", GREEN, mark="D"))
    return Chart((Panel(data.run, "prompt length L", "risk  ½E(ŷ−y)²", tuple(series)),), columns=1)
