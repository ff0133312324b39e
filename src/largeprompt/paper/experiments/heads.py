"""Claims H1 to H3, our own: what do several softmax heads learn, and how near do they come to linear attention?

The patterns are those of He, Pan, Chen and Yang, "In-context linear regression demystified" (arXiv 2503.12734): scores
of each head are a multiple of x·x_l, values read the label alone and add up to zero over heads. Their setting is the
paper's isotropic one, d = 5 and s² = 0.1, at L = 40.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.paper.chart import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION, Chart, Panel, Series
from largeprompt.paper.choice import Choice
from largeprompt.paper.claims import Check, Finding, claim, mean_of_counts, mean_over_seeds, worst
from largeprompt.paper.experiment import Experiment, Needed, Results
from largeprompt.paper.experiments._several_heads import BATCH, RATE, LeastRisks, TrainedHeads, imbalance, paired

_SOURCE = "He, Pan, Chen and Yang, arXiv 2503.12734"
_OF_HEADS = {1: (PURPLE, "s"), 2: (BLUE, "o"), 4: (ORANGE, "^")}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The lengths of the exact curves, what is trained, as (heads, length, seeds), and for how many steps."""

    head_lengths: tuple[int, ...]
    trained_heads: tuple[tuple[int, int, int], ...]
    head_steps: int


_TENS, _HUNDREDS = tuple(range(10, 100, 10)), tuple(range(100, 1001, 100))
SIZES = {
    "smoke": Sizes((10, 40), ((1, 40, 2), (2, 40, 2)), 2000),
    "quick": Sizes((10, 40, 100, 300, 1000), ((1, 40, 3), (2, 40, 16), (4, 40, 4), (2, 100, 2)), 12_000),
    "paper": Sizes(
        _TENS + _HUNDREDS, tuple((H, L, seeds) for L in (40, 100) for H, seeds in ((1, 4), (2, 40), (4, 16))), 40_000
    ),
}


class SeveralHeads(Experiment):
    """Exact least risks by length with those of trained heads, and what trained heads look like."""

    words: ClassVar[str] = "Several softmax heads, {covariates}: least risks and trained heads"
    advice: ClassVar[str] = (
        "The best pair of softmax heads (dashed) lies on linear attention, far below one head. Trained heads come in "
        "pairs of opposite signs and end there; from a few starts both heads take one sign and stay as good as one."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (LeastRisks(SIZES[choice.preset].head_lengths), *_trained(choice).values())

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        """The least risks by `L`, and every trained head by `run`, with NaN for heads that it has not."""
        curves = results[LeastRisks(SIZES[choice.preset].head_lengths)]
        columns = ("scale", "value", "uneven", "covariates", "risk", "risk_stderr")
        rows: dict[str, list[Any]] = {name: [] for name in (*columns, "heads", "trained_at", "paired", "imbalance")}
        items = _trained(choice)
        widest = max(H for H, _ in items)
        for (H, L), item in items.items():
            data = results[item]
            for name in columns:
                values = data[name].values
                room = [(0, 0), (0, widest - H)] if values.ndim == 2 else [(0, 0)]
                rows[name] += list(np.pad(values, room, constant_values=math.nan))
            n = data.sizes["seed"]
            rows["heads"] += [H] * n
            rows["trained_at"] += [L] * n
            rows["paired"] += [bool(one) for one in paired(data).values]
            rows["imbalance"] += list(imbalance(data).values)
        of_runs = {name: (("run", "head")[: np.ndim(row)], np.asarray(row)) for name, row in rows.items()}
        steps = {"steps": SIZES[choice.preset].head_steps, "source": _SOURCE, "covariance": self.covariance}
        return xr.Dataset(of_runs | {name: curves[name] for name in curves.data_vars}, attrs=steps)

    def chart(self, data: xr.Dataset) -> Chart:
        L, noise = data.L.values, data.noise.values
        curves = (
            Series("one head, least", L, data.one - noise, "theory", PURPLE),
            Series("linear attention, least", L, data.linear - noise, "theory", VERMILION, width=2.4),
            Series("two heads, best pair", L, data.pair - noise, "theory", INK, dash="dash"),
            Series("Bayes", L, data.Bayes - noise, "theory", GREEN),
        )
        first, here = _at_first(data)
        best, a = data.sel(L=first), np.linspace(0.12, max(0.6, float(abs(here.scale).max())), 60)
        values = float(best.best_scale * best.best_value) / a
        style: Any = {"role": "theory", "colour": GREY, "dash": "dot"}
        balanced = [
            Series("product a r of the best pair", sign * a, sign * values, in_legend=sign > 0, **style)
            for sign in (1, -1)
        ]
        ends = _points(data, lambda of: (of.trained_at, of.risk - float(noise[0])))
        heads = _points(here, lambda of: (of.scale.values.ravel(), of.value.values.ravel()))
        words = "scale a of the scores a x·x_l", "factor r of the labels"
        return Chart(
            (
                Panel("risk above that of the noise, s²/2", "prompt length L", "R − s²/2", (*curves, *ends)),
                Panel(f"each trained head, L = {first}", *words, (*balanced, *heads), x_log=False, y_log=False),
            ),
            columns=2,
            share_y=False,
        )

    def summary(self, data: xr.Dataset) -> list[str]:
        above = 100 * (data.pair / data.linear - 1)
        one = 100 * (data.one / data.linear - 1)
        lines = [
            "Least risk above that of linear attention: "
            + "; ".join(
                f"L = {int(L)}: two heads {above.sel(L=L).item():.3g} %, one head {one.sel(L=L).item():.3g} %"
                for L in data.L.values
            )
            + "."
        ]
        for H, L in _groups(data):
            group = _of(data, H, L)
            best = data.sel(L=L)
            both = group.isel(run=group.paired.values)
            whose = f"{_heads(H)} trained at L = {L} ({group.sizes['run']} seeds):"
            apart = [f"risk {float(group.risk.mean() / best.one):.3f} of the least of one head"]
            if H > 1:
                count = both.sizes["run"]
                apart += [f"{count} run{' has' if count == 1 else 's have'} heads of both signs"]
            if H > 1 and both.sizes["run"]:
                apart += [f"these end {100 * float(both.risk.mean() / best.pair - 1):.1f} % above the best pair"]
                apart += [f"their values add up to {float(both.imbalance.mean()):.3f} of their sizes"]
            lines.append(f"{whose} {', '.join(apart)}.")
        return lines


SEVERAL_HEADS = SeveralHeads("heads")


def _trained(choice: Choice) -> dict[tuple[int, int], TrainedHeads]:
    """The trainings, by heads and length."""
    sizes = SIZES[choice.preset]
    return {(H, L): TrainedHeads(H, L, seeds, sizes.head_steps) for H, L, seeds in sizes.trained_heads}


def _groups(data: xr.Dataset) -> list[tuple[int, int]]:
    pairs = zip(data.heads.values, data.trained_at.values, strict=True)
    return list(dict.fromkeys((int(H), int(L)) for H, L in pairs))


def _of(data: xr.Dataset, H: int, L: int) -> xr.Dataset:
    """The runs with so many heads at one length."""
    return data.isel(run=(data.heads.values == H) & (data.trained_at.values == L))


def _at_first(data: xr.Dataset) -> tuple[int, xr.Dataset]:
    """The first trained length, which claims are about, and its runs."""
    first = int(data.trained_at.values[0])
    return first, data.isel(run=data.trained_at.values == first)


def _several_at_first(data: xr.Dataset) -> dict[int, xr.Dataset]:
    """The runs at the first trained length with more heads than one, by their number."""
    first, _ = _at_first(data)
    return {H: _of(data, H, L) for H, L in _groups(data) if H > 1 and first == L}


def _points(data: xr.Dataset, of_runs: Callable[[xr.Dataset], tuple[Any, Any]]) -> list[Series]:
    """Points of the runs with each number of heads."""
    series = []
    for H in dict.fromkeys(int(H) for H in data.heads.values):
        x, y = of_runs(data.isel(run=data.heads.values == H, head=slice(H)))
        colour, mark = _OF_HEADS[H]
        series.append(Series(f"{_heads(H)}, trained", x, y, colour=colour, line=False, mark=mark))
    return series


def _heads(H: int) -> str:
    return "1 head" if H == 1 else f"{H} heads"


@claim("H1", f"our own, on {_SOURCE}", SEVERAL_HEADS, role="context")
def _a_pair_is_linear_attention(data: xr.Dataset) -> Finding:
    """Two softmax heads do what linear attention does, at every prompt length from 10 to 1000.

    Exact least risks at each length: of what one softmax head is above linear attention, two heads close more than nine
    tenths; and they are better than linear attention with one token less.
    """
    closed = ((data.one - data.pair) / (data.one - data.linear)).values
    ahead = (data.linear_shorter / data.pair - 1).values
    names, exact = [f"L = {int(L)}" for L in data.L.values], np.zeros(data.sizes["L"])
    above = 100 * (data.pair / data.linear - 1).values
    return Finding(
        (
            _least_of(
                "share of the gap between one head and linear attention that two heads close", closed, names, 0.9
            ),
            worst("risk of linear attention with one token less over that of two heads, less 1", ahead, exact, names),
        ),
        f"Two heads are {above.max():.2g} % above linear attention at {names[int(above.argmax())]} and "
        f"{above[-1]:.2g} % at {names[-1]}. Above the noise their risk is {_factor(data, 0):.1f} times Bayes' at "
        f"{names[0]} and {_factor(data, -1):.1f} times at {names[-1]}.",
    )


def _least_of(label: str, values: Float[np.ndarray, " m"], names: list[str], target: float) -> Check:
    """That the least of exact numbers exceeds a target."""
    i = int(np.argmin(values))
    return Check(f"{label}, least at {names[i]}", float(values[i]), ">", target)


def _factor(data: xr.Dataset, i: int) -> float:
    return float((data.pair[i] - data.noise[i]) / (data.Bayes[i] - data.noise[i]))


@claim("H2", f"our own, on {_SOURCE}", SEVERAL_HEADS, role="context")
def _pairs(data: xr.Dataset) -> Finding:
    """SGD from default starts makes heads of opposite signs, with even scores and values of labels that sum to zero.

    Two and four heads at the first trained length. Share of starts from which two heads take opposite signs: more than
    half. In runs with heads of both signs: |Σr|/Σ|r| below 0.05, and with two heads ‖A − aI‖/‖A‖ below 0.2 and the
    share of covariates in the values below 0.1, each the mean over runs.
    """
    (L, _), groups = _at_first(data), _several_at_first(data)
    two, checks = groups[2], []
    share, error = mean_of_counts(two.paired.values.astype(float), 0.5, 1.0)
    checks.append(Check(f"2 heads: share of {two.sizes['run']} starts that end in a pair", share, ">", 0.5, error))
    for H, group in groups.items():
        checks.append(_mean_below(f"{H} heads: |Σr|/Σ|r|", group.imbalance.values[group.paired.values], 0.05))
    both = two.isel(run=two.paired.values, head=slice(2)).mean("head")
    checks.append(_mean_below("2 heads: ‖A − aI‖/‖A‖", both.uneven.values, 0.2))
    checks.append(_mean_below("2 heads: share of covariates in the values", both.covariates.values, 0.1))
    left = two.isel(run=~two.paired.values)
    ratio = float((left.risk / data.one.sel(L=L)).mean()) if left.sizes["run"] else math.nan
    alone = f" Two heads of one sign end at {ratio:.3f} times the least risk of one head." if left.sizes["run"] else ""
    return Finding(tuple(checks), f"{left.sizes['run']} of {two.sizes['run']} starts end with one sign.{alone}")


def _mean_below(label: str, values: Float[np.ndarray, " s"], target: float, common: float = 0.0) -> Check:
    """That the mean over runs is below a target; `common` is an error that all runs share."""
    mean, error = mean_over_seeds(values)
    return Check(f"{label}, mean over {len(values)} runs", mean, "<", target, math.hypot(error, common))


@claim("H3", f"our own, on {_SOURCE}", SEVERAL_HEADS, role="context")
def _trained_below_one_head(data: xr.Dataset) -> Finding:
    """Trained, several softmax heads are better than the best single one, and nearly as good as the best pair.

    At the first trained length: the risk over the least of one head, mean over all starts, is below 1; over that of the
    best pair, mean over the runs with heads of both signs, it is below 1.05. Errors are over runs and prompts.
    """
    L, _ = _at_first(data)
    best, checks = data.sel(L=L), []
    for H, group in _several_at_first(data).items():
        for name, least, runs in (
            ("one head", best.one, group.paired | True),
            ("the best pair", best.pair, group.paired),
        ):
            these = group.isel(run=runs.values)
            ratios, common = these.risk / least, float((these.risk_stderr / least).max()) if these.sizes["run"] else 0.0
            target = 1.0 if name == "the best single head" else 1.05
            checks.append(_mean_below(f"{H} heads: risk over that of {name}", ratios.values, target, common))
    return Finding(tuple(checks), f"SGD of {data.steps} steps at rate {RATE} with {BATCH} prompts each.")
