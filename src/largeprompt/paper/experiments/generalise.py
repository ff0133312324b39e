"""Our own figure and claims S1 to S3: what does the best layer of one prompt length lose at another?"""

import dataclasses
import math
from typing import ClassVar, get_args

import numpy as np
import xarray as xr

from largeprompt._display import length_text
from largeprompt.attention import Kind
from largeprompt.concentration import predict
from largeprompt.icl import (
    LinearRegression,
    generalisation,
    mismatch_rate,
    optimal_layers,
    optimal_softmax,
)
from largeprompt.icl._generalisation import RATIO
from largeprompt.lab import Progress, Run
from largeprompt.paper.chart import Chart, HeatMap
from largeprompt.paper.choice import COVARIANCES, MEMBERS, Choice, covariates
from largeprompt.paper.claims import Check, Finding, claim, equal
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results

LENGTHS = (10, 30, 100, 300, 1000)
_LONG = 10**6  # tokens, at which the leading order is held against the excess
_DECADES = (10**9, 10**12)  # lengths between which a decay is read off
_FROM = 100  # tokens of training from which softmax attention loses more


@dataclasses.dataclass(frozen=True)
class Lengths(Computation):
    """Risks of the best layers of each length at each other length, infinite ones among both; and what theory says.

    `leading` is the excess at infinite length of the layer of `long` tokens over its leading order. Of the softmax
    layer of each length: `spread`, the variance θ² of its scores in their widest direction, and how fast its risk
    falls to that of infinite prompts, measured and predicted.
    """

    words: ClassVar[str] = "other lengths than in training, {covariance}"

    covariance: str
    lengths: tuple[int, ...] = LENGTHS
    long: int = _LONG
    d: int = 5
    noise: float = 0.1
    query_sigma: str | None = None

    def _compute(self, progress: Progress) -> xr.Dataset:
        task = Run(sigma=self.covariance, d=self.d, noise=self.noise, query_sigma=self.query_sigma).task()
        lengths = (*self.lengths, math.inf)
        found = generalisation(optimal_layers(task, lengths), task, lengths, progress=progress).to_dataset()
        leading = [self._leading(task, member) for member in get_args(Kind)]
        spread, decay, predicted = np.array([_decay(task, L) for L in self.lengths]).T
        return found.isel(test=0, drop=True).assign(
            leading=("attention", leading),
            spread=("length", spread),
            decay=("length", decay),
            predicted=("length", predicted),
            length=list(self.lengths),
        )

    def _leading(self, task: LinearRegression, member: Kind) -> float:
        far = generalisation(optimal_layers(task, [self.long], [member]), task, [math.inf])
        return far.excess.item() * self.long**2 / float(mismatch_rate(task, member))


def _decay(task: LinearRegression, trained: int) -> tuple[float, float, float]:
    """θ² of the softmax layer of a length, the power of L with which its risk falls, and the one predicted."""
    found = predict(optimal_softmax(task, trained).attention, task, None, _DECADES, "risk")
    near, far = np.sqrt(found.mean_square)
    slope = math.log(near / far) / math.log(_DECADES[1] / _DECADES[0])
    return found.regime.spread, slope, found.regime.exponent / found.regime.power


class OtherLengths(Experiment):
    """Maps of the risk over the least risk at the tested length, for each attention and covariance."""

    words: ClassVar[str] = "Trained at one prompt length, used at another"
    advice: ClassVar[str] = (
        "On the diagonal layers are best. Trained on the shortest prompts, softmax attention loses less on longer ones "
        "than linear attention; trained on long prompts it loses more, above all on shorter ones."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return tuple(_grid(choice, covariance) for covariance in COVARIANCES)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        parts = [results[need] for need in self.needs(choice)]
        return xr.concat(parts, xr.DataArray(list(COVARIANCES), dims="covariance", name="covariance"))

    def chart(self, data: xr.Dataset) -> Chart:
        maps = [
            heat_map(f"{member}, {covariates(covariance)}", data.sel(covariance=covariance, attention=member))
            for covariance in data.covariance.values
            for member in data.attention.values
        ]
        return Chart(tuple(maps), columns=data.sizes["attention"])

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = []
        for covariance in data.covariance.values:
            here = data.ratio.sel(covariance=covariance)
            for trained, tested in ((LENGTHS[0], math.inf), (_FROM, math.inf), (math.inf, LENGTHS[0])):
                parts = (f"{member} {_cell(here, member, trained, tested):.3f}" for member in MEMBERS)
                where = f"trained at {length_text(trained)}, used at {length_text(tested)}"
                lines.append(f"{covariates(str(covariance))}, {where}: {', '.join(parts)} times the least risk.")
        return lines


def heat_map(title: str, data: xr.Dataset) -> HeatMap:
    """The map of one attention: the risk over the least risk, or the risk where that is not known."""
    known = not bool(np.isnan(data.optimum).all())
    values = (data.ratio if known else data.risk).transpose("trained_at", "tested_at").values
    rows, columns = (tuple(length_text(L) for L in data[name].values) for name in ("trained_at", "tested_at"))
    scale = RATIO if known else "risk"
    return HeatMap(title, "length of the test", "length of training", rows, columns, values, scale)


def _cell(ratio: xr.DataArray, member: str, trained: float, tested: float) -> float:
    return float(ratio.sel(attention=member, trained_at=trained, tested_at=tested))


def _grid(choice: Choice, covariance: str) -> Lengths:
    return Lengths(covariance, query_sigma=choice.conventions.query_sigma)


OTHER_LENGTHS = OtherLengths("generalise")


@claim("S1", "beyond Section 5", OTHER_LENGTHS, role="own")
def _square_of_the_difference(data: xr.Dataset) -> Finding:
    """The best layer of length L₁ loses c₂(1/L₁ − 1/L₂)² at length L₂, to leading order, for linear and for softmax
    attention, each with the constant that theory gives.

    Exact excess at L₂ = ∞ of the best layer of a million tokens, over c₂/L₁², within 2 %.
    """
    checks = [
        equal(f"{member}, {covariance}: excess over c₂/L₁²", float(here), 1.0, 0.02)
        for covariance in data.covariance.values
        for member in data.attention.values
        for here in [data.leading.sel(covariance=covariance, attention=member)]
    ]
    return Finding(tuple(checks))


@claim("S2", "beyond Section 5", OTHER_LENGTHS, role="own")
def _softmax_against_linear(data: xr.Dataset) -> Finding:
    """As a share of the least risk of its own kind, softmax attention trained on 100 tokens or more loses more than
    linear attention at every other length; trained on 10 tokens it loses less on longer prompts.

    The exact risk over the least risk of the tested length, softmax less linear, at every pair of lengths.
    """
    checks, more = [], data.ratio.sel(attention="softmax") - data.ratio.sel(attention="linear")
    for covariance in data.covariance.values:
        cells = {
            (L1, L2): float(more.sel(covariance=covariance, trained_at=L1, tested_at=L2))
            for L1 in data.trained_at.values
            for L2 in data.tested_at.values
        }
        long = {pair: value for pair, value in cells.items() if pair[0] >= _FROM and pair[0] != pair[1]}
        short = {pair: value for pair, value in cells.items() if pair[0] == LENGTHS[0] < pair[1]}
        (L1, L2), least = min(long.items(), key=lambda item: item[1])
        where = f"trained on {_FROM} tokens or more, {covariance}, least at {length_text(L1)} → {length_text(L2)}"
        checks.append(Check(f"{where}: softmax − linear", least, ">", 0.0))
        (L1, L2), most = max(short.items(), key=lambda item: item[1])
        where = f"trained on {LENGTHS[0]} tokens, {covariance}, most at {length_text(L1)} → {length_text(L2)}"
        checks.append(Check(f"{where}: softmax − linear", most, "<", 0.0))
    return Finding(tuple(checks), "Numbers are exact: no error stands beside them.")


@claim("S3", "beyond Proposition 3.1", OTHER_LENGTHS, role="own")
def _threshold_of_training(data: xr.Dataset) -> Finding:
    """Trained on prompts so short that its scores pass the threshold θ² = ½, softmax attention reaches its risk on
    infinite prompts more slowly than 1/L; trained on longer prompts, like 1/L.

    The power of L with which the risk of the best softmax layer of each length falls to that of infinite prompts,
    between 10⁹ and 10¹² tokens, within 0.15 of the one predicted; and which side of 0.97 it is on.
    """
    checks, remarks = [], []
    for covariance in data.covariance.values:
        here = data.sel(covariance=covariance)
        for L in here.length.values:
            spread, decay, predicted = (float(here[name].sel(length=L)) for name in ("spread", "decay", "predicted"))
            where = f"trained on {L} tokens, {covariance}"
            checks.append(equal(f"{where}: power of L", decay, predicted, 0.15))
            checks.append(Check(f"{where}: power of L", decay, "<" if spread > 0.5 else ">", 0.97))
        past = [
            f"{L} (θ² = {float(here.spread.sel(length=L)):.2f})"
            for L in here.length.values
            if here.spread.sel(length=L) > 0.5
        ]
        remarks.append(f"{covariance}: past the threshold when trained on {', '.join(past) or 'none'}")
    return Finding(tuple(checks), f"{'; '.join(remarks)}.")
