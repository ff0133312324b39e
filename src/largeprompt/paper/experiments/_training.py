"""What the experiments along training share: all seeds at some lengths, and flows at the recorded steps of a run."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.dynamics import Trajectory, gradient_flow
from largeprompt.lab import VERDICTS, Run
from largeprompt.paper.chart import Series
from largeprompt.paper.choice import ANISOTROPIC, MEMBERS, Choice
from largeprompt.paper.claims import Finding, not_settled
from largeprompt.paper.experiment import Experiment, Needed, Results

COURSES = {"smoke": (10, 40), "quick": (10, 100, 1000), "paper": (10, 100, 1000)}
"""The lengths whose risk is followed, by preset."""
_ENOUGH = 100_000  # steps, twice those by which the paper sees its runs converge


class AllSeeds(Experiment):
    """Risks and distances along training from all seeds, at the shortest, at middle and at the longest prompts.

    For claims that count seeds: `seeds` says how many were trained at each length; after these all is NaN.
    """

    drawn: ClassVar[bool] = False

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return all_of(choice.all_runs(self.covariance, COURSES[choice.preset]))

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        runs = choice.all_runs(self.covariance, COURSES[choice.preset])
        data = gathered(runs, results, "distance", "risk", "verdict")
        data["seeds"] = "L", [len(of_length) for of_length in runs.values()]
        steps = choice.protocol.record.steps(choice.protocol.steps)
        return data.assign_coords(step=steps).assign_attrs(covariance=self.covariance, steps=choice.protocol.steps)


ALL_SEEDS = AllSeeds("all seeds, isotropic"), AllSeeds("all seeds, anisotropic", ANISOTROPIC)


def all_of(runs: Mapping[int, Sequence[Run]]) -> tuple[Needed, ...]:
    """The runs of all lengths."""
    return tuple(run for of_length in runs.values() for run in of_length)


def gathered(runs: Mapping[int, Sequence[Run]], results: Results, *names: str) -> xr.Dataset:
    """Variables of runs by attention, if they have one, length, seed and all else; NaN or empty for seeds not run."""
    rows = []
    for of_length in runs.values():
        seeds = xr.concat([results[run][list(names)] for run in of_length], "seed", combine_attrs="drop")
        rows.append(seeds.assign_coords(seed=np.arange(len(of_length))))
    data = xr.concat(rows, "L", join="outer", fill_value={"verdict": ""}, combine_attrs="drop")
    data = data.sel(member=list(MEMBERS)).transpose("member", "L", "seed", "step")
    coords = {"member": list(MEMBERS), "L": np.asarray(list(runs), np.int32), "seed": data.seed.values}
    columns = {name: (column.dims, column.values) for name, column in data.data_vars.items()}
    return xr.Dataset(columns, coords | {"step": data.step.values})


def counts_of(verdicts: np.ndarray, who: str = "") -> list[str]:
    """How many runs ended how, of those that were run."""
    return [f"{who}{count} {end}" for end in VERDICTS if (count := int((verdicts == end).sum()))]


def median_of_seeds(
    label: str, steps: np.ndarray, curves: Float[np.ndarray, "s t"], colour: str, each: str
) -> list[Series]:
    """The median of curves over steps, and if there are several seeds their range and each, by the label `each`."""
    several = len(curves) > 1
    limits = {"low": curves.min(axis=0), "high": curves.max(axis=0)} if several else {}
    middle = Series(label, steps, np.median(curves, axis=0), colour=colour, **limits)
    seeds = enumerate(curves if several else ())
    return [middle, *(Series(each.format(i), steps, curve, "seed", colour, in_legend=False) for i, curve in seeds)]


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
