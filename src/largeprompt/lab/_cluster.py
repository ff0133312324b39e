"""Sweeps on a Dask cluster: each run is one task, its result goes from the worker to the store, a line comes back."""

import collections
import contextlib
import hashlib
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from ._engines import with_engines
from ._execution import CHECKPOINT_SECONDS
from ._remote_store import RemoteStore, store_at
from ._run import Run
from ._sitting import Interrupted
from ._store import AbstractStore, Store
from ._sweep import usable_cores
from ._worker import Order, Told, carry_out, halt

_CONNECT_SECONDS = 10.0
_HALT_SECONDS = 60.0
_AHEAD = 200  # runs that the scheduler holds at most, or four for each of its threads
_BATCH = 1000
_LOOK_SECONDS = 1.0
_GATHER_SECONDS = 0.05
_KEPT = "what is finished is in the store, and the same command goes on"


class Failed(NamedTuple):
    """A run that was given up, and why."""

    run: Run
    message: str


class Outcome(NamedTuple):
    """What became of a sweep: of its runs, how many were `found` finished, are `finished` now, and which `failed`."""

    runs: int
    found: int
    finished: int
    failed: tuple[Failed, ...]


class SweepWatcher:
    """Is told how a sweep goes on; this one keeps still."""

    def began(self, runs: int, found: int) -> None:
        """A sweep begins; of its runs, some were found finished."""

    def went_on(self, ended: int, failed: int, threads: int, seconds_left: float | None) -> None:
        """So many runs have ended since; there are so many threads at work, and this long to go where that is known."""

    def failed(self, run: Run, message: str) -> None:
        """A run was given up."""

    def noticed(self, message: str) -> None:
        """Something a user should know of."""


def sweep_on(
    runs: Sequence[Run],
    store: AbstractStore | None = None,
    scheduler: Any = None,
    *,
    workers: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    watcher: SweepWatcher | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Carry runs out on a Dask cluster: the address of a scheduler, a `distributed.Client`, or None for a local one.

    A local one has `workers` processes of one thread, by default one a core; a script then needs the usual
    `if __name__ == "__main__"`. Results are in the store, which every worker must see. Runs that are there are not run
    again; those of a lost worker go on from their last checkpoint; one that fails is reported and stops no other.
    An interrupt (Ctrl-C), or `stop` set by another thread, makes every run keep a checkpoint and raises `Interrupted`.
    """
    store, watcher = store or store_at(), watcher or SweepWatcher()
    runs = tuple({run.hash: run for run in with_engines(runs)}.values())
    there = store.finished_of([run.hash for run in runs])
    waiting = [run for run in runs if run.hash not in there]
    begun = store.begun_of([run.hash for run in waiting])
    waiting.sort(key=lambda run: run.hash not in begun)
    watcher.began(len(runs), len(there))
    failed: list[Failed] = []
    if waiting:
        with _client(scheduler, workers) as client, _order(store, checkpoint_seconds) as order:
            failed = _Driver(client, order, store, watcher, stop or threading.Event()).carry_out(waiting)
    return Outcome(len(runs), len(there), len(runs) - len(failed), tuple(failed))


def runs_at_work(scheduler: str, store: AbstractStore) -> set[str]:
    """The hashes of the runs for this store that a scheduler has given to workers."""
    tail = _place(store)
    with _client(scheduler, None) as client:
        keys = [str(key) for held in client.processing().values() for key in held]
    parts = [key.split("-") for key in keys if key.startswith("largeprompt-")]
    return {part[1] for part in parts if part[2:3] == [tail]}


def _where(store: AbstractStore) -> str:
    if isinstance(store, Store):
        return str(store.folder.absolute())
    return store.url if isinstance(store, RemoteStore) else store.location


def _place(store: AbstractStore) -> str:
    """A few letters for the store in a task's key: the same run for two stores is two tasks."""
    return hashlib.sha256(_where(store).encode()).hexdigest()[:8]


@contextlib.contextmanager
def _order(store: AbstractStore, checkpoint_seconds: float) -> Iterator[Order]:
    session = secrets.token_hex(8)
    mark = f".sweep-{session}"
    store.mark(mark)
    try:
        yield Order(_where(store), session, mark, checkpoint_seconds)
    finally:
        store.unmark(mark)


@contextlib.contextmanager
def _client(scheduler: Any, workers: int | None) -> Iterator[Any]:
    distributed = _distributed()
    if isinstance(scheduler, distributed.Client):
        yield scheduler
    elif scheduler is not None:
        with _connected(distributed, scheduler) as client:
            yield client
    else:
        with (
            _local(distributed, workers or usable_cores()) as cluster,
            distributed.Client(cluster, set_as_default=False) as client,
        ):
            yield client


def _local(distributed: Any, workers: int) -> Any:
    from dask import config

    given = config.get("distributed.worker.preload")
    preload = [*([given] if isinstance(given, str) else given), "largeprompt.lab._worker"]
    try:
        # no limit of memory: that of a run is small and does not grow, and to kill its worker would gain nothing
        return distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            preload=preload,
        )
    except RuntimeError as error:
        raise OSError(f"the local cluster does not start: {error.__cause__ or error}") from error


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise ValueError("a sweep on a cluster needs Dask: pip install 'largeprompt[cluster]'") from None
    return distributed


def _connected(distributed: Any, address: str) -> Any:
    if not re.fullmatch(r"\w+://\S+:\d+/?", address):
        raise ValueError(f"the scheduler is {address!r}; it must be an address such as tcp://HOST:8786")
    try:
        return distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"no Dask scheduler answers at {address!r}: {first}") from None


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """A scheduler that is gone is an error of one line, whatever Dask raises."""
    try:
        yield
    except (OSError, RuntimeError, CancelledError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"the scheduler is gone: {first}; {_KEPT}") from error


class _Driver:
    """Keeps a bounded number of runs in the scheduler until all have ended."""

    def __init__(self, client: Any, order: Order, store: AbstractStore, watcher: SweepWatcher, stop: threading.Event):
        self._client, self._order, self._store, self._watcher, self._stop = client, order, store, watcher, stop
        self._place = _place(store)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out: dict[str, tuple[Any, Run]] = {}  # by the key of the task
        self._tries: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        self._failed: list[Failed] = []
        self._threads, self._looked = 0, 0.0

    def carry_out(self, waiting: list[Run]) -> list[Failed]:
        pace, total = Pace(waiting), len(waiting)
        waiting = waiting[::-1]  # taken from the end
        try:
            while waiting or self._out:
                self._look()
                self._submit(waiting)
                for future, told in self._done():
                    _, run = self._out.pop(future.key)
                    again, seconds = self._judged(run, told) if told is not None else self._lost(run, future)
                    if again:
                        waiting.append(run)
                    else:
                        pace.ended(run, seconds)
                ended = total - len(waiting) - len(self._out)
                self._watcher.went_on(ended, len(self._failed), self._threads, pace.left(self._threads))
                if self._stop.is_set():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._halt()
            raise Interrupted from None
        return self._failed

    def _look(self) -> None:
        """How many threads there are, now and then."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        with _asking():
            threads = sum(self._client.nthreads().values())
        if not threads and (self._threads or not self._looked):
            self._watcher.noticed("the scheduler has no workers; waiting for some")
        self._threads, self._looked = threads, time.monotonic()

    def _submit(self, waiting: list[Run]) -> None:
        ahead = max(_AHEAD, 4 * self._threads)
        room = min(ahead - len(self._out), len(waiting), _BATCH)
        if room < min(ahead // 4, len(waiting)) or room < 1:  # many at once: a submission has a price of its own
            return
        runs = [waiting.pop() for _ in range(room)]
        texts, keys = [run.canonical for run in runs], [self._key(run) for run in runs]
        with _asking():
            futures = self._client.map(carry_out, texts, key=keys, order=self._order)
        for future, run in zip(futures, runs, strict=True):
            self._out[future.key] = future, run
            future.add_done_callback(self._ready.put)

    def _key(self, run: Run) -> str:
        tries = self._tries.get(run.hash, 0)
        return f"largeprompt-{run.hash}-{self._place}" + (f"-{tries}" if tries else "")

    def _done(self) -> list[tuple[Any, Told | None]]:
        """The tasks that have ended, and what was told of them, once there are some or a moment has passed."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._ready.get(timeout=_LOOK_SECONDS))
            time.sleep(_GATHER_SECONDS)  # for more of them: what the scheduler holds keeps the workers busy
            while len(found) < _BATCH:
                found.append(self._ready.get_nowait())
        with _asking():
            told = self._client.gather({f.key: f for f in found if f.status == "finished"}, errors="skip")
        return [(future, told.get(future.key)) for future in found]

    def _lost(self, run: Run, future: Any) -> tuple[bool, float]:
        """Nothing was told of a run: whether to submit it again, and the seconds it took."""
        from distributed import KilledWorker

        if future.status != "error":
            raise OSError(f"the scheduler let go of run {run.hash[:12]}; {_KEPT}")
        error = future.exception()
        if not isinstance(error, KilledWorker):
            raise OSError(f"a worker cannot begin a run: {type(error).__name__}: {error}")
        step = self._step(run)
        if step > self._reached.get(run.hash, 0):  # its workers died of something else: it gets on
            self._reached[run.hash] = step
            return self._again(run), 0.0
        message = f"{error.allowed_failures + 1} workers died while at it, at step {step} all of them"
        with contextlib.suppress(OSError):
            self._store.fail(run, message, "")
        self._give_up(run, message)
        return False, 0.0

    def _judged(self, run: Run, told: Told) -> tuple[bool, float]:
        """What became of a run: whether to submit it again, and the seconds it took."""
        for note in told.notes:
            self._watcher.noticed(note)
        # another driver had submitted it first, and was interrupted, or took its mark back with it
        if told.status == "interrupted" or (told.status == "elsewhere" and told.session != self._order.session):
            return self._again(run), 0.0
        if told.status == "elsewhere":
            where = f"the worker on {told.machine} does not see the store {store_at(self._order.store).location}"
            raise ValueError(f"{where}; it must be a folder that all machines share, or an address such as s3://…")
        if told.status == "failed":
            self._give_up(run, told.message)
        return False, told.seconds

    def _again(self, run: Run) -> bool:
        self._tries[run.hash] = self._tries.get(run.hash, 0) + 1  # under a new key: the old one may linger
        return True

    def _give_up(self, run: Run, message: str) -> None:
        self._failed.append(Failed(run, message))
        self._watcher.failed(run, message)

    def _step(self, run: Run) -> int:
        try:
            checkpoint = self._store.checkpoint(run.hash)
        except (OSError, ValueError):
            return 0
        return 0 if checkpoint is None else int(checkpoint.header["step"])

    def _halt(self) -> None:
        """Tell every worker to keep checkpoints and end, and wait until they have."""
        try:
            self._client.run(halt, self._order.session, on_error="ignore")
        except (OSError, RuntimeError, CancelledError) as error:
            self._watcher.noticed(f"the workers could not be told to stop: {error}")
            return
        end = time.monotonic() + _HALT_SECONDS
        while self._out and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                self._out.pop(self._ready.get(timeout=_LOOK_SECONDS).key, None)


class Pace:
    """The time that is left, from the seconds of the runs of each kind that have ended: latest first."""

    def __init__(self, runs: Sequence[Run]):
        self._left = collections.Counter(map(_kind, runs))
        self._ended = collections.Counter[_Kind]()
        self._seconds: dict[_Kind, float] = {}

    def ended(self, run: Run, seconds: float) -> None:
        """A run has ended, after so many seconds of one thread."""
        kind = _kind(run)
        self._left[kind] -= 1
        self._ended[kind] += 1
        before = self._seconds.get(kind, seconds)
        # the first run of a worker compiles: it is soon forgotten
        self._seconds[kind] = before + max(1 / self._ended[kind], 0.1) * (seconds - before)

    def left(self, threads: int) -> float | None:
        """Seconds that are left; None before any run has ended, or while nobody works."""
        if not self._seconds or not threads:
            return None
        a_step = sum(s / max(kind.steps, 1) for kind, s in self._seconds.items()) / len(self._seconds)
        each = {kind: self._seconds.get(kind, a_step * kind.steps) for kind in self._left}
        return sum(count * each[kind] for kind, count in self._left.items()) / threads


class _Kind(NamedTuple):
    """What the time of a run depends on most."""

    steps: int
    settings: tuple


def _kind(run: Run) -> _Kind:
    return _Kind(run.steps, (run.L, run.attention, run.parameters, run.heads, run.d, run.batch, run.record))
