"""Figures of diversity and phases, claims F1 to F3: how many tasks, prompts and steps does in-context learning take?

Statements of other papers on finitely many tasks (Lu et al., arXiv 2405.11751) and finitely many covariates (Huang,
Cheng and Liang, arXiv 2310.05249), on this package's exact risks and flows.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from largeprompt.dynamics import attention_flow
from largeprompt.icl import (
    FiniteTasks,
    LinearRegression,
    RegressionOn,
    asymptotic_risks,
    bayes_risk,
    discrete_risk,
    diversity_risk,
    identity,
    ridge_pretrained,
    risk,
)
from largeprompt.lab import Progress
from largeprompt.measures import Empirical
from largeprompt.paper.chart import BLUE, GREEN, VERMILION, Chart, Panel, Series, level, sequence
from largeprompt.paper.choice import Choice
from largeprompt.paper.claims import Check, Finding, claim, worst
from largeprompt.paper.experiment import Computation, Experiment, Measurement, Needed, Results


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Draws of tasks, fits at the smaller and at the larger dimension, prompts of the discrete posterior."""

    diversity_draws: int
    fits: tuple[int, int]
    posterior_prompts: int
    features: tuple[int, ...]


SIZES = {
    "smoke": Sizes(4, (8, 4), 64, (4, 8)),
    "quick": Sizes(12, (120, 60), 256, (8, 24)),
    "paper": Sizes(100, (400, 100), 4096, (8, 16, 32, 64)),
}
NOISE = 0.1


@dataclasses.dataclass(frozen=True)
class Diversity(Computation):
    """Risks of the best linear attention for m = κd tasks, own and fresh, by κ and length L = αd of prompts."""

    words: ClassVar[str] = "risks by number of tasks, {draws} draws"

    draws: int
    prompts: int
    d: int = 20
    alphas: tuple[int, ...] = (10, 100)
    tasks: tuple[int, ...] = (5, 10, 20, 40, 200)

    def _compute(self, progress: Progress) -> xr.Dataset:
        law, shape = LinearRegression.experiment(identity(self.d), NOISE), (len(self.alphas), len(self.tasks))
        found = {name: np.zeros((*shape, 2)) for name in ("average", "stderr", "limit")}
        posterior, keys = np.zeros((*shape, 2)), jax.random.split(jax.random.key(0), len(self.tasks))
        with progress.task(self.title, math.prod(shape)) as advance:
            for (i, alpha), (j, m) in ((a, b) for a in enumerate(self.alphas) for b in enumerate(self.tasks)):
                L = alpha * self.d
                risks = diversity_risk(law, L, m, keys[j], draws=self.draws)
                limits = asymptotic_risks(alpha, m / self.d, math.inf, NOISE)
                found["average"][i, j] = [float(each.value) for each in risks]
                found["stderr"][i, j] = [float(each.stderr) for each in risks]
                found["limit"][i, j] = [float(each.value) for each in limits]
                if i == 0:
                    own = FiniteTasks.drawn(keys[j], law, m)
                    known = discrete_risk(own, L, keys[j], on=law, prompts=self.prompts)
                    posterior[i, j] = float(known.value), float(known.stderr)
                advance(1, f"α = {alpha}, m = {m}")
        bayes = [float(bayes_risk(law, alpha * self.d).value) for alpha in self.alphas]
        return xr.Dataset(
            {name: (("alpha", "m", "on"), values) for name, values in found.items()}
            | {"posterior": ("m", posterior[0, :, 0]), "posterior_stderr": ("m", posterior[0, :, 1])}
            | {"bayes": ("alpha", bayes)},
            {"alpha": list(self.alphas), "m": list(self.tasks), "on": ["own", "fresh"]},
            {"d": self.d, "noise": NOISE, "draws": self.draws},
        )


@dataclasses.dataclass(frozen=True)
class Fits(Computation):
    """Linear attention fitted to n = τd² sampled prompts of d/2 tasks by least squares, at two dimensions."""

    words: ClassVar[str] = "fits to few prompts"

    fits: tuple[int, int]
    dims: tuple[int, int] = (9, 18)
    taus: tuple[float, ...] = (0.4, 0.9, 3.0)
    alpha: int = 2

    @property
    def seconds(self) -> float:
        return 4 + 1e-2 * self.fits[0] + 0.1 * self.fits[1]

    def _compute(self, progress: Progress) -> xr.Dataset:
        value, error = np.zeros((2, 2, len(self.taus), 2))
        with progress.task(self.title, sum(self.fits)) as advance:
            for i, (d, fits) in enumerate(zip(self.dims, self.fits, strict=True)):
                law, rows = LinearRegression.experiment(identity(d), NOISE), []
                for key in jax.random.split(jax.random.key(d), fits):
                    tasks = FiniteTasks.drawn(key, law, d // 2)
                    rows.append([_fitted(tasks, self.alpha * d, tau, key) for tau in self.taus])
                    advance(1, f"d = {d}")
                value[i], error[i] = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1) / math.sqrt(fits)
        limit = [[float(r.value) for r in asymptotic_risks(self.alpha, 0.5, tau, NOISE)] for tau in self.taus]
        return xr.Dataset(
            {"risk": (("d", "tau", "on"), value), "stderr": (("d", "tau", "on"), error)}
            | {"limit": (("tau", "on"), np.array(limit))},
            {"d": list(self.dims), "tau": list(self.taus), "on": ["own", "fresh"]},
            {"alpha": self.alpha, "kappa": 0.5, "noise": NOISE},
        )


def _fitted(tasks: FiniteTasks, L: int, tau: float, key) -> tuple[float, float]:
    d = tasks.regression.d
    layer = ridge_pretrained(tasks, L, round(tau * d * d), jax.random.fold_in(key, round(10 * tau)))
    return float(risk(layer, tasks, L).value), float(risk(layer, tasks.regression, L).value)


@dataclasses.dataclass(frozen=True)
class Phases(Computation):
    """Flows of attention on K orthonormal covariates, balanced, and with one in half of the tokens."""

    words: ClassVar[str] = "flows of attention on finitely many covariates"

    features: tuple[int, ...]
    length: int = 20  # prompts have so many times K tokens

    @property
    def seconds(self) -> float:
        return 4 + 3.0 * len(self.features)

    def _compute(self, progress: Progress) -> xr.Dataset:
        names = ("frequent", "rare", "switch", "balanced")
        times = {name: np.zeros(len(self.features)) for name in names}
        grid, short, weights = np.geomspace(3e-2, 12, 120), math.nan, np.zeros(0)
        with progress.task(self.title, len(self.features)) as advance:
            for i, K in enumerate(self.features):
                clock = K * K * grid
                even = RegressionOn(Empirical(np.eye(K), np.full(K, 1 / K)))
                uneven = RegressionOn(Empirical(np.eye(K), np.r_[0.5, np.full(K - 1, 0.5 / (K - 1))]))
                times["balanced"][i] = attention_flow(even, math.inf, clock).first(0.5)[0]
                if i == 0:
                    short = attention_flow(even, self.length * K, clock).first(0.5)[0] / times["balanced"][i]
                flow = attention_flow(uneven, math.inf, clock)
                times["frequent"][i], times["rare"][i] = flow.first(0.75)[:2]
                falling, rising = -np.asarray(flow.velocity[:, 0, 1]), np.asarray(flow.velocity[:, 1, 1])
                weights = np.asarray(flow.attention)
                times["switch"][i] = clock[np.argmax(rising > falling)]
                advance(1, f"K = {K}")
        K = self.features[-1]
        shown = {
            "frequent query": weights[:, 0, 0],
            "rare query": weights[:, 1, 1],
            "rare on frequent": weights[:, 0, 1],
        }
        return xr.Dataset(
            {name: ("K", value) for name, value in times.items()}
            | {"attention": (("what", "t"), list(shown.values()))}
            | {"short": ((), short)},
            {"K": list(self.features), "t": K * K * grid, "what": list(shown)},
            {"length": self.length},
        )


class RisksByTasks(Experiment):
    """Risk on fresh tasks by number of training tasks: exact at one dimension, and in the limit."""

    words: ClassVar[str] = "The risk on fresh tasks, by the number of tasks in training"
    advice: ClassVar[str] = (
        "Past as many tasks as dimensions the risk of linear attention falls to that of training on all tasks. The "
        "discrete posterior, the best predictor on its own tasks, does not learn fresh ones."
    )

    def _tasks(self, choice: Choice) -> Diversity:
        sizes = SIZES[choice.preset]
        return Diversity(sizes.diversity_draws, sizes.posterior_prompts)

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (self._tasks(choice),)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        return results[self._tasks(choice)]

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(data.sel(alpha=alpha)) for alpha in data.alpha.values), columns=2)

    def summary(self, data: xr.Dataset) -> list[str]:
        here = data.isel(alpha=-1).sel(on="fresh")
        first, last = (f"{float(here.average[i]):.3f} for {int(here.m[i])}" for i in (0, -1))
        return [
            f"d = {data.attrs['d']}, L = {int(here.alpha)}d: the risk on fresh tasks is {first} tasks and {last}.",
            f"Gap between fresh and own tasks at m = d/2: {join_gaps(data, 0.5)}; at m = 2d: {join_gaps(data, 2.0)}.",
        ]


def join_gaps(data: xr.Dataset, kappa: float) -> str:
    """The gaps at each length, in words."""
    gaps, _ = _gaps(data, kappa)
    return ", ".join(f"{gap:.4f} (L = {int(alpha)}d)" for gap, alpha in zip(gaps, data.alpha.values, strict=True))


def _panel(data: xr.Dataset) -> Panel:
    m, series = data.m.values, []
    for on, colour in (("fresh", BLUE), ("own", VERMILION)):
        here = data.sel(on=on)
        off = 2 * here.stderr.values
        y = here.average.values
        series.append(Series(f"linear attention, {on} tasks", m, y, "measured", colour, y - off, y + off, False, "o"))
        series.append(Series("limit of large d", m, here.limit.values, "theory", colour))
    if int(data.alpha) == 10:
        y, off = data.posterior.values, 2 * data.posterior_stderr.values
        series.append(Series("discrete posterior, fresh tasks", m, y, "measured", GREEN, y - off, y + off, False, "s"))
    series.append(level("Bayes, all tasks", float(data.bayes), m))
    return Panel(f"L = {int(data.alpha)}d", "number of tasks m", "risk", tuple(series))


class AttentionInPhases(Experiment):
    """Attention of a frequent and of a rare query along training."""

    words: ClassVar[str] = "Attention on orthonormal covariates along training, one of them in half of the tokens"
    advice: ClassVar[str] = (
        "A query of the frequent covariate attends to it first. A rare query first takes its attention off the "
        "frequent covariate, and finds its own much later."
    )

    def _phases(self, choice: Choice) -> Phases:
        return Phases(SIZES[choice.preset].features)

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (self._phases(choice),)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        return results[self._phases(choice)]

    def chart(self, data: xr.Dataset) -> Chart:
        curves = [
            Series(str(what), data.t.values, data.attention.sel(what=what).values, "measured", colour)
            for what, colour in zip(data.what.values, (BLUE, VERMILION, GREEN), strict=True)
        ]
        names = ("balanced", "frequent", "switch", "rare")
        colours = sequence(len(names))
        times = [
            Series(name, data.K.values, data[name].values, "measured", colour, mark="o")
            for name, colour in zip(names, colours, strict=True)
        ]
        return Chart(
            (
                Panel(f"K = {int(data.K[-1])}", "time", "attention", tuple(curves), y_log=False),
                Panel("times of the phases", "number of covariates K", "time", tuple(times)),
            ),
            columns=2,
            share_y=False,
        )

    def summary(self, data: xr.Dataset) -> list[str]:
        last = data.isel(K=-1)
        return [
            f"K = {int(last.K)}: the frequent query puts 0.75 of its attention on its own covariate from "
            f"t = {float(last.frequent):.0f} on, a rare one from t = {float(last.rare):.0f} on; at "
            f"t = {float(last.switch):.0f} what changes fastest for a rare query switches.",
            f"Balanced covariates have half of the attention at time {float(last.balanced / last.K**2):.2f} K².",
        ]


DIVERSITY = RisksByTasks("diversity")
PHASES = AttentionInPhases("phases")
FITS = Measurement("fits", computation=lambda choice: Fits(SIZES[choice.preset].fits))
_PEAK = 0.9
_NEAR = 0.25  # how near extrapolated risks must be to the limit, relative


@claim("F1", "Lu et al. (arXiv 2405.11751), Result 1", FITS, role="context")
def _double_descent(data: xr.Dataset) -> Finding:
    """The risks of linear attention after n = τd² prompts tend to the published limit, with a peak at τ = 1.

    Away from the peak fits at two dimensions, extrapolated as 1/d, over the limit: within 0.25 of 1, the worst of all.
    And how much larger the risk on fresh tasks is near the peak, at τ = 0.9, than before and after.
    """
    small, large = data.isel(d=0), data.isel(d=1)
    off_peak = data.tau != _PEAK
    ratio = ((2 * large.risk - small.risk) / data.limit).sel(tau=off_peak).values.ravel()
    error = (np.hypot(2 * large.stderr, small.stderr) / data.limit).sel(tau=off_peak).values.ravel()
    labels = [f"τ = {tau:g}, {on} tasks" for tau in data.tau.values[off_peak] for on in data.on.values]
    far = worst("extrapolated over limit, off 1", np.abs(ratio - 1), error, labels, "<", _NEAR)
    fresh = large.sel(on="fresh")
    peak = [
        Check(
            f"fresh risk at τ = {_PEAK} over that at τ = {tau:g}",
            float(fresh.risk.sel(tau=_PEAK) / fresh.risk.sel(tau=tau)),
            ">",
            1.0,
            float(fresh.stderr.sel(tau=_PEAK) / fresh.risk.sel(tau=tau)),
        )
        for tau in (0.4, 3.0)
    ]
    return Finding((far, *peak))


def _gaps(data: xr.Dataset, kappa: float) -> tuple[np.ndarray, np.ndarray]:
    """Fresh less own risk by length at m = κd, and their errors."""
    here = data.sel(m=round(kappa * data.attrs["d"]))
    gap = (here.average.sel(on="fresh") - here.average.sel(on="own")).values
    return gap, np.hypot(here.stderr.sel(on="fresh").values, here.stderr.sel(on="own").values)


@claim("F2", "Lu et al. (arXiv 2405.11751), abstract", DIVERSITY, role="context")
def _transition(data: xr.Dataset) -> Finding:
    """With fewer tasks than dimensions training memorises them; with more, it learns to learn fresh ones.

    The gap between fresh and own tasks at the longer prompts over that at the shorter ones: it stays for half as many
    tasks as dimensions (above 0.8), and goes for twice as many (below 0.2).
    """
    below, of_below = _share_left(data, 0.5)
    above, of_above = _share_left(data, 2.0)
    return Finding(
        (
            Check("m = d/2: share of the gap that is left", below, ">", 0.8, of_below),
            Check("m = 2d: share of the gap that is left", above, "<", 0.2, of_above),
        )
    )


def _share_left(data: xr.Dataset, kappa: float) -> tuple[float, float]:
    """The gap at the longest prompts over that at the shortest, and its error."""
    gap, error = _gaps(data, kappa)
    share = float(gap[-1] / gap[0])
    return share, abs(share) * math.hypot(error[-1] / gap[-1], error[0] / gap[0])


@claim("F3", "Huang, Cheng and Liang (arXiv 2310.05249), abstract", PHASES, role="context")
def _stages(data: xr.Dataset) -> Finding:
    """Queries of the frequent covariate are learned first, rare ones later, after they have unlearned the frequent one.

    Time of a weight of 0.75, rare over frequent, least over K; time of the switch over that of a rare query, greatest.
    For balanced covariates the slope in K of the time of a weight of 0.5, within 0.2 of 2, and that time for short
    prompts over that for infinite ones, within 0.1 of 1.
    """
    later = Check("time, rare over frequent", float((data.rare / data.frequent).min()), ">", 1.0)
    before = Check("time of the switch over that of a rare query", float((data.switch / data.rare).max()), "<", 1.0)
    K = np.log(data.K.values)
    slope = float(np.polyfit(K, np.log(data.balanced.values), 1)[0])
    growth = Check("slope in K of the time of balanced covariates", slope, "=", 2.0, 0.0, 0.2)
    label = f"that time for K = {int(data.K[0])} at L = {data.attrs['length']}K over that of infinite prompts"
    return Finding((later, before, growth, Check(label, float(data.short), "=", 1.0, 0.0, 0.1)))
