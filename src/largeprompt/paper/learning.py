"""In-context linear regression without sampling a prompt: the best risks by length, and flows of every length.

Sections 4 and 5 at the settings of Appendix A: the minima of linear and softmax attention beside the Bayes risk (what
Figures 2 and 6 tend to), and Theorem 4.3 and Lemma E.1 watched along a ladder of lengths from Assumption 5.1.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable

import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.dynamics import Trajectory, flow_ladder, structured_start
from largeprompt.icl import LinearRegression, bayes_risk, covariance_named, optimal_linear, optimal_softmax

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
        for name in ("lengths", "ladder"):
            lengths = [checks.count("L", L) for L in getattr(self, name)]
            if not lengths or sorted(set(lengths)) != lengths:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be prompt lengths in increasing order")
        if not 0 < self.time < math.inf:
            raise ValueError(f"time is {self.time}; it must be positive and finite")
        for covariance in self.covariances:
            self.task(covariance)

    def task(self, covariance: str) -> LinearRegression:
        """The regression of the experiments with the covariance named. Paper: Appendix A."""
        return LinearRegression.experiment(covariance_named(covariance, self.d), self.noise)

    def attributes(self) -> dict:
        """As attributes of a dataset."""
        return {"paper": PAPER, "d": self.d, "noise": self.noise, "risk": "half the mean squared error"}


PRESETS = {
    "smoke": Settings(covariances=("kms:0.5",), d=3, lengths=(5, 100), ladder=(10, 100), time=3.0),
    "quick": Settings(),
}
Done = Callable[[str], None]


def optima(settings: Settings, done: Done = lambda what: None) -> xr.Dataset:
    """The least risk of linear and of softmax attention, and the Bayes risk, by covariance and length."""
    found = {
        name: np.empty((len(settings.covariances), len(settings.lengths))) for name in ("linear", "softmax", "Bayes")
    }
    for i, covariance in enumerate(settings.covariances):
        task = settings.task(covariance)
        for j, L in enumerate(settings.lengths):
            found["linear"][i, j] = optimal_linear(task, L).risk.value
            found["softmax"][i, j] = optimal_softmax(task, L).risk.value
            found["Bayes"][i, j] = bayes_risk(task, L).value
            done(f"{covariance}, L = {L}: least risks")
    return xr.Dataset(
        {name: (("covariance", "L"), values) for name, values in found.items()} | {"floor": ((), settings.noise / 2)},
        coords={"covariance": list(settings.covariances), "L": list(settings.lengths)},
        attrs=settings.attributes(),
    )


def ladder(settings: Settings, done: Done = lambda what: None) -> xr.Dataset:
    """Softmax flows from Assumption 5.1: their distance to the infinite-prompt flow, and their risks, over time."""
    times = np.geomspace(settings.time / 1e4, settings.time, 41)
    shape = (len(settings.covariances), len(settings.ladder), len(times))
    distance, risk, error, limit = np.empty(shape), np.empty(shape), np.empty(shape), np.empty((shape[0], shape[2]))
    for i, covariance in enumerate(settings.covariances):
        task = settings.task(covariance)
        with warnings.catch_warnings():  # the range of α is the theorem's, and not needed: see the errata
            warnings.filterwarnings("ignore", message="alpha is")
            start = structured_start(task, settings.alpha)

        def report(L: float, flow: Trajectory, covariance=covariance) -> None:
            done(f"{covariance}, L = {L:g}: flow to t = {flow.ended_at:g}")

        rungs = flow_ladder(start, task, settings.ladder, times, report=report)
        distance[i], risk[i], error[i], limit[i] = rungs.distance, rungs.risk, rungs.risk_stderr, rungs.infinite.risk
    dims = ("covariance", "L", "t")
    return xr.Dataset(
        {
            "distance": (dims, distance, {"long_name": "distance of the parameters to the infinite-prompt flow"}),
            "risk": (dims, risk, {"long_name": "risk at length L along the flow at length L"}),
            "stderr": (dims, error, {"long_name": "standard error of the risk over nodes of the query"}),
            "infinite": (("covariance", "t"), limit, {"long_name": "risk of the infinite prompt along its own flow"}),
            "floor": ((), settings.noise / 2),
        },
        coords={"covariance": list(settings.covariances), "L": list(settings.ladder), "t": times},
        attrs=settings.attributes() | {"alpha": settings.alpha},
    )
