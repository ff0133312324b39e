"""Settings as a user writes them, in TOML or on a command line: one run, or a sweep wherever a list stands."""

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._files import about
from ._lengths import listed_lengths
from ._record import Record
from ._run import Run, twin
from ._validity import whole

_FIELDS = tuple(field.name for field in dataclasses.fields(Run))
_RECORD = tuple(field.name for field in dataclasses.fields(Record))
_MATRICES = ("sigma", "omega", "query_sigma")
_STACKED = {2: ("U", "V"), 3: ("K", "Q", "V"), 4: ("K", "Q", "V", "O")}
KEYS = (*_FIELDS, "seed", "seeds")


def read_toml(path: Path | str) -> dict[str, Any]:
    """The settings in a TOML file; the arrays of .npz and .npy files that it names, in its own folder, are read in."""
    path = Path(path)
    try:
        with about(path):
            settings = tomllib.loads(path.read_text("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not TOML: it is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return with_files(settings, path.parent)


def with_files(settings: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """The settings with each name of an .npz or .npy file replaced by the arrays in it."""
    found = dict(settings)
    for name in _MATRICES:
        if is_file(found.get(name)):
            found[name] = array_in(folder / found[name], name)
    start = found.get("start")
    file = start.get("file") if isinstance(start, Mapping) else start
    if isinstance(start, Mapping) and "file" in start and (len(start) > 1 or not is_file(file)):
        raise ValueError(
            f"start has file = {file!r}; it must be the name of an .npz or .npy file, and the table's only key"
        )
    if is_file(file):
        found["start"] = arrays_in(folder / str(file))
    return found


def is_file(value: Any) -> bool:
    """Whether a setting names a file of arrays."""
    return isinstance(value, str) and value.endswith((".npz", ".npy"))


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, or those stacked in an .npy file: U, V, or K, Q, V, or K, Q, V, O."""
    found = _loaded(path)
    if isinstance(found, dict):
        return found
    names = _STACKED.get(len(found), ()) if found.ndim > 2 else ()
    if not names:
        raise ValueError(
            f"{path} has an array of shape {found.shape}; weights in it are stacked, U, V or K, Q, V or K, Q, V, O: of "
            "shape (2, D, D), (3, k, D) or (4, D, D); for other shapes use an .npz file with an array for each"
        )
    return dict(zip(names, found, strict=True))


def array_in(path: Path, name: str) -> np.ndarray:
    """The array of an .npy file, or that of this name in an .npz file."""
    found = _loaded(path)
    if not isinstance(found, dict):
        return found
    if name not in found:
        raise ValueError(f"{path} has the arrays {', '.join(found) or 'none'}; it must have one named {name}")
    return found[name]


def _loaded(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """What a file holds. Nothing in it is ever unpickled."""
    try:
        with about(path):
            found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with about(path), found as file:
            return {key: file[key] for key in file.files}
    except OSError:
        raise
    except Exception as error:
        kind = "an .npy file of one plain array" if path.suffix == ".npy" else "an .npz file of plain arrays"
        raise ValueError(f"{path} is not {kind}: {str(error).splitlines()[0]}") from None


def runs_from(settings: Mapping[str, Any]) -> tuple[Run, ...]:
    """The runs of some settings: the product over every setting that is a list, `seed` standing for both seeds."""
    unknown = sorted(set(settings) - set(KEYS))
    if unknown:
        raise ValueError(f"{unknown[0]} = {settings[unknown[0]]!r} is not a setting; they are {', '.join(KEYS)}")
    settings = dict(settings)
    record = _record(settings.pop("record", {}))
    seeds = _seeds(settings)
    axes = {name: _choices(name, value) for name, value in settings.items()}
    runs = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        first = Run(**{**_both(seeds[0]), **chosen, "record": record})
        free = [name for name in ("weight_seed", "data_seed") if name not in chosen]
        runs += [first, *(twin(first, **dict.fromkeys(free, seed)) for seed in seeds[1:])]
    return tuple(dict.fromkeys(runs))


def _both(seed: int | None) -> dict[str, Any]:
    return {} if seed is None else {"weight_seed": seed, "data_seed": seed}


def _seeds(settings: dict[str, Any]) -> list[int | None]:
    """The seeds that stand for both; None for the seeds of the settings."""
    seed, count = settings.pop("seed", None), settings.pop("seeds", None)
    if seed is not None and count is not None:
        raise ValueError(
            f"seed is {seed!r} and seeds is {count!r}; give the seeds themselves or their number, not both"
        )
    if count is not None:
        return list(range(whole("seeds", count)))
    return [None] if seed is None else [whole("weight_seed", one) for one in _choices("seed", seed)]


def _choices(name: str, value: Any) -> list[Any]:
    """What a setting runs over: the entries of a list, or the value itself; rows of numbers are one matrix."""
    if name == "L":
        return listed_lengths(value)
    if name == "start" and isinstance(value, tuple):  # arrays, as a run keeps them
        return [value]
    if not isinstance(value, list | tuple | range) or (name in _MATRICES and value and all(map(_is_row, value))):
        return [value]
    if not value:
        raise ValueError(f"{name} is an empty list; it must have at least one entry")
    return list(value)


def _is_row(part: Any) -> bool:
    return isinstance(part, list | tuple) and not any(isinstance(entry, list | tuple | str) for entry in part)


def _record(settings: Any) -> Record:
    if isinstance(settings, Record):
        return settings
    if not isinstance(settings, Mapping):
        raise ValueError(f"record is {settings!r}; it must be a table with {', '.join(_RECORD)}")
    unknown = sorted(set(settings) - set(_RECORD))
    if unknown:
        key = unknown[0]
        raise ValueError(f"record.{key} = {settings[key]!r} is not a setting; they are {', '.join(_RECORD)}")
    return Record(**settings)


def as_toml(run: Run) -> str:
    """A file that makes this run."""
    settings = run.as_dict()
    tables = {name: settings.pop(name) for name in ("record", "start") if isinstance(settings[name], dict)}
    lines = [f"{name} = {_toml_value(value)}" for name, value in settings.items() if value is not None]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    if isinstance(value, float) and math.isfinite(value):
        return repr(value) if set(repr(value)) & set(".e") else f"{value!r}.0"
    return json.dumps(value, ensure_ascii=False)
