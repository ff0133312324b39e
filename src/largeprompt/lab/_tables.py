"""Tables of settings: every value in its own type, or one line that says where it stands and what would be right."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from largeprompt import _checks as checks
from largeprompt.icl import covariance_named

from ._settings import array_in, arrays_in, is_file

Found = TypeVar("Found")

_DEEPEST = 32  # tables within tables
_LARGEST = 10_000  # dimension


class Table:
    """One table of settings and where it stands, so that every error can say where."""

    def __init__(self, where: str, settings: Any):
        if not isinstance(settings, Mapping):
            raise ValueError(f"{where} is {settings!r}; it must be a table, such as {{kind = ...}}")
        self.where, self.settings = where, settings

    def __contains__(self, name: str) -> bool:
        return name in self.settings

    def at(self, name: str) -> str:
        return f"{self.where}.{name}"

    def holds(self, *names: str) -> None:
        """Refuse every other key."""
        for name, value in self.settings.items():
            if name not in names:
                raise ValueError(f"{self.at(name)} = {short(value)} is not a setting; they are {', '.join(names)}")

    def value(self, name: str) -> Any:
        if name not in self.settings:
            raise ValueError(f"{self.at(name)} is missing; {self.where} has {', '.join(self.settings) or 'nothing'}")
        return self.settings[name]

    def choice(self, name: str, choices: Any) -> str:
        value = self.value(name)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{self.at(name)} is {short(value)}; it must be one of {', '.join(choices)}")
        return value

    def array(self, name: str, *shape: int | None) -> np.ndarray:
        value = self.value(name)
        if isinstance(value, str | Mapping) or _has_truth_values(value):
            wanted = ("a number", "a list of numbers", "a matrix of numbers, or the name of an .npy or .npz file")[
                len(shape)
            ]
            raise ValueError(f"{self.at(name)} is {short(value)}; it must be {wanted}")
        return np.asarray(checks.array(self.at(name), value, shape))

    def number(self, name: str, default: float, at_least: float = -math.inf) -> float:
        if name not in self:
            return default
        return float(checks.number(self.at(name), self.array(name), at_least=at_least))

    def count(self, name: str, default: int | None = None, at_least: int = 1) -> int | None:
        return checks.count(self.at(name), self.settings[name], at_least=at_least) if name in self else default

    def size(self, name: str, default: int | None = None) -> int | None:
        """A dimension, of which matrices fit into memory."""
        found = self.count(name, default)
        if found is not None and found > _LARGEST:
            raise ValueError(f"{self.at(name)} is {found}; it must be at most {_LARGEST}")
        return found

    def covariance(self, name: str, size: str, dim: int | None, default: str = "identity") -> jax.Array:
        """A covariance by its name or as a matrix; `size` is the key that says its dimension."""
        value = self.settings.get(name, default)
        if not isinstance(value, str):
            return checks.covariance(self.at(name), self.array(name, None, None), dim)
        if dim is None:
            raise ValueError(f"{self.at(size)} is missing; {name} = {value!r} does not say the dimension")
        with self.naming(name):
            return covariance_named(value, dim)

    def tables(self, name: str) -> list["Table"]:
        value = self.value(name)
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"{self.at(name)} is {short(value)}; it must be a list of tables")
        return [Table(f"{self.at(name)}[{i}]", part) for i, part in enumerate(value)]

    @contextlib.contextmanager
    def naming(self, name: str | None = None) -> Iterator[None]:
        """Say where the settings stand that a constructor refuses."""
        try:
            yield
        except ValueError as error:
            first = str(error).split(maxsplit=1)[0].partition("[")[0]
            known = name is None and first in self.settings
            place = f"{self.where}." if known else f"{self.where if name is None else self.at(name)}: "
            raise ValueError(f"{place}{error}") from None


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _has_truth_values(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_truth_values, value))
    return isinstance(value, bool | np.bool_) or (isinstance(value, np.ndarray) and value.dtype == bool)


def inlined(where: str, value: Any, folder: Path | str = ".", depth: int = 0) -> Any:
    """The settings with arrays for the names of files: `cov = "laws.npz"` is the array `cov` in that file.

    An .npy file is its one array. `file = "weights.npz"` stands for all arrays of a file, each under its own name;
    in an .npy file they are stacked.
    """
    if depth > _DEEPEST:
        raise ValueError(f"{where[:60]}... lies more than {_DEEPEST} tables deep")
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, part in value.items():
            arrays = _arrays(f"{where}.{name}", part, folder) if name == "file" else {name: part}
            for twice in [other for other in arrays if other in found]:
                raise ValueError(f"{where}.{twice} is given twice, once by a file")
            found |= arrays
        return {name: _inlined(where, name, part, folder, depth) for name, part in found.items()}
    if isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
        return [inlined(f"{where}[{i}]", part, folder, depth + 1) for i, part in enumerate(value)]
    return value


def _inlined(where: str, name: str, value: Any, folder: Path | str, depth: int) -> Any:
    if not is_file(value):
        return inlined(f"{where}.{name}", value, folder, depth + 1)
    return _named(f"{where}.{name}", lambda: array_in(Path(folder) / value, name))


def _arrays(place: str, file: Any, folder: Path | str) -> dict[str, np.ndarray]:
    if not is_file(file):
        raise ValueError(f"{place} is {short(file)}; it must be the name of an .npz or .npy file")
    return _named(place, lambda: arrays_in(Path(folder) / file))


def _named(place: str, read: Callable[[], Found]) -> Found:
    """What a file holds, or which setting names one that cannot be read."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
