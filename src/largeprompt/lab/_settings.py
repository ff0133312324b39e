"""Settings as a user writes them: TOML files, arrays in other files, and tables of which every value is checked.

What is wrong is one line that says where the value stands, what it is and what would be right.
"""

import contextlib
import json
import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from largeprompt import _checks as checks
from largeprompt.icl import covariance_named

from ._files import about

COVARIANCES = ("sigma", "omega", "query_sigma")
_STACKED = {2: ("U", "V"), 3: ("K", "Q", "V"), 4: ("K", "Q", "V", "O")}
_DEEPEST = 32  # tables within tables
_LARGEST = 10_000  # dimension
_SHAPES = ("a number", "a list of numbers", "a matrix of numbers, or the name of an .npy or .npz file")


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
    """The settings of runs with each name of an .npz or .npy file replaced by the arrays in it."""
    found = dict(settings)
    for name in COVARIANCES:
        if _is_file(found.get(name)):
            found[name] = _array_in(name, folder / found[name])
    start = found.get("start")
    if _is_file(start) or isinstance(start, Mapping):
        found["start"] = inlined("start", {"file": start} if _is_file(start) else start, folder)
    return found


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
            arrays = _arrays_in(f"{where}.file", part, folder) if name == "file" else {name: part}
            for twice in [other for other in arrays if other in found]:
                raise ValueError(f"{where}.{twice} is given twice, once by a file")
            found |= arrays
        return {
            name: _array_in(f"{where}.{name}", Path(folder) / part)
            if _is_file(part)
            else inlined(f"{where}.{name}", part, folder, depth + 1)
            for name, part in found.items()
        }
    if isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
        return [inlined(f"{where}[{i}]", part, folder, depth + 1) for i, part in enumerate(value)]
    return value


def _is_file(value: Any) -> bool:
    """Whether a setting names a file of arrays."""
    return isinstance(value, str) and value.endswith((".npz", ".npy"))


def _array_in(where: str, path: Path) -> np.ndarray:
    """The array of an .npy file, or that of the setting's name in an .npz file."""
    found, name = _loaded(where, path), where.rpartition(".")[2]
    if not isinstance(found, dict):
        return found
    if name not in found:
        raise ValueError(f"{where}: {path} has the arrays {', '.join(found) or 'none'}; it must have one named {name}")
    return found[name]


def _arrays_in(where: str, file: Any, folder: Path | str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, or those stacked in an .npy file: U, V, or K, Q, V, or K, Q, V, O."""
    if not _is_file(file):
        raise ValueError(f"{where} is {short(file)}; it must be the name of an .npz or .npy file")
    path = Path(folder) / file
    found = _loaded(where, path)
    if isinstance(found, dict):
        return found
    names = _STACKED.get(len(found), ()) if found.ndim > 2 else ()
    if not names:
        raise ValueError(
            f"{where}: {path} has an array of shape {found.shape}; weights in it are stacked, U, V or K, Q, V or K, Q, "
            "V, O: of shape (2, D, D), (3, k, D) or (4, D, D); for other shapes use an .npz file with an array for each"
        )
    return dict(zip(names, found, strict=True))


def _loaded(where: str, path: Path) -> np.ndarray | dict[str, np.ndarray]:
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
        raise ValueError(f"{where}: {path} is not {kind}: {str(error).splitlines()[0]}") from None


class Table:
    """One table of settings and where it stands: "" for the settings themselves, `measure.of` for one inside."""

    def __init__(self, where: str, settings: Any):
        if not isinstance(settings, Mapping):
            raise ValueError(f"{where} is {short(settings)}; it must be a table, such as {{kind = ...}}")
        self.where, self.settings = where, settings

    def __contains__(self, name: str) -> bool:
        return name in self.settings

    def at(self, name: str) -> str:
        """The place of a setting, for messages."""
        return f"{self.where}.{name}" if self.where else name

    def holds(self, *names: str) -> None:
        """Refuse every other key."""
        for name, value in self.settings.items():
            if name not in names:
                raise ValueError(f"{self.at(name)} = {short(value)} is not a setting; they are {', '.join(names)}")

    def value(self, name: str) -> Any:
        """A setting that must be there."""
        if name not in self.settings:
            raise ValueError(f"{self.at(name)} is missing; {self.where} has {', '.join(self.settings) or 'nothing'}")
        return self.settings[name]

    def choice(self, name: str, choices: Collection[str], default: str | None = None) -> str:
        """One of some names."""
        value = self.value(name) if default is None else self.settings.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{self.at(name)} is {short(value)}; it must be one of {', '.join(choices)}")
        return value

    def truth(self, name: str) -> bool:
        """True or false."""
        value = self.value(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self.at(name)} is {short(value)}; it must be true or false")
        return value

    def array(self, name: str, *shape: int | None) -> np.ndarray:
        """An array of numbers of that shape."""
        value = self.value(name)
        if isinstance(value, str | Mapping) or _has_truth_values(value):
            raise ValueError(f"{self.at(name)} is {short(value)}; it must be {_SHAPES[len(shape)]}")
        return np.asarray(checks.array(self.at(name), value, shape))

    def number(self, name: str, default: float = 1.0, at_least: float = -math.inf, above: float = -math.inf) -> float:
        """A finite number in its range."""
        if name not in self:
            return default
        value = self.settings[name]
        try:
            # a plain number as it is given: an array would round it where JAX's precision is float32
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            number = float(value) if plain else float(self.array(name))
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and number >= at_least and number > above:
            return number
        wanted = f"a number of at least {at_least:g}" if at_least > -math.inf else "a finite number"
        wanted = f"a number above {above:g}" if above > -math.inf else wanted
        raise ValueError(f"{self.at(name)} is {short(self.settings[name])}; it must be {wanted}")

    def count(self, name: str, default: int | None = None, at_least: int = 1, below: int = 2**63) -> int | None:
        """A whole number in its range; `below` is the first that is beyond."""
        if name not in self:
            return default
        number = checks.count(self.at(name), self.settings[name], at_least=at_least)
        if number >= below:
            power = below.bit_length() - 1
            limit = f"below 2**{power}" if below == 2**power else f"at most {below - 1}"
            raise ValueError(f"{self.at(name)} is {number}; it must be {limit}")
        return number

    def size(self, name: str, default: int | None = None) -> int | None:
        """A dimension, of which matrices fit into memory."""
        return self.count(name, default, below=_LARGEST + 1)

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
        """A list of tables, not empty."""
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
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _has_truth_values(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_truth_values, value))
    return isinstance(value, bool | np.bool_) or (isinstance(value, np.ndarray) and value.dtype == bool)


def toml_lines(settings: Mapping[str, Any]) -> list[str]:
    """Settings as lines of TOML, those that are None left out."""
    return [f"{name} = {_toml(value)}" for name, value in settings.items() if value is not None]


def _toml(value: Any) -> str:
    """A value as TOML writes it, tables within a line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(toml_lines(value)) + "}"
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and math.isfinite(value):
        return repr(value) if set(repr(value)) & set(".e") else f"{value!r}.0"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
