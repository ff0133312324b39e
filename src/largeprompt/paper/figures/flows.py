"""A figure of our own: gradient flows from Assumption 5.1 by prompt length, beside that of the infinite prompt."""

import numpy as np
import xarray as xr

from largeprompt.concentration import RateFit, fit_power_law
from largeprompt.paper.chart import GREY, INK, Chart, Panel, Series, level, sequence
from largeprompt.paper.pieces import Ladder, Needed
from largeprompt.paper.pieces.ladder import by_covariance
from largeprompt.paper.settings import COVARIANCES, Settings

from ._figure import AbstractFigure, Results
from .words import covariates, listed


class Flows(AbstractFigure):
    """Distances to the infinite-prompt flow, and risks, over time and by length, for both covariances."""

    @property
    def title(self) -> str:
        return "Softmax flows from the structured start, by prompt length"

    @property
    def look(self) -> str:
        return (
            "At a fixed time the distance to the infinite-prompt flow falls with L (Lemma E.1). At a fixed L it grows: "
            "the finite-L risk has its minimiser elsewhere in the valley rA = Σ⁻¹, reached after a time of order L. "
            "The risks end above that of the infinite prompt by less and less (Theorems 4.3 and 5.2)."
        )

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        return tuple(ladder(settings, covariance) for covariance in COVARIANCES)

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        return by_covariance({covariance: results[ladder(settings, covariance)] for covariance in COVARIANCES})

    def chart(self, data: xr.Dataset) -> Chart:
        return chart(data)

    def told(self, data: xr.Dataset) -> list[str]:
        lines = []
        for covariance in data.covariance.values:
            here, end = data.sel(covariance=covariance), float(data.t[-1])
            early = float(data.t.sel(t=end / 1000, method="nearest"))
            risks = [f"{float(risk):.5f} at L = {int(L)}" for L, risk in zip(data.L, here.risk.isel(t=-1), strict=True)]
            fit = fall(here)
            tail = f"; the excess falls like L^{fit.slope:.2f} at the end".replace("-", "−") if fit else ""
            lines.append(
                f"{covariates(str(covariance))}: risks at t = {end:g} are {listed(risks)}, against "
                f"{float(here.infinite[-1]):.5f} of the infinite prompt{tail}."
            )
            for time in (early, end):
                distance = [f"{float(value):.2e}" for value in here.distance.sel(t=time)]
                lines.append(f"Distance of the parameters at t = {time:.4g}: {listed(distance)}.")
        return lines


def ladder(settings: Settings, covariance: str) -> Ladder:
    """What the preset follows."""
    return Ladder(covariance, settings.ladder, settings.flow_time, draws=min(settings.record.draws, 2**12))


def excesses(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """By how much each flow ends above the infinite one, and the standard error of that."""
    return (data.risk - data.infinite).isel(t=-1).values, data.stderr.isel(t=-1).values


def fall(data: xr.Dataset) -> RateFit | None:
    """The power of L by which that falls between the two longest prompts; None where it is not above both times."""
    excess, error = (part[-2:] for part in excesses(data))
    return fit_power_law(data.L.values[-2:], excess, error) if len(excess) > 1 and np.all(excess > 0) else None


def chart(data: xr.Dataset) -> Chart:
    """Of each covariance two panels: distances and risks over time."""
    panels = []
    for covariance in data.covariance.values:
        here, name = data.sel(covariance=covariance), covariates(str(covariance))
        lengths = list(zip(data.L.values, sequence(data.sizes["L"]), strict=True))
        apart = [Series(f"L = {L}", data.t.values, here.distance.sel(L=L).values, colour=hue) for L, hue in lengths]
        risks = []
        for L, hue in lengths:
            risk, off = here.risk.sel(L=L).values, 2 * here.stderr.sel(L=L).values
            risks.append(Series(f"L = {L}", data.t.values, risk, "measured", hue, risk - off, risk + off))
        risks.append(Series("L = ∞", data.t.values, here.infinite.values, "theory", INK, dash="dash"))
        risks.append(level("noise floor s²/2", float(data.floor), data.t.values, colour=GREY, dash="dot"))
        time = "time t of the gradient flow"
        panels.append(Panel(f"distance to the infinite flow\n{name}", time, "‖θ_L(t) − θ_∞(t)‖", tuple(apart)))
        panels.append(Panel(f"risk along the flow\n{name}", time, "R_L(θ_L(t))", tuple(risks)))
    return Chart(tuple(panels), columns=2, share_y=False)


FIGURES = (Flows("flows"),)
