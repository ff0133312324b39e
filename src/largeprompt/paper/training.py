"""How training runs are told: a table of where they ended, and their risks drawn against the step."""

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

from largeprompt.lab import VERDICTS, Run, run_of, setting, varying
from largeprompt.paper.drawing import COLOURS, STYLE

HUE: dict[str, str] = {"softmax": COLOURS[0], "linear": COLOURS[1]}


def rows_as_dataset(rows: Sequence[dict[str, Any]]) -> xr.Dataset:
    """The rows of a summary as columns, for NetCDF and CSV."""
    return xr.Dataset({name: ("row", _column([row[name] for row in rows])) for name in rows[0]})


def _column(values: list[Any]) -> list[Any]:
    """Whole numbers as they are while they fit 32 bits, the most that the files hold."""
    return [float(v) if isinstance(v, int) and abs(v) >= 2**31 else v for v in values]


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table | str]:
    """A table for each covariance, one line for each other setting and attention; then what became of the rest."""
    settings = [name for name in rows[0] if name not in _TOLD]
    for sigma in dict.fromkeys(row["sigma"] for row in rows):
        yield _table(
            f"{sigma}: final risk ½E(ŷ−y)² of the good runs", settings, [r for r in rows if r["sigma"] == sigma]
        )
    runs = sum(row["runs"] for row in rows)
    unfinished, settled = (sum(row[name] for row in rows) for name in ("unfinished", "settled"))
    if unfinished:
        yield f"{unfinished} of {runs} were not finished: more steps would help, or a lower rate where the risk rises"
    if settled:
        yield f"{settled} of {runs} have settled, and whether at the optimum is not known"
    for row in rows:
        if row["trapped"]:
            where = ", ".join(f"{name} = {_text(row[name])}" for name in ("sigma", *settings))
            yield f"trapped ({where}): {row['trapped']} end at a mean risk of {row['trapped_risk']:.5f}"


def _table(title: str, settings: list[str], rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    headings = ("runs", "final risk", "best linear", "best softmax", "Bayes", "trapped", "diverged")
    for name in (*settings, *headings):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        error = row["risk_stderr"]
        risk = "–" if math.isnan(row["risk"]) else f"{row['risk']:.5f}"
        risk += "" if math.isnan(error) else f" ± {error:.0e}"
        least = (*(_least(row, kind) for kind in ("linear", "softmax")), f"{row['Bayes']:.5f}")
        shares = (_share(row, name) for name in ("trapped", "diverged"))
        table.add_row(*(_text(row[name]) for name in settings), str(row["runs"]), risk, *least, *shares)
    return table


_TOLD = {
    "sigma",
    "runs",
    *VERDICTS,
    "risk",
    "risk_stderr",
    "trapped_risk",
    "Bayes",
}
_TOLD |= {f"{name}_{what}" for name in ("trapped", "diverged") for what in ("share", "low", "high")}
_TOLD |= {f"{name}_{what}" for name in ("linear", "softmax") for what in ("optimum", "attainable")}


def _least(row: dict[str, Any], kind: str) -> str:
    """The least risk, or what it is at most."""
    optimum, attainable = row[f"{kind}_optimum"], row[f"{kind}_attainable"]
    if math.isnan(attainable):
        return "–"
    return f"≤ {attainable:.5f}" if math.isnan(optimum) else f"{optimum:.5f}"


def _share(row: dict[str, Any], name: str) -> str:
    low, high = (round(100 * row[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{100 * row[f'{name}_share']:.0f}% [{low}, {high}]"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "∞" if math.inf == value else f"{value:g}"
    return str(value)


def risks(results: Sequence[xr.Dataset]) -> Figure:
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
            _panel(panel, group)
            run = group[0][0]
            title = ", ".join(f"{_label(name)}{_text(setting(run, name))}" for name in names)
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


def _panel(panel: Axes, group: list[tuple[Run, xr.Dataset]]) -> None:
    members = dict.fromkeys(member for run, _ in group for member in run.members)
    for member in members:
        curves = [data.sel(member=member) for run, data in group if member in run.members]
        good = [curve for curve in curves if str(curve.verdict.values) not in ("trapped", "diverged")]
        for curve in curves:
            end = str(curve.verdict.values)
            style = {"trapped": ":", "diverged": "--"}.get(end, "-")
            label = f"{member}, {end}" if end in ("trapped", "diverged") else None
            _draw(panel, curve, color=HUE[member], linestyle=style, linewidth=0.7, alpha=0.6, label=label)
        if good:
            steps = good[0].step.values
            same = [curve for curve in good if np.array_equal(curve.step.values, steps)]
            mean = np.mean([curve.risk.values for curve in same], axis=0)
            panel.plot(np.maximum(steps, 1), mean, color=HUE[member], linewidth=1.8, label=f"{member}, mean")
        known = not math.isnan(float(curves[0].optimum))
        label = f"best {member}" if known else f"{member}, attainable"
        dashes = (0, (6, 2)) if known else (0, (6, 2, 1, 2))
        panel.axhline(float(curves[0].attainable), color=HUE[member], linestyle=dashes, linewidth=0.9, label=label)
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
