"""Figures 2 and 6, claims C3, C4, C7, C8 and C12: which risk does training reach?"""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import xarray as xr

from largeprompt.icl import (
    LinearRegression,
    StationaryPoint,
    bayes_risk,
    optimal_linear,
    optimal_softmax,
    stationary_points,
)
from largeprompt.lab import Progress, Run
from largeprompt.paper.chart import GREEN, GREY, OF_ATTENTION, Chart, Panel, Series, level, over_seeds
from largeprompt.paper.choice import ANISOTROPIC, COVARIANCES, ISOTROPIC, MEMBERS, Choice, covariates
from largeprompt.paper.claims import Check, Finding, claim, equal, widened, worst
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results, places, with_error
from largeprompt.paper.experiments._training import all_of, counts_of, gathered

TRAPS: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "smoke": (),
    "quick": ((ISOTROPIC, (1000,)),),
    "paper": tuple((covariance, (10, 100, 200, 500, 1000)) for covariance in COVARIANCES),
}
"""By preset and covariance, the lengths at which spurious minima of softmax attention are looked for."""


@dataclasses.dataclass(frozen=True)
class Levels(Computation):
    """By length: least risks of both attentions, the Bayes risk, the lowest spurious minimum and saddle of each.

    Those of linear attention at every length; those of softmax attention, a longer search, at the lengths `traps`; none
    at all if that is None. NaN is where none was found. A point that is neither for sure counts as a minimum.
    """

    words: ClassVar[str] = "least risks, {covariance}"
    version: ClassVar[int] = 2

    covariance: str
    lengths: tuple[int, ...]
    traps: tuple[int, ...] | None = ()
    d: int = 5
    noise: float = 0.1
    query_sigma: str | None = None

    @property
    def seconds(self) -> float:
        return 15 + 1.0 * len(self.lengths) + 12 * len(self.traps or ())

    def _compute(self, progress: Progress) -> xr.Dataset:
        task = Run(sigma=self.covariance, d=self.d, noise=self.noise, query_sigma=self.query_sigma).task()
        rows = []
        with progress.task(self.title, len(self.lengths)) as advance:
            for L in self.lengths:
                rows.append(self._at(L, task))
                advance(1, f"L = {L}")
        return xr.Dataset(
            {name: ("L", np.asarray([row[name] for row in rows])) for name in rows[0]}
            | {"floor": ((), self.noise / 2)},
            coords={"L": np.asarray(self.lengths, np.int32)},
            attrs={"covariance": self.covariance, "d": self.d, "noise": self.noise, "risk": "half mean squared error"},
        )

    def _at(self, L: int, task: LinearRegression) -> dict[str, float]:
        Bayes = bayes_risk(task, L)
        row = {"linear": float(optimal_linear(task, L).risk.value)}
        row |= {"softmax": float(optimal_softmax(task, L).risk.value)}
        row |= {"Bayes": float(Bayes.value), "Bayes_stderr": float(Bayes.stderr)}
        for kind in ("linear", "softmax"):
            searched = self.traps is not None and (kind == "linear" or L in self.traps)
            points = stationary_points(task, L, kind, starts=0) if searched else []
            row[f"{kind}_trap"] = _lowest(points, "local minimum", "undecided")
            row[f"{kind}_saddle"] = _lowest(points, "saddle")
        return row


def _lowest(points: list[StationaryPoint], *kinds: str) -> float:
    return min((float(point.risk.value) for point in points if point.kind in kinds), default=math.nan)


_MARKS = {"softmax": "o", "linear": "s"}
_CURVES = ("Bayes", *(f"{member}_{what}" for member in MEMBERS for what in ("optimum", "trap", "saddle")))
_ENDS = {"risk": "exact risk at the last parameters", "risk_stderr": "standard error of that risk, over its nodes"}
_SMOOTH = 9  # lengths from which exact curves look smooth


class FinalRisk(Experiment):
    """Risks at convergence, trapped runs as their own marks, on the exact optima and what bounds them from below."""

    words: ClassVar[str] = "Risk at the end of training, {covariates}"
    advice: ClassVar[str] = (
        "Runs that find the optimum lie on the exact curves: linear attention below softmax at every length, both "
        "above the Bayes risk and falling to the noise floor. Crosses are runs that ended in a spurious minimum; "
        "dotted lines are where theory puts the lowest minimum and the lowest saddle."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (levels(choice, self.covariance), *all_of(choice.all_runs(self.covariance, choice.protocol.lengths)))

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        known = results[levels(choice, self.covariance)]
        known = known.rename(softmax="softmax_optimum", linear="linear_optimum")
        curves = known[list(_CURVES)].rename({name: f"{name}_curve" for name in _CURVES} | {"L": "length"})
        runs = choice.all_runs(self.covariance, choice.protocol.lengths)
        ends = gathered(runs, results, *_ENDS, "verdict").isel(step=-1, drop=True)
        for name, words in _ENDS.items():
            ends[name].attrs["long_name"] = words
        return xr.merge([known.sel(L=ends.L), curves, ends], combine_attrs="drop").assign_attrs(
            covariance=self.covariance, steps=choice.protocol.steps, risk="half the mean squared error"
        )

    def chart(self, data: xr.Dataset) -> Chart:
        L, length, series = data.L.values, data.length.values, []
        for member in MEMBERS:
            hue, mark = OF_ATTENTION[member], _MARKS[member]
            here = data.sel(member=member)
            good = here.risk.where(here.verdict == "converged").values
            some = np.isfinite(good).any(axis=1)
            if some.any():
                centre, low, high = over_seeds(good[some].T)
                label = f"{member}, converged (range over seeds)"
                series.append(Series(label, L[some], centre, "measured", hue, low, high, line=False, mark=mark))
            for end, sign in (("trapped", "x"), ("settled", "s"), ("unfinished", "^"), ("diverged", "v")):
                at, seed = np.nonzero((here.verdict == end).values & np.isfinite(here.risk.values))
                if len(at):
                    risk = here.risk.values[at, seed]
                    series.append(Series(f"{member}, {end}", L[at], risk, colour=hue, line=False, mark=sign))
            at, seed = np.nonzero(np.isfinite(here.risk.values))
            shown: dict[str, Any] = {"role": "seed", "colour": hue, "line": False, "mark": ".", "in_legend": False}
            series.append(Series(f"{member}, each seed", L[at], here.risk.values[at, seed], **shown))
            best = data[f"{member}_optimum_curve"].values
            series.append(Series(f"best {member} attention", length, best, "theory", hue))
            for what, name in (("trap", "minimum"), ("saddle", "saddle")):
                found = data[f"{member}_{what}_curve"].values
                known = np.isfinite(found)
                if known.any():
                    width = 1.1 if what == "trap" else 0.6
                    style: dict[str, Any] = {"colour": hue, "dash": "dot", "mark": "_", "width": width}
                    label = f"lowest spurious {member} {name}"
                    series.append(Series(label, length[known], found[known], "theory", **style))
        series.append(Series("Bayes (ridge regression)", length, data.Bayes_curve.values, "theory", GREEN, dash="dash"))
        series.append(level("noise floor s²/2", float(data.floor), L, colour=GREY, dash="dash"))
        panel = Panel(covariates(self.covariance), "prompt length L", "final risk  ½E(ŷ−y)²", tuple(series))
        return Chart((panel,), columns=1)

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = []
        for L in (int(data.L[0]), int(data.L[-1])):
            at = data.sel(L=L)
            parts = [_ends_at(at, member) for member in MEMBERS]
            parts.append(f"Bayes {with_error(float(at.Bayes), float(at.Bayes_stderr))}")
            lines.append(f"L = {L}: {'; '.join(parts)}.")
        for member in MEMBERS:
            ends = data.verdict.sel(member=member).values
            lines.append(f"{member}: of {int((ends != '').sum())} runs {', '.join(counts_of(ends))}.")
        return lines


def _ends_at(at: xr.Dataset, member: str) -> str:
    """The mean risk of the runs that converged; their seeds have the nodes and so the error of these in common."""
    here = at.sel(member=member)
    good = here.isel(seed=here.verdict.values == "converged")
    best, n = float(at[f"{member}_optimum"]), good.sizes["seed"]
    if not n:
        return f"{member}: no run converged (best {best:.5f})"
    between = float(good.risk.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    error = math.hypot(between, float(good.risk_stderr.mean()))
    return f"{member} {with_error(float(good.risk.mean()), error)} (best {best:.{places(error)}f})"


def levels(choice: Choice, covariance: str) -> Levels:
    """What the final risks are held against."""
    traps = dict(TRAPS[choice.preset]).get(covariance, ())
    own = choice.protocol.lengths
    between = np.geomspace(own[0], own[-1], _SMOOTH).round().astype(int) if len(own) < _SMOOTH else ()
    lengths = sorted({*own, *(int(L) for L in between)})
    return Levels(covariance, tuple(lengths), traps, query_sigma=choice.conventions.query_sigma)


FIGURE_2, FIGURE_6 = FinalRisk("2"), FinalRisk("6", ANISOTROPIC)
BOTH = (FIGURE_2, FIGURE_6)
_ABOVE: dict[str, str] = {"floor": "the noise s²/2", "Bayes": "the Bayes risk of that length"}
_LONG, _NEAR = 300, 0.002  # prompts from which the risk is near to a + b/L, and how near a must be to the noise


def at_convergence(data: xr.Dataset, member: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean final risk of the runs that converged, at each length, with its error.

    Failed starts are left out, as the paper runs them again. The error has two parts. Between seeds: the spread of
    converged runs, alike at all lengths and so pooled over them, by Student's law. Common to seeds: what is left to the
    exact least risk, below which no run can end, so that it contains what longer training and better starts could
    change; or the standard error of the recorded risk, with which that is measured, if it is larger. A length without a
    converged run is unknown.
    """
    here = data.sel(member=member)
    risk = here.risk.where(here.verdict == "converged")
    counts, mean = risk.count("seed").values, risk.mean("seed")
    seeds = int(np.maximum(counts - 1, 0).sum()) + 1  # as many as a pooled spread is worth
    if seeds == 1:
        return mean.values, np.full(len(mean), math.inf)
    spread = math.sqrt(float(((risk - mean) ** 2).sum()) / (seeds - 1))
    between = widened(seeds) * spread / np.sqrt(np.maximum(counts, 1))
    nodes = here.risk_stderr.where(here.verdict == "converged").mean("seed").values
    left = np.abs(mean.values - here[f"{member}_optimum"].values)
    return mean.values, np.hypot(between, np.maximum(nodes, left))


def _lengths(data: xr.Dataset) -> list[str]:
    return [f"L = {L}" for L in data.L.values]


def _order(data: xr.Dataset) -> tuple[Check, ...]:
    lengths = _lengths(data)
    (soft, soft_error), (linear, linear_error) = (at_convergence(data, member) for member in MEMBERS)
    gap, error = soft - linear, np.hypot(soft_error, linear_error)
    falls, fall_errors = gap[:-1] - gap[1:], np.hypot(error[:-1], error[1:])
    return (
        worst("softmax − linear", gap, error, lengths),
        worst("fall of softmax − linear to the next length", falls, fall_errors, lengths),
        worst("linear − Bayes", linear - data.Bayes.values, linear_error, lengths),
    )


def _to_the_floor(data: xr.Dataset) -> tuple[Check, ...]:
    """The intercept of a + b/L through the two longest lengths."""
    checks = []
    for member in MEMBERS:
        risk, error = (values[-2:] for values in at_convergence(data, member))
        short, long = (float(L) for L in data.L.values[-2:])
        weights = np.asarray([-short, long]) / (long - short)
        intercept = float(weights @ risk) if long >= _LONG else math.nan
        label = f"{member}: a of a + b/L through L = {short:.0f} and {long:.0f}"
        off = float(np.linalg.norm(weights * error))
        checks.append(equal(label, intercept, float(data.floor), _NEAR, off))
    return tuple(checks)


def _about(data: xr.Dataset) -> str:
    """Which runs the numbers are of."""
    counts = [part for who in MEMBERS for part in counts_of(data.verdict.sel(member=who).values, f"{who} ")]
    return f"Means over the runs that converged; of all runs: {', '.join(counts)}."


_ERROR = (
    "The error has the spread between seeds and what is left to the exact least risk, which longer training and better "
    "starts could change."
)


@claim("C3", "Section 6, Figure 2", FIGURE_2, seeds=2, error=_ERROR)
def _order_of_risks(data: xr.Dataset) -> Finding:
    """At convergence linear attention beats softmax at every prompt length, neither beats ridge regression, and the gap
    between the two narrows as prompts grow.

    The mean final risk of the runs that converged at each length; the worst margin over lengths, in errors. {error}
    Linear attention above Bayes is a theorem, and checks the runs.
    """
    pairs = (data.risk.sel(member="softmax") - data.risk.sel(member="linear")).values
    against, n = int((pairs < 0).sum()), int(np.isfinite(pairs).sum())
    remark = f"{_about(data)} Seed by seed softmax ends below linear in {against} of {n} pairs, linear being trapped."
    return Finding(_order(data), remark)


@claim("C4", "Section 6, Figure 2", FIGURE_2, seeds=2, error=_ERROR)
def _level_of_the_noise(data: xr.Dataset) -> Finding:
    """As prompts grow both attentions reach the level of the label noise, s²/2.

    The intercept a of a + b/L through the mean risks of converged runs at the two longest lengths, within 0.002 of
    s²/2. {error}
    """
    return Finding(_to_the_floor(data), _about(data))


@claim("C7", "Appendix A.2.2, Figure 6", FIGURE_6, seeds=2)
def _anisotropic_alike(data: xr.Dataset) -> Finding:
    """Anisotropic covariates behave alike: both attentions approach the Bayes optimum as prompts grow, with the gap and
    the order of the isotropic case.

    As for C3 and C4, with the Kac-Murdock-Szegö covariance.
    """
    return Finding((*_to_the_floor(data), *_order(data)), _about(data))


def _excess(both: tuple[xr.Dataset, ...], member: str, above: str) -> tuple[np.ndarray, ...]:
    """The logarithm of the risk above a level, isotropic and anisotropic, by length, each with its error."""
    found = []
    for data in both:
        risk, error = at_convergence(data, member)
        excess = risk - data[above].values
        found += [np.log(np.where(excess > 0, excess, math.nan)), error / np.abs(excess)]
    return tuple(found)


@claim("C8", "Appendix A.2.2, Figure 6", *BOTH, seeds=2, error=_ERROR)
def _slower_in_length(*both: xr.Dataset) -> Finding:
    """With anisotropic covariates the risk converges more slowly to the Bayes optimum as prompts grow.

    By what factor the mean risk of converged runs, above the noise and above the Bayes risk of the same length, falls
    from the shortest prompts to the longest: isotropic over anisotropic, above 1. {error}
    """
    checks, falls_of = [], []
    short, long = both[0].L.values[[0, -1]]
    for above, name in _ABOVE.items():
        for member in MEMBERS:
            base, base_error, other, error = _excess(both, member, above)
            falls = [float(values[0] - values[-1]) for values in (base, other)]
            off = float(np.linalg.norm([base_error[0], base_error[-1], error[0], error[-1]]))
            label = f"{member}: fall of the risk above {name} from L = {short} to {long}, isotropic over anisotropic"
            ratio = math.exp(falls[0] - falls[1])
            checks.append(Check(label, ratio, ">", 1.0, ratio * off))
            falls_of.append(
                f"{member}, above {name}: {math.exp(falls[0]):.3g}-fold against {math.exp(falls[1]):.3g}-fold"
            )
    return Finding(
        tuple(checks), f"Isotropic against anisotropic: {'; '.join(falls_of)}. What this means is C12's matter."
    )


@claim("C12", "Appendix A.2.2, last paragraph", *BOTH, seeds=2, error=_ERROR)
def _longer_prompts_needed(*both: xr.Dataset) -> Finding:
    """With anisotropic covariates longer prompts may be required for a performance comparable to the isotropic one.

    Mean risk of converged runs above the Bayes risk of the same length, anisotropic over isotropic, geometric mean over
    lengths: above 1. {error}
    """
    checks, ends_of = [], []
    for member in MEMBERS:
        base, base_error, other, error = _excess(both, member, "Bayes")
        ratios, off = other - base, np.hypot(base_error, error)
        mean, mean_error = float(ratios.mean()), float(np.linalg.norm(off)) / len(off)
        label = f"{member}: risk above Bayes, anisotropic over isotropic, geometric mean over lengths"
        checks.append(Check(label, math.exp(mean), ">", 1.0, math.exp(mean) * mean_error))
        ends_of.append(f"{member} {math.exp(ratios[0]):.3f} and {math.exp(ratios[-1]):.3f}")
    ends = f"L = {both[0].L.values[0]} and {both[0].L.values[-1]}"
    return Finding(
        tuple(checks),
        f"The ratio at {ends}: {', '.join(ends_of)}. Of the exact least risks it is below 1 from L = 6 on, and "
        "tends to 1 (G21): the anisotropic risk decays more slowly because it starts lower. What takes longer is "
        "training.",
    )
