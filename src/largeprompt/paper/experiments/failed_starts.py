"""Claims C11 and T14: how often does training miss the optimum, and which attention more often?"""

import math

import numpy as np
import xarray as xr

from largeprompt.paper.choice import MEMBERS
from largeprompt.paper.claims import Check, Finding, claim, mean_of_counts
from largeprompt.paper.experiments.figure_2 import BOTH

_NAMES = ("isotropic", "anisotropic")  # in the order of BOTH
_MANY = 10  # seeds: fewer cannot settle a share at one length
_OPEN = ["unfinished", "settled"]  # whether such a run is at the optimum is not known


@claim("C11", "Appendix A.2", *BOTH, seeds=10)
def _stability(*both: xr.Dataset) -> Finding:
    """Softmax attention trains more stably than linear attention, which fails from some random starts.

    Share of runs trapped or diverged, linear minus softmax from the same starts on the same tokens, mean over all runs.
    The error is over seeds, and that which it would have if both were alike; pairs unfinished or settled count as
    alike, and widen it.
    """
    checks, counts = [], []
    for name, data in zip(_NAMES, both, strict=True):
        run, left = (data.verdict != "").all("member"), data.verdict.isin(_OPEN).any("member")
        failed = data.verdict.isin(["trapped", "diverged"])
        more = failed.sel(member="linear").astype(float) - failed.sel(member="softmax")
        more = more.where(~left, 0.0).where(run)  # such a pair shows nothing
        unknown = float((left & run).sum() / run.sum())
        share, error = mean_of_counts(more.transpose("seed", "L").values, 0.0, 1.0, unknown)
        n = int(run.any("L").sum())
        label = f"{name}: share of failed runs, linear − softmax, mean over {n} seeds and their lengths"
        checks.append(Check(label, share, ">", 0.0, error))
        failures = ", ".join(f"{member} {int(failed.sel(member=member).where(run).sum())}" for member in MEMBERS[::-1])
        counts.append(f"{name}: {failures} of {int(run.sum())}, {int((left & run).sum())} unfinished or settled")
    return Finding(tuple(checks), f"Failed is trapped or diverged; {'; '.join(counts)} pairs.")


@claim("T14", "Section 5, after Assumption 5.1", *BOTH, seeds=10)
def _default_starts(*both: xr.Dataset) -> Finding:
    """The structured start of Assumption 5.1 is not necessary in practice: default starts reach the optimum too.

    For each covariance and attention the share of runs that converged, at lengths with ten or more seeds and over all
    lengths: more than half, by the error that half would have over these seeds.
    """
    checks = []
    for name, data in zip(_NAMES, both, strict=True):
        for member in MEMBERS:
            ends = data.verdict.sel(member=member).transpose("seed", "L").values
            who = f"{name}, {member}"
            for i, L in enumerate(data.L.values):
                if (ends[:, i] != "").sum() >= _MANY:
                    checks.append(_share(f"{who}, L = {L}", ends[:, [i]]))
            checks.append(_share(f"{who}, all L", ends))
    checks.sort(key=lambda check: check.margin / check.error)
    shares = [check.measured for check in checks]
    return Finding(
        tuple(checks),
        f"Shares from {min(shares):.2f} to {max(shares):.2f}; a run that is unfinished or settled counts half.",
    )


def _share(who: str, ends: np.ndarray) -> Check:
    """Of the runs that reach the optimum, by seed and length; those that were not run are empty."""
    run, left = ends != "", np.isin(ends, _OPEN)
    reached = np.where(run, np.where(left, 0.5, ends == "converged"), math.nan)
    share, error = mean_of_counts(reached, 0.5, 1.0, float(left.sum() / run.sum()) / 2)
    starts = int(run.any(axis=1).sum())
    return Check(f"{who}: share of runs from {starts} starts that reach the optimum", share, ">", 0.5, error)
