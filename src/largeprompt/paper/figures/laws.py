"""A figure of our own: how fast output and gradients converge, by law of tokens (Propositions 3.1 and 3.4)."""

import math

import numpy as np
import xarray as xr

from largeprompt.paper.chart import COLOURS, Chart, Panel, Series
from largeprompt.paper.pieces import Laws, Needed
from largeprompt.paper.settings import Settings

from ._figure import AbstractFigure, Results
from .words import listed

NAMES = {"output": "output T", **{name: f"gradient ∇_{name} T" for name in "VUKQ"}}
_MARKS = ("o", "s", "D", "^", "v", "o", "s")
_BARS = 2  # standard errors on each side


class Convergence(AbstractFigure):
    """Mean squared deviations from the infinite prompt by length: measured, predicted without a fit, and bounded."""

    @property
    def title(self) -> str:
        return "Convergence to the infinite prompt, by law of tokens"

    @property
    def look(self) -> str:
        return (
            "Points lie on the predicted lines, which are not fitted: 1/L for every law, but slower where scores are "
            "not divided by √D and spread past the threshold. The paper's bounds lie many powers of ten above."
        )

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        return (measured_laws(settings),)

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        return results[measured_laws(settings)]

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(data.sel(quantity=name)) for name in data.quantity.values), share_y=False)

    def told(self, data: xr.Dataset) -> list[str]:
        lines = [_told(data.sel(quantity=name)) for name in data.quantity.values]
        for law in data.law.values:
            here = data.sel(law=law).isel(quantity=0)
            if str(here.regime_name.values) != "1/L":
                lines.append(f"{law}: {here.regime.item()}.")
        doubtful = int(data.trusted.size - data.trusted.astype(bool).sum())
        few, many = int(data.prompts.min()), int(data.prompts.max())
        prompts = f"{few}" if few == many else f"{few} to {many}"
        lines.append(
            f"{prompts} prompts a law and length, slopes and ratios over the longer half of the lengths; {doubtful} of "
            f"{data.trusted.size} points have tails too heavy for their error bars."
        )
        return lines


def measured_laws(settings: Settings) -> Laws:
    """What the preset measures."""
    return Laws(settings.law_lengths, settings.law_prompts, laws=settings.laws)


def _panel(data: xr.Dataset) -> Panel:
    L, series = data.L.values, []
    for law, colour, mark in zip(data.law.values, COLOURS, _MARKS, strict=False):
        here = data.sel(law=law)
        off = _BARS * here.stderr.values
        low, high = here.measured.values - off, here.measured.values + off
        low = np.where(low > 0, low, here.measured.values * 1e-3)  # the axis is logarithmic
        series.append(Series(str(law), L, here.measured.values, "measured", colour, low, high, line=False, mark=mark))
        expected = np.where(np.isfinite(here.predicted.values), here.predicted.values, np.nan)
        series.append(Series("predicted", L, expected, "theory", colour, width=1.0))
        bound = 10.0**here.bound_log10.values
        series.append(Series("the paper's bound", L, bound, "bound", colour, dash="dot", width=1.0))
    title = NAMES[str(data.quantity.values)]
    return Panel(title, "prompt length L", "mean squared deviation", tuple(series))


def decades_above(data: xr.Dataset, errors: float = 0.0) -> xr.DataArray:
    """By how many powers of ten the bound exceeds the measurement, raised by some standard errors."""
    return data.bound_log10 - np.log10(data.measured + errors * data.stderr)


def _told(data: xr.Dataset) -> str:
    parts = [
        f"{law} {_slope(float(here.slope))} ± {float(here.slope_stderr):.3f}{_expected(float(here.predicted_slope))}"
        for law, here in ((law, data.sel(law=law)) for law in data.law.values)
        if math.isfinite(float(here.slope))
    ]
    slopes = f"slopes {listed(parts)}" if parts else "no slope can be told"
    ratios = data.ratio.values[np.isfinite(data.ratio.values)]
    ratio = f"; measured over predicted {_range(ratios, '{:.3f}')}" if len(ratios) else ""
    above = decades_above(data).values
    above = above[np.isfinite(above)]
    bound = f"; bound over measured {_range(above, '10^{:.1f}')}" if len(above) else ""
    return f"{NAMES[str(data.quantity.values)]}: {slopes}{ratio}{bound}."


def _range(values: np.ndarray, form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(end) for end in (values.min(), values.max())))


def _slope(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _expected(slope: float) -> str:
    return f" (predicted {_slope(slope)})" if math.isfinite(slope) else ""


FIGURES = (Convergence("laws"),)
