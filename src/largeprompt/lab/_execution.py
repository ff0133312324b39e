import contextlib
import platform
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xarray as xr

from largeprompt import __version__
from largeprompt.dynamics import State

from ._checkpoint import Checkpoint, Damaged
from ._course import Course
from ._remote_store import store_at
from ._result import result
from ._run import Run
from ._store import AbstractStore
from ._weights import matrices, with_matrices

CHECKPOINT_SECONDS = 30.0
_PIECE_SECONDS = 0.25


class Interrupted(Exception):
    """Work stopped on request; what was done is kept."""


class Watcher:
    """Is told how runs go on; this one keeps still, except about damage."""

    def moved(self, run: Run, step: int, speed: float, risk: tuple[float, ...]) -> None:
        """A run has come to `step`, at `speed` steps a second; `risk` is the latest recorded of each member."""

    def ended(self, run: Run, found: bool) -> None:
        """A run is finished, or was `found` finished."""

    def noticed(self, message: str) -> None:
        """Something a user should know of."""
        warnings.warn(message, stacklevel=2)


def attempt(
    run: Run,
    store: AbstractStore,
    watcher: Watcher | None = None,
    stop: threading.Event | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> xr.Dataset | None:
    """The result of a run: from the store, or carried out from its last checkpoint on. None if another is at it."""
    run, watcher, stop = run.resolved, watcher or Watcher(), stop or threading.Event()
    try:
        found = store.load(run.hash)
    except Damaged:
        found = None  # judged below, where no one else can be writing it
    if found is None:
        with store.claim(run.hash) as alone:
            if not alone:
                return None
            found = _unless_damaged(store, run, "nc", watcher)
            if found is None:
                result = _Sitting(run, store, watcher, stop, checkpoint_seconds).carry_out()
                watcher.ended(run, found=False)
                return result
    if store.has_checkpoint(run.hash):  # killed after the result was written and before this
        with store.claim(run.hash) as alone:
            if alone:
                store.drop_checkpoint(run.hash)
    watcher.ended(run, found=True)
    return found


def train(
    run: Run,
    store: AbstractStore | None = None,
    *,
    watcher: Watcher | None = None,
    stop: threading.Event | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> xr.Dataset:
    """The result of a run, from the store or carried out; if another process is at it, its result once it is there."""
    store, stop = store or store_at(), stop or threading.Event()
    while (data := attempt(run, store, watcher, stop, checkpoint_seconds)) is None:
        if stop.wait(0.2):
            raise Interrupted
    return data


def _unless_damaged(store: AbstractStore, run: Run, suffix: str, watcher: Watcher) -> Any:
    """What the store has of a run; a file that cannot be used is named and set aside."""
    try:
        return store.load(run.hash) if suffix == "nc" else store.checkpoint(run.hash)
    except Damaged as error:
        kept = store.set_aside(run.hash, suffix)
        watcher.noticed(f"{error}; kept as {kept}, and the run begins anew")
        return None


class _Sitting:
    """One process at work on one run, from its last checkpoint to its end or to an interrupt."""

    def __init__(
        self, run: Run, store: AbstractStore, watcher: Watcher, stop: threading.Event, checkpoint_seconds: float
    ):
        self._run, self._store, self._watcher, self._stop = run, store, watcher, stop
        self._every = checkpoint_seconds
        self._trainer = run.trainer()
        self._state = self._trainer.start()
        self._course = Course(run, self._state)
        self._seconds, self._sittings, self._saved_step, self._speed = 0.0, 1, 0, 0.0

    def carry_out(self) -> xr.Dataset:
        self._resume()
        began = saved = time.monotonic()
        before, cost = self._seconds, 0.0
        while (due := self._course.due) is not None:
            if self._state.step < due:
                self._advance(due)
            recorded = self._state.step == due
            if recorded:
                self._course.add(self._state)
            self._watcher.moved(self._run, self._state.step, self._speed, self._course.risk)
            now = time.monotonic()
            self._seconds = before + now - began
            if self._stop.is_set():
                self._save()
                raise Interrupted
            # what was recorded is worth a checkpoint wherever one takes a hundredth of the time
            every = max(self._every, 20 * cost) if self._every > 0 else 0.0
            if now - saved >= (min(every, 100 * cost) if recorded else every):
                self._save()
                saved = time.monotonic()
                cost = saved - now
        data = result(self._run, self._course, self._state.diverged)
        with self._explaining_a_full_disk():
            self._store.save(self._run.hash, data, self._log())
        return data

    def _advance(self, due: int) -> None:
        first, began = self._state.step, time.monotonic()
        # the first piece is one step, because it may have to compile; then each grows to its time
        steps = max(1, int(self._speed * _PIECE_SECONDS))
        self._state = self._trainer.advance(self._state, min(due, first + steps))
        measured = (self._state.step - first) / max(time.monotonic() - began, 1e-6)
        self._speed = measured if self._speed == 0 else min(measured, 8 * self._speed)

    def _resume(self) -> None:
        found: Checkpoint | None = _unless_damaged(self._store, self._run, "checkpoint", self._watcher)
        if found is None:
            return
        header = found.header
        state = {name: array for name, array in found.arrays.items() if name.startswith("state ")}
        layers = tuple(
            with_matrices(layer, {name: state[f"state {i} {name}"] for name in matrices(layer)})
            for i, layer in enumerate(self._state.layers)
        )
        self._state = State(header["step"], layers, tuple(header["diverged"]))
        self._course.restore({name: array for name, array in found.arrays.items() if name not in state})
        self._seconds, self._sittings = header["seconds"], header["sittings"] + 1
        self._saved_step = self._state.step

    def _save(self) -> None:
        header = {
            "hash": self._run.hash,
            "run": self._run.canonical,
            "step": self._state.step,
            "diverged": self._state.diverged,
            "seconds": self._seconds,
            "sittings": self._sittings,
        }
        arrays = {
            f"state {i} {name}": matrix
            for i, layer in enumerate(self._state.layers)
            for name, matrix in matrices(layer).items()
        }
        with self._explaining_a_full_disk():
            self._store.keep(self._run.hash, Checkpoint(header, arrays | self._course.arrays()))
        self._saved_step = self._state.step

    def _log(self) -> dict[str, Any]:
        versions = {"largeprompt": __version__, "numpy": np.__version__, "jax": jax.__version__}
        return {"seconds": self._seconds, "sittings": self._sittings, "machine": platform.node(), "versions": versions}

    @contextlib.contextmanager
    def _explaining_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"run {self._run.hash[:12]} is kept up to step {self._saved_step} in {self._store.location}"
            raise OSError(
                f"{error.strerror or error}: {what}, and goes on from there once it can be written"
            ) from error
