"""Figures 4 and 8, claims C6 and C10: how does the risk fall along training, and does it follow the population flow?"""

import dataclasses
import math
from typing import ClassVar

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from scipy.signal import find_peaks

from largeprompt.icl import risk_function
from largeprompt.lab import Progress, Run
from largeprompt.paper.chart import GREEN, OF_ATTENTION, Chart, Panel, Series, level
from largeprompt.paper.choice import ANISOTROPIC, MEMBERS, Choice
from largeprompt.paper.claims import Check, Finding, claim, mean_of_counts, mean_over_seeds, not_settled
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results, places
from largeprompt.paper.experiments._training import (
    ALL_SEEDS,
    COURSES,
    counts_of,
    followed,
    gathered,
    median_of_seeds,
    recorded,
    too_short,
)


@dataclasses.dataclass(frozen=True)
class Flow(Computation):
    """The exact risk along the population flow of one member of a run, at its recorded steps; NaN after its end."""

    words: ClassVar[str] = "population flow, {member}, {run.sigma}, L = {run.L}, seed {run.weight_seed}"

    run: Run
    member: str

    @property
    def seconds(self) -> float:
        return 5.0 if self.member == "softmax" else 1.0

    def _compute(self, progress: Progress) -> xr.Dataset:
        steps, flow = followed(self.run, self.member, self.run.L)
        # by nodes other than those it was followed with, which it fits a little
        function = risk_function(flow.layer(0), self.run.task(), self.run.L, jax.random.key(1), draws=2**14)
        risk, error = _risks(function, flow.layers)
        return recorded(self.run, steps, flow, {"risk": np.asarray(risk), "risk_stderr": np.asarray(error)})


@eqx.filter_jit
def _risks(function, layers):
    arrays, static = eqx.partition(layers, eqx.is_inexact_array)
    return jax.lax.map(lambda one: function.value_and_error(eqx.combine(one, static)), arrays)


class Courses(Experiment):
    """Exact risks along SGD, beside those along the population gradient flow from the same start."""

    words: ClassVar[str] = "Risk along training, {covariates}"
    advice: ClassVar[str] = (
        "SGD follows the exact population flow from its start, plateau by plateau, down to the least risk of its "
        "attention or to a spurious minimum above it. Dashed: the flow; thin: each seed."
    )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (*choice.runs(self.covariance, COURSES[choice.preset]), *_flows(choice, self.covariance).values())

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        lengths = COURSES[choice.preset]
        runs = {L: choice.runs(self.covariance, (L,)) for L in lengths}
        along = gathered(runs, results, "risk", "risk_stderr", "verdict", "optimum", "Bayes")
        flow, cut = np.full_like(along.risk, np.nan), []
        for (member, L, seed), item in _flows(choice, self.covariance).items():
            flow[MEMBERS.index(member), lengths.index(L), seed] = results[item].risk.values
            if results[item].attrs.get("cut_short"):
                cut.append(f"{member}, L = {L}, seed {seed}: {results[item].attrs['cut_short']}")
        first = along.isel(seed=0, drop=True)
        return xr.Dataset(
            {
                "risk": along.risk.assign_attrs(long_name="exact risk along SGD"),
                "flow": (along.risk.dims, flow, {"long_name": "exact risk along the population flow, NaN if unknown"}),
                "risk_stderr": along.risk_stderr.isel(step=-1).assign_attrs(long_name="its standard error"),
                "verdict": along.verdict,
                "optimum": first.optimum,
                "Bayes": first.Bayes,
            },
            attrs={
                "covariance": self.covariance,
                "steps": choice.protocol.steps,
                "risk": "half the mean squared error",
                "flows_cut_short": "; ".join(cut),
            },
        )

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(data.sel(L=L)) for L in data.L.values))

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = []
        for L in data.L.values:
            at = data.sel(L=L)
            ends = [_ends(at.sel(member=member), member) for member in MEMBERS]
            lines.append(f"L = {L}, final risk of each seed: {'; '.join(ends)}.")
        off = (np.abs(data.risk - data.flow) / data.flow).values
        followed = off[np.isfinite(off).all(axis=-1)].max(axis=-1)
        if len(followed):
            lines.append(
                f"Of {len(followed)} runs beside their population flow, SGD is never further from it than "
                f"{100 * np.median(followed):.1f} % of the risk in half, {100 * followed.max():.0f} % in all."
            )
        if data.attrs.get("flows_cut_short"):
            lines.append(f"Population flows that end before training does: {data.attrs['flows_cut_short']}.")
        return lines


def _ends(here: xr.Dataset, member: str) -> str:
    """The last risk of each run, and how it ended where it did not converge."""
    known = "risk_stderr" in here  # data of an earlier version do not have it
    error = float(np.nan_to_num(here.risk_stderr.values).max()) if known else 0.0
    digits = places(error)
    ends = ["" if verdict == "converged" else f" {verdict}" for verdict in here.verdict.values]
    risks = [f"{float(risk[-1]):.{digits}f}{end}".rstrip() for risk, end in zip(here.risk, ends, strict=True)]
    each = f" (each ± {error:.{digits}f}, " if error else " ("
    return f"{member} {', '.join(risks)}{each}least {float(here.optimum):.{digits}f})"


def _flows(choice: Choice, covariance: str) -> dict[tuple[str, int, int], Flow]:
    """The population flows of the first seeds, by attention, length and seed."""
    seeds = min(choice.protocol.seeds, choice.protocol.flow_seeds)
    return {
        (member, L, seed): Flow(run, member)
        for member in MEMBERS
        for L in COURSES[choice.preset]
        for seed, run in enumerate(choice.runs(covariance, (L,), seeds))
    }


def _panel(data: xr.Dataset) -> Panel:
    later = data.sel(step=data.step[data.step >= data.steps / 5000])  # nothing happens before
    steps, series = later.step.values, []
    for member in MEMBERS:
        hue, here = OF_ATTENTION[member], later.sel(member=member)
        names = f"{member} (median, range over seeds)", f"{member}, seed {{}}"
        series += median_of_seeds(names[0], steps, here.risk.values, hue, names[1])
        followed = [seed for seed in here.seed.values if np.isfinite(here.flow.sel(seed=seed).values).any()]
        whose = "" if len(followed) == here.sizes["seed"] else f" of seed {', '.join(map(str, followed))}"
        for seed in followed:
            flow, label = here.flow.sel(seed=seed).values, f"{member}, population flow{whose}"
            series.append(Series(label, steps, flow, "theory", hue, dash="dash", width=1.0))
        series.append(level(f"best {member} attention", float(here.optimum), steps, colour=hue, dash="dot"))
    series.append(level("Bayes (ridge regression)", float(data.Bayes), steps, colour=GREEN, dash="dash"))
    return Panel(f"L = {int(data.L)}", "step", "risk  ½E(ŷ−y)²", tuple(series))


FIGURE_4, FIGURE_8 = Courses("4"), Courses("8", ANISOTROPIC)

_LEFT = 0.01  # of the whole fall, at which a run counts as having converged
_DECADES, _GRID = 3.7, 75  # the last decades of steps, in which risks fall, and points on them
_PROMINENT = 0.1  # of the highest speed: what counts as a fall of its own


def _fall_steps(risk: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """The step by which the fall of the risk is done, up to a hundredth, and how far apart steps are recorded there.

    Between recorded steps risks are taken to be linear. Unknown of a diverged run.
    """
    if not np.isfinite(risk).all():
        return math.nan, math.nan
    low = risk[-1] + _LEFT * (risk[0] - risk[-1])
    after = max(int(np.argmax(risk <= low)), 1)
    (left, right), (before, now) = risk[after - 1 : after + 1], steps[after - 1 : after + 1]
    share = (left - low) / (left - right) if left > right else 1.0
    return float(before + min(max(share, 0.0), 1.0) * (now - before)), float(now - before)


def _falls(risk: np.ndarray, steps: np.ndarray) -> float:
    """How often the risk falls, with a plateau between, over the logarithm of steps; unknown of a diverged run."""
    if not np.isfinite(risk).all():
        return math.nan
    at = np.linspace(math.log10(steps[-1]) - _DECADES, math.log10(steps[-1]), _GRID)
    speed = -np.gradient(np.interp(at, np.log10(np.maximum(steps, 1)), risk))
    peaks, _ = find_peaks(np.concatenate([[0.0], speed, [0.0]]), prominence=_PROMINENT * speed.max())
    return float(len(peaks))


@claim("C6", "Appendix A.2.1, Figure 4", ALL_SEEDS[0], figures=("4",), seeds=3)
def _converges_early(data: xr.Dataset) -> Finding:
    """With isotropic covariates training converges before 50 000 steps.

    Step by which 99 % of the fall of the risk is done, mean over all seeds, for each attention and length. The error is
    over seeds, and has the distance of recorded steps.
    """
    if short := too_short(data):
        return short
    checks, ends = [], []
    for L in data.L.values:
        for member in MEMBERS:
            runs = data.sel(L=L, member=member).isel(seed=slice(int(data.seeds.sel(L=L))))
            falls = np.asarray([_fall_steps(risk, data.step.values.astype(float)) for risk in runs.risk.values])
            centre, error = mean_over_seeds(falls[:, 0], rounding=float(falls[:, 1].max()))
            label = f"{member}, L = {L}: step by which 99 % of the fall is done, mean over {len(falls)} seeds"
            checks.append(Check(label, centre, "<", 50_000.0, error))
            ends.append(runs.verdict.values)
    checks.sort(key=lambda check: check.margin / max(check.error, 1e-9))
    counts = counts_of(np.concatenate(ends))
    return Finding(tuple(checks), f"Of all runs, whatever they fall to: {', '.join(counts)}.")


@claim("C10", "Appendix A.2.2, Figure 8", *ALL_SEEDS, figures=("4", "8"), seeds=10)
def _irregular_when_anisotropic(*both: xr.Dataset) -> Finding:
    """With anisotropic covariates the risk falls more irregularly along training.

    Separate falls of the risk over the logarithm of steps (peaks of its speed, a tenth of the highest or more),
    anisotropic less isotropic from the same seeds, mean over attentions, lengths and seeds. Its error is over seeds,
    and that which it would have if both were alike: fewer than ten seeds cannot settle it.
    """
    if short := too_short(both[0]):
        return short
    lengths = both[0].L.values
    counts = np.full((len(both), max(data.sizes["seed"] for data in both), len(lengths)), math.nan)
    for i, data in enumerate(both):
        for j, n in enumerate(data.seeds.values):
            for k in range(n):
                falls = [_falls(risk, data.step.values) for risk in data.risk.values[:, j, k]]
                counts[i, k, j] = np.mean(falls)
            if np.isnan(counts[i, :n, j]).any():
                return not_settled(f"A run at L = {lengths[j]} diverged.")
    more = counts[1] - counts[0]
    difference, error = mean_of_counts(more, 0.0, 1 / len(MEMBERS))
    pairs, seeds = int(np.isfinite(more).sum()), int(np.isfinite(more).any(axis=1).sum())
    label = f"separate falls of a run, anisotropic − isotropic, mean over {pairs} pairs from {seeds} seeds"
    means = ", ".join(
        f"{np.nanmean(counts[1, :, j]):.1f} against {np.nanmean(counts[0, :, j]):.1f} at L = {L}"
        for j, L in enumerate(lengths)
    )
    return Finding(
        (Check(label, difference, ">", 0.0, error),),
        f"Falls with a plateau between, anisotropic against isotropic: {means}.",
    )
