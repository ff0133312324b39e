"""In-context linear regression without sampling a prompt: the best risks by length, and flows of every length.

Sections 4 and 5 at the settings of Appendix A, for any covariance, dimension and noise: the minima of linear and
softmax attention beside the Bayes risk, and the flows from Assumption 5.1 along a ladder of lengths.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.icl import LinearRegression, covariance_named
from largeprompt.icl._bayes import EXACT_RANK
from largeprompt.paper.chart import GREEN, GREY, OF_ATTENTION, Chart, Panel, Series, level
from largeprompt.paper.pieces import Ladder, Levels
from largeprompt.paper.pieces.ladder import by_covariance

PAPER = "arXiv:2512.11784"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Covariances by name, dimension, label noise, lengths for the optima and for the flows, final time and α."""

    covariances: tuple[str, ...] = ("identity", "kms:0.5")
    d: int = 5
    noise: float = 0.1
    lengths: tuple[int, ...] = (5, 10, 20, 50, 100, 200, 500, 1000)
    ladder: tuple[int, ...] = (10, 100, 1000, 10_000)
    time: float = 1000.0
    alpha: float = 0.3

    def __post_init__(self):
        checks.count("d", self.d)
        lengths = [checks.count("L", L) for L in self.lengths]
        if not lengths or sorted(set(lengths)) != lengths:
            raise ValueError(f"lengths is {self.lengths}; it must be prompt lengths in increasing order")
        for covariance in self.covariances:
            self.task(covariance)
        self.ladders()

    @property
    def remark(self) -> str:
        """What takes long, to be said before it does; empty if nothing does."""
        if self.d <= EXACT_RANK:
            return ""
        return f"d is {self.d}: beyond {EXACT_RANK} the Bayes risk is sampled, which may take minutes for each length"

    def task(self, covariance: str) -> LinearRegression:
        """The regression of the experiments with the covariance named. Paper: Appendix A."""
        return LinearRegression.experiment(covariance_named(covariance, self.d), self.noise)

    def ladders(self) -> dict[str, Ladder]:
        """The flows of each covariance."""
        return {
            covariance: Ladder(covariance, self.ladder, self.time, self.alpha, self.d, self.noise)
            for covariance in self.covariances
        }


Done = Callable[[str], None]


def optima(settings: Settings, done: Done = lambda what: None) -> xr.Dataset:
    """The least risk of linear and of softmax attention, and the Bayes risk, by covariance and length."""
    found = {
        covariance: Levels(covariance, settings.lengths, None, settings.d, settings.noise).compute(
            lambda what, covariance=covariance: done(f"{covariance}, {what}: least risks")
        )[["linear", "softmax", "Bayes"]]
        for covariance in settings.covariances
    }
    return (
        xr.concat(found.values(), "covariance", combine_attrs="drop")
        .assign_coords(covariance=list(found))
        .assign(floor=settings.noise / 2)
        .assign_attrs(paper=PAPER, d=settings.d, noise=settings.noise, risk="half the mean squared error")
    )


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


def ladder(settings: Settings, done: Done = lambda what: None) -> xr.Dataset:
    """Softmax flows from Assumption 5.1: their distance to the infinite-prompt flow, and their risks, over time."""
    return by_covariance({covariance: piece.compute(done) for covariance, piece in settings.ladders().items()})
