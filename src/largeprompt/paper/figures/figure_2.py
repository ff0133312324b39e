"""Figures 2 and 6: the risk at the end of training, by prompt length."""

import numpy as np
import xarray as xr

from largeprompt.lab import VERDICTS
from largeprompt.paper.chart import GREEN, GREY, OF_ATTENTION, Chart, Panel, Series, level, over_seeds
from largeprompt.paper.pieces import Levels, Needed
from largeprompt.paper.settings import ANISOTROPIC, MEMBERS, Settings

from ._figure import AbstractFigure, Results
from .words import covariates

_MARKS = {"softmax": "o", "linear": "s"}
_CURVES = ("Bayes", *(f"{member}_{what}" for member in MEMBERS for what in ("optimum", "trap", "saddle")))
_SMOOTH = 9  # lengths from which exact curves look smooth


class FinalRisk(AbstractFigure):
    """Risks at convergence, trapped runs as their own marks, on the exact optima and what bounds them from below."""

    @property
    def title(self) -> str:
        return f"Risk at the end of training, {covariates(self.covariance)}"

    @property
    def look(self) -> str:
        return (
            "Runs that find the optimum lie on the exact curves: linear attention below softmax at every length, both "
            "above the Bayes risk and falling to the noise floor. Crosses are runs that ended in a spurious minimum; "
            "dotted lines are where theory puts the lowest minimum and the lowest saddle."
        )

    def needs(self, settings: Settings) -> tuple[Needed, ...]:
        return (levels(settings, self.covariance), *trained(settings, self.covariance))

    def dataset(self, settings: Settings, results: Results) -> xr.Dataset:
        known = results[levels(settings, self.covariance)]
        known = known.rename(softmax="softmax_optimum", linear="linear_optimum")
        curves = known[list(_CURVES)].rename({name: f"{name}_curve" for name in _CURVES} | {"L": "length"})
        ends = final_risks(settings, self.covariance, results)
        return xr.merge([known.sel(L=ends.L), curves, ends], combine_attrs="drop").assign_attrs(
            covariance=self.covariance, steps=settings.steps, risk="half the mean squared error"
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
            shown = {"role": "seed", "colour": hue, "line": False, "mark": ".", "in_legend": False}
            series.append(Series(f"{member}, each seed", L[at], here.risk.values[at, seed], **shown))
            best = data[f"{member}_optimum_curve"].values
            series.append(Series(f"best {member} attention", length, best, "theory", hue))
            for what, name in (("trap", "minimum"), ("saddle", "saddle")):
                found = data[f"{member}_{what}_curve"].values
                known = np.isfinite(found)
                if known.any():
                    style = {"colour": hue, "dash": "dot", "mark": "_", "width": 1.1 if what == "trap" else 0.6}
                    label = f"lowest spurious {member} {name}"
                    series.append(Series(label, length[known], found[known], "theory", **style))
        series.append(Series("Bayes (ridge regression)", length, data.Bayes_curve.values, "theory", GREEN, dash="dash"))
        series.append(level("noise floor s²/2", float(data.floor), L, colour=GREY, dash="dash"))
        panel = Panel(covariates(self.covariance), "prompt length L", "final risk  ½E(ŷ−y)²", tuple(series))
        return Chart((panel,), columns=1)

    def told(self, data: xr.Dataset) -> list[str]:
        lines = []
        for L in (int(data.L[0]), int(data.L[-1])):
            at = data.sel(L=L)
            parts = [_told(at, member) for member in MEMBERS]
            lines.append(f"L = {L}: {'; '.join(parts)}; Bayes {float(at.Bayes):.5f}.")
        for member in MEMBERS:
            ends = data.verdict.sel(member=member).values.ravel()
            counts = [f"{int((ends == end).sum())} {end}" for end in VERDICTS if (ends == end).any()]
            lines.append(f"{member}: of {int((ends != '').sum())} runs {', '.join(counts)}.")
        return lines


def _told(at: xr.Dataset, member: str) -> str:
    here = at.sel(member=member)
    good = here.risk.values[here.verdict.values == "converged"]
    best = f"best {float(at[f'{member}_optimum']):.5f}"
    return f"{member} {good.mean():.5f} ({best})" if len(good) else f"{member}: no run converged ({best})"


def levels(settings: Settings, covariance: str) -> Levels:
    """What the final risks are held against."""
    traps = dict(settings.traps).get(covariance, ())
    query = settings.conventions.query_sigma
    ends = settings.lengths[0], settings.lengths[-1]
    between = np.geomspace(*ends, _SMOOTH).round().astype(int) if len(settings.lengths) < _SMOOTH else ()
    lengths = sorted({*settings.lengths, *(int(L) for L in between)})
    return Levels(covariance, tuple(lengths), traps, query_sigma=query)


def trained(settings: Settings, covariance: str) -> tuple[Needed, ...]:
    """All runs of a covariance."""
    return tuple(
        run for L in settings.lengths for run in settings.runs(covariance, (L,), settings.seeds_at(covariance, L))
    )


def final_risks(settings: Settings, covariance: str, results: Results) -> xr.Dataset:
    """Where every run ended, by attention, length and seed; a seed that was not run at a length is NaN."""
    most = max(settings.seeds_at(covariance, L) for L in settings.lengths)
    shape = (len(MEMBERS), len(settings.lengths), most)
    risk, error = np.full(shape, np.nan), np.full(shape, np.nan)
    verdict = np.full(shape, "", dtype="<U10")
    for j, L in enumerate(settings.lengths):
        for k, run in enumerate(settings.runs(covariance, (L,), settings.seeds_at(covariance, L))):
            data = results[run]
            for i, member in enumerate(MEMBERS):
                here = data.sel(member=member)
                risk[i, j, k], verdict[i, j, k] = float(here.risk[-1]), str(here.verdict.values)
                error[i, j, k] = float(here.risk_stderr[-1])
    dims = ("member", "L", "seed")
    return xr.Dataset(
        {
            "risk": (dims, risk, {"long_name": "exact risk at the last parameters"}),
            "risk_stderr": (dims, error, {"long_name": "standard error of that risk, over its nodes"}),
            "verdict": (dims, verdict),
        },
        coords={"member": list(MEMBERS), "L": np.asarray(settings.lengths, np.int32), "seed": np.arange(most)},
    )


FIGURES = (FinalRisk("2"), FinalRisk("6", ANISOTROPIC))
