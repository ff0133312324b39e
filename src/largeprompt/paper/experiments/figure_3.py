"""Figures 3 and 7, claims C5 and C9: how far apart do softmax and linear attention grow while they are trained?"""

import dataclasses
import itertools
import math
from typing import ClassVar

import numpy as np
import xarray as xr

from largeprompt.lab import Progress, Run
from largeprompt.paper.chart import Chart, Panel, sequence
from largeprompt.paper.choice import ANISOTROPIC, Choice
from largeprompt.paper.claims import Check, Finding, claim, mean_over_seeds
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results
from largeprompt.paper.experiments._training import ALL_SEEDS, followed, median_of_seeds, recorded, too_short

PATHS = {
    "smoke": (10, 40),
    "quick": (10, 30, 100, 300, 1000),
    "paper": (10, 20, 50, 100, 200, 500, 1000),
}
"""The lengths whose weights are followed, by preset."""
_MATRICES = ("K", "Q", "V", "O")


@dataclasses.dataclass(frozen=True)
class InfiniteFlow(Computation):
    """The infinite-prompt flow from the start of a run, at its recorded steps: all parameters, and the risk.

    On centred Gaussian tokens it is the same for softmax and linear attention. The length of the run does not matter.
    After the end of a flow that could not be followed to the last step all is NaN.
    """

    words: ClassVar[str] = "infinite-prompt flow, {run.sigma}, seed {run.weight_seed}"

    run: Run

    def _compute(self, progress: Progress) -> xr.Dataset:
        steps, flow = followed(self.run, "linear", math.inf)
        theta = np.concatenate([_rows(getattr(flow.layers, name)) for name in _MATRICES], axis=1)
        return recorded(self.run, steps, flow, {"theta": theta, "risk": np.asarray(flow.risk)})


def _rows(matrices) -> np.ndarray:
    return np.asarray(matrices).reshape(len(matrices), -1)


def squared_distance(run_data: xr.Dataset, member: str, flow: xr.Dataset) -> np.ndarray:
    """Of the parameters of one member of a run to the infinite-prompt flow, at each recorded step."""
    theta = np.concatenate([_rows(run_data[name].sel(member=member).values) for name in _MATRICES], axis=1)
    return np.sum((theta - flow.theta.values) ** 2, axis=1)


DISTANCES = {
    "apart": "softmax to linear  ‖θ_soft − θ_lin‖²",
    "softmax": "softmax to the infinite-prompt flow  ‖θ_soft − θ_∞‖²",
    "linear": "linear to the infinite-prompt flow  ‖θ_lin − θ_∞‖²",
}


class Paths(Experiment):
    """Squared distances of parameters along training: between the two attentions, and of each to their common limit."""

    words: ClassVar[str] = "Distance of the trained parameters, {covariates}"
    advice: ClassVar[str] = (
        "Early in training longer prompts lie lower, for the two attentions and for each against the gradient flow "
        "of the infinite prompt from the same start. Late they need not: a run that ends in a spurious minimum, or "
        "slides along a valley, leaves the others behind."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (*choice.runs(self.covariance, PATHS[choice.preset]), *infinite_flows(choice, self.covariance))

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        flows = [results[flow] for flow in infinite_flows(choice, self.covariance)]
        found: dict[str, list[list[np.ndarray]]] = {name: [] for name in DISTANCES}
        for L in PATHS[choice.preset]:
            runs = [results[run] for run in choice.runs(self.covariance, (L,))]
            found["apart"].append([run.distance.values**2 for run in runs])
            for member in ("softmax", "linear"):
                found[member].append([squared_distance(r, member, f) for r, f in zip(runs, flows, strict=True)])
        steps = flows[0].step.values
        return xr.Dataset(
            {n: (("L", "seed", "step"), np.asarray(v), {"long_name": DISTANCES[n]}) for n, v in found.items()},
            coords={"L": np.asarray(PATHS[choice.preset], np.int32), "seed": np.arange(len(flows)), "step": steps},
            attrs={"covariance": self.covariance, "steps": choice.protocol.steps},
        )

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(name, data) for name in DISTANCES))

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = []
        for step in (early_step(data), float(data.step[-1])):
            at = data.apart.sel(step=step).median("seed")
            values = ", ".join(f"{float(value):.2e} at L = {int(L)}" for L, value in zip(data.L, at, strict=True))
            lines.append(f"Step {step:.0f}: ‖θ_soft − θ_lin‖² is {values} (median over {data.sizes['seed']} seeds).")
        return lines


def early_step(data: xr.Dataset) -> float:
    """The recorded step nearest to a fiftieth of the training of the paper, or to half of a shorter one."""
    return float(data.step.sel(step=min(10_000.0, float(data.step[-1]) / 2), method="nearest"))


def infinite_flows(choice: Choice, covariance: str) -> tuple[InfiniteFlow, ...]:
    """The infinite-prompt flow from each seed."""
    return tuple(InfiniteFlow(run) for run in choice.runs(covariance, PATHS[choice.preset][:1]))


def _panel(name: str, data: xr.Dataset) -> Panel:
    later = data.sel(step=data.step[data.step >= 10])
    series = []
    for L, hue in zip(later.L.values, sequence(later.sizes["L"]), strict=True):
        series += median_of_seeds(f"L = {L}", later.step.values, later[name].sel(L=L).values, hue, f"L = {L}")
    return Panel(DISTANCES[name].replace("  ", "\n"), "step", "squared distance", tuple(series))


FIGURE_3, FIGURE_7 = Paths("3"), Paths("7", ANISOTROPIC)

_LATE = 1000  # the step from which falls back are counted: before it the distance is all noise


def _apart(data: xr.Dataset) -> dict[int, np.ndarray]:
    """log₁₀ ‖θ_soft − θ_lin‖² along training, of each seed at each length."""
    with np.errstate(divide="ignore"):  # at the start they are the same
        logs = 2 * np.log10(data.distance.values)
    return {int(L): of_length[: int(n)] for L, of_length, n in zip(data.L, logs, data.seeds, strict=True)}


def _difference(long: np.ndarray, short: np.ndarray) -> tuple[float, float]:
    """Mean over the seeds that both have."""
    n = min(len(long), len(short))
    return mean_over_seeds(long[:n] - short[:n])


def _closer(data: xr.Dataset, when: tuple[str, ...]) -> tuple[Check, ...]:
    """From the shortest prompts to those of about 100 tokens, and on to the longest: does the distance fall?"""
    apart, steps = _apart(data), data.step.values
    at = {"early": int(np.argmax(steps == early_step(data))), "last": len(steps) - 1}
    checks = []
    for name in when:
        for short, long in itertools.pairwise(apart):
            change, error = _difference(apart[long][:, at[name]], apart[short][:, at[name]])
            label = f"{name} step ({steps[at[name]]}): log₁₀ of ‖θ_soft − θ_lin‖² at L = {long} over L = {short}"
            checks.append(Check(label, change, "<", 0.0, error, resolution=2.0))
    return tuple(checks)


@claim("C5", "Section 6, Figure 3", ALL_SEEDS[0], figures=("3",), seeds=3)
def _parameters_come_closer(data: xr.Dataset) -> Finding:
    """Trained from the same weights on the same tokens, the parameters of softmax and linear attention lie closer the
    longer the prompts.

    Ratio of ‖θ_soft − θ_lin‖² between lengths, mean of its logarithm over seeds: below 1 from the shortest prompts to
    the middle ones and on to the longest, at the end of training and early in it.
    """
    if short := too_short(data):
        return short
    checks = _closer(data, ("last", "early"))
    early = Finding(tuple(check for check in checks if check.label.startswith("early"))).verdict
    remark = (
        f"Early in training: {early}. At the end it need not be: the two attentions have different optima at every "
        "finite length, far apart along a valley of the risk, and some runs are trapped."
    )
    return Finding(checks, remark)


def _retreat(curves: np.ndarray) -> np.ndarray:
    """By how many decades, in all, each curve falls back from where it was."""
    return -np.minimum(np.diff(curves, axis=-1), 0).sum(axis=-1)


@claim("C9", "Appendix A.2.2, Figure 7", *ALL_SEEDS, figures=("3", "7"), seeds=3)
def _erratic_when_anisotropic(*both: xr.Dataset) -> Finding:
    """With anisotropic covariates the distance of the two attentions evolves more erratically, above all for short
    prompts, and more regularly for long ones; still they lie closer the longer the prompts.

    Sum of all falls of log₁₀ ‖θ_soft − θ_lin‖² along training, compared at the shortest length between covariances, and
    between the shortest and the longest; the ratios of C5, early in training.
    """
    if few := too_short(both[0]):
        return few
    late = both[0].step.values >= _LATE
    isotropic, anisotropic = ({L: _retreat(curves[:, late]) for L, curves in _apart(data).items()} for data in both)
    short, *_, long = isotropic
    label = "decades by which ‖θ_soft − θ_lin‖² falls back"
    differences = {
        f"{label} at L = {short}, anisotropic − isotropic": _difference(anisotropic[short], isotropic[short]),
        f"{label}, anisotropic, L = {short} − L = {long}": _difference(anisotropic[short], anisotropic[long]),
    }
    checks = [Check(name, value, ">", 0.0, error, resolution=1.0) for name, (value, error) in differences.items()]
    checks += _closer(both[1], ("early",))
    seeds = ", ".join(f"{len(values)} at L = {L}" for L, values in anisotropic.items())
    return Finding(tuple(checks), f"Falls from step {_LATE} on; seeds: {seeds}.")
