import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ._checkpoint import Checkpoint, Damaged, read_checkpoint, write_checkpoint
from ._files import claimed, is_claimed, leftovers, replacing, set_aside
from ._run import Run
from ._settings import runs_from

_HASH = 64  # letters


class Entry(NamedTuple):
    """A run that the store knows of: `finished`, `running` or `interrupted`."""

    address: str
    status: str
    run: Run
    step: int


class Store:
    """Results of runs in a folder, each under the content hash of its settings.

    `HASH.nc` is a finished run and never changes; `HASH.checkpoint` an unfinished one; `HASH.json` how the work went;
    `HASH.lock` is there while a process works on it. Several processes may share a folder. Without one, the folder
    that LARGEPROMPT_STORE names, or `runs`.
    """

    def __init__(self, folder: Path | str | None = None):
        self.folder = Path(folder if folder is not None else os.environ.get("LARGEPROMPT_STORE") or "runs")

    def path(self, address: str, suffix: str = "nc") -> Path:
        """The file of a run."""
        return self.folder / f"{address}.{suffix}"

    def load(self, address: str) -> xr.Dataset | None:
        """A finished run, once every number of it is as it was written; None if there is none."""
        path = self.path(address)
        if not path.exists():
            return None
        try:
            data = xr.load_dataset(path, engine="scipy", decode_times=False)
            kept = data.attrs.pop("digest")
            held = hashlib.sha256(data.attrs["run"].encode()).hexdigest()
        except OSError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise Damaged(f"{path} is damaged: {first}") from None
        if held != address:
            raise Damaged(f"{path} holds the run {held[:12]}, not {address[:12]}")
        if kept != digest(data):
            raise Damaged(f"{path} is damaged: its contents are not those that were written")
        return data

    def save(self, address: str, data: xr.Dataset, log: dict[str, Any]) -> None:
        """Keep a finished run, and apart from it how the work went; its checkpoint goes."""
        with replacing(self.path(address, "json")) as temporary:
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            temporary.write_text(json.dumps({**log, "finished": when}, indent=1) + "\n")
        with replacing(self.path(address)) as temporary:
            data.assign_attrs(digest=digest(data)).to_netcdf(temporary, engine="scipy")
        self.path(address, "checkpoint").unlink(missing_ok=True)

    def checkpoint(self, address: str) -> Checkpoint | None:
        """How far a run had come; None if it has none."""
        path = self.path(address, "checkpoint")
        return read_checkpoint(path, address) if path.exists() else None

    def keep(self, address: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of a run."""
        write_checkpoint(self.path(address, "checkpoint"), checkpoint)

    def log(self, address: str) -> dict[str, Any]:
        """How the work on a finished run went: seconds, sittings, versions."""
        try:
            return json.loads(self.path(address, "json").read_text())
        except (OSError, ValueError):
            return {}

    @contextlib.contextmanager
    def claim(self, address: str) -> Iterator[bool]:
        """Whether the run is this block's alone to work on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with claimed(self.path(address, "lock")) as alone:
            if alone:
                for suffix in ("nc", "checkpoint", "json"):  # what a killed writer left half done
                    for path in leftovers(self.path(address, suffix)):
                        path.unlink(missing_ok=True)
            yield alone

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged file."""
        return set_aside(path)

    def addresses(self) -> list[str]:
        """The hashes of all runs, finished or not."""
        names = {path.stem for suffix in ("nc", "checkpoint") for path in self.folder.glob(f"*.{suffix}")}
        return sorted(name for name in names if len(name) == _HASH)

    def find(self, prefix: str) -> str:
        """The one run whose hash begins so."""
        matches = [address for address in self.addresses() if prefix and address.startswith(prefix.lower())]
        if not matches:
            raise ValueError(
                f"no run in {self.folder} has a hash that begins with {prefix!r}; see largeprompt runs list"
            )
        if len(matches) > 1:
            shown = ", ".join(address[:12] for address in matches[:4]) + (", …" if len(matches) > 4 else "")
            raise ValueError(f"{len(matches)} runs in {self.folder} have a hash that begins with {prefix!r}: {shown}")
        return matches[0]

    def entry(self, address: str) -> Entry:
        """What is known of a run, read without its numbers."""
        path = self.path(address)
        if path.exists():
            try:
                with xr.open_dataset(path, engine="scipy", decode_times=False) as data:
                    run = run_of(data)
            except Exception as error:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                raise Damaged(f"{path} is damaged: {first}") from None
            return Entry(address, "finished", run, run.steps)
        checkpoint = self.checkpoint(address)
        if checkpoint is None:
            raise FileNotFoundError(f"{path} is gone")
        run, step = _run_from(checkpoint.header["run"]), int(checkpoint.header["step"])
        working = is_claimed(self.path(address, "lock"))
        return Entry(address, "running" if working else "interrupted", run, step)

    def remove(self, address: str) -> None:
        """Delete a run, unless a process works on it."""
        with self.claim(address) as alone:
            if not alone:
                raise ValueError(f"run {address[:12]} is being worked on; stop that process first")
            for suffix in ("nc", "checkpoint", "json"):
                self.path(address, suffix).unlink(missing_ok=True)


def run_of(data: xr.Dataset) -> Run:
    """The settings inside a result."""
    return _run_from(data.attrs["run"])


def _run_from(text: str) -> Run:
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
