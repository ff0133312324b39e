"""What valid settings are: each in its own type, or one line that names it, its value and what would be right."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from largeprompt import _checks as checks

from ._lengths import length_from
from ._record import Record
from ._weights import FORMS

ATTENTIONS = {"softmax": ("softmax",), "linear": ("linear",), "pair": ("softmax", "linear")}
ENGINES = ("auto", "fused", "reference")
_CHOICES = {"attention": ATTENTIONS, "parameters": FORMS, "engine": ENGINES}
_WHOLE = {"heads": 1, "batch": 1, "steps": 0, "weight_seed": 0, "data_seed": 0}
_BELOW = {"steps": 32, "weight_seed": 63, "data_seed": 63}  # powers of two
Start = str | tuple[tuple[str, Any], ...]


def validated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run in their own types, those that follow from others filled in."""
    found = {name: _VALID[name](name, value) for name, value in settings.items()}
    if found["d"] is None:
        found["d"] = 5 if isinstance(found["sigma"], str) else len(found["sigma"])
    _refuse_contradictions(found)
    return found


def whole(name: str, value: Any) -> int:
    """A whole number within the range of its setting."""
    number = checks.count(name, value, at_least=_WHOLE.get(name, 1))
    if number >= 2 ** _BELOW.get(name, 63):
        raise ValueError(f"{name} is {number}; it must be below 2**{_BELOW.get(name, 63)}")
    return number


def as_nested(name: str, value: Any) -> Any:
    """An array as nested tuples of numbers, which compare, hash and print as what they are."""
    try:
        shape = np.shape(value)
    except ValueError:
        raise ValueError(f"{name} is not an array: its rows differ in length") from None
    checks.array(name, value, shape)  # what it returns is rounded where JAX computes in float32
    return _tuples(np.asarray(value, float).tolist())


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _choice(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in _CHOICES[name]:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(_CHOICES[name])}")
    return value


def _covariance(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    matrix = as_nested(name, value)
    if np.ndim(matrix) != 2:
        raise ValueError(f"{name} is {value!r}; it must be a name such as kms:0.5, or a matrix")
    return matrix


def _positive(name: str, value: Any) -> float:
    return _number(name, value, "a number above 0", lambda number: number > 0)


def _nonnegative(name: str, value: Any) -> float:
    return _number(name, value, "a number of at least 0", lambda number: number >= 0)


def _number(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")
    number = float(value)
    if not math.isfinite(number) or not holds(number):
        raise ValueError(f"{name} is {number:g}; it must be {wanted}")
    return number


def _start(name: str, value: Any) -> Start:
    wanted = "it must be pytorch, structured:ALPHA, or arrays in a table, an .npz or an .npy file"
    if isinstance(value, str):
        kind, _, text = value.partition(":")
        if value == "pytorch":
            return value
        try:
            alpha = float(text or 0.3)
        except ValueError:
            alpha = math.nan
        if kind != "structured" or not math.isfinite(alpha):
            raise ValueError(f"{name} is {value!r}; {wanted}")
        return f"structured:{alpha!r}"
    if not isinstance(value, Mapping | tuple):
        raise ValueError(f"{name} is {value!r}; {wanted}")
    arrays = dict(value)
    if "alpha" in arrays and not set(arrays) <= {"alpha", "Theta"}:
        raise ValueError(f"{name} has the keys {', '.join(sorted(arrays))}; beside alpha it may have Theta only")
    return tuple((key, as_nested(f"{name}.{key}", arrays[key])) for key in sorted(arrays))


def _record(name: str, value: Any) -> Record:
    if not isinstance(value, Record):
        raise ValueError(f"{name} is {value!r}; it must be a Record")
    return value


def _optional(valid: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else valid(name, value)


_VALID: dict[str, Callable[[str, Any], Any]] = {
    "L": lambda name, value: length_from(value, name),
    "attention": _choice,
    "sigma": _covariance,
    "d": _optional(whole),
    "noise": _nonnegative,
    "omega": _optional(_covariance),
    "query_sigma": _optional(_covariance),
    "parameters": _choice,
    "heads": whole,
    "head_dim": _optional(whole),
    "outputs": _optional(whole),
    "score_scale": _positive,
    "start": _start,
    "batch": whole,
    "rate": _positive,
    "loss_factor": _positive,
    "steps": whole,
    "weight_seed": whole,
    "data_seed": whole,
    "engine": _choice,
    "record": _record,
}


def _refuse_contradictions(found: dict[str, Any]) -> None:
    start, dim, parameters = found["start"], found["d"] + 1, found["parameters"]
    if found["outputs"] not in (None, 1, dim):
        raise ValueError(f"outputs is {found['outputs']}; it must be 1, or {dim} of which the last counts")
    if parameters == "UV" and found["heads"] > 1:
        raise ValueError(f"heads is {found['heads']}; with parameters = 'UV' it must be 1")
    if parameters == "UV" and found["score_scale"] != 1:
        raise ValueError(
            f"score_scale is {found['score_scale']:g}; with parameters = 'UV' U holds it, and it must be 1"
        )
    structured = start.startswith("structured") if isinstance(start, str) else "alpha" in dict(start)
    if structured and parameters != "UV":
        raise ValueError(f"parameters is {parameters!r}; the start of Assumption 5.1 needs parameters = 'UV'")
