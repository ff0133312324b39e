"""Many runs on one machine: over its cores, or side by side on its GPU."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence

import xarray as xr

from largeprompt._device import Device, DeviceName, resolve_device
from largeprompt._progress import Progress

from ._grid import with_engines
from ._remote_store import store_at
from ._run import Run
from ._session import CHECKPOINT_SECONDS, Interrupted, attempt
from ._store import AbstractStore

MOST_ON_GPU = 512  # runs side by side: each keeps its lock file open


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    runs: Sequence[Run],
    store: AbstractStore | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    seconds: Mapping[Run, float] | None = None,
    stop: threading.Event | None = None,
    device: Device = "cpu",
    in_order: bool = False,
) -> list[xr.Dataset]:
    """The results of many runs, `jobs` at a time: first those with a checkpoint, then those with the most `seconds`.

    `in_order` takes the latter in the order given instead. On a GPU, where `device` resolves to one, all runs that the
    compiled loops apply to go side by side. Runs that are in the store are not run again. Several processes given the
    same runs share them. An interrupt (Ctrl-C), or `stop` set by another thread, makes every run save a checkpoint and
    raises `Interrupted`; so does the failure of one run.
    """
    store, progress, stop = store or store_at(), progress or Progress(), stop or threading.Event()
    where = resolve_device(device, "cuda")
    expected, resolved = seconds or {}, with_engines(runs)
    begun = store.begun_of([run.key for run in resolved])
    last = {run: 0.0 if in_order else -expected.get(run, 0.0) for run in runs}
    order = sorted(range(len(runs)), key=lambda i: (resolved[i].key not in begun, last[runs[i]]))
    amounts = {
        named.name: float(run.steps) if seconds is None else expected.get(run, 0.0)
        for run, named in zip(runs, resolved, strict=True)
    }
    work = _Work(resolved, order, store, _Together(progress, amounts), checkpoint_seconds, stop)
    with progress.task("training", sum(amounts.values())):
        return _results(work, where, jobs or usable_cores())


class _Together(Progress):
    """Passes on the progress of runs, and adds that of all of them as the piece of work `training`."""

    def __init__(self, progress: Progress, amounts: Mapping[str, float]):
        self._progress, self._amounts = progress, amounts
        self._lock, self._totals, self._shares = threading.Lock(), {}, {}
        self._done, self._ended = 0.0, 0

    def start(self, name: str, total: float) -> None:
        self._totals[name] = max(total, 1.0)
        self._progress.start(name, total)

    def step(self, name: str, done: float, note: str = "") -> None:
        self._progress.step(name, done, note)
        self._advance(name, done / self._totals[name])

    def close(self, name: str, outcome: str = "") -> None:
        self._progress.close(name, outcome)
        if outcome in ("finished", "found"):
            self._advance(name, 1.0, ended=1)

    def warn(self, message: str) -> None:
        self._progress.warn(message)

    def _advance(self, name: str, share: float, ended: int = 0) -> None:
        with self._lock:
            self._done += self._amounts[name] * (share - self._shares.get(name, 0.0))
            self._shares[name] = share
            self._ended += ended
            self._progress.step("training", self._done, f"{self._ended} of {len(self._amounts)} runs")


def _results(work: "_Work", device: DeviceName, jobs: int) -> list[xr.Dataset]:
    if device == "gpu":
        work.run_on_gpu()
    ends = [work.begin() for _ in range(jobs)]
    try:
        _wait(ends)
    except KeyboardInterrupt:
        work.stop.set()
        _wait(ends)
        raise Interrupted from None
    if work.failure is not None:
        raise work.failure
    if len(work.results) < len(work.runs):
        raise Interrupted
    return [work.results[i] for i in range(len(work.runs))]


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
    # not for the threads themselves: an interrupted join takes a running thread for one that has ended
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
        progress: Progress,
        checkpoint_seconds: float,
        stop: threading.Event,
    ):
        self.runs, self._waiting, self._store, self._progress = runs, order, store, progress
        self._checkpoint_seconds = checkpoint_seconds
        self._lock = threading.Lock()
        self.stop = stop
        self.results: dict[int, xr.Dataset] = {}
        self.failure: BaseException | None = None

    def run_on_gpu(self) -> None:
        """Run those that the compiled loops apply to, as many at a time as one process should hold; others wait."""
        from ._gpu_batch import run_together  # imports a compiler

        able = [i for i in self._waiting if self.runs[i].engine == "fused"]
        for first in range(0, len(able), MOST_ON_GPU):
            batch = able[first : first + MOST_ON_GPU]
            options = self._store, self._progress, self.stop, self._checkpoint_seconds
            with _interrupts_heard(self.stop):
                found = run_together([self.runs[i] for i in batch], *options)
            self.results |= {i: data for i, data in zip(batch, found, strict=True) if data is not None}
        self._waiting = [i for i in self._waiting if i not in self.results]

    def begin(self) -> threading.Event:
        """Start a thread that runs what waits; the event is set when it has ended."""
        end = threading.Event()

        def work() -> None:
            try:
                self._work()
            finally:
                end.set()

        threading.Thread(target=work, daemon=True).start()
        return end

    def _work(self) -> None:
        """Take run after run until none is left; one that another process runs goes to the end of the line."""
        while not self.stop.is_set():
            with self._lock:
                if not self._waiting:
                    return
                i = self._waiting.pop(0)
            try:
                data = attempt(self.runs[i], self._store, self._progress, self.stop, self._checkpoint_seconds)
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
