"""Results of commands as charts."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from largeprompt.lab import Run, run_of, setting, varying
from largeprompt.paper.chart import (
    BLUE,
    GREEN,
    GREY,
    OF_ATTENTION,
    PURPLE,
    VERMILION,
    Chart,
    Dash,
    Panel,
    Series,
    level,
)

from ._tables import NAMES, asymptote_of, decades_above, has_gap, in_text, is_asymptote, points

_REACH = 3.0  # decades above the measurement from which words say how far a bound lies
_APART = 0.03  # relative difference from which the asymptote is drawn beside the prediction


def concentration_chart(data: xr.Dataset) -> Chart:
    """A panel for each quantity: the measurement with its intervals, the spread of prompts, prediction and bound."""
    what = "difference" if "gap" in data else "mean squared deviation"
    panels = []
    for name in data.quantity.values:
        curve = data.sel(quantity=name)
        series, remarks = tuple(_concentration(curve)), tuple(_far_bound(curve))
        panels.append(Panel(NAMES[str(name)], "prompt length L", f"{what} from ∞", series, remarks=remarks))
    return Chart(tuple(panels), columns=2 if len(panels) in (2, 4) else 3, share_y=False)


def _concentration(curve: xr.Dataset) -> Iterator[Series]:
    L, root = curve.L.values.astype(float), 0.5 if has_gap(curve) else 1.0  # of risks the difference itself

    def seen(values: np.ndarray, where: np.ndarray | bool = True) -> np.ndarray:
        """Roots of the positive numbers among the values, which a logarithmic axis can show."""
        return np.where((values > 0) & np.isfinite(values) & where, np.maximum(values, 0) ** root, np.nan)

    def line(label: str, values: np.ndarray, *style: Any, **more: Any) -> Series:
        """A curve; of one length, a line about it."""
        if len(L) > 1:
            return Series(label, L, values, *style, **more)
        both = {name: value if isinstance(value, str) else np.repeat(value, 2) for name, value in more.items()}
        return Series(label, L * np.array([0.8, 1.25]), np.repeat(values, 2), *style, **both)

    names = ("measured", "low", "high", "q05", "q50", "q95", "predicted")
    measured, low, high, q05, q50, q95, predicted = (curve[name].values for name in names)
    yield line("median, 5 to 95 % of prompts", seen(q50), "seed", BLUE, low=seen(q05), high=seen(q95))
    trusted = curve.trusted.values.astype(bool)
    for chosen, label, hue, mark in (
        (trusted, "measured", BLUE, "o"),
        (~trusted, "measured, not to be trusted", GREY, "x"),
    ):
        if (chosen & (measured > 0)).any():
            y, ends = seen(measured, chosen), (seen(np.where(end > 0, end, measured * 1e-3)) for end in (low, high))
            yield Series(f"{label} (95 %)", L, y, "measured", hue, *ends, line=False, mark=mark)
    below = (measured <= 0) & (high > 0)
    if below.any():  # nothing but noise: how far up it may reach
        yield Series("below (95 %)", L, seen(high, below), colour=GREY, line=False, mark="v")
    asymptote, alone = asymptote_of(curve), is_asymptote(curve)
    if (predicted > 0).any() and not alone:
        yield line("predicted", seen(predicted), "theory", VERMILION)
    apart = np.any(~(np.abs(asymptote - predicted) <= _APART * predicted))
    if np.all(np.isfinite(asymptote) & (asymptote > 0)) and (apart or alone):
        yield line("predicted for large L", seen(asymptote), "theory", VERMILION, dash="dash")
    with np.errstate(over="ignore"):
        bound = 10.0**curve.bound_log10.values
    if np.isfinite(bound).any():
        yield line("the paper's bound", np.where(np.isfinite(bound), bound, np.nan), "bound", GREEN, dash="dot")


def _far_bound(curve: xr.Dataset) -> Iterator[str]:
    """How far above the measurement the bound lies, in words, where it is far."""
    decades = [found for found in map(decades_above, points(curve)) if not math.isnan(found)]
    if decades and max(decades) > _REACH:
        power = " to ".join(dict.fromkeys(f"{end:.0f}" for end in (min(decades), max(decades))))
        yield f"{curve.bound_name.values!s}: {power} decades above"


_DASHES: dict[str, Dash] = {"trapped": "dot", "diverged": "dash"}


def training_chart(results: Sequence[xr.Dataset]) -> Chart:
    """A panel for each setting: seeds as thin lines, the mean of the good ones thick, trapped ones dotted."""
    runs = [run_of(data) for data in results]
    names = varying(runs)
    groups: dict[tuple, list[tuple[Run, xr.Dataset]]] = {}
    for run, data in zip(runs, results, strict=True):
        groups.setdefault(tuple(getattr(run, name) for name in names), []).append((run, data))
    panels = []
    for group in groups.values():
        labels = (("" if name == "sigma" else f"{name.replace('_', ' ')} = ", name) for name in names)
        title = ", ".join(f"{label}{in_text(setting(group[0][0], name))}" for label, name in labels)
        panels.append(Panel(title, "step", "risk  ½E(ŷ−y)²", tuple(_training(group))))
    return Chart(tuple(panels), columns=4)


def _training(group: list[tuple[Run, xr.Dataset]]) -> Iterator[Series]:
    every = [max(float(step), 1.0) for _, data in group for step in data.step.values[[0, -1]]]
    for member in dict.fromkeys(member for run, _ in group for member in run.members):
        hue, good = OF_ATTENTION.get(member, PURPLE), []
        curves = [data.sel(member=member) for run, data in group if member in run.members]
        for curve in curves:
            end, steps, risk = str(curve.verdict.values), np.maximum(curve.step.values, 1), curve.risk.values
            failed = end in _DASHES
            dash = _DASHES.get(end, "solid")
            yield Series(f"{member}, {end}", steps, risk, "seed", hue, dash=dash, in_legend=failed)
            known = np.flatnonzero(np.isfinite(risk))
            if 0 < len(known) < len(risk):  # the last that is known of a run that diverged
                place = steps[known[-1:]], risk[known[-1:]]
                yield Series(f"{member}, {end}", *place, "seed", hue, line=False, mark="x", in_legend=False)
            good += [] if failed else [curve]
        same = [curve.risk.values for curve in good if np.array_equal(curve.step.values, good[0].step.values)]
        if same:
            steps = np.maximum(good[0].step.values, 1)
            yield Series(f"{member}, mean", steps, np.mean(same, axis=0), colour=hue, width=1.8)
        known = not math.isnan(float(curves[0].optimum))
        label = f"best {member}" if known else f"{member}, attainable"
        yield level(label, float(curves[0].attainable), every, colour=hue, dash="dash" if known else "dot")
    yield level("Bayes", float(group[0][1].Bayes), every, colour=GREY, dash="dot")


def optima_chart(data: xr.Dataset) -> Chart:
    """A panel for each covariance: the least risks of both attentions, the Bayes risk and the noise floor."""
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
        colour, one = OF_ATTENTION.get(member, PURPLE), finite.sel(member=member)
        band = {"low": one.risk - one.risk_stderr, "high": one.risk + one.risk_stderr}
        series += [Series(f"{member}, trained", x, one.risk, colour=colour, mark="o", **band)] if len(one.L) else []
        series += [Series(f"best {member}", x, one.optimum, "theory", colour, dash="dash")] if len(one.L) else []
        for risk in infinite.sel(member=member).risk.values:
            series.append(level(f"{member}, trained, at ∞", risk, x, colour=colour, dash="dot"))
    if len(finite.L):
        series.append(Series("Bayes", x, finite.Bayes, "theory", GREEN, mark="D"))
    return Chart((Panel(data.run, "prompt length L", "risk  ½E(ŷ−y)²", tuple(series)),), columns=1)
