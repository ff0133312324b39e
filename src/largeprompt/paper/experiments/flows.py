"""Figure of flows, claims T7, T8 and T9: do gradient flows on long prompts follow that of the infinite prompt?"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.concentration import RateFit, fit_power_law
from largeprompt.dynamics import flow_ladder, structured_start
from largeprompt.icl import LinearRegression, covariance_named
from largeprompt.lab import Progress
from largeprompt.paper.chart import GREY, INK, Chart, Panel, Series, level, sequence
from largeprompt.paper.choice import COVARIANCES, ISOTROPIC, Choice, covariates
from largeprompt.paper.claims import Check, Finding, claim, equal, not_settled
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results, join


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The lengths whose flows are followed, and up to which time."""

    ladder: tuple[int, ...]
    flow_time: float


SIZES = {
    "smoke": Sizes((10, 100), 3.0),
    "quick": Sizes((10, 100, 1000, 10_000), 1000.0),
    "paper": Sizes((10, 100, 1000, 10_000, 100_000), 1000.0),
}
_POINTS = 41  # times recorded
_DECADES = 4  # from the first to the last


@dataclasses.dataclass(frozen=True)
class Ladder(Computation):
    """Flows at each length and at infinite length up to `time`: their distances, their risks, and the limit of these.

    `alpha` is the scale of the start; the risk averages over `draws` nodes of the query. Paper: Theorem 4.3, Lemma E.1,
    Theorem 5.2, at the settings of Appendix A.
    """

    words: ClassVar[str] = "flows by prompt length, {covariance}"

    covariance: str
    lengths: tuple[int, ...]
    time: float
    alpha: float = 0.3
    d: int = 5
    noise: float = 0.1
    draws: int = 2**12

    def __post_init__(self):
        checks.count("d", self.d)
        lengths = [checks.count("L", L) for L in self.lengths]
        if not lengths or sorted(set(lengths)) != lengths:
            raise ValueError(f"ladder is {self.lengths}; it must be prompt lengths in increasing order")
        if not 0 < self.time < math.inf:
            raise ValueError(f"time is {self.time}; it must be positive and finite")

    @property
    def seconds(self) -> float:
        stiffness = 1 if self.covariance == ISOTROPIC else 2  # eigenvalues that differ make the valley long and steep
        return 8 + 3 * stiffness * len(self.lengths) * self.draws / 2**12

    @property
    def task(self) -> LinearRegression:
        """The regression of the experiments."""
        return LinearRegression.experiment(covariance_named(self.covariance, self.d), self.noise)

    def _compute(self, progress: Progress) -> xr.Dataset:
        times = np.geomspace(self.time / 10**_DECADES, self.time, _POINTS)
        with warnings.catch_warnings():  # the range of α is the theorem's, and not needed: see the errata
            warnings.filterwarnings("ignore", message="alpha is")
            start = structured_start(self.task, self.alpha)

        options = {"draws": self.draws, "progress": progress, "name": self.title}
        rungs = flow_ladder(start, self.task, self.lengths, times, **options)
        curves: dict[str, tuple[Any, str]] = {
            "distance": (rungs.distance, "distance of the parameters to the infinite-prompt flow"),
            "risk": (rungs.risk, "risk at length L along the flow at length L"),
            "stderr": (rungs.risk_stderr, "standard error of the risk over nodes of the query"),
        }
        infinite = np.asarray(rungs.infinite.risk), {"long_name": "risk of the infinite prompt along its own flow"}
        return xr.Dataset(
            {name: (("L", "t"), np.asarray(values), {"long_name": words}) for name, (values, words) in curves.items()}
            | {"infinite": ("t", *infinite), "floor": ((), self.noise / 2)},
            coords={"L": np.asarray(self.lengths, np.int32), "t": times},
            attrs={
                "paper": "arXiv:2512.11784",
                "d": self.d,
                "noise": self.noise,
                "alpha": self.alpha,
                "risk": "half the mean squared error",
            },
        )


def by_covariance(ladders: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """The ladders of several covariances as one dataset."""
    curves = ["distance", "risk", "stderr", "infinite"]
    data = xr.concat(ladders.values(), "covariance", data_vars=curves, join="exact", combine_attrs="drop_conflicts")
    return data.assign_coords(covariance=list(ladders))


class Flows(Experiment):
    """Distances to the infinite-prompt flow, and risks, over time and by length, for both covariances."""

    words: ClassVar[str] = "Softmax flows from the structured start, by prompt length"
    advice: ClassVar[str] = (
        "At a fixed time the distance to the infinite-prompt flow falls with L (Lemma E.1). At a fixed L it grows: "
        "the finite-L risk has its minimiser elsewhere in the valley rA = Σ⁻¹, reached after a time of order L. "
        "The risks end above that of the infinite prompt by less and less (Theorems 4.3 and 5.2)."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return tuple(ladder(choice, covariance) for covariance in COVARIANCES)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        return by_covariance({covariance: results[ladder(choice, covariance)] for covariance in COVARIANCES})

    def chart(self, data: xr.Dataset) -> Chart:
        return chart(data)

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = []
        for covariance in data.covariance.values:
            here, end = data.sel(covariance=covariance), float(data.t[-1])
            early = float(data.t.sel(t=end / 1000, method="nearest"))
            risks = [f"{float(risk):.5f} at L = {int(L)}" for L, risk in zip(data.L, here.risk.isel(t=-1), strict=True)]
            fit = fall(here)
            tail = f"; the excess falls like L^{fit.slope:.2f} at the end".replace("-", "−") if fit else ""
            lines.append(
                f"{covariates(str(covariance))}: risks at t = {end:g} are {join(risks)}, against "
                f"{float(here.infinite[-1]):.5f} of the infinite prompt{tail}."
            )
            for time in (early, end):
                distance = [f"{float(value):.2e}" for value in here.distance.sel(t=time)]
                lines.append(f"Distance of the parameters at t = {time:.4g}: {join(distance)}.")
        return lines


def ladder(choice: Choice, covariance: str) -> Ladder:
    """What the preset follows."""
    sizes = SIZES[choice.preset]
    return Ladder(covariance, sizes.ladder, sizes.flow_time, draws=min(choice.protocol.record.draws, 2**12))


def excesses(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """By how much each flow ends above the infinite one, and the standard error of that."""
    return (data.risk - data.infinite).isel(t=-1).values, data.stderr.isel(t=-1).values


def fall(data: xr.Dataset) -> RateFit | None:
    """The power of L by which that falls between the two longest prompts; None where it is not above both times."""
    excess, error = (part[-2:] for part in excesses(data))
    return fit_power_law(data.L.values[-2:], excess, error) if len(excess) > 1 and np.all(excess > 0) else None


def chart(data: xr.Dataset) -> Chart:
    """Of each covariance two panels: distances and risks over time."""
    panels = []
    for covariance in data.covariance.values:
        here, name = data.sel(covariance=covariance), covariates(str(covariance))
        lengths = list(zip(data.L.values, sequence(data.sizes["L"]), strict=True))
        apart = [Series(f"L = {L}", data.t.values, here.distance.sel(L=L).values, colour=hue) for L, hue in lengths]
        risks = []
        for L, hue in lengths:
            risk, off = here.risk.sel(L=L).values, 2 * here.stderr.sel(L=L).values
            risks.append(Series(f"L = {L}", data.t.values, risk, "measured", hue, risk - off, risk + off))
        risks.append(Series("L = ∞", data.t.values, here.infinite.values, "theory", INK, dash="dash"))
        risks.append(level("noise floor s²/2", float(data.floor), data.t.values, colour=GREY, dash="dot"))
        time = "time t of the gradient flow"
        panels.append(Panel(f"distance to the infinite flow\n{name}", time, "‖θ_L(t) − θ_∞(t)‖", tuple(apart)))
        panels.append(Panel(f"risk along the flow\n{name}", time, "R_L(θ_L(t))", tuple(risks)))
    return Chart(tuple(panels), columns=2, share_y=False)


FLOWS = Flows("flows")
_NEAR = 1e-3  # how near risks must be to count as one: 2 % of the floor, 0.2 % of the risk of predicting nothing
_NODES = 0.03  # relative error of a distance that fixed nodes of the query leave: 2^12 of them at most 0.02
_EARLIER = (1000, 100, 10)  # parts of the time followed up to which trajectories are compared


def _ladders(data: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    """Those of each covariance, with what to call it."""
    return [(covariates(str(name)), data.sel(covariance=name)) for name in data.covariance.values]


def _too_short(ladders: list[tuple[str, xr.Dataset]]) -> Finding | None:
    """For a time or a ladder that cannot stand for its limit."""
    left = max(float(data.infinite[-1] - data.floor) for _, data in ladders)
    if left > _NEAR:
        end = float(ladders[0][1].t[-1])
        return not_settled(f"Flows to t = {end:g} are too short: the infinite prompt's has {left:.3g} yet to fall.")
    rungs = ladders[0][1].sizes["L"]
    return None if rungs > 1 else not_settled(f"A ladder of {rungs} length shows no trend.")


@claim("T7", "Theorem 4.3", FLOWS)
def _final_risks(flows: xr.Dataset) -> Finding:
    """For every ε, gradient flow on long enough prompts ends at a risk at most ε above that at which the
    infinite-prompt flow ends.

    Risks of softmax flows from Assumption 5.1 at the last time, above that of the infinite prompt, along a ladder of
    lengths and for both covariances: they fall from each length to the next.
    """
    ladders = _ladders(flows)
    if short := _too_short(ladders):
        return short
    rises, exponents, remarks = [], [], []
    for name, data in ladders:
        L, (excess, error) = data.L.values, excesses(data)
        step = int(np.argmax(np.diff(excess)))
        where = f"{name}: change of the final risk, above the infinite flow's, from L = {L[step]} to {L[step + 1]}"
        off = math.hypot(error[step], error[step + 1])
        rises.append(Check(where, float(np.diff(excess)[step]), "<", 0.0, off))
        if fit := fall(data):  # a risk at most that of the infinite flow has no rate, and is no failure
            where = f"{name}: exponent in L of the final risk above the infinite flow's, from L = {L[-2]} to {L[-1]}"
            exponents.append(Check(where, fit.slope, "<", 0.0, fit.stderr))
        values = [f"{value:.2e} ± {off:.0e}" for value, off in zip(excess, error, strict=True)]
        remarks.append(f"{name}: excess {join(values)} at L = {join([str(length) for length in L])}.")
    remarks.append("Risks never rise along a flow: at the last time they lie above the limit that the theorem bounds.")
    return Finding((*exponents, *rises), " ".join(remarks))


@claim("T8", "Lemma E.1", FLOWS)
def _trajectories(flows: xr.Dataset) -> Finding:
    """On every interval [0, T] the parameters of the finite-prompt flow tend to those of the infinite-prompt flow as L
    grows.

    Largest distance of the parameters on [0, T], for three T, at the longest prompts of the ladder against those
    before.
    """
    ladders = _ladders(flows)
    L = ladders[0][1].L.values
    if len(L) < 2:
        return not_settled(f"A ladder of {len(L)} length shows no trend.")
    checks, remarks = [], []
    for name, data in ladders:
        for part in _EARLIER:
            end = float(data.t.sel(t=float(data.t[-1]) / part, method="nearest"))
            short, long = (float(data.distance.isel(L=i).sel(t=slice(0, end)).max()) for i in (-2, -1))
            where = f"{name}, t ≤ {end:.3g}: log₁₀ of the largest distance at L = {L[-1]} over that at L = {L[-2]}"
            checks.append(Check(where, math.log10(long / short), "<", 0.0, math.sqrt(2) * _NODES / math.log(10)))
        late = join([f"{float(value):.2f}" for value in data.distance.isel(t=-1)])
        remarks.append(f"{name}: distances {late} at t = {float(data.t[-1]):g}.")
    remarks.append(
        "At a fixed L the distance grows with t: the minimiser at L tokens lies elsewhere in the valley rA = Σ⁻¹, and "
        "is reached after a time of order L. The limits in t and in L do not commute for parameters, which the paper "
        "leaves open after Theorem 4.3; they do for the risk."
    )
    return Finding(tuple(checks), " ".join(remarks))


def at_infinity(L: np.ndarray, risk: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    """What risks that are linear in 1/L for long prompts tend to; the error has what a bend in 1/L would change."""

    def through(last: int) -> tuple[float, float]:
        x = 1 / L[-last:].astype(float)
        weights = [math.prod(other / (other - own) for other in x if other != own) for own in x]
        return float(np.dot(weights, risk[-last:])), float(np.linalg.norm(weights * error[-last:]))

    value, spread = through(2)
    return value, math.hypot(spread, value - through(3)[0]) if len(L) > 2 else spread


@claim("T9", "Theorem 5.2", FLOWS)
def _bayes_in_the_limit(flows: xr.Dataset) -> Finding:
    """From Assumption 5.1 the risk at which softmax attention ends on in-context linear regression tends to the Bayes
    risk of the infinite prompt as L grows.

    Final risks along the ladder, extrapolated to L = ∞, and that of the infinite-prompt flow, against s²/2.
    """
    ladders = _ladders(flows)
    if short := _too_short(ladders):
        return short
    checks = []
    for name, data in ladders:
        end, floor = data.isel(t=-1), float(data.floor)
        value, error = at_infinity(data.L.values, end.risk.values, end.stderr.values)
        where = f"{name}: final risk extrapolated to L = ∞"
        checks.append(equal(where, value, floor, _NEAR, error))
    for name, data in ladders:
        where = f"{name}: final risk of the infinite-prompt flow"
        checks.append(equal(where, float(data.infinite[-1]), float(data.floor), _NEAR))
    alpha = float(ladders[0][1].alpha)
    remark = (
        f"With label noise of variance s² the Bayes risk is s²/2 (erratum T16); α = {alpha:g} lies in the printed "
        "range, which is not needed (G14). Extrapolated in 1/L from the two longest prompts; the error has what a "
        "third changes."
    )
    return Finding(tuple(checks), remark)
