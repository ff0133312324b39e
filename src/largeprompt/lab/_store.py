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
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ._checkpoint import Checkpoint, Damaged, checkpoint_bytes, checkpoint_from
from ._files import about, claimed, is_claimed, leftovers, reason, replacing, set_aside
from ._run import Run
from ._settings import runs_from

_HASH = 64  # letters
_KINDS = ("nc", "checkpoint", "json", "failed")
_FEW = 1000  # so many runs are asked for one by one, more of them in one listing


class Entry(NamedTuple):
    """A run that the store knows of: `finished`, `running`, `interrupted` or `failed`.

    `begun` is one of which the store cannot tell whether someone works on it.
    """

    address: str
    status: str
    run: Run
    step: int


class AbstractStore(abc.ABC):
    """Results of runs, each under the content hash of its settings.

    `HASH.nc` is a finished run and never changes; `HASH.checkpoint` an unfinished one; `HASH.json` how the work went;
    `HASH.failed` why a sweep gave it up. A kind of store says how such objects are read, and how they are written so
    that no reader ever sees a part of one. It can be pickled and then means the same place in another process.
    """

    location: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

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
        """Of all objects."""

    @abc.abstractmethod
    def _is_there(self) -> bool:
        """Whether anything is at the place of the store."""

    @abc.abstractmethod
    def _rename(self, name: str, to: str) -> None: ...

    @abc.abstractmethod
    def _working(self, address: str) -> bool | None:
        """Whether someone works on a run; None if that cannot be told."""

    @abc.abstractmethod
    def claim(self, address: str) -> contextlib.AbstractContextManager[bool]:
        """Whether the run is this block's alone to work on."""

    def _place(self, name: str) -> str:
        return f"{self.location}/{name}"

    def finished(self, address: str) -> bool:
        """Whether the result of a run is there."""
        return self._exists(f"{address}.nc")

    def finished_of(self, addresses: Collection[str]) -> set[str]:
        """Which of these runs are finished; for many, by one listing."""
        return self._which("nc", addresses)

    def begun_of(self, addresses: Collection[str]) -> set[str]:
        """Which of these runs have a checkpoint, good or not; for many, by one listing."""
        return self._which("checkpoint", addresses)

    def _which(self, kind: str, addresses: Collection[str]) -> set[str]:
        if len(addresses) <= _FEW:
            return {address for address in addresses if self._exists(f"{address}.{kind}")}
        return {name.removesuffix(f".{kind}") for name in self._names() if name.endswith(f".{kind}")} & set(addresses)

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

    def load(self, address: str) -> xr.Dataset | None:
        """A finished run, once every number of it is as it was written; None if there is none."""
        place, content = self._place(f"{address}.nc"), self._read(f"{address}.nc")
        if content is None:
            return None
        try:
            data = xr.load_dataset(io.BytesIO(content), engine="scipy", decode_times=False)
        except Exception:  # of many kinds, none of which says more
            raise Damaged(f"{place} is damaged: it is cut short, or no NetCDF file") from None
        kept, text = data.attrs.pop("digest", None), data.attrs.get("run")
        if not isinstance(kept, str) or not isinstance(text, str):
            raise Damaged(f"{place} is damaged, or no result of a run: what it holds does not say which run it is")
        held = hashlib.sha256(text.encode()).hexdigest()
        if held != address:
            raise Damaged(f"{place} holds the run {held[:12]}, not {address[:12]}")
        if kept != digest(data):
            raise Damaged(f"{place} is damaged: its contents are not those that were written")
        from ._result import judged  # which reads settings by this module

        return judged(data)

    def save(self, address: str, data: xr.Dataset, log: dict[str, Any]) -> None:
        """Keep a finished run, and apart from it how the work went; its checkpoint goes."""
        self._write(f"{address}.json", _as_json({**log, "finished": _now()}))
        self._write(f"{address}.nc", data.assign_attrs(digest=digest(data)).to_netcdf(engine="scipy"))
        self.drop_checkpoint(address)
        self._delete(f"{address}.failed")

    def checkpoint(self, address: str) -> Checkpoint | None:
        """How far a run had come; None if it has none."""
        name = f"{address}.checkpoint"
        content = self._read(name)
        return None if content is None else checkpoint_from(content, self._place(name), address)

    def has_checkpoint(self, address: str) -> bool:
        """Whether a run has a checkpoint, good or not."""
        return self._exists(f"{address}.checkpoint")

    def keep(self, address: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of a run."""
        self._write(f"{address}.checkpoint", checkpoint_bytes(checkpoint))

    def drop_checkpoint(self, address: str) -> None:
        """Delete the checkpoint of a run, if it has one."""
        self._delete(f"{address}.checkpoint")

    def log(self, address: str) -> dict[str, Any]:
        """How the work on a finished run went: seconds, sittings, versions."""
        return self._json(f"{address}.json")

    def fail(self, run: Run, error: str, machine: str) -> None:
        """Keep why a run was given up; its result, once there is one, takes this away."""
        told = {"run": run.canonical, "error": error, "machine": machine, "failed": _now()}
        self._write(f"{run.hash}.failed", _as_json(told))

    def failure(self, address: str) -> dict[str, Any]:
        """Why a run was given up: error, machine, time; empty if it was not."""
        return self._json(f"{address}.failed")

    def set_aside(self, address: str, kind: str) -> str:
        """Rename a damaged object to `NAME.damaged-N`, so that nothing is lost and its place is free."""
        name, n = f"{address}.{kind}", 1
        while self._exists(kept := f"{name}.damaged-{n}"):
            n += 1
        self._rename(name, kept)
        return kept

    def mark(self, name: str) -> None:
        """Leave a sign that another process can look for, to see that it has the same store."""
        self._write(name, b"")

    def has_mark(self, name: str) -> bool:
        """Whether that sign is here."""
        return self._exists(name)

    def unmark(self, name: str) -> None:
        """Take that sign away."""
        self._delete(name)

    def addresses(self) -> list[str]:
        """The hashes of all runs, finished or not."""
        return sorted(address for address, kinds in self.kinds().items() if kinds & {"nc", "checkpoint", "failed"})

    def kinds(self) -> dict[str, frozenset[str]]:
        """Of each run, the kinds of objects that are there, by one listing."""
        found: dict[str, set[str]] = {}
        for name in self._names():
            stem, _, kind = name.partition(".")
            if len(stem) == _HASH and kind in (*_KINDS, "lock"):
                found.setdefault(stem, set()).add(kind)
        return {address: frozenset(kinds) for address, kinds in found.items()}

    def find(self, prefix: str) -> str:
        """The one run whose hash begins so."""
        matches = [address for address in self.addresses() if prefix and address.startswith(prefix.lower())]
        if not matches:
            raise ValueError(
                f"no run in {self.location} has a hash that begins with {prefix!r}; see largeprompt runs list"
            )
        if len(matches) > 1:
            shown = ", ".join(address[:12] for address in matches[:4]) + (", …" if len(matches) > 4 else "")
            raise ValueError(f"{len(matches)} runs in {self.location} have a hash that begins with {prefix!r}: {shown}")
        return matches[0]

    def entry(self, address: str) -> Entry:
        """What is known of a run, once every number of it is as it was written."""
        name = f"{address}.nc"
        data = self.load(address)
        if data is not None:
            run = self._run(name, data.attrs["run"])
            return Entry(address, "finished", run, run.steps)
        checkpoint, failure = self.checkpoint(address), self.failure(address)
        if checkpoint is not None:
            name, step = f"{address}.checkpoint", int(checkpoint.header["step"])
            run = self._run(name, checkpoint.header["run"])
        elif self._exists(f"{address}.failed"):
            run, step = self._run(f"{address}.failed", failure.get("run")), 0
        else:
            raise FileNotFoundError(f"{self._place(name)} is gone")
        return Entry(address, self.stage(address, bool(failure)), run, step)

    def _run(self, name: str, text: Any) -> Run:
        try:
            return run_from_text(text)
        except Exception:  # of many kinds, none of which says more
            raise Damaged(f"{self._place(name)} cannot be read: damaged, or another version's") from None

    def stage(self, address: str, failed: bool) -> str:
        """What an unfinished run that was begun is now."""
        working = self._working(address)
        return "running" if working else "failed" if failed else "begun" if working is None else "interrupted"

    def remove(self, address: str) -> None:
        """Delete a run, unless a process works on it."""
        with self.claim(address) as alone:
            if not alone:
                raise ValueError(f"run {address[:12]} is being worked on; stop that process first")
            for kind in _KINDS:
                self._delete(f"{address}.{kind}")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._read(name) or b"{}")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Store(AbstractStore):
    """A folder of results; without one, the folder that LARGEPROMPT_STORE names, or `runs`.

    Several processes may share it, on one machine or on several: `HASH.lock` is there while a process works on a run,
    and the system lets go of the lock of one that was killed.
    """

    def __init__(self, folder: Path | str | None = None):
        given = folder if folder is not None else os.environ.get("LARGEPROMPT_STORE") or "runs"
        if "://" in str(given):
            raise ValueError(f"the store is {str(given)!r}; it must be a folder here, and lab.store_at takes addresses")
        self.folder = Path(given)
        self.location = str(self.folder)

    def __repr__(self) -> str:
        """The folder and what is in it: a listing, no file is read."""
        kinds = self.kinds().values() if self.folder.is_dir() else []
        finished = sum("nc" in kind for kind in kinds)
        begun = sum("nc" not in kind and "checkpoint" in kind for kind in kinds)
        held = f"{finished} finished, {begun} with a checkpoint" if self.folder.is_dir() else "no such folder yet"
        return f"Store({self.location!r}: {held})"

    def __reduce__(self):
        return Store, (self.folder.absolute(),)  # whatever folder the other process is in

    def path(self, address: str, kind: str = "nc") -> Path:
        """The file of a run."""
        return self.folder / f"{address}.{kind}"

    @contextlib.contextmanager
    def claim(self, address: str) -> Iterator[bool]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with claimed(self.path(address, "lock")) as alone:
            if alone:
                for kind in _KINDS:  # what a killed writer left half done
                    for path in leftovers(self.path(address, kind)):
                        path.unlink(missing_ok=True)
            yield alone

    def set_aside(self, address: str, kind: str) -> str:
        return set_aside(self.path(address, kind)).name

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

    def _working(self, address: str) -> bool:
        return is_claimed(self.path(address, "lock"))


def run_of(data: xr.Dataset) -> Run:
    """The settings inside a result."""
    return run_from_text(data.attrs["run"])


def run_from_text(text: str) -> Run:
    """The run of a canonical text."""
    settings = json.loads(text)
    settings.pop("format")
    (run,) = runs_from(settings)
    return run


def digest(data: xr.Dataset) -> str:
    """Of every value and attribute, whatever types a file format turns them into."""
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


def _as_json(told: dict[str, Any]) -> bytes:
    return (json.dumps(told, indent=1) + "\n").encode()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
