"""In-context linear regression without sampling a prompt: the best risks by length, and flows of every length.

Sections 4 and 5 at the settings of Appendix A, for any covariance, dimension and noise: the minima of linear and
softmax attention beside the Bayes risk, and the flows from Assumption 5.1 along a ladder of lengths.
"""

import dataclasses
from collections.abc import Callable

import xarray as xr

from largeprompt import _checks as checks
from largeprompt.icl import LinearRegression, covariance_named
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


def ladder(settings: Settings, done: Done = lambda what: None) -> xr.Dataset:
    """Softmax flows from Assumption 5.1: their distance to the infinite-prompt flow, and their risks, over time."""
    return by_covariance({covariance: piece.compute(done) for covariance, piece in settings.ladders().items()})
