"""The store of results: runs and other experiments under their keys, in a folder."""

import abc
import contextlib
import datetime
import hashlib
import io
import json
import os
import secrets
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xarray as xr

from ._checkpoint import Checkpoint, Damaged, checkpoint_bytes, checkpoint_from
from ._files import about, claimed, is_claimed, leftovers, reason, replacing
from ._result import digest, judged, run_from_text
from ._run import Run

_KEY = 64  # letters
_LOGS = {"run": "json", "experiment": "experiment.json"}  # by the attribute of a dataset that holds its settings
_KINDS = ("nc", "checkpoint", "failed", *_LOGS.values())
_FEW = 1000  # up to so many runs are looked up one by one, more of them in one listing


class Kept(Protocol):
    """What a store keeps results of, such as a `Run`: its settings as one JSON text, and the SHA-256 of that text."""

    @property
    def canonical(self) -> str: ...

    @property
    def key(self) -> str: ...


class Status(NamedTuple):
    """How far a run is: its stage, its settings where they were read, the last step that is kept, why it failed.

    A stage is `finished`, `running`, `interrupted`, `failed`, `not begun`, or `begun`: unfinished, in a store that does
    not know whether a process works on it.
    """

    key: str
    stage: str
    run: Run | None = None
    step: int = 0
    message: str = ""

    @property
    def title(self) -> str:
        """The title of the run, where its settings were read."""
        return self.run.title if self.run is not None else ""

    @property
    def steps(self) -> int:
        """How many steps the run has in all, where its settings were read."""
        return self.run.steps if self.run is not None else 0


class AbstractStore(abc.ABC):
    """Results of runs and of other experiments, each under its key, the hash of its settings.

    `KEY.nc` is a result and never changes; `KEY.checkpoint` an unfinished run; `KEY.json` how the work on a run went,
    `KEY.experiment.json` that on an experiment; `KEY.failed` why a sweep gave a run up. A kind of store says how such
    objects are read, and how they are written so that no reader ever sees a part of one. It can be pickled and then
    means the same place in another process.
    """

    location: str  # for messages
    address: str  # for another process

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

    def __reduce__(self):
        return type(self), (self.address,)  # whatever folder the other process is in

    @abc.abstractmethod
    def _read(self, name: str) -> bytes | None:
        """An object; None if there is none."""

    @abc.abstractmethod
    def _write(self, name: str, content: bytes | memoryview) -> None:
        """Replace an object at once."""

    @abc.abstractmethod
    def _delete(self, name: str) -> None:
        """Delete an object, if it is there."""

    @abc.abstractmethod
    def _exists(self, name: str) -> bool: ...

    @abc.abstractmethod
    def _names(self) -> Iterable[str]:
        """The names of all objects."""

    @abc.abstractmethod
    def _is_there(self) -> bool:
        """Whether anything is at the place of the store."""

    @abc.abstractmethod
    def _rename(self, name: str, to: str) -> None: ...

    @abc.abstractmethod
    def _working(self, key: str) -> bool | None:
        """Whether a process works on a run; None if that cannot be known."""

    @abc.abstractmethod
    def claim(self, key: str) -> contextlib.AbstractContextManager[bool]:
        """Whether the item is claimed for this block, and for no other process or thread."""

    def _place(self, name: str) -> str:
        return f"{self.location}/{name}"

    def finished(self, key: str) -> bool:
        """Whether the result of a run is there."""
        return self._exists(f"{key}.nc")

    def finished_of(self, keys: Collection[str]) -> set[str]:
        """Which of these runs are finished; for many, by one listing."""
        return self._which("nc", keys)

    def begun_of(self, keys: Collection[str]) -> set[str]:
        """Which of these runs have a checkpoint, good or not; for many, by one listing."""
        return self._which("checkpoint", keys)

    def _which(self, kind: str, keys: Collection[str]) -> set[str]:
        if len(keys) <= _FEW:
            return {key for key in keys if self._exists(f"{key}.{kind}")}
        return {name.removesuffix(f".{kind}") for name in self._names() if name.endswith(f".{kind}")} & set(keys)

    def check_readable(self) -> None:
        """A store that is not there is an error, before it passes for one without runs."""
        if not self._is_there():
            other = "training makes one, --store or LARGEPROMPT_STORE names another"
            raise ValueError(f"there is no store at {self.location!r}; {other}")

    def check_writable(self) -> None:
        """One that cannot be written is an error, before any work."""
        probe = f".probe-{secrets.token_hex(8)}"
        try:
            self._write(probe, b"")
            self._delete(probe)
        except OSError as error:
            raise ValueError(f"the store is {self.location!r}; no file can be written there: {reason(error)}") from None

    def load(self, key: str) -> xr.Dataset | None:
        """A result, once every number of it is as it was written; None if there is none, `Damaged` if it is not."""
        place, content = self._place(f"{key}.nc"), self._read(f"{key}.nc")
        if content is None:
            return None
        try:
            data = _read_back(content)
        except Exception:  # of many kinds, none of which says more
            raise Damaged(f"{place} is damaged: it is cut short, or no NetCDF file") from None
        kept, sort = data.attrs.pop("digest", None), _sort(data)
        if not isinstance(kept, str) or sort is None:
            raise Damaged(f"{place} is damaged, or no result of a run: what it holds does not say which run it is")
        held = hashlib.sha256(data.attrs[sort].encode()).hexdigest()
        if held != key:
            raise Damaged(f"{place} holds the {sort} {held[:12]}, not {key[:12]}")
        if kept != digest(data):
            raise Damaged(f"{place} is damaged: its contents are not those that were written")
        return judged(data) if sort == "run" else data

    def save(self, item: Kept, data: xr.Dataset, log: dict[str, Any]) -> xr.Dataset:
        """Keep a result, and apart from it how the work went; its checkpoint goes. Returned is what will be read.

        The dataset holds the canonical settings as its attribute `run`, or `experiment`.
        """
        sort = _sort(data)
        if sort is None or data.attrs[sort] != item.canonical:
            raise ValueError(f"the dataset of {item.key[:12]} must hold its canonical settings as run or experiment")
        as_read = _read_back(data.to_netcdf(engine="scipy"))
        self._write(f"{item.key}.{_LOGS[sort]}", _as_json({**log, "finished": _now()}))
        self._write(f"{item.key}.nc", as_read.assign_attrs(digest=digest(as_read)).to_netcdf(engine="scipy"))
        self.drop_checkpoint(item.key)
        self._delete(f"{item.key}.failed")
        return as_read

    def load_checkpoint(self, key: str) -> Checkpoint | None:
        """How far a run had come; None if it has none."""
        name = f"{key}.checkpoint"
        content = self._read(name)
        return None if content is None else checkpoint_from(content, self._place(name), key)

    def kept_step(self, key: str) -> int:
        """The last step of an unfinished run that is kept; 0 if it has no checkpoint that can be used."""
        with contextlib.suppress(OSError, ValueError):
            checkpoint = self.load_checkpoint(key)
            return 0 if checkpoint is None else int(checkpoint.header["step"])
        return 0

    def save_checkpoint(self, key: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of a run."""
        self._write(f"{key}.checkpoint", checkpoint_bytes(checkpoint))

    def drop_checkpoint(self, key: str) -> None:
        """Delete the checkpoint of a run, if it has one."""
        self._delete(f"{key}.checkpoint")

    def log(self, key: str) -> dict[str, Any]:
        """How the work on a result went: seconds, versions and the like."""
        return self._json(f"{key}.json") or self._json(f"{key}.experiment.json")

    def fail(self, run: Run, error: str, machine: str) -> None:
        """Keep why a run was given up; its result, once there is one, takes this away."""
        reason = {"run": run.canonical, "error": error, "machine": machine, "failed": _now()}
        self._write(f"{run.key}.failed", _as_json(reason))

    def failure(self, key: str) -> dict[str, Any]:
        """Why a run was given up: error, machine, time; empty if it was not."""
        return self._json(f"{key}.failed")

    def set_aside(self, key: str, kind: str) -> str:
        """Rename a damaged object to `NAME.damaged-N`, so that nothing is lost and its place is free."""
        name, n = f"{key}.{kind}", 1
        while self._exists(kept := f"{name}.damaged-{n}"):
            n += 1
        self._rename(name, kept)
        return kept

    @contextlib.contextmanager
    def marked(self, name: str) -> Iterator[None]:
        """A file of this name, until the block ends: another process sees by it that it has the same store."""
        self._write(name, b"")
        try:
            yield
        finally:
            self._delete(name)

    def has_mark(self, name: str) -> bool:
        """Whether that file is here."""
        return self._exists(name)

    def run_keys(self) -> list[str]:
        """The keys of all runs, finished or not."""
        return sorted(key for key, kinds in self.kinds().items() if kinds & {"nc", "checkpoint", "failed"})

    def kinds(self) -> dict[str, frozenset[str]]:
        """The kinds of objects that are there of each run, by one listing; experiments are left out."""
        found: dict[str, set[str]] = {}
        for name in self._names():
            stem, _, kind = name.partition(".")
            if len(stem) == _KEY and kind in (*_KINDS, "lock"):
                found.setdefault(stem, set()).add(kind)
        return {key: frozenset(kinds) for key, kinds in found.items() if _LOGS["experiment"] not in kinds}

    def find(self, prefix: str) -> str:
        """The key of the one run that begins so."""
        matches = [key for key in self.run_keys() if prefix and key.startswith(prefix.lower())]
        if not matches:
            raise ValueError(
                f"no run in {self.location} has a hash that begins with {prefix!r}; see largeprompt runs list"
            )
        if len(matches) > 1:
            shown = ", ".join(key[:12] for key in matches[:4]) + (", …" if len(matches) > 4 else "")
            raise ValueError(f"{len(matches)} runs in {self.location} have a hash that begins with {prefix!r}: {shown}")
        return matches[0]

    def status(self, key: str) -> Status:
        """How far a run is, once every number of it is as it was written."""
        name = f"{key}.nc"
        data = self.load(key)
        if data is not None:
            run = self._run(name, data.attrs["run"])
            return Status(key, "finished", run, run.steps)
        checkpoint, failure = self.load_checkpoint(key), self.failure(key)
        if checkpoint is not None:
            name, step = f"{key}.checkpoint", int(checkpoint.header["step"])
            run = self._run(name, checkpoint.header["run"])
        elif self._exists(f"{key}.failed"):
            run, step = self._run(f"{key}.failed", failure.get("run")), 0
        else:
            raise FileNotFoundError(f"{self._place(name)} is gone")
        return Status(key, self.stage(key, bool(failure)), run, step, str(failure.get("error", "")))

    def _run(self, name: str, text: Any) -> Run:
        try:
            return run_from_text(text)
        except Exception:  # of many kinds, none of which says more
            raise Damaged(f"{self._place(name)} cannot be read: damaged, or another version's") from None

    def stage(self, key: str, failed: bool) -> str:
        """What an unfinished run that was begun is now."""
        working = self._working(key)
        return "running" if working else "failed" if failed else "begun" if working is None else "interrupted"

    def remove(self, key: str) -> None:
        """Delete a run, unless a process works on it."""
        with self.claim(key) as alone:
            if not alone:
                raise ValueError(f"run {key[:12]} is being worked on; stop that process first")
            for kind in _KINDS:
                self._delete(f"{key}.{kind}")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._read(name) or b"{}")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Store(AbstractStore):
    """A folder of results; without one, the folder that LARGEPROMPT_STORE names, or `runs`.

    Several processes may share it, on one machine or on several: `KEY.lock` is there while a process works on a run,
    and the system lets go of the lock of one that was killed.
    """

    def __init__(self, folder: Path | str | None = None):
        given = folder if folder is not None else os.environ.get("LARGEPROMPT_STORE") or "runs"
        if "://" in str(given):
            raise ValueError(f"the store is {str(given)!r}; it must be a folder here, and lab.store_at takes addresses")
        self.folder = Path(given)
        self.location, self.address = str(self.folder), str(self.folder.absolute())

    def __repr__(self) -> str:
        """The folder and what is in it: a listing, no file is read."""
        kinds = self.kinds().values() if self.folder.is_dir() else []
        finished = sum("nc" in kind for kind in kinds)
        begun = sum("nc" not in kind and "checkpoint" in kind for kind in kinds)
        held = f"{finished} finished, {begun} with a checkpoint" if self.folder.is_dir() else "no such folder yet"
        return f"Store({self.location!r}: {held})"

    def path(self, key: str, kind: str = "nc") -> Path:
        """The file of a run."""
        return self.folder / f"{key}.{kind}"

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with claimed(self.path(key, "lock")) as alone:
            if alone:
                for kind in _KINDS:  # what a killed writer left half done
                    for path in leftovers(self.path(key, kind)):
                        path.unlink(missing_ok=True)
            yield alone

    def _read(self, name: str) -> bytes | None:
        try:
            with about(self.folder / name):
                return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write(self, name: str, content: bytes | memoryview) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / name) as temporary:
            temporary.write_bytes(content)

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def _exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _names(self) -> Iterable[str]:
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []

    def _is_there(self) -> bool:
        return self.folder.is_dir()

    def _rename(self, name: str, to: str) -> None:
        (self.folder / name).rename(self.folder / to)

    def _working(self, key: str) -> bool:
        return is_claimed(self.path(key, "lock"))


def _read_back(content: bytes | memoryview) -> xr.Dataset:
    return xr.load_dataset(io.BytesIO(content), engine="scipy", decode_times=False)


def _sort(data: xr.Dataset) -> str | None:
    """Whether a dataset is the result of a run or of another experiment: the attribute that holds its settings."""
    return next((sort for sort in _LOGS if isinstance(data.attrs.get(sort), str)), None)


def _as_json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
