"""The risks that training can end at, without sampling a prompt: optima, the Bayes risk, spurious stationary points."""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import xarray as xr

from largeprompt.icl import (
    StationaryPoint,
    bayes_risk,
    optimal_linear,
    optimal_softmax,
    stationary_points,
)
from largeprompt.lab import Run

from ._piece import AbstractPiece, Done


@dataclasses.dataclass(frozen=True)
class Levels(AbstractPiece):
    """By length: least risks of both attentions, the Bayes risk, the lowest spurious minimum and saddle of each.

    Those of linear attention at every length; those of softmax attention, a longer search, at the lengths `traps`; none
    at all if that is None. NaN is where none was found. A point that is neither for sure counts as a minimum.
    """

    version: ClassVar[int] = 2

    covariance: str
    lengths: tuple[int, ...]
    traps: tuple[int, ...] | None = ()
    d: int = 5
    noise: float = 0.1
    query_sigma: str | None = None

    @property
    def title(self) -> str:
        return f"least risks, {self.covariance}"

    @property
    def seconds(self) -> float:
        return 15 + 1.0 * len(self.lengths) + 12 * len(self.traps or ())

    def _compute(self, done: Done) -> xr.Dataset:
        task = Run(sigma=self.covariance, d=self.d, noise=self.noise, query_sigma=self.query_sigma).task()
        rows = []
        for L in self.lengths:
            Bayes = bayes_risk(task, L)
            row: dict[str, Any] = {"linear": float(optimal_linear(task, L).risk.value)}
            row |= {"softmax": float(optimal_softmax(task, L).risk.value)}
            row |= {"Bayes": float(Bayes.value), "Bayes_stderr": float(Bayes.stderr)}
            for kind in ("linear", "softmax"):
                searched = self.traps is not None and (kind == "linear" or L in self.traps)
                points = stationary_points(task, L, kind, starts=0) if searched else []
                row[f"{kind}_trap"] = _lowest(points, "local minimum", "undecided")
                row[f"{kind}_saddle"] = _lowest(points, "saddle")
            rows.append(row)
            done(f"L = {L}")
        return xr.Dataset(
            {name: ("L", np.asarray([row[name] for row in rows])) for name in rows[0]}
            | {"floor": ((), self.noise / 2)},
            coords={"L": np.asarray(self.lengths, np.int32)},
            attrs={"covariance": self.covariance, "d": self.d, "noise": self.noise, "risk": "half mean squared error"},
        )


def _lowest(points: list[StationaryPoint], *kinds: str) -> float:
    return min((float(point.risk.value) for point in points if point.kind in kinds), default=math.nan)
