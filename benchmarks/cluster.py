"""Claim: a sweep of 10^6 runs is bound by its runs and not by the cluster, unless they are shorter than a few
milliseconds times the number of workers: that is what a task costs the scheduler. A restarted driver finds what is
finished by one listing, in seconds.

A real scheduler and real workers on loopback, processes of their own. Times of the scheduler and of the driver are
processor time, so that they do not depend on what else runs here. Run: python benchmarks/cluster.py
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

import largeprompt as lp
from largeprompt import lab
from largeprompt.lab import _cluster, _worker

SHORTEST = {"L": 10, "d": 2, "attention": "linear", "steps": 1, "record": {"points": 2}}


class Cluster:
    """A scheduler and workers of one thread."""

    def __init__(self, folder: Path, workers: int):
        file = folder / "scheduler.json"
        where = ["--scheduler-file", str(file), "--no-dashboard"]
        self._processes = [self._start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", *where)]
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        self.address = json.loads(file.read_text())["address"]
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(folder)]
        self._processes += [self._start("dask_worker", self.address, *options) for _ in range(workers)]
        self.scheduler = psutil.Process(self._processes[0].pid)
        self.workers = [psutil.Process(process.pid) for process in self._processes[1:]]

    def _start(self, command: str, *arguments: str) -> subprocess.Popen:
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "-m", f"distributed.cli.{command}", *arguments], **quiet)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def loopback_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def nothing(text: str, order: _worker.Order) -> _worker.Report:
    """A task that does no work, of the size of a real one."""
    return _worker.Report(order.sweep, "finished", "a machine")


def tasks(cluster: Cluster, folder: Path, count: int, text: str) -> None:
    order = _worker.Order(str(folder / "runs"), "0" * 16, ".sweep-" + "0" * 16, 30.0)
    me = psutil.Process()
    with Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(2)
        before, moved, began = (seconds_of(cluster.scheduler), seconds_of(me)), loopback_bytes(), time.perf_counter()
        out: dict[str, Any] = {}
        sent = done = 0
        while done < count:  # as the driver of a sweep does it: a bounded number at a time, some at once
            room = min(_cluster._AHEAD - len(out), count - sent)
            if room >= min(_cluster._AHEAD // 4, count - sent) and room > 0:
                keys = [f"nothing-{sent + i}" for i in range(room)]
                futures = client.map(nothing, [text] * room, key=keys, order=order)
                out |= dict(zip(keys, futures, strict=True))
                sent += room
            ended = {key: future for key, future in out.items() if future.done()}
            gathered: Any = client.gather(ended)
            done += len(gathered)
            for key in ended:
                del out[key]
            time.sleep(_cluster._GATHER_SECONDS)
        wall = time.perf_counter() - began
        spent = seconds_of(cluster.scheduler) - before[0], seconds_of(me) - before[1]
    answer = nothing(text, order)
    print(f"{count} tasks that do nothing, {_cluster._AHEAD} at a time: {count / wall:.0f} a second here")
    print(
        f"  scheduler {1e3 * spent[0] / count:.2f} ms, driver {1e3 * spent[1] / count:.2f} ms of processor time a task"
    )
    print(f"  {(loopback_bytes() - moved) / count / 1e3:.1f} kB a task over all connections, of which")
    print(f"  the task itself {len(pickle.dumps((text, order)))} bytes and its answer {len(pickle.dumps(answer))}")


def runs_in_memory(count: int) -> None:
    began = time.perf_counter()
    runs = lab.runs_from({"seeds": count})
    made = time.perf_counter()
    hashes = {run.key for run in lab.with_engines(runs)}
    hashed = time.perf_counter()
    assert len(hashes) == count
    tracemalloc.start()
    kept = lab.with_engines(lab.runs_from({"seeds": count // 10}))
    hashes = {run.key for run in kept}
    size = tracemalloc.get_traced_memory()[0] / len(hashes)
    tracemalloc.stop()
    print(f"\n{count} runs in the driver: {1e3 * (made - began) / count:.2f} ms a run to make and check,")
    print(f"  {1e3 * (hashed - made) / count:.2f} ms to hash, {size / 1e3:.1f} kB of memory")


def shortest_runs(cluster: Cluster, folder: Path, count: int) -> None:
    store = lab.Store(folder / "shortest")
    warm = lab.runs_from({**SHORTEST, "seed": [10**6 + i for i in range(8)]})
    lab.sweep_on(warm, store, cluster.address)  # compiles, on every worker
    runs = lab.with_engines(lab.runs_from({**SHORTEST, "seeds": count}))
    before = used(cluster)
    began = time.perf_counter()
    outcome = lab.sweep_on(runs, store, cluster.address)
    wall, after = time.perf_counter() - began, used(cluster)
    assert outcome.finished == count, outcome
    of_scheduler, of_workers = (1e3 * (late - early) / count for early, late in zip(before, after, strict=True))
    print(f"\n{count} shortest runs (one step) on 2 workers: {count / wall:.0f} a second here")
    print(f"  scheduler {of_scheduler:.2f} ms, worker {of_workers:.1f} ms of processor time a run")
    before = used(cluster)
    time.sleep(5)
    print(f"  scheduler at rest: {1e3 * (used(cluster)[0] - before[0]) / 5:.0f} ms of processor time a second")


def used(cluster: Cluster) -> tuple[float, float]:
    """Processor time of the scheduler and of the workers."""
    return seconds_of(cluster.scheduler), sum(map(seconds_of, cluster.workers))


def sizes(folder: Path) -> None:
    print("\nbytes of a run                              result   account   checkpoint")
    kinds = {
        "the paper's, d = 5, 100 points": {},
        "the same, without parameters": {"record": {"what": ["norms", "distances"]}},
        "linear, d = 2, 2 points": SHORTEST,
    }
    for name, settings in kinds.items():
        (run,) = lab.runs_from({"L": 10, "steps": 500_000, **settings})
        steps = min(run.steps, 2000)  # a record of as many points as that of all steps, nearly
        (short,) = lab.runs_from({"L": 10, **settings, "steps": steps})
        store = lab.Store(folder / "sizes")
        lab.train(
            short, store, checkpoint_seconds=0.0, progress=(keeping := Keeping(store.path(short.key, "checkpoint")))
        )
        result, account = (store.path(short.key, kind).stat().st_size for kind in ("nc", "json"))
        print(f"  {name:<38}{result:>10}{account:>10}{keeping.size:>13}")


class Keeping(lab.Progress):
    """The size of the last checkpoint."""

    def __init__(self, path: Path):
        self._path, self.size = path, 0

    def step(self, name: str, done: float, note: str = "") -> None:
        self.size = self._path.stat().st_size if self._path.exists() else self.size


def folder_of_many(folder: Path, count: int) -> None:
    store = lab.Store(folder / "many")
    store.folder.mkdir()
    hashes = [f"{n:064x}" for n in range(count)]
    for address in hashes:
        for kind in ("nc", "json"):
            os.close(os.open(store.path(address, kind), os.O_CREAT | os.O_WRONLY))
    some = hashes[:: max(1, count // 1000)][:1000]
    began = time.perf_counter()
    assert all(store.finished(address) for address in some)
    asked = time.perf_counter()
    assert len(store.finished_of(hashes)) == count
    listed = time.perf_counter()
    assert len(store.kinds()) == count
    counted = time.perf_counter()
    print(f"\na folder with the files of {count} runs: {1e6 * (asked - began) / len(some):.1f} µs to ask for one run,")
    listing, status = 1e6 * (listed - asked) / count, 1e6 * (counted - listed) / count
    print(f"  {listing:.1f} µs a run to list what is finished, {status:.1f} for sweep status")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tasks", type=int, default=10_000)
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("--files", type=int, default=200_000)
    chosen = options.parse_args()
    lp.use_float64()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = Cluster(folder, 2)
        try:
            tasks(cluster, folder, chosen.tasks, lab.runs_from({})[0].canonical)
            shortest_runs(cluster, folder, chosen.runs)
        finally:
            cluster.close()
        runs_in_memory(chosen.runs)
        sizes(folder)
        folder_of_many(folder, chosen.files)


if __name__ == "__main__":
    main()
