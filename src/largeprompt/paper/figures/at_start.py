"""What Figures 1 and 5 share: softmax against linear attention before training, by prompt length."""

import math
from typing import ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.paper.chart import BLUE, GREY, INK, Chart, Panel, Series, over_seeds
from largeprompt.paper.pieces import Gaps, Needed
from largeprompt.paper.pieces.gaps import standard_error
from largeprompt.paper.settings import Settings

from ._figure import AbstractFigure, Results
from .words import covariates

PRECISE = 0.1  # relative standard error up to which a measured gap counts in the comparison with the exact one

Values = Float[np.ndarray, "h L"]


class AbstractGap(AbstractFigure):
    """A gap between the two attentions at the weights that training starts from."""

    quantity: ClassVar[str]
    what: ClassVar[str]
    symbol: ClassVar[str]
    power: ClassVar[str]

    @property
    def title(self) -> str:
        return f"Softmax against linear attention before training, {self.what}: {covariates(self.covariance)}"

    @property
    def look(self) -> str:
        return (
            f"The gap between the {self.what} falls along the whole range, more slowly than the {self.power} that "
            "bounded scores would give: there are always queries and coefficients too large for a prompt. Points "
            "measured on sampled prompts lie on the exact line, but where the mean is carried by queries too rare "
            "for so few prompts; the paper's bound lies many decades above both."
        )

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        return (gaps(settings, self.covariance),)

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        data = results[gaps(settings, self.covariance)].sel(quantity=self.quantity, drop=True)
        read = data.isel(head=slice(int(data.attrs["measured_heads"])))
        _, low, high = over_seeds(data.exact.values)
        largest = read.bound_log10.max("head")
        return data.assign(
            exact_mean=read.exact.mean("head"),
            exact_low=("L", low),
            exact_high=("L", high),
            bound_mean_log10=largest + np.log10((10 ** (read.bound_log10 - largest)).mean("head")),
        ).assign_attrs(data.attrs, quantity=self.quantity)

    def chart(self, data: xr.Dataset) -> Chart:
        L, heads = data.L.values, int(data.attrs["measured_heads"])
        mean, error = data.measured_mean.values, data.measured_mean_stderr.values
        # on a logarithmic axis a bar that reaches below 0 ends below all else
        low = np.minimum(mean, np.maximum(mean - error, data.exact.values.min() / 2))
        seeds = [
            Series("each draw of the weights", L, row, "seed", GREY, width=0.6, in_legend=i == 0)
            for i, row in enumerate(data.exact.values)
        ]
        exact = Series(
            f"exact, mean of {heads} draws (band: range of {len(seeds)})",
            L,
            data.exact_mean.values,
            "theory",
            BLUE,
            data.exact_low.values,
            data.exact_high.values,
        )
        positive = np.where(mean > 0, mean, np.nan)
        points = Series(
            "measured on sampled prompts", L, positive, "measured", INK, low, mean + error, line=False, mark="o"
        )
        log_bound = data.bound_mean_log10.values
        with np.errstate(over="ignore"):
            bound = Series("the paper's bound", L, 10**log_bound, "bound", GREY, dash="dash")
        lost = [f"{length}" for length, value in zip(L, mean, strict=True) if value <= 0]
        remarks = (f"measured below 0, so not drawn: L = {', '.join(lost)}",) if lost else ()
        if np.isfinite(log_bound[-1]):
            above = log_bound[-1] - math.log10(data.exact_mean.values[-1])
            remarks = (*remarks, f"bound at L = {L[-1]}: {above:.0f} decades above")
        series = (*seeds, exact, points, bound)
        return Chart(
            (Panel(covariates(self.covariance), "prompt length L", self.symbol, series, remarks=remarks),), columns=1
        )

    def told(self, data: xr.Dataset) -> list[str]:
        exact, L = data.exact.values, data.L.values
        n = len(exact)
        ends = [f"{exact[:, i].mean():.3g} ± {standard_error(exact[:, i]):.1g} at L = {L[i]}" for i in (0, -1)]
        lines = [f"Mean gap over {n} draws of the weights: {ends[0]}, {ends[1]}."]
        steps = [f"{slope:.2f} ± {error:.2f}" for slope, error in zip(*local_slopes(exact, L), strict=True)]
        lines.append(f"Log-log slopes between successive lengths (mean ± error over draws): {', '.join(steps)}.")
        ratio, error = agreement(data)
        if math.isfinite(ratio):
            told = f"Measured over exact: {ratio:.3f} ± {error:.3f}, at lengths where the error is below a tenth."
            lines.append(told)
        if self.quantity == "risk-gradient":
            share = exact.mean(axis=0) / data["size"].values.mean(axis=0)
            told = f"Relative to the squared gradient of linear attention: {share[0]:.2g} to {share[-1]:.2g}."
            lines.append(told)
        above = data.bound_mean_log10.values - np.log10(data.exact_mean.values)
        if np.isfinite(above).all():
            lines.append(f"The paper's bound lies {above.min():.1f} to {above.max():.1f} decades above.")
        else:
            lines.append(f"The paper's bound does not apply: {data.attrs['bound_refusal']}.")
        return lines


def gaps(settings: Settings, covariance: str) -> Gaps:
    """What these figures and their claims are made from."""
    return Gaps(covariance, settings.short_to_long, settings.heads, settings.prompts, settings.conventions)


def local_slopes(values: Values, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-log slopes between successive lengths: the mean over heads and its standard error."""
    steps = np.diff(_logs(values), axis=1) / np.diff(np.log(L))
    return steps.mean(axis=0), standard_error(steps)


def long_slope(values: Values, L: np.ndarray) -> tuple[float, float]:
    """The log-log slope over the longer half of the lengths, by least squares for each head; mean and error."""
    late = slice(len(L) // 2, None)
    x = np.log(L[late]) - np.log(L[late]).mean()
    slopes = _logs(values)[:, late] @ x / (x @ x)
    return float(slopes.mean()), float(standard_error(slopes))


def ratio_of_means(values: np.ndarray, to: np.ndarray) -> tuple[float, float]:
    """The ratio of two means over heads, and its standard error with the values paired by head."""
    ratio = float(values.mean() / to.mean())
    return ratio, float(standard_error(values - ratio * to) / to.mean())


def agreement(data: xr.Dataset) -> tuple[float, float]:
    """Measured over exact: the mean over lengths where the error is below a tenth, weighed by it, and its error."""
    exact = data.exact_mean.values
    heads = int(data.attrs["measured_heads"])
    of_exact = data.exact_stderr.values[:heads].mean(axis=0)  # at most: heads share their nodes
    ratio, error = data.measured_mean.values / exact, np.hypot(data.measured_mean_stderr.values, of_exact) / exact
    precise = error < PRECISE
    if not precise.any():
        return math.nan, math.nan
    weights = error[precise] ** -2.0
    return float(weights @ ratio[precise] / weights.sum()), float(weights.sum() ** -0.5)


def _logs(values: np.ndarray) -> np.ndarray:
    return np.log(np.where(values > 0, values, np.nan))
