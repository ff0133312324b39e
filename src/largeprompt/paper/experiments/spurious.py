"""Claim S5, our own: which spurious minima do linear heads have, and from how many starts do flows end there?

Every stationary point has its Hessian checked, and flows are those of the exact risk: no run, no prompt is sampled. The
task is the paper's isotropic one; with several outputs each has coefficients of its own.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from largeprompt._intervals import wilson
from largeprompt.dynamics import start_shares
from largeprompt.icl import LinearRegression, identity, stationary_points
from largeprompt.lab import Progress
from largeprompt.paper.chart import BLUE, GREY, VERMILION, Chart, Panel, Series
from largeprompt.paper.choice import Choice
from largeprompt.paper.claims import Check, Finding, claim, mean_of_counts
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results

_D, _NOISE = 5, 0.1
_OF_OUTPUTS = {1: BLUE, 2: VERMILION}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The layers, as (outputs, heads), the prompt length, and how many flows there are of each."""

    spurious_layers: tuple[tuple[int, int], ...]
    spurious_length: int
    spurious_starts: int


_ONE_OUTPUT, _TWO_OUTPUTS = ((1, 1), (1, 2)), ((2, 1), (2, 2), (2, 3))
SIZES = {
    "smoke": Sizes(_ONE_OUTPUT, 100, 4),
    "quick": Sizes(_ONE_OUTPUT, 100, 60),
    "paper": Sizes((*_ONE_OUTPUT, (1, 3), *_TWO_OUTPUTS), 1000, 400),
}


@dataclasses.dataclass(frozen=True)
class EndsOfStarts(Computation):
    """The stationary points of linear heads, and how many flows from default starts end at each."""

    words: ClassVar[str] = "flows of {heads} linear heads with {outputs} outputs from {starts} default starts"

    outputs: int
    heads: int
    L: int
    starts: int

    @property
    def seconds(self) -> float:
        return 6.0 + 0.03 * self.starts * self.heads

    def _compute(self, progress: Progress) -> xr.Dataset:
        task = LinearRegression(identity(_D), _NOISE, identity(_D) / _D, targets=self.outputs)
        of_points, of_starts = jax.random.split(jax.random.key(0))
        # no random search: a flow that ends at a point that is not known would be counted as elsewhere
        points = stationary_points(task, self.L, "linear", of_points, heads=self.heads, starts=0)
        given: Any = {"heads": self.heads, "starts": self.starts, "points": points, "progress": progress}
        data = start_shares(task, self.L, "linear", of_starts, **given).to_dataset()
        lowest = [float(point.hessian_eigenvalues[0]) for point in points]
        return data.assign(lowest_curvature=("point", lowest))


class SpuriousMinima(Experiment):
    """The risks of stationary points by heads and outputs, and the shares of starts that end at them."""

    words: ClassVar[str] = "Spurious minima of linear heads, {covariates}: risks, and shares of default starts"
    advice: ClassVar[str] = (
        "With one head and one output almost half of the default starts end at a minimum that is not global (circle). "
        "With a second head the same point is a saddle (cross), and all starts find the optimum."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return tuple(_items(choice))

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        """Every stationary point of every layer by `row`."""
        rows: dict[str, list[Any]] = {}
        for item in _items(choice):
            data = results[item]
            for i in range(data.sizes["point"]):
                found = {name: data[name].values[i] for name in data.data_vars}
                found |= {"outputs": item.outputs, "heads": item.heads, "elsewhere": data.attrs["elsewhere"]}
                for name, value in found.items():
                    rows.setdefault(str(name), []).append(value)
        sizes = SIZES[choice.preset]
        facts = {"L": sizes.spurious_length, "starts": sizes.spurious_starts, "covariance": self.covariance}
        return xr.Dataset({name: ("row", np.asarray(row)) for name, row in rows.items()}, attrs=facts)

    def chart(self, data: xr.Dataset) -> Chart:
        levels, shares = [], []
        for outputs in dict.fromkeys(int(k) for k in data.outputs.values):
            of = data.isel(row=data.outputs.values == outputs)
            colour, name = _OF_OUTPUTS[outputs], _outputs(outputs)
            for kind, mark in (("local minimum", "o"), ("saddle", "x")):
                these = of.isel(row=of.kind.values == kind)
                if these.sizes["row"]:
                    label = f"{name}, {kind}"
                    levels.append(Series(label, these.heads, these.excess, colour=colour, line=False, mark=mark))
            heads, share, low, high = _failed(of)
            shares.append(Series(name, heads, share, colour=colour, low=low, high=high, line=False, mark="o"))
        optimum = Series("global minimum", *np.unique(data.heads.values)[None].repeat(2, 0), role="theory", colour=GREY)
        optimum = dataclasses.replace(optimum, y=np.zeros(len(optimum.x)))
        flat: Any = {"x_log": False, "y_log": False}
        words = f"risk above the least, L = {data.L}", "linear heads", "R − least R"
        return Chart(
            (
                Panel(*words, (optimum, *levels), **flat),
                Panel("share of default starts above the least risk", "linear heads", "share", tuple(shares), **flat),
            ),
            columns=2,
            share_y=False,
        )

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = []
        for k, H in _layers(data):
            of = _of(data, k, H)
            ends = "; ".join(
                f"{kind}, {abs(excess):.4f} above the least risk: {int(count)} of {data.starts} starts"
                for kind, excess, count in zip(of.kind.values, of.excess.values, of["count"].values, strict=True)
            )
            lines.append(f"{_outputs(k)}, {_heads(H)}: {ends}.")
        return lines


SPURIOUS = SpuriousMinima("spurious")


def _items(choice: Choice) -> list[EndsOfStarts]:
    sizes = SIZES[choice.preset]
    return [EndsOfStarts(k, H, sizes.spurious_length, sizes.spurious_starts) for k, H in sizes.spurious_layers]


def _layers(data: xr.Dataset) -> list[tuple[int, int]]:
    return list(dict.fromkeys((int(k), int(H)) for k, H in zip(data.outputs.values, data.heads.values, strict=True)))


def _of(data: xr.Dataset, outputs: int, heads: int) -> xr.Dataset:
    return data.isel(row=(data.outputs.values == outputs) & (data.heads.values == heads))


def _failed(data: xr.Dataset) -> tuple[Any, Any, Any, Any]:
    """Heads, and the share of starts that are not at the global minimum, with Wilson's interval."""
    layers = [(H, int(_of(data, k, H)["count"].values[0])) for k, H in _layers(data)]
    missed = [data.starts - count for _, count in layers]
    low, high = np.array([wilson(count, data.starts) for count in missed]).T
    return np.array([H for H, _ in layers]), np.asarray(missed) / data.starts, low, high


def _outputs(k: int) -> str:
    return "1 output" if k == 1 else f"{k} outputs"


def _heads(H: int) -> str:
    return "1 head" if H == 1 else f"{H} heads"


@claim("S5", "beyond Appendix A.2", SPURIOUS, role="own")
def _a_second_head_removes_spurious_minima(data: xr.Dataset) -> Finding:
    """Linear attention with one head and one output has a spurious minimum; with a second head it has none.

    Certified stationary points: with one head one local minimum that is not global, with two none; there the same risk
    belongs to a saddle. Share of default starts whose flow is not at the optimum: with one head more than a tenth, with
    two less than a tenth.
    """
    checks = []
    for H, target in ((1, 1.0), (2, 0.0)):
        of = _of(data, 1, H)
        found = float(np.count_nonzero(of.kind.values == "local minimum"))
        checks.append(Check(f"{_heads(H)}: local minima that are not global", found, "=", target))
    for H, relation in ((1, ">"), (2, "<")):
        reached = int(_of(data, 1, H)["count"].values[0])
        missed = np.arange(data.starts) >= reached
        share, error = mean_of_counts(missed.astype(float), 0.1, 1.0)
        label = f"{_heads(H)}: share of {data.starts} starts not at the optimum"
        checks.append(Check(label, share, relation, 0.1, error))
    one, two = (_of(data, 1, H) for H in (1, 2))
    excess = float(one.excess.values[-1])
    return Finding(
        tuple(checks),
        f"At L = {data.L} the spurious minimum is {excess:.4f} above the least risk; with two heads the lowest "
        f"curvature there is {float(two.lowest_curvature.values[-1]):.3f}.",
    )
