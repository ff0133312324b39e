"""Sweeps on a Dask cluster: each run is one task, its result goes from the worker to the store, a line comes back."""

import contextlib
import hashlib
import logging
import math
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from largeprompt._progress import Progress

from ._grid import with_engines
from ._remote_store import store_at
from ._run import Run
from ._session import CHECKPOINT_SECONDS, Interrupted
from ._store import AbstractStore
from ._sweep import usable_cores
from ._worker import Order, Report, halt, run_task

_CONNECT_SECONDS = 10.0
_HALT_SECONDS = 60.0
_AHEAD = 200  # runs that the scheduler holds at most, or four for each of its threads
_BATCH = 1000
_LOOK_SECONDS = 1.0
_GATHER_SECONDS = 0.05
SWEEP = "sweep"  # the name under which its progress is reported
_KEPT = "what is finished is in the store, and the same command goes on"


class Failed(NamedTuple):
    """A run that was given up, and why."""

    run: Run
    message: str


class Outcome(NamedTuple):
    """The end of a sweep: how many of its runs were `found` finished, are `finished` now, and which `failed`."""

    runs: int
    found: int
    finished: int
    failed: tuple[Failed, ...]


def sweep_on(
    runs: Sequence[Run],
    store: AbstractStore | None = None,
    scheduler: Any = None,
    *,
    workers: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run a sweep on a Dask cluster: the address of a scheduler, a `distributed.Client`, or None for a local one.

    A local one has `workers` processes of one thread, by default one per core; a script then needs the usual
    `if __name__ == "__main__"`. Results are in the store, which every worker must see. Runs that are there are not run
    again; those of a lost worker go on from their last checkpoint; one that fails is reported and stops no other.
    An interrupt (Ctrl-C), or `stop` set by another thread, makes every run save a checkpoint and raises `Interrupted`.
    """
    store, progress = store or store_at(), progress or Progress()
    runs = tuple({run.key: run for run in with_engines(runs)}.values())
    there = store.finished_of([run.key for run in runs])
    waiting = [run for run in runs if run.key not in there]
    begun = store.begun_of([run.key for run in waiting])
    waiting.sort(key=lambda run: run.key not in begun)
    sweep, failed = secrets.token_hex(8), []
    if waiting:
        order = Order(store.address, sweep, f".sweep-{sweep}", checkpoint_seconds)
        with (
            _client(scheduler, workers) as client,
            store.marked(order.mark),
            progress.task(SWEEP, sum(map(_work, waiting))),
        ):
            failed = _Driver(client, order, store, progress, stop or threading.Event(), len(there)).run(waiting)
    return Outcome(len(runs), len(there), len(runs) - len(failed), tuple(failed))


def running_runs(scheduler: str, store: AbstractStore) -> set[str]:
    """The keys of the runs for this store that a scheduler has given to workers."""
    tail = _place(store)
    with _client(scheduler, None) as client:
        keys = [str(key) for held in client.processing().values() for key in held]
    parts = [key.split("-") for key in keys if key.startswith("largeprompt-")]
    return {part[1] for part in parts if part[2:3] == [tail]}


def _place(store: AbstractStore) -> str:
    """A few letters for the store in a task's key: the same run for two stores is two tasks."""
    return hashlib.sha256(store.address.encode()).hexdigest()[:8]


@contextlib.contextmanager
def _client(scheduler: Any, workers: int | None) -> Iterator[Any]:
    try:
        import distributed
    except ImportError:
        raise ValueError("a sweep on a cluster needs Dask: pip install 'largeprompt[cluster]'") from None
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


def _connected(distributed: Any, address: str) -> Any:
    if not re.fullmatch(r"\w+://\S+:\d+/?", address):
        raise ValueError(f"the scheduler is {address!r}; it must be an address such as tcp://HOST:8786")
    try:
        return distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"no Dask scheduler answers at {address!r}: {first}") from None


@contextlib.contextmanager
def _scheduler_errors() -> Iterator[None]:
    """A scheduler that is gone is an error of one line, whatever Dask raises."""
    try:
        yield
    except (OSError, RuntimeError, CancelledError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"the scheduler is gone: {first}; {_KEPT}") from error


class _Driver:
    """Keeps a bounded number of runs in the scheduler until all have ended."""

    def __init__(
        self,
        client: Any,
        order: Order,
        store: AbstractStore,
        progress: Progress,
        stop: threading.Event,
        found: int = 0,
    ):
        self._client, self._order, self._store, self._progress, self._stop = client, order, store, progress, stop
        self._place = _place(store)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out: dict[str, tuple[Any, Run]] = {}  # by the key of the task
        self._tries: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        self._failed: list[Failed] = []
        self._threads, self._looked = 0, 0.0
        self._ended, self._done_work = found, 0.0

    def run(self, waiting: list[Run]) -> list[Failed]:
        total = self._ended + len(waiting)
        waiting = waiting[::-1]  # taken from the end
        try:
            while waiting or self._out:
                self._look()
                self._submit(waiting)
                for future, report in self._done():
                    _, run = self._out.pop(future.key)
                    if self._is_over(run, report) if report is not None else self._is_lost(run, future):
                        self._ended += 1
                        self._done_work += _work(run)
                    else:
                        self._tries[run.key] = self._tries.get(run.key, 0) + 1  # a new task key: the old may linger
                        waiting.append(run)
                self._progress.step(SWEEP, self._done_work, self._note(total))
                if self._stop.is_set():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._halt()
            raise Interrupted from None
        return self._failed

    def _note(self, total: int) -> str:
        """How far the sweep is, in words."""
        failed = f", {len(self._failed)} failed" if self._failed else ""
        return f"{self._ended} of {total} runs{failed}, {self._threads} worker{'' if self._threads == 1 else 's'}"

    def _look(self) -> None:
        """How many threads there are, now and then."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        with _scheduler_errors():
            threads = sum(self._client.nthreads().values())
        if not threads and (self._threads or not self._looked):
            self._progress.warn("the scheduler has no workers; waiting for some")
        self._threads, self._looked = threads, time.monotonic()

    def _submit(self, waiting: list[Run]) -> None:
        ahead = max(_AHEAD, 4 * self._threads)
        room = min(ahead - len(self._out), len(waiting), _BATCH)
        if room < min(ahead // 4, len(waiting)) or room < 1:  # many at once: a submission has a price of its own
            return
        runs = [waiting.pop() for _ in range(room)]
        texts, keys = [run.canonical for run in runs], [self._key(run) for run in runs]
        with _scheduler_errors():
            futures = self._client.map(run_task, texts, key=keys, order=self._order)
        for future, run in zip(futures, runs, strict=True):
            self._out[future.key] = future, run
            future.add_done_callback(self._ready.put)

    def _key(self, run: Run) -> str:
        tries = self._tries.get(run.key, 0)
        return f"largeprompt-{run.key}-{self._place}" + (f"-{tries}" if tries else "")

    def _done(self) -> list[tuple[Any, Report | None]]:
        """The tasks that have ended, with their reports, once there are some or a moment has passed."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._ready.get(timeout=_LOOK_SECONDS))
            time.sleep(_GATHER_SECONDS)  # for more of them: what the scheduler holds keeps the workers busy
            while len(found) < _BATCH:
                found.append(self._ready.get_nowait())
        with _scheduler_errors():
            reports = self._client.gather({f.key: f for f in found if f.status == "finished"}, errors="skip")
        return [(future, reports.get(future.key)) for future in found]

    def _is_lost(self, run: Run, future: Any) -> bool:
        """Whether to give up a run whose worker has died, rather than to submit it again."""
        from distributed import KilledWorker

        if future.status != "error":
            raise OSError(f"the scheduler let go of run {run.key[:12]}; {_KEPT}")
        error = future.exception()
        if not isinstance(error, KilledWorker):
            raise OSError(f"a worker cannot begin a run: {type(error).__name__}: {error}")
        step = self._store.kept_step(run.key)
        if step > self._reached.get(run.key, 0):  # its workers died of something else: it gets on
            self._reached[run.key] = step
            return False
        message = f"{error.allowed_failures + 1} workers died while they ran it, all at step {step}"
        with contextlib.suppress(OSError):
            self._store.fail(run, message, "")
        self._give_up(run, message)
        return True

    def _is_over(self, run: Run, report: Report) -> bool:
        """Whether a run has ended, well or not, rather than to be submitted again."""
        for note in report.notes:
            self._progress.warn(note)
        # another driver had submitted it first, and was interrupted, or took its mark back with it
        if report.status == "interrupted" or (report.status == "elsewhere" and report.sweep != self._order.sweep):
            return False
        if report.status == "elsewhere":
            where = f"the worker on {report.machine} does not see the store {store_at(self._order.store).location}"
            raise ValueError(f"{where}; it must be a folder that all machines share, or an address such as s3://…")
        if report.status == "failed":
            self._give_up(run, report.message)
        return True

    def _give_up(self, run: Run, message: str) -> None:
        self._failed.append(Failed(run, message))
        self._progress.start(run.name, run.steps)
        self._progress.close(run.name, f"failed: {message}")

    def _halt(self) -> None:
        """Make every worker save checkpoints and end, and wait until they have."""
        try:
            self._client.run(halt, self._order.sweep, on_error="ignore")
        except (OSError, RuntimeError, CancelledError) as error:
            self._progress.warn(f"the workers could not be stopped: {error}")
            return
        end = time.monotonic() + _HALT_SECONDS
        while self._out and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                self._out.pop(self._ready.get(timeout=_LOOK_SECONDS).key, None)


def _work(run: Run) -> float:
    """About how much there is to compute: a step reads the tokens of its prompts, and costs a little for each."""
    tokens = run.L if "softmax" in run.members and math.inf > run.L else 1
    return float(max(run.steps, 1) * run.batch * run.heads * (tokens + 10))
