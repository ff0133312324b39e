"""The result of a run as a dataset: what it recorded, what that is compared with, its settings; many as a table."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from largeprompt import __version__
from largeprompt._intervals import wilson
from largeprompt.dynamics import optimiser_named

from ._grid import runs_from, varying
from ._history import History
from ._run import Run, as_toml
from ._verdict import VERDICTS, verdict
from ._yardstick import bayes, yardstick

_DIMS = {
    "risk": (),
    "risk_stderr": (),
    "norms": ("matrix",),
    "from_start": (),
    "K": ("inner", "token"),
    "Q": ("inner", "token"),
    "O": ("output", "value"),
    "U": ("token", "query_token"),
    "QK": ("token", "query_token"),
    "OV": ("output", "token"),
}
_MEANING = {
    "risk": "exact risk R_L at the recorded parameters, half the mean squared error",
    "risk_stderr": "standard error of the risk, 0 where nothing is averaged over nodes or prompts",
    "norms": "Frobenius norm of each matrix",
    "from_start": "distance of all parameters to the start",
    "distance": "distance of the parameters of softmax attention to those of linear attention",
    "QK": "U = s KᵀQ, the matrix of the scores",
    "OV": "what a token is written out as",
}


def result(run: Run, history: History, diverged: tuple[int | None, ...]) -> xr.Dataset:
    """All that a finished run has recorded, what it is compared with and where it ended, with its settings inside."""
    arrays = history.arrays()
    variables = {name: _variable(name, array, run) for name, array in arrays.items()}
    variables["diverged"] = (
        ("member",),
        [np.nan if at is None else float(at) for at in diverged],
        _about("step of divergence"),
    )
    variables["Bayes"] = ((), bayes(run), _about("Bayes risk at this length"))
    coordinates = {"member": list(run.members), "step": history.steps.astype(float)}
    if "norms" in variables:
        coordinates["matrix"] = list(run.layers()[0].parameters)
    attributes = {
        "hash": run.key,
        "run": run.canonical,
        "toml": as_toml(run),
        "version": __version__,
        "weight_seed": str(run.weight_seed),
        "data_seed": str(run.data_seed),
    }
    return judged(xr.Dataset(variables, coords=coordinates, attrs=attributes))


def judged(data: xr.Dataset) -> xr.Dataset:
    """The recorded risks with what they are compared with and where they ended; a result that has it stays as it is.

    Results of earlier versions hold the optimum of one head, and what their verdicts were by another rule.
    """
    if "attainable" in data:
        return data
    run = run_of(data)
    sticks = [yardstick(run, member) for member in run.members]
    time, ends = run.rate * optimiser_named(run.optimiser).speed(run.batch, run.loss_factor) * run.steps, []
    for member, stick in zip(run.members, sticks, strict=True):
        own = data.sel(member=member)
        at = None if np.isnan(own.diverged) else int(own.diverged)
        error = float(own.risk_stderr[-1])
        ends.append(verdict(own.step.values, own.risk.values, error, stick, diverged=at, time=time))
    optimum = np.asarray([stick.optimum for stick in sticks])
    attainable = np.asarray([stick.bounds[1] for stick in sticks])
    return data.assign(
        optimum=(("member",), optimum, _about("least risk of such layers at this length, where it is known")),
        attainable=(("member",), attainable, _about("risk that such layers are known to come as near as wanted to")),
        excess=(("member",), data.risk.values[:, -1] - optimum, _about("final risk above the optimum")),
        verdict=(("member",), ends),
    )


def digest(data: xr.Dataset) -> str:
    """A hash of every value and attribute, whatever types a file format turns them into."""
    total = hashlib.sha256()
    for name in sorted(str(name) for name in data.variables):
        values = np.asarray(data[name].values)
        total.update(f"{name} {data[name].dims} {values.shape}".encode())
        if values.dtype.kind in "fiub":
            total.update(np.ascontiguousarray(values, np.float64).tobytes())
        else:
            total.update(json.dumps([str(value) for value in values.ravel()]).encode())
    total.update(json.dumps({k: str(v) for k, v in data.attrs.items() if k != "digest"}, sort_keys=True).encode())
    return total.hexdigest()


def run_of(data: xr.Dataset) -> Run:
    """The settings inside a result."""
    return run_from_text(data.attrs["run"])


def run_from_text(text: str) -> Run:
    """The run of a canonical text."""
    settings = json.loads(text)
    settings.pop("format")
    (run,) = runs_from(settings)
    return run


def layer_at(data: xr.Dataset, member: str, index: int = -1) -> Any:
    """The layer of a result at one of its recorded steps, by default the last."""
    run = run_of(data)
    if member not in run.members:
        raise ValueError(f"member is {member!r}; this run has {', '.join(run.members)}")
    start = run.layers()[run.members.index(member)]
    names = list(start.parameters)
    if names[0] not in data:
        raise ValueError("the run did not record its parameters; add 'parameters' to record.what")
    return start.with_parameters({name: data[name].sel(member=member).isel(step=index).values for name in names})


def _variable(name: str, array: np.ndarray, run: Run) -> tuple:
    if name == "distance":
        return ("step",), array, _about(_MEANING[name])
    own = _DIMS.get(name, ("output" if run.parameters == "UV" else "value", "token"))
    heads = ("head",) if run.heads > 1 and len(own) == 2 else ()
    dims = ("member", "step", *heads, *own)
    return dims, np.moveaxis(array, 1, 0), _about(_MEANING.get(name, f"the matrix {name}"))


def _about(meaning: str) -> dict[str, str]:
    return {"long_name": meaning}


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
