import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import xarray as xr

from largeprompt._progress import Progress

from ._checkpoint import Damaged
from ._remote_store import store_at
from ._run import Run
from ._sitting import Interrupted, Sitting, unless_damaged
from ._store import AbstractStore

CHECKPOINT_SECONDS = 30.0
_PIECE_SECONDS = 0.25


def attempt(
    run: Run,
    store: AbstractStore,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> xr.Dataset | None:
    """The result of a run: from the store, or carried out from its last checkpoint on. None if another is at it."""
    run, progress, stop = run.resolved, progress or Progress(), stop or threading.Event()
    with claimed_unless_found(run, store, progress) as (found, alone):
        if found is not None or not alone:
            return found
        sitting = Sitting(run, store, progress, "cpu")
        with reported(run, progress):
            return _carried_out(sitting, progress, stop, checkpoint_seconds)


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
    """The result that the store has of a run, or whether the run is this block's alone to carry out."""
    try:
        found = store.load(run.key)
    except Damaged:
        found = None  # judged below, where no one else can be writing it
    if found is None:
        with store.claim(run.key) as alone:
            found = unless_damaged(store, run, "nc", progress) if alone else None
            if found is None:
                yield None, alone
                return
    if store.has_checkpoint(run.key):  # killed after the result was written and before this
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
    """The result of a run, from the store or carried out; if another process is at it, its result once it is there."""
    store, stop = store or store_at(), stop or threading.Event()
    while (data := attempt(run, store, progress, stop, checkpoint_seconds)) is None:
        if stop.wait(0.2):
            raise Interrupted
    return data


def _carried_out(sitting: Sitting, progress: Progress, stop: threading.Event, checkpoint_seconds: float) -> xr.Dataset:
    began = saved = time.monotonic()
    cost = speed = 0.0
    while (due := sitting.course.due) is not None:
        if sitting.state.step < due:
            speed = _advance(sitting, due, speed)
        recorded = sitting.state.step == due
        if recorded:
            sitting.course.add(sitting.state)
        progress.step(sitting.run.name, sitting.state.step, note(speed, sitting.course.risk))
        now = time.monotonic()
        sitting.seconds = now - began
        if stop.is_set():
            sitting.save()
            raise Interrupted
        # what was recorded is worth a checkpoint wherever one takes a hundredth of the time
        every = max(checkpoint_seconds, 20 * cost) if checkpoint_seconds > 0 else 0.0
        if now - saved >= (min(every, 100 * cost) if recorded else every):
            sitting.save()
            saved = time.monotonic()
            cost = saved - now
    return sitting.finish()


def note(speed: float, risk: Sequence[float]) -> str:
    """The steps per second of a run and its latest risk, in words; no risk before one is known."""
    risks = ", ".join(f"{value:.4f}" for value in risk)
    return f"{speed:.0f}/s" + (f", risk {risks}" if risks else "")


def _advance(sitting: Sitting, due: int, speed: float) -> float:
    """A piece of work towards `due`; the steps a second that it was."""
    first, began = sitting.state.step, time.monotonic()
    # the first piece is one step, because it may have to compile; then each grows to its time
    steps = max(1, int(speed * _PIECE_SECONDS))
    sitting.state = sitting.trainer.advance(sitting.state, min(due, first + steps))
    measured = (sitting.state.step - first) / max(time.monotonic() - began, 1e-6)
    return measured if speed == 0 else min(measured, 8 * speed)
