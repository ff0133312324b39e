"""Softmax flows from Assumption 5.1 at a ladder of prompt lengths, beside that of the infinite prompt."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.dynamics import flow_ladder, structured_start
from largeprompt.icl import LinearRegression, covariance_named

from ._piece import AbstractPiece, Done

_POINTS = 41  # times recorded
_DECADES = 4  # from the first to the last


@dataclasses.dataclass(frozen=True)
class Ladder(AbstractPiece):
    """Flows at each length and at infinite length up to `time`: their distances, their risks, and the limit of these.

    `alpha` is the scale of the start; the risk averages over `draws` nodes of the query. Paper: Theorem 4.3, Lemma E.1,
    Theorem 5.2, at the settings of Appendix A.
    """

    covariance: str
    lengths: tuple[int, ...]
    time: float
    alpha: float = 0.3
    d: int = 5
    noise: float = 0.1
    draws: int = 2**12

    def __post_init__(self):
        checks.count("d", self.d)
        lengths = [checks.count("L", L) for L in self.lengths]
        if not lengths or sorted(set(lengths)) != lengths:
            raise ValueError(f"ladder is {self.lengths}; it must be prompt lengths in increasing order")
        if not 0 < self.time < math.inf:
            raise ValueError(f"time is {self.time}; it must be positive and finite")

    @property
    def title(self) -> str:
        return f"flows by prompt length, {self.covariance}"

    @property
    def seconds(self) -> float:
        return 8 + 3 * len(self.lengths) * self.draws / 2**12

    @property
    def task(self) -> LinearRegression:
        """The regression of the experiments."""
        return LinearRegression.experiment(covariance_named(self.covariance, self.d), self.noise)

    def _compute(self, done: Done) -> xr.Dataset:
        times = np.geomspace(self.time / 10**_DECADES, self.time, _POINTS)
        with warnings.catch_warnings():  # the range of α is the theorem's, and not needed: see the errata
            warnings.filterwarnings("ignore", message="alpha is")
            start = structured_start(self.task, self.alpha)

        rungs = flow_ladder(start, self.task, self.lengths, times, draws=self.draws)
        done(f"{self.covariance}: flows at {len(self.lengths)} lengths and at infinite length")
        curves: dict[str, tuple[Any, str]] = {
            "distance": (rungs.distance, "distance of the parameters to the infinite-prompt flow"),
            "risk": (rungs.risk, "risk at length L along the flow at length L"),
            "stderr": (rungs.risk_stderr, "standard error of the risk over nodes of the query"),
        }
        infinite = np.asarray(rungs.infinite.risk), {"long_name": "risk of the infinite prompt along its own flow"}
        return xr.Dataset(
            {name: (("L", "t"), np.asarray(values), {"long_name": told}) for name, (values, told) in curves.items()}
            | {"infinite": ("t", *infinite), "floor": ((), self.noise / 2)},
            coords={"L": np.asarray(self.lengths, np.int32), "t": times},
            attrs={
                "paper": "arXiv:2512.11784",
                "d": self.d,
                "noise": self.noise,
                "alpha": self.alpha,
                "risk": "half the mean squared error",
            },
        )


def by_covariance(ladders: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """The ladders of several covariances as one dataset."""
    curves = ["distance", "risk", "stderr", "infinite"]
    data = xr.concat(ladders.values(), "covariance", data_vars=curves, join="exact", combine_attrs="drop_conflicts")
    return data.assign_coords(covariance=list(ladders))
