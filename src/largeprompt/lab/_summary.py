"""Many results as a table: a row for each setting and kind of attention."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from ._grid import varying
from ._result import run_of
from ._run import Run
from ._verdict import VERDICTS, wilson
from ._yardstick import yardstick


def setting(run: Run, name: str) -> Any:
    """A setting as a label: names and numbers as they are, arrays as `given`."""
    value = getattr(run, name)
    return "default" if value is None else "given" if isinstance(value, tuple) else value


def summary(results: Sequence[xr.Dataset]) -> list[dict[str, Any]]:
    """A row for each setting and attention: how many runs ended how, and the final risk of the good ones.

    Good is neither trapped nor diverged. Where the least risk of such layers is not known, `optimum` is NaN, and
    `attainable` a risk that they are known to come as near as wanted to. Shares come with their 95 % Wilson interval.
    """
    runs = [run_of(data) for data in results]
    names = varying(runs)
    groups: dict[tuple, list[xr.Dataset]] = {}
    for run, data in zip(runs, results, strict=True):
        for member in run.members:
            key = (*(getattr(run, name) for name in names), member)
            groups.setdefault(key, []).append(data.sel(member=member))
    return [_row(names, key[-1], group) for key, group in groups.items()]


def _row(names: tuple[str, ...], member: str, group: list[xr.Dataset]) -> dict[str, Any]:
    run = run_of(group[0])
    ends = [str(data.verdict.values) for data in group]
    final = np.asarray([float(data.risk[-1]) for data in group])
    good_runs = [data for data, end in zip(group, ends, strict=True) if end not in ("trapped", "diverged")]
    good = np.asarray([float(data.risk[-1]) for data in good_runs])
    trapped = final[[end == "trapped" for end in ends]]
    counts = {name: ends.count(name) for name in VERDICTS}
    row: dict[str, Any] = {name: setting(run, name) for name in names}
    row |= {"attention": member, "runs": len(group), **counts}
    error = float(good.std(ddof=1)) / math.sqrt(len(good)) if len(good) > 1 else math.nan
    # what the nodes of the recorded risks add: runs share them, so that it does not average out
    error = math.hypot(error, _mean(np.asarray([float(data.risk_stderr[-1]) for data in good_runs])))
    row |= {"risk": _mean(good), "risk_stderr": error, "trapped_risk": _mean(trapped)}
    for kind in ("linear", "softmax"):
        row[f"{kind}_optimum"], row[f"{kind}_attainable"] = _known(run, kind)
    row["Bayes"] = float(group[0].Bayes)
    for name in ("trapped", "diverged"):
        low, high = wilson(counts[name], len(group))
        row |= {f"{name}_share": counts[name] / len(group), f"{name}_low": low, f"{name}_high": high}
    return row


def _known(run: Run, kind: str) -> tuple[float, float]:
    """The least risk of such layers of that kind, and one that they are known to attain; NaN where it is not known."""
    try:
        stick = yardstick(run, kind)
    except ValueError:  # a length beyond those of softmax attention
        if kind in run.members:
            raise
        return math.nan, math.nan
    return stick.optimum, stick.bounds[1]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan
