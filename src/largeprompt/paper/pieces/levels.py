"""The risks that training can end at, without sampling a prompt: optima, the Bayes risk, spurious stationary points."""

import dataclasses
import math
from typing import Any

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
    """By length: least risks of both attentions, the Bayes risk, and the lowest spurious stationary point of each.

    Those of linear attention at every length; those of softmax attention, a longer search, at the lengths `traps`. A
    local minimum is preferred to a saddle that lies lower: it is where runs end. NaN is where none was found.
    """

    covariance: str
    lengths: tuple[int, ...]
    traps: tuple[int, ...] = ()
    d: int = 5
    noise: float = 0.1
    query_sigma: str | None = None

    @property
    def title(self) -> str:
        return f"least risks, {self.covariance}"

    @property
    def seconds(self) -> float:
        return 15 + 1.0 * len(self.lengths) + 12 * len(self.traps)

    def _compute(self, done: Done) -> xr.Dataset:
        task = Run(sigma=self.covariance, d=self.d, noise=self.noise, query_sigma=self.query_sigma).task()
        rows = []
        for L in self.lengths:
            Bayes = bayes_risk(task, L)
            row: dict[str, Any] = {"linear": float(optimal_linear(task, L).risk.value)}
            row |= {"softmax": float(optimal_softmax(task, L).risk.value)}
            row |= {"Bayes": float(Bayes.value), "Bayes_stderr": float(Bayes.stderr)}
            for kind in ("linear", "softmax"):
                searched = kind == "linear" or L in self.traps
                row[f"{kind}_trap"], row[f"{kind}_trap_kind"] = (
                    _trap(stationary_points(task, L, kind, starts=0)) if searched else (math.nan, "")
                )
            rows.append(row)
            done(f"L = {L}")
        return xr.Dataset(
            {name: ("L", np.asarray([row[name] for row in rows])) for name in rows[0]}
            | {"floor": ((), self.noise / 2), "zero": ((), _of_predicting_zero(task))},
            coords={"L": np.asarray(self.lengths, np.int32)},
            attrs={"covariance": self.covariance, "d": self.d, "noise": self.noise, "risk": "half mean squared error"},
        )


def _trap(points: list[StationaryPoint]) -> tuple[float, str]:
    spurious = [point for point in points if point.kind != "global minimum"]
    lowest = sorted(spurious, key=lambda point: (point.kind == "saddle", float(point.risk.value)))
    return (float(lowest[0].risk.value), lowest[0].kind) if lowest else (math.nan, "")


def _of_predicting_zero(task) -> float:
    return float((np.sum(np.asarray(task.query_Sigma) * np.asarray(task.Omega)) + np.asarray(task.noise)) / 2)
