"""What the experiments along training share: all seeds at some lengths, and flows at the recorded steps of a run."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.dynamics import Trajectory, gradient_flow
from largeprompt.lab import Run
from largeprompt.paper.choice import MEMBERS, Choice
from largeprompt.paper.claims import Finding, not_settled
from largeprompt.paper.experiment import Experiment, Needed, Results

_ENOUGH = 100_000  # steps, twice those by which the paper sees its runs converge


@dataclasses.dataclass(frozen=True)
class AllSeeds(Experiment):
    """Risks and distances along training from all seeds at some lengths, for claims that count seeds.

    `seeds` says how many were trained at each length; after these all is NaN.
    """

    drawn: ClassVar[bool] = False
    lengths: Callable[[Choice], tuple[int, ...]] = dataclasses.field(kw_only=True)

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        runs = choice.all_runs(self.covariance, self.lengths(choice))
        return tuple(run for of_length in runs.values() for run in of_length)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        runs = choice.all_runs(self.covariance, self.lengths(choice))
        steps = choice.protocol.record.steps(choice.protocol.steps)
        dims = ("L", "seed", "step")
        return xr.Dataset(
            {
                "distance": (dims, stacked(runs, results, "distance")),
                "risk": (("member", *dims), stacked(runs, results, "risk")),
                "verdict": (("member", "L", "seed"), stacked(runs, results, "verdict", "")),
                "seeds": ("L", [len(of_length) for of_length in runs.values()]),
            },
            {"member": list(MEMBERS), "L": np.asarray(list(runs), np.int32), "step": steps},
            {"covariance": self.covariance, "steps": choice.protocol.steps},
        )


def stacked(
    runs: Mapping[int, Sequence[Run]], results: Results, name: str, missing: float | str = math.nan
) -> np.ndarray:
    """A variable of runs by attention, if it has one, length and seed, and all else; `missing` for seeds not run."""
    rows, axis = [], 0
    most = max(map(len, runs.values()))
    for of_length in runs.values():
        found = [results[run][name] for run in of_length]
        axis = int("member" in found[0].dims)
        values = [(data.sel(member=list(MEMBERS)) if axis else data).values for data in found]
        values += [np.full_like(values[0], missing)] * (most - len(values))
        rows.append(np.stack(values, axis))
    return np.stack(rows, axis)


def too_short(data: xr.Dataset) -> Finding | None:
    """The finding of training that has only begun, which settles nothing; None where it is long enough."""
    return not_settled(f"{data.steps} steps are too few; it takes {_ENOUGH}.") if data.steps < _ENOUGH else None


def followed(run: Run, member: str, L: float) -> tuple[Float[np.ndarray, " t"], Trajectory]:
    """The recorded steps of a run, and the flow at the times that they stand for."""
    steps = run.record.steps(run.steps).astype(float)
    layer = run.layers()[run.members.index(member)]
    return steps, gradient_flow(layer, run.task(), L, steps * _time_per_step(run))


def _time_per_step(run: Run) -> float:
    return run.rate * run.loss_factor


def recorded(
    run: Run, steps: Float[np.ndarray, "t *rest"], flow: Trajectory, columns: dict[str, Float[np.ndarray, "t *rest"]]
) -> xr.Dataset:
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
