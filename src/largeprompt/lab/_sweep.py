import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence

import xarray as xr

from largeprompt._device import Device, Place, checked_device

from ._engines import with_engines
from ._execution import CHECKPOINT_SECONDS, attempt
from ._remote_store import store_at
from ._run import Run
from ._sitting import Interrupted, Watcher
from ._store import AbstractStore

MOST_ON_GPU = 512  # runs side by side: each holds a file open, its lock


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    runs: Sequence[Run],
    store: AbstractStore | None = None,
    *,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    seconds: Mapping[Run, float] | None = None,
    stop: threading.Event | None = None,
    device: Device = "cpu",
) -> list[xr.Dataset]:
    """The results of many runs, `jobs` at a time: first those with a checkpoint, then those with the most `seconds`.

    On a GPU, where `device` asks for one and there is one, all that the compiled loops apply to go side by side. Runs
    that are in the store are not run again. Several processes given the same runs share them. An interrupt
    (Ctrl-C), or `stop` set by another thread, makes every run keep a checkpoint and raises `Interrupted`; so does the
    failure of one run.
    """
    store, watcher, stop = store or store_at(), watcher or Watcher(), stop or threading.Event()
    expected, hashes = seconds or {}, [run.hash for run in with_engines(runs)]
    begun = store.begun_of(hashes)
    order = sorted(range(len(runs)), key=lambda i: (hashes[i] not in begun, -expected.get(runs[i], 0.0)))
    work = _Work(runs, order, store, watcher, checkpoint_seconds, stop)
    if place_for(device).device == "gpu":
        work.carry_out_on_gpu()
    ends = [work.begin() for _ in range(jobs or usable_cores())]
    try:
        _wait(ends)
    except KeyboardInterrupt:
        work.stop.set()
        _wait(ends)
        raise Interrupted from None
    if work.failure is not None:
        raise work.failure
    if len(work.results) < len(runs):
        raise Interrupted
    return [work.results[i] for i in range(len(runs))]


def place_for(device: str) -> Place:
    """Where runs would be carried out."""
    if checked_device(device) == "cpu":
        return Place("cpu")
    from largeprompt.engine import fused_place  # imports a compiler

    return fused_place(device)


@contextlib.contextmanager
def _interrupts_heard(stop: threading.Event) -> Iterator[None]:
    """An interrupt sets `stop`, and the work ends at its next pause; elsewhere than in the main thread, none comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heard)


def _wait(ends: list[threading.Event]) -> None:
    # not for the threads themselves: an interrupted join takes a thread at work for one that has ended
    for end in ends:
        while not end.wait(0.2):
            pass


class _Work:
    """Runs waiting for a thread to take them."""

    def __init__(
        self,
        runs: Sequence[Run],
        order: list[int],
        store: AbstractStore,
        watcher: Watcher,
        checkpoint_seconds: float,
        stop: threading.Event,
    ):
        self._runs, self._waiting, self._store, self._watcher = runs, order, store, watcher
        self._checkpoint_seconds = checkpoint_seconds
        self._lock = threading.Lock()
        self.stop = stop
        self.results: dict[int, xr.Dataset] = {}
        self.failure: BaseException | None = None

    def carry_out_on_gpu(self) -> None:
        """Those that can be, as many at a time as one process should hold; the others stay in line."""
        from ._fleet import carried_out_together  # imports a compiler

        named = with_engines(self._runs)
        able = [i for i in self._waiting if named[i].engine == "fused"]
        for first in range(0, len(able), MOST_ON_GPU):
            batch = able[first : first + MOST_ON_GPU]
            options = self._store, self._watcher, self.stop, self._checkpoint_seconds
            with _interrupts_heard(self.stop):
                found = carried_out_together([self._runs[i] for i in batch], *options)
            self.results |= {i: data for i, data in zip(batch, found, strict=True) if data is not None}
        self._waiting = [i for i in self._waiting if i not in self.results]

    def begin(self) -> threading.Event:
        """Set a thread to work; the event comes when it has ended."""
        end = threading.Event()

        def carry_out() -> None:
            try:
                self._carry_out()
            finally:
                end.set()

        threading.Thread(target=carry_out, daemon=True).start()
        return end

    def _carry_out(self) -> None:
        """Take run after run until none is left; one that another process is at goes to the end of the line."""
        while not self.stop.is_set():
            with self._lock:
                if not self._waiting:
                    return
                i = self._waiting.pop(0)
            try:
                data = attempt(self._runs[i], self._store, self._watcher, self.stop, self._checkpoint_seconds)
            except Interrupted:
                return
            except BaseException as failure:
                with self._lock:
                    self.failure = self.failure or failure
                self.stop.set()
                return
            with self._lock:
                if data is not None:
                    self.results[i] = data
                else:
                    self._waiting.append(i)
            if data is None:
                self.stop.wait(0.2)
