"""The exact gradient flows beside training runs: same start, same time, no noise."""

import dataclasses
import math

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.dynamics import Trajectory, gradient_flow
from largeprompt.icl import risk_function
from largeprompt.lab import Run

from ._piece import AbstractPiece, Done

_MATRICES = ("K", "Q", "V", "O")
_Array = Float[np.ndarray, "t *rest"]


@dataclasses.dataclass(frozen=True)
class InfiniteFlow(AbstractPiece):
    """The infinite-prompt flow from the start of a run, at its recorded steps: all parameters, and the risk.

    On centred Gaussian tokens it is the same for softmax and linear attention. The length of the run does not matter.
    After the end of a flow that could not be followed to the last step all is NaN.
    """

    run: Run

    @property
    def title(self) -> str:
        return f"infinite-prompt flow, {self.run.sigma}, seed {self.run.weight_seed}"

    @property
    def seconds(self) -> float:
        return 1.0

    def _compute(self, done: Done) -> xr.Dataset:
        steps, flow = _followed(self.run, "linear", math.inf)
        theta = np.concatenate([_rows(getattr(flow.layers, name)) for name in _MATRICES], axis=1)
        return _recorded(self.run, steps, flow, {"theta": theta, "risk": np.asarray(flow.risk)})


@dataclasses.dataclass(frozen=True)
class Flow(AbstractPiece):
    """The exact risk along the population flow of one member of a run, at its recorded steps; NaN after its end."""

    run: Run
    member: str

    @property
    def title(self) -> str:
        return f"population flow, {self.member}, {self.run.sigma}, L = {self.run.L}, seed {self.run.weight_seed}"

    @property
    def seconds(self) -> float:
        return 5.0 if self.member == "softmax" else 1.0

    def _compute(self, done: Done) -> xr.Dataset:
        steps, flow = _followed(self.run, self.member, self.run.L)
        # by nodes other than those it was followed with, which it fits a little
        function = risk_function(flow.layer(0), self.run.task(), self.run.L, jax.random.key(1), draws=2**14)
        risk, error = _risks(function, flow.layers)
        return _recorded(self.run, steps, flow, {"risk": np.asarray(risk), "risk_stderr": np.asarray(error)})


def _followed(run: Run, member: str, L: float) -> tuple[np.ndarray, Trajectory]:
    """The recorded steps of a run, and the flow at the times that they stand for."""
    steps = run.record.steps(run.steps).astype(float)
    layer = run.layers()[run.members.index(member)]
    return steps, gradient_flow(layer, run.task(), L, steps * _time_per_step(run))


def _time_per_step(run: Run) -> float:
    return run.rate * run.loss_factor


def _recorded(run: Run, steps: _Array, flow: Trajectory, columns: dict[str, _Array]) -> xr.Dataset:
    """Columns of a flow at all recorded steps, NaN after its end; `cut_short` says how and when, if before the last."""
    reached = len(flow.times)
    if flow.ending != "completed" and flow.ended_at < steps[reached - 1] * _time_per_step(run):
        reached -= 1  # the last state is one between recorded steps
    dims = {1: ("step",), 2: ("step", "parameter")}
    data = {}
    for name, column in columns.items():
        padded = np.full((len(steps), *column.shape[1:]), np.nan)
        padded[:reached] = column[:reached]
        data[name] = dims[column.ndim], padded
    end = "" if flow.ending == "completed" else f"{flow.ending} at step {flow.ended_at / _time_per_step(run):.0f}"
    return xr.Dataset(data, coords={"step": steps}, attrs={"cut_short": end})


@eqx.filter_jit
def _risks(function, layers):
    arrays, static = eqx.partition(layers, eqx.is_inexact_array)
    return jax.lax.map(lambda one: function.value_and_error(eqx.combine(one, static)), arrays)


def _rows(matrices) -> np.ndarray:
    return np.asarray(matrices).reshape(len(matrices), -1)


def squared_distance(run_data: xr.Dataset, member: str, flow: xr.Dataset) -> np.ndarray:
    """Of the parameters of one member of a run to the infinite-prompt flow, at each recorded step."""
    theta = np.concatenate([_rows(run_data[name].sel(member=member).values) for name in _MATRICES], axis=1)
    return np.sum((theta - flow.theta.values) ** 2, axis=1)
