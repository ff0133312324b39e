"""The exact gradient flows beside training runs: same start, same time, no noise."""

import dataclasses
import math

import equinox as eqx
import jax
import numpy as np
import xarray as xr

from largeprompt.dynamics import Trajectory, gradient_flow
from largeprompt.icl import risk_function
from largeprompt.lab import Run

from ._piece import AbstractPiece, Done

_MATRICES = ("K", "Q", "V", "O")


@dataclasses.dataclass(frozen=True)
class InfiniteFlow(AbstractPiece):
    """The infinite-prompt flow from the start of a run, at its recorded steps: all parameters, and the risk.

    On centred Gaussian tokens it is the same for softmax and linear attention. The length of the run does not matter.
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
        return xr.Dataset(
            {"theta": (("step", "parameter"), theta), "risk": ("step", np.asarray(flow.risk))},
            coords={"step": steps},
        )


@dataclasses.dataclass(frozen=True)
class Flow(AbstractPiece):
    """The exact risk along the population flow of one member of a run, at its recorded steps."""

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
        return xr.Dataset(
            {"risk": ("step", np.asarray(risk)), "risk_stderr": ("step", np.asarray(error))}, coords={"step": steps}
        )


def _followed(run: Run, member: str, L: float) -> tuple[np.ndarray, Trajectory]:
    """The recorded steps of a run, and the flow at the times that they stand for."""
    steps = run.record.steps(run.steps).astype(float)
    layer = run.layers()[run.members.index(member)]
    flow = gradient_flow(layer, run.task(), L, steps * run.rate * run.loss_factor)
    if flow.ending != "completed":
        raise ValueError(f"the flow of {run.title} ended at t = {flow.ended_at:g}: {flow.ending}")
    return steps, flow


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
