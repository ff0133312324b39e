"""One run as a task of a cluster: what a worker does, and its short report. Nothing here imports Dask."""

import hashlib
import platform
import signal
import threading
from typing import Any, NamedTuple

from largeprompt import __version__, use_float64
from largeprompt._progress import Progress

from ._remote_store import store_at
from ._result import run_from_text
from ._session import Interrupted, train

_stops: dict[str, threading.Event] = {}
_seen: set[tuple[str, str]] = set()


class Order(NamedTuple):
    """What the tasks of one sweep have in common: `mark` is a file that its driver has left in the store."""

    store: str
    sweep: str
    mark: str
    checkpoint_seconds: float


class Report(NamedTuple):
    """What became of a run: `finished`, `found` finished, `failed`, `interrupted`, or `elsewhere`: another store.

    `sweep` is the sweep that submitted it: drivers with the same run share a task.
    """

    sweep: str
    status: str
    machine: str
    message: str = ""
    notes: tuple[str, ...] = ()


class _Notes(Progress):
    """Keeps warnings until the run ends."""

    def __init__(self):
        self.messages: list[str] = []
        self.found = False

    def close(self, name: str, outcome: str = "") -> None:
        self.found = outcome == "found"

    def warn(self, message: str) -> None:
        self.messages.append(message)


def run_task(text: str, order: Order) -> Report:
    """Run the settings of a canonical text, from the last checkpoint on; the result goes to the store.

    A failure is reported, and kept in the store. If another process runs it, wait for its result.
    """
    use_float64()
    key, notes = hashlib.sha256(text.encode()).hexdigest(), _Notes()

    def report(status: str, message: str = "") -> Report:
        return Report(order.sweep, status, platform.node(), message, tuple(notes.messages))

    stop = _stop(order.sweep)
    if stop.is_set():
        return report("interrupted")
    store = run = None
    try:
        store = store_at(order.store)
        if (order.store, order.mark) not in _seen:
            if not store.has_mark(order.mark):
                return report("elsewhere")
            _seen.add((order.store, order.mark))
        read = run_from_text(text)
        if read.key != key:
            raise ValueError(f"largeprompt {__version__} on {platform.node()} reads other settings out of this run")
        run = read
        train(run, store, progress=notes, stop=stop, checkpoint_seconds=order.checkpoint_seconds)
    except Interrupted:
        return report("interrupted")
    except Exception as error:
        message = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        if store is not None and run is not None:
            try:
                store.fail(run, message, platform.node())
            except OSError as second:
                notes.warn(f"why run {key[:12]} failed could not be kept: {second}")
        return report("failed", message)
    return report("found" if notes.found else "finished")


def halt(sweep: str) -> None:
    """Make every run of a sweep in this process save a checkpoint and end."""
    _stop(sweep).set()


def _stop(sweep: str) -> threading.Event:
    return _stops.setdefault(sweep, threading.Event())


def dask_setup(worker: Any) -> None:
    """As a preload of the workers of a local cluster: Ctrl-C is for the driver, which stops them."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
