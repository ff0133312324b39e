from typing import Any

import numpy as np
import xarray as xr

from largeprompt import __version__

from ._course import Course
from ._run import Run
from ._settings import as_toml
from ._store import run_of
from ._verdict import bayes, verdict, yardstick
from ._weights import matrices, with_matrices

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


def result(run: Run, course: Course, diverged: tuple[int | None, ...]) -> xr.Dataset:
    """All that a finished run has recorded, what it is held against and where it ended, with its settings inside."""
    arrays = course.arrays()
    variables = {name: _variable(name, array, run) for name, array in arrays.items()}
    sticks = [yardstick(run, member) for member in run.members]
    optimum = np.asarray([stick.optimum for stick in sticks])
    time, risk, error = run.rate * run.loss_factor * run.steps, arrays["risk"], arrays["risk_stderr"][-1]
    ends = [
        verdict(course.steps, risk[:, i], float(error[i]), stick, diverged=diverged[i], time=time)
        for i, stick in enumerate(sticks)
    ]
    variables |= {
        "diverged": (
            ("member",),
            [np.nan if at is None else float(at) for at in diverged],
            _about("step of divergence"),
        ),
        "optimum": (("member",), optimum, _about("least risk of one head of this attention at this length")),
        "excess": (("member",), risk[-1] - optimum, _about("final risk above the optimum")),
        "verdict": (("member",), ends),
        "Bayes": ((), bayes(run), _about("Bayes risk at this length")),
    }
    coordinates = {"member": list(run.members), "step": course.steps.astype(float)}
    if "norms" in variables:
        coordinates["matrix"] = list(matrices(run.layers()[0]))
    attributes = {
        "hash": run.hash,
        "run": run.canonical,
        "toml": as_toml(run),
        "version": __version__,
        "weight_seed": str(run.weight_seed),
        "data_seed": str(run.data_seed),
    }
    return xr.Dataset(variables, coords=coordinates, attrs=attributes)


def layer_at(data: xr.Dataset, member: str, index: int = -1) -> Any:
    """The layer of a result at one of its recorded steps, by default the last."""
    run = run_of(data)
    if member not in run.members:
        raise ValueError(f"member is {member!r}; this run has {', '.join(run.members)}")
    start = run.layers()[run.members.index(member)]
    names = list(matrices(start))
    if names[0] not in data:
        raise ValueError("the run did not record its parameters; add 'parameters' to record.what")
    return with_matrices(start, {name: data[name].sel(member=member).isel(step=index).values for name in names})


def _variable(name: str, array: np.ndarray, run: Run) -> tuple:
    if name == "distance":
        return ("step",), array, _about(_MEANING[name])
    own = _DIMS.get(name, ("output" if run.parameters == "UV" else "value", "token"))
    heads = ("head",) if run.heads > 1 and len(own) == 2 else ()
    dims = ("member", "step", *heads, *own)
    return dims, np.moveaxis(array, 1, 0), _about(_MEANING.get(name, f"the matrix {name}"))


def _about(meaning: str) -> dict[str, str]:
    return {"long_name": meaning}
