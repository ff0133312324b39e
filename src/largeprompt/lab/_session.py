"""One process that works on one run: from its last checkpoint to its result, or to an interrupt."""

import contextlib
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import xarray as xr

from largeprompt import __version__
from largeprompt._device import DeviceName
from largeprompt._progress import Progress
from largeprompt.dynamics import State

from ._checkpoint import Checkpoint, Damaged, layers_in
from ._history import History
from ._remote_store import store_at
from ._result import result
from ._run import Run
from ._store import AbstractStore
from ._weights import matrices

CHECKPOINT_SECONDS = 30.0
_PIECE_SECONDS = 0.25


class Interrupted(Exception):
    """Work stopped on request; what was done is kept."""


class RunSession:
    """One process that works on one run, from its last checkpoint on: its state, its history, and what it saves."""

    def __init__(self, run: Run, store: AbstractStore, progress: Progress, device: DeviceName):
        self.run, self._store, self._device = run, store, device
        self.trainer = run.trainer()
        self.state = self.trainer.start()
        self.history = History(run, self.state)
        self.seconds, self._sessions, self._saved_step = 0.0, 1, 0
        self._earlier: dict[str, float] = {"seconds": 0.0, "gpu_seconds": 0.0}  # in other sessions
        self._resume(progress)

    def _resume(self, progress: Progress) -> None:
        found: Checkpoint | None = unless_damaged(self._store, self.run, "checkpoint", progress)
        if found is None:
            return
        header = found.header
        layers = layers_in(found, self.state.layers)
        moments = (layers_in(found, like, f" moment {j}") for j, like in enumerate(self.state.moments))
        self.state = State(header["step"], layers, tuple(header["diverged"]), tuple(moments))
        self.history.restore({name: array for name, array in found.arrays.items() if not name.startswith("state ")})
        self._earlier = {name: header.get(name, 0.0) for name in self._earlier}
        self._sessions = header["sittings"] + 1
        self._saved_step = self.state.step

    def save(self) -> None:
        """Save a checkpoint."""
        header = {
            "hash": self.run.key,
            "run": self.run.canonical,
            "step": self.state.step,
            "diverged": self.state.diverged,
            "sittings": self._sessions,
            **self._spent(),
        }
        parts = {"": self.state.layers} | {f" moment {j}": of for j, of in enumerate(self.state.moments)}
        arrays = {
            f"state {i} {name}{part}": matrix
            for part, layers in parts.items()
            for i, layer in enumerate(layers)
            for name, matrix in matrices(layer).items()
        }
        with self._explaining_a_full_disk():
            self._store.save_checkpoint(self.run.key, Checkpoint(header, arrays | self.history.arrays()))
        self._saved_step = self.state.step

    def finish(self) -> xr.Dataset:
        """Save the result of a run after its last step."""
        data = result(self.run, self.history, self.state.diverged)
        versions = {"largeprompt": __version__, "numpy": np.__version__, "jax": jax.__version__}
        where = {"machine": platform.node(), "device": self._device}
        log = {**self._spent(), "sittings": self._sessions, **where, "versions": versions}
        with self._explaining_a_full_disk():
            return self._store.save(self.run, data, log)

    def _spent(self) -> dict[str, float]:
        """Seconds of all sessions of this run, and how many of them were spent by a GPU."""
        own = {"seconds": self.seconds, "gpu_seconds": self.seconds if self._device == "gpu" else 0.0}
        return {name: self._earlier[name] + own[name] for name in own}

    @contextlib.contextmanager
    def _explaining_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"run {self.run.key[:12]} is kept up to step {self._saved_step} in {self._store.location}"
            why = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None)
            raise OSError(f"{why}: {what}, and goes on from there once it can be written") from error


def unless_damaged(store: AbstractStore, run: Run, suffix: str, progress: Progress) -> Any:
    """What the store has of a run; a file that cannot be used is reported and set aside."""
    try:
        return store.load(run.key) if suffix == "nc" else store.load_checkpoint(run.key)
    except Damaged as error:
        kept = store.set_aside(run.key, suffix)
        progress.warn(f"{error}; kept as {kept}, and the run begins again")
        return None


def attempt(
    run: Run,
    store: AbstractStore,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> xr.Dataset | None:
    """The result of a run, from the store or by running it from its last checkpoint; None if another runs it."""
    run, progress, stop = run.resolved, progress or Progress(), stop or threading.Event()
    with claimed_unless_found(run, store, progress) as (found, alone):
        if found is not None or not alone:
            return found
        session = RunSession(run, store, progress, "cpu")
        with reported(run, progress):
            return _finished(session, progress, stop, checkpoint_seconds)


@contextlib.contextmanager
def reported(run: Run, progress: Progress) -> Iterator[None]:
    """The work on a run, reported from its start to its end."""
    progress.start(run.name, run.steps)
    try:
        yield
    except BaseException as error:
        progress.close(run.name, "interrupted" if isinstance(error, Interrupted) else "failed")
        raise
    progress.close(run.name, "finished")


@contextlib.contextmanager
def claimed_unless_found(
    run: Run, store: AbstractStore, progress: Progress
) -> Iterator[tuple[xr.Dataset | None, bool]]:
    """The result that the store has of a run, or whether the run is claimed for this block."""
    try:
        found = store.load(run.key)
    except Damaged:
        found = None  # looked at again below, where no one else can be writing it
    if found is None:
        with store.claim(run.key) as alone:
            found = unless_damaged(store, run, "nc", progress) if alone else None
            if found is None:
                yield None, alone
                return
    if store.begun_of([run.key]):  # killed after the result was written and before this
        with store.claim(run.key) as alone:
            if alone:
                store.drop_checkpoint(run.key)
    progress.start(run.name, run.steps)
    progress.close(run.name, "found")
    yield found, False


def train(
    run: Run,
    store: AbstractStore | None = None,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> xr.Dataset:
    """The result of a run, from the store or by running it; if another process runs it, its result once it is there."""
    store, stop = store or store_at(), stop or threading.Event()
    while (data := attempt(run, store, progress, stop, checkpoint_seconds)) is None:
        if stop.wait(0.2):
            raise Interrupted
    return data


def _finished(session: RunSession, progress: Progress, stop: threading.Event, checkpoint_seconds: float) -> xr.Dataset:
    began = saved = time.monotonic()
    cost = speed = 0.0
    while (due := session.history.due) is not None:
        if session.state.step < due:
            speed = _advance(session, due, speed)
        recorded = session.state.step == due
        if recorded:
            session.history.add(session.state)
        progress.step(session.run.name, session.state.step, note(speed, session.history.risk))
        now = time.monotonic()
        session.seconds = now - began
        if stop.is_set():
            session.save()
            raise Interrupted
        # what was recorded is worth a checkpoint wherever one takes a hundredth of the time
        every = max(checkpoint_seconds, 20 * cost) if checkpoint_seconds > 0 else 0.0
        if now - saved >= (min(every, 100 * cost) if recorded else every):
            session.save()
            saved = time.monotonic()
            cost = saved - now
    return session.finish()


def note(speed: float, risk: Sequence[float]) -> str:
    """The steps per second of a run and its latest risk, in words; no risk before one is known."""
    risks = ", ".join(f"{value:.4f}" for value in risk)
    return f"{speed:.0f}/s" + (f", risk {risks}" if risks else "")


def _advance(session: RunSession, due: int, speed: float) -> float:
    """Advance towards `due` for a moment; returned are the steps per second."""
    first, began = session.state.step, time.monotonic()
    # the first piece is one step, because it may have to compile; then each grows to its time
    steps = max(1, int(speed * _PIECE_SECONDS))
    session.state = session.trainer.advance(session.state, min(due, first + steps))
    measured = (session.state.step - first) / max(time.monotonic() - began, 1e-6)
    return measured if speed == 0 else min(measured, 8 * speed)
