"""One run as a task of a cluster: what a worker does, and the little that it tells. Nothing here imports Dask."""

import hashlib
import platform
import signal
import threading
from typing import Any, NamedTuple

from largeprompt import __version__, use_float64
from largeprompt._progress import Progress

from ._execution import train
from ._remote_store import store_at
from ._sitting import Interrupted
from ._store import run_from_text

_stops: dict[str, threading.Event] = {}
_seen: set[tuple[str, str]] = set()


class Order(NamedTuple):
    """What the tasks of one sweep have in common: `mark` is a sign in the store that its driver has left there."""

    store: str
    session: str
    mark: str
    checkpoint_seconds: float


class Told(NamedTuple):
    """What became of a run: `finished`, `found` finished, `failed`, `interrupted`, or `elsewhere`: another store.

    `session` is that of the sweep which ordered it: drivers with the same run share a task.
    """

    session: str
    status: str
    machine: str
    message: str = ""
    notes: tuple[str, ...] = ()


class _Notes(Progress):
    """Keeps what a user should know of, until the run ends."""

    def __init__(self):
        self.messages: list[str] = []
        self.found = False

    def close(self, name: str, outcome: str = "") -> None:
        self.found = outcome == "found"

    def warn(self, message: str) -> None:
        self.messages.append(message)


def run_task(text: str, order: Order) -> Told:
    """The run of a canonical text, from the store or from its last checkpoint on; its result stays in the store.

    A failure is an answer, and kept in the store. If another process is at the run, wait for its result.
    """
    use_float64()
    key, notes = hashlib.sha256(text.encode()).hexdigest(), _Notes()

    def told(status: str, message: str = "") -> Told:
        return Told(order.session, status, platform.node(), message, tuple(notes.messages))

    stop = _stop(order.session)
    if stop.is_set():
        return told("interrupted")
    store = run = None
    try:
        store = store_at(order.store)
        if (order.store, order.mark) not in _seen:
            if not store.has_mark(order.mark):
                return told("elsewhere")
            _seen.add((order.store, order.mark))
        read = run_from_text(text)
        if read.key != key:
            raise ValueError(f"largeprompt {__version__} on {platform.node()} reads other settings out of this run")
        run = read
        train(run, store, progress=notes, stop=stop, checkpoint_seconds=order.checkpoint_seconds)
    except Interrupted:
        return told("interrupted")
    except Exception as error:
        message = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        if store is not None and run is not None:
            try:
                store.fail(run, message, platform.node())
            except OSError as second:
                notes.warn(f"why run {key[:12]} failed could not be kept: {second}")
        return told("failed", message)
    return told("found" if notes.found else "finished")


def halt(session: str) -> None:
    """Make every run of a sweep in this process keep a checkpoint and end."""
    _stop(session).set()


def _stop(session: str) -> threading.Event:
    return _stops.setdefault(session, threading.Event())


def dask_setup(worker: Any) -> None:
    """As a preload of the workers of a local cluster: Ctrl-C is the driver's to hear, who tells them."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
