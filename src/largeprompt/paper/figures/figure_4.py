"""Figures 4 and 8: the risk along training."""

import numpy as np
import xarray as xr

from largeprompt.paper.chart import GREEN, OF_ATTENTION, Chart, Panel, Series, level
from largeprompt.paper.pieces import Flow, Needed
from largeprompt.paper.settings import ANISOTROPIC, MEMBERS, Settings

from ._figure import AbstractFigure, Results
from .words import covariates


class Courses(AbstractFigure):
    """Exact risks along SGD, beside those along the population gradient flow from the same start."""

    @property
    def title(self) -> str:
        return f"Risk along training, {covariates(self.covariance)}"

    @property
    def look(self) -> str:
        return (
            "SGD follows the exact population flow from its start, plateau by plateau, down to the least risk of its "
            "attention or to a spurious minimum above it. Dashed: the flow; thin: each seed."
        )

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        return (*settings.runs(self.covariance, settings.courses), *_flows(settings, self.covariance).values())

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        runs = {L: [results[r] for r in settings.runs(self.covariance, (L,))] for L in settings.courses}
        flows = _flows(settings, self.covariance)
        first = runs[settings.courses[0]][0]
        shape = (len(MEMBERS), len(settings.courses), settings.seeds)
        flow, optimum = np.full((*shape, first.sizes["step"]), np.nan), np.empty(shape[:2])
        risk, verdict, cut = np.empty_like(flow), np.empty(shape, dtype="<U10"), []
        for i, member in enumerate(MEMBERS):
            for j, L in enumerate(settings.courses):
                optimum[i, j] = float(runs[L][0].optimum.sel(member=member))
                for k, data in enumerate(runs[L]):
                    here = data.sel(member=member)
                    risk[i, j, k], verdict[i, j, k] = here.risk.values, str(here.verdict.values)
                    if (member, L, k) in flows:
                        followed = results[flows[member, L, k]]
                        flow[i, j, k] = followed.risk.values
                        if followed.attrs.get("cut_short"):
                            cut.append(f"{member}, L = {L}, seed {k}: {followed.attrs['cut_short']}")
        dims = ("member", "L", "seed")
        return xr.Dataset(
            {
                "risk": ((*dims, "step"), risk, {"long_name": "exact risk along SGD"}),
                "flow": ((*dims, "step"), flow, {"long_name": "exact risk along the population flow, NaN if unknown"}),
                "verdict": (dims, verdict),
                "optimum": (dims[:2], optimum),
                "Bayes": ("L", [float(runs[L][0].Bayes) for L in settings.courses]),
            },
            coords={
                "member": list(MEMBERS),
                "L": np.asarray(settings.courses, np.int32),
                "seed": np.arange(settings.seeds),
                "step": first.step.values,
            },
            attrs={
                "covariance": self.covariance,
                "steps": settings.steps,
                "risk": "half the mean squared error",
                "flows_cut_short": "; ".join(cut),
            },
        )

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(data.sel(L=L)) for L in data.L.values))

    def told(self, data: xr.Dataset) -> list[str]:
        lines = []
        for L in data.L.values:
            at = data.sel(L=L)
            ends = [
                f"{m} {', '.join(_ends(at.sel(member=m)))} (least {float(at.optimum.sel(member=m)):.5f})"
                for m in MEMBERS
            ]
            lines.append(f"L = {L}, final risk of each seed: {'; '.join(ends)}.")
        off = (np.abs(data.risk - data.flow) / data.flow).values
        followed = off[np.isfinite(off).all(axis=-1)].max(axis=-1)
        if len(followed):
            lines.append(
                f"Of {len(followed)} runs beside their population flow, SGD is never further from it than "
                f"{100 * np.median(followed):.1f} % of the risk in half, {100 * followed.max():.0f} % in all."
            )
        if data.attrs.get("flows_cut_short"):
            lines.append(f"Population flows that end before training does: {data.attrs['flows_cut_short']}.")
        return lines


def _ends(here: xr.Dataset) -> list[str]:
    """The last risk of each run, and how it ended where it did not converge."""
    ends = ["" if verdict == "converged" else f" {verdict}" for verdict in here.verdict.values]
    return [f"{float(risk[-1]):.5f}{end}".rstrip() for risk, end in zip(here.risk, ends, strict=True)]


def _flows(settings: Settings, covariance: str) -> dict[tuple[str, int, int], Flow]:
    """The population flows of the first seeds."""
    return {
        (member, L, seed): Flow(run, member)
        for L in settings.courses
        for seed, run in enumerate(settings.runs(covariance, (L,), min(settings.seeds, settings.flow_seeds)))
        for member in MEMBERS
    }


def _panel(data: xr.Dataset) -> Panel:
    later = data.sel(step=data.step[data.step >= data.steps / 5000])  # nothing happens before
    steps, series = later.step.values, []
    for member in MEMBERS:
        hue, here = OF_ATTENTION[member], later.sel(member=member)
        risk, many = here.risk.values, here.sizes["seed"] > 1
        limits = {"low": risk.min(axis=0), "high": risk.max(axis=0)} if many else {}
        series.append(
            Series(f"{member} (median, range over seeds)", steps, np.median(risk, axis=0), colour=hue, **limits)
        )
        for seed in here.seed.values if many else ():
            style = {"colour": hue, "in_legend": False}
            series.append(Series(f"{member}, seed {seed}", steps, risk[seed], "seed", **style))
        followed = [seed for seed in here.seed.values if np.isfinite(here.flow.sel(seed=seed).values).any()]
        whose = "" if len(followed) == here.sizes["seed"] else f" of seed {', '.join(map(str, followed))}"
        for seed in followed:
            flow, style = here.flow.sel(seed=seed).values, {"colour": hue, "dash": "dash", "width": 1.0}
            series.append(Series(f"{member}, population flow{whose}", steps, flow, "theory", **style))
        series.append(level(f"best {member} attention", float(here.optimum), steps, colour=hue, dash="dot"))
    series.append(level("Bayes (ridge regression)", float(data.Bayes), steps, colour=GREEN, dash="dash"))
    return Panel(f"L = {int(data.L)}", "step", "risk  ½E(ŷ−y)²", tuple(series))


FIGURES = (Courses("4"), Courses("8", ANISOTROPIC))
