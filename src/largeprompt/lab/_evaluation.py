"""What a run has trained, and its risk at lengths and on tasks other than those of its training."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from largeprompt._precision import is_float64
from largeprompt._progress import Progress
from largeprompt.attention import heads_of, kind_of
from largeprompt.icl import bayes_risk, optimal_linear, optimal_softmax, risk

from ._checkpoint import layers_in
from ._lengths import listed_lengths
from ._result import layer_at, run_from_text, run_of
from ._run import Run
from ._store import AbstractStore

_TOKENS = 2**28  # drawn at most for one risk, where it has no closed form


class Trained(NamedTuple):
    """What came out of a run, or has come so far: its settings, its step, and the layer of each member."""

    run: Run
    step: int
    layers: dict[str, Any]


def trained(store: AbstractStore, key: str) -> Trained:
    """The layers of a finished run, or of the checkpoint of one that is under way; those that diverged are left out."""
    data = store.load(key)
    checkpoint = store.load_checkpoint(key) if data is None else None
    if data is not None:
        run, step = run_of(data), int(data.step[-1])
        diverged = [None if math.isnan(at) else int(at) for at in data.diverged.values]
    elif checkpoint is not None:
        run, step = run_from_text(checkpoint.header["run"]), int(checkpoint.header["step"])
        diverged = checkpoint.header["diverged"]
    else:
        raise ValueError(f"run {key[:12]} has neither a result nor a checkpoint in {store.location}; train it")
    good = [member for member, at in zip(run.members, diverged, strict=True) if at is None]
    if not good:
        raise ValueError(f"run {key[:12]} diverged at step {diverged[0]}; no layer came out of it")
    if checkpoint is not None:
        layers = dict(zip(run.members, layers_in(checkpoint, run.layers()), strict=True))
    else:
        assert data is not None
        layers = {member: layer_at(data, member) for member in good}
    return Trained(run, step, {member: layers[member] for member in good})


def risks_by_length(
    of: Trained,
    L: Any,
    *,
    noise: float | None = None,
    query_sigma: Any = None,
    rtol: float = 1e-3,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The risk of trained layers at other lengths, beside the optimum of each length and the Bayes risk.

    The run's own length is always among them, and marked as `trained`. Another label noise, or another covariance of
    the queries, makes another task of the test. Where a risk is an average over prompts they are drawn until the
    standard error is `rtol` of it or 2²⁸ tokens are drawn. Of several heads `optimum` is that of one head.
    """
    if not is_float64():
        raise ValueError("runs are evaluated in float64; call largeprompt.use_float64() first")
    run, lengths = of.run, sorted({*listed_lengths(L), of.run.L})
    given: dict[str, Any] = {name: getattr(run, name) for name in ("sigma", "d", "omega", "noise", "query_sigma")}
    given |= {name: value for name, value in {"noise": noise, "query_sigma": query_sigma}.items() if value is not None}
    task = Run(**given).task()
    for length in lengths:
        if run.heads > 1 and run.attention != "linear" and math.inf > length > _TOKENS // 2:
            known = f"the risk of several softmax heads is known up to L = {_TOKENS // 2} and at inf"
            raise ValueError(f"L is {length}; {known}")
    risks, errors, optima, best = [], [], [], []
    with (progress or Progress()).task("risks", len(lengths)) as advance:
        for length in lengths:
            found = [_risk(layer, task, length, rtol) for layer in of.layers.values()]
            risks.append([float(one.value) for one in found])
            errors.append([float(one.stderr) for one in found])
            optima.append([_optimum(member, task, length) for member in of.layers])
            best.append(float(bayes_risk(task, length).value))
            advance(1, f"L = {length}")
    dims = ("L", "member")
    return xr.Dataset(
        {
            "risk": (dims, np.asarray(risks)),
            "risk_stderr": (dims, np.asarray(errors)),
            "optimum": (dims, np.asarray(optima)),
            "Bayes": ("L", np.asarray(best)),
            "trained": ("L", [length == run.L for length in lengths]),
        },
        coords={"L": np.asarray(lengths, float), "member": list(of.layers)},
        attrs={"hash": run.key, "run": run.title, "step": of.step, "steps": run.steps, "heads": run.heads},
    )


def _optimum(member: str, task: Any, L: int | float) -> float:
    """The least risk of one head of that kind; NaN where it is not known."""
    known = {"softmax": optimal_softmax, "linear": optimal_linear}
    return float(known[member](task, L).risk.value) if member in known else math.nan


def _risk(layer: Any, task: Any, L: int | float, rtol: float) -> Any:
    exact = all(kind_of(head) for head in heads_of(layer) or (layer,))  # over prompts: none is drawn
    most = 2**22 if exact or math.inf == L else max(2, min(2**22, _TOKENS // int(L)))
    with warnings.catch_warnings():  # the standard error says it
        warnings.filterwarnings("ignore", message="the standard error is")
        return risk(layer, task, L, rtol=rtol, max_draws=most)
