"""Figures 3 and 7: how far softmax and linear attention grow apart while they are trained on the same tokens."""

import numpy as np
import xarray as xr

from largeprompt.paper.chart import Chart, Panel, Series, sequence
from largeprompt.paper.pieces import InfiniteFlow, Needed, squared_distance
from largeprompt.paper.settings import ANISOTROPIC, Settings

from ._figure import AbstractFigure, Results
from .words import covariates

DISTANCES = {
    "apart": "softmax to linear  ‖θ_soft − θ_lin‖²",
    "softmax": "softmax to the infinite-prompt flow  ‖θ_soft − θ_∞‖²",
    "linear": "linear to the infinite-prompt flow  ‖θ_lin − θ_∞‖²",
}


class Paths(AbstractFigure):
    """Squared distances of parameters along training: between the two attentions, and of each to their common limit."""

    @property
    def title(self) -> str:
        return f"Distance of the trained parameters, {covariates(self.covariance)}"

    @property
    def look(self) -> str:
        return (
            "Early in training longer prompts lie lower, for the two attentions and for each against the gradient flow "
            "of the infinite prompt from the same start. Late they need not: a run that ends in a spurious minimum, or "
            "slides along a valley, leaves the others behind."
        )

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        return (*settings.runs(self.covariance, settings.paths), *infinite_flows(settings, self.covariance))

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        flows = [results[flow] for flow in infinite_flows(settings, self.covariance)]
        found: dict[str, list[list[np.ndarray]]] = {name: [] for name in DISTANCES}
        for L in settings.paths:
            runs = [results[run] for run in settings.runs(self.covariance, (L,))]
            found["apart"].append([run.distance.values**2 for run in runs])
            for member in ("softmax", "linear"):
                found[member].append([squared_distance(r, member, f) for r, f in zip(runs, flows, strict=True)])
        steps = flows[0].step.values
        return xr.Dataset(
            {n: (("L", "seed", "step"), np.asarray(v), {"long_name": DISTANCES[n]}) for n, v in found.items()},
            coords={"L": np.asarray(settings.paths, np.int32), "seed": np.arange(len(flows)), "step": steps},
            attrs={"covariance": self.covariance, "steps": settings.steps},
        )

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(name, data) for name in DISTANCES))

    def told(self, data: xr.Dataset) -> list[str]:
        lines = []
        for step in (early_step(data), float(data.step[-1])):
            at = data.apart.sel(step=step).median("seed")
            values = ", ".join(f"{float(value):.2e} at L = {int(L)}" for L, value in zip(data.L, at, strict=True))
            lines.append(f"Step {step:.0f}: ‖θ_soft − θ_lin‖² is {values} (median over {data.sizes['seed']} seeds).")
        return lines


def early_step(data: xr.Dataset) -> float:
    """The recorded step nearest to a fiftieth of the training of the paper, or to half of a shorter one."""
    return float(data.step.sel(step=min(10_000.0, float(data.step[-1]) / 2), method="nearest"))


def infinite_flows(settings: Settings, covariance: str) -> tuple[InfiniteFlow, ...]:
    """From each seed."""
    return tuple(InfiniteFlow(run) for run in settings.runs(covariance, settings.paths[:1]))


def _panel(name: str, data: xr.Dataset) -> Panel:
    later = data.sel(step=data.step[data.step >= 10])
    series = []
    for L, hue in zip(later.L.values, sequence(later.sizes["L"]), strict=True):
        curves = later[name].sel(L=L).values
        many = len(curves) > 1
        limits = {"low": curves.min(axis=0), "high": curves.max(axis=0)} if many else {}
        series.append(Series(f"L = {L}", later.step.values, np.median(curves, axis=0), colour=hue, **limits))
        for curve in curves if many else ():
            series.append(Series(f"L = {L}", later.step.values, curve, "seed", hue, in_legend=False))
    return Panel(DISTANCES[name].replace("  ", "\n"), "step", "squared distance", tuple(series))


FIGURES = (Paths("3"), Paths("7", ANISOTROPIC))
