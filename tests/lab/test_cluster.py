"""Sweeps on a real scheduler and real workers on loopback, some of which are killed."""

import dataclasses
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, KilledWorker
from forks import PATIENCE, Forks

from largeprompt import lab
from largeprompt.lab import _cluster, _worker

HERE = Path(__file__).parent
START = {"K": [[1, 0, 0]], "Q": [[1, 0, 0]], "V": [[0, 0, 1]], "O": [[0.5]]}
SETTINGS = {"L": 4, "d": 2, "attention": "linear", "start": START, "engine": "reference", "record": {"points": 6}}
SETTINGS |= {"steps": 400, "weight_seed": 0}


def runs_of(*seeds):
    return lab.runs_from({**SETTINGS, "data_seed": list(seeds)})


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


class Process:
    """A scheduler, a worker or a driver."""

    def __init__(self, pid, log, ended):
        self.pid, self._log, self._ended = pid, log, ended

    def status(self):
        """How it ended; None if it has not."""
        return self._ended.get(self.pid)

    def said(self):
        return self._log.read_text()

    def signal(self, number):
        os.kill(self.pid, number)


class Cluster:
    """A scheduler and workers, each a process of its own; `trouble` is the folder through which runs are steered."""

    def __init__(self, folder, environment):
        self.folder, self.trouble = folder, folder / "trouble"
        self.trouble.mkdir()
        environment = environment | {
            "TROUBLE": str(self.trouble),
            "DASK_DISTRIBUTED__WORKER__PRELOAD": "stand_in_worker",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self._forks = Forks(HERE / "warm.py", environment=environment)
        self._processes: list[Process] = []
        file = folder / "scheduler.json"
        where = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file), "--no-dashboard")
        self._start("dask_scheduler", *where)
        self.address = until(lambda: file.exists() and json.loads(file.read_text() or "{}").get("address"))
        self.workers = [self.worker() for _ in range(3)]
        self.wait_for(self.workers)

    def _start(self, command, *arguments):
        log = self.folder / f"process-{len(self._processes)}.log"
        pid = self._forks.start(command=command, arguments=arguments, log=str(log))
        self._processes.append(Process(pid, log, self._forks.ended))
        return self._processes[-1]

    def worker(self):
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(self.folder))
        return self._start("dask_worker", self.address, *options)

    def driver(self, *arguments):
        return self._start("largeprompt", "sweep", *arguments)

    def wait_for(self, workers):
        """Until these processes have reported to the scheduler that they are there."""
        with Client(self.address, set_as_default=False) as client:
            while not {worker.pid for worker in workers} <= set(_answers(client).values()):
                for worker in workers:
                    assert worker.status() is None, worker.said()
                time.sleep(0.05)

    def begun(self):
        """Process, seed and step of each beginning, since the last time this was cleared."""
        file = self.trouble / "begun"
        return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []

    def clear(self):
        for path in self.trouble.iterdir():
            path.unlink()

    def open_gate(self):
        (self.trouble / "gate").touch()

    def close(self):
        for process in self._processes:
            if process.status() is None:
                process.signal(signal.SIGKILL)
        self._forks.close()


def _answers(client) -> dict:
    return client.run(os.getpid, on_error="ignore")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, environment):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), environment)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def cleared(cluster):
    cluster.clear()


def swept(*arguments, stop=None, **options):
    """A sweep that does not wait for ever."""
    stop = stop or threading.Event()
    limit = threading.Timer(PATIENCE, stop.set)
    limit.start()
    try:
        return lab.sweep_on(*arguments, stop=stop, **options)
    finally:
        limit.cancel()


def step_of(store, address):
    checkpoint = store.load_checkpoint(address)
    return -1 if checkpoint is None else checkpoint.header["step"]


def as_grid(run, seeds):
    """The run with other seeds, as a file."""
    lines = [line for line in lab.as_toml(run).splitlines() if not line.startswith("data_seed")]
    return "\n".join([f"data_seed = {list(seeds)}", *lines])


def contents(store):
    """What may not depend on who carried the runs out: all but the account of how the work went."""
    return {path.name: path.read_bytes() for path in store.folder.iterdir() if path.suffix != ".json"}


@pytest.mark.usefixtures("quick")
def test_a_sweep_that_loses_a_worker_and_gains_one_gives_the_serial_results_bit_for_bit(cluster, store, tmp_path):
    runs = runs_of(*range(20, 40), *range(100, 120))
    serial = lab.Store(tmp_path / "serial")
    lab.sweep(runs, serial, jobs=1)

    class Killing(lab.Progress):
        """Once every worker waits at the gate, one is killed at work and one added; then the gate opens."""

        added = None

        def step(self, name, done, note=""):
            waiting = {pid: seed for pid, seed, _ in cluster.begun() if seed >= 100}
            if self.added is None and note.startswith("20 of 40 runs") and len(waiting) == 3:
                lost = cluster.workers.pop(0)
                (hash_,) = (run.key for run in runs if run.data_seed == waiting[lost.pid])
                until(lambda: step_of(store, hash_) >= 100)
                lost.signal(signal.SIGKILL)
                self.added = cluster.worker()
                cluster.workers.append(self.added)
                cluster.wait_for([self.added])
                cluster.open_gate()

    progress = Killing()
    outcome = swept(runs, store, cluster.address, progress=progress, checkpoint_seconds=0.0)
    assert outcome == (40, 0, 40, ())
    assert contents(store) == contents(serial)
    assert len(contents(store)) == 40
    begun = cluster.begun()
    again = [(seed, step) for _, seed, step in begun if step > 0]
    assert len(begun) == 41
    assert [step >= 100 for _, step in again] == [True]  # that of the lost worker, and from its checkpoint
    assert sorted(store.log(run.key)["sittings"] for run in runs) == [1] * 39 + [2]
    assert progress.added is not None
    assert progress.added.pid in {pid for pid, _, _ in begun}
    assert swept(runs, store, "tcp://nowhere:1") == (40, 40, 40, ())  # nothing to do: nobody is asked


def test_a_run_that_fails_is_reported_and_stops_no_other(cluster, store):
    runs = runs_of(11, 12, 13, 14)
    cluster.open_gate()
    outcome = swept(runs, store, cluster.address)
    assert outcome == (4, 0, 3, ((runs[2], "RuntimeError: an unlucky run"),))
    assert [store.finished(run.key) for run in runs] == [True, True, False, True]
    assert store.failure(runs[2].key)["error"] == "RuntimeError: an unlucky run"
    found = lab.statuses(store, [*runs, *runs_of(15)])
    assert [status.stage for status in found] == ["finished", "finished", "failed", "finished", "not begun"]
    assert found[2].message == "RuntimeError: an unlucky run"
    assert store.status(runs[2].key).stage == "failed"


def test_the_command_names_the_runs_that_failed_and_tables_the_others(cluster, store, tmp_path):
    runs = runs_of(3, 13)
    grid = tmp_path / "grid.toml"
    grid.write_text(as_grid(runs[0], [3, 13]))
    driver = cluster.driver(str(grid), "--scheduler", cluster.address, "--store", str(store.folder))
    assert until(lambda: driver.status() is not None) is True
    assert driver.status() == 1, driver.said()
    said = driver.said()
    assert "best linear" in said
    assert f"1 of 2 runs are finished, 0 were before; they are in {store.folder}\n" in said
    title = f"largeprompt: run {runs[1].key[:12]} ({runs[1].title}) failed: RuntimeError: an unlucky run"
    assert said.splitlines()[-1] == title


def test_a_driver_that_was_killed_leaves_runs_at_work_and_the_next_one_waits_for_them(cluster, store, tmp_path):
    runs = runs_of(1, 2, 101, 102)
    grid = tmp_path / "grid.toml"
    grid.write_text(as_grid(runs[0], [1, 2, 101, 102]))
    arguments = (str(grid), "--scheduler", cluster.address, "--store", str(store.folder), "--checkpoint", "0")
    driver = cluster.driver(*arguments)
    until(lambda: len(cluster.begun()) == 4 or driver.status() is not None)
    until(lambda: len(store.finished_of([run.key for run in runs])) == 2 or driver.status() is not None)
    assert driver.status() is None, driver.said()
    assert [status.stage for status in lab.statuses(store, runs)] == ["finished"] * 2 + ["running"] * 2
    driver.signal(signal.SIGKILL)
    assert until(driver.status) == -signal.SIGKILL
    assert lab.running_runs(cluster.address, lab.Store(tmp_path)) == set()
    opener = threading.Timer(0.5, cluster.open_gate)
    opener.start()
    assert swept(runs, store, cluster.address) == (4, 2, 4, ())
    opener.join()
    assert sorted(seed for _, seed, _ in cluster.begun()) == [1, 2, 101, 102]  # none of them twice
    assert {status.stage for status in lab.statuses(store)} == {"finished"}


def test_a_sweep_that_is_stopped_keeps_checkpoints_and_goes_on_from_them(cluster, store):
    runs, stop = runs_of(103, 104, 105, 106, 107), threading.Event()

    class Stopping(lab.Progress):
        at_work: frozenset[str] | set[str] = frozenset()

        def step(self, name, done, note=""):
            if sum(step_of(store, run.key) >= 100 for run in runs) == 3:
                self.at_work = lab.running_runs(cluster.address, store)
                stop.set()

    progress = Stopping()
    with pytest.raises(lab.Interrupted):
        swept(runs, store, cluster.address, progress=progress, stop=stop, checkpoint_seconds=0.0)
    stages = [status.stage for status in lab.statuses(store, runs)]
    assert stages == ["interrupted"] * 3 + ["not begun"] * 2
    assert {run.key for run in runs[:3]} <= progress.at_work
    cluster.open_gate()
    assert swept(runs, store, cluster.address) == (5, 0, 5, ())
    assert sorted(step >= 100 for _, _, step in cluster.begun()[3:]) == [False, False, True, True, True]


def test_ctrl_c_on_a_local_cluster_says_what_is_kept(cluster, store, tmp_path):
    (run,) = runs_of(108)
    grid = tmp_path / "grid.toml"
    grid.write_text(lab.as_toml(run))
    arguments = (str(grid), "--store", str(store.folder), "--workers", "1", "--checkpoint", "0")
    driver = cluster.driver(*arguments)
    until(lambda: step_of(store, run.key) >= 100 or driver.status() is not None)
    assert driver.status() is None, driver.said()
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does it: to the workers too
    assert until(driver.status) == 130, driver.said()
    line = f"largeprompt: interrupted: 0 of 1 runs are finished, the others kept in {store.folder}"
    assert driver.said() == f"{line}; the same command goes on\n"
    assert store.status(run.key).stage == "interrupted"
    assert store.status(run.key).step >= 100


def test_workers_that_do_not_see_the_store_are_told_of_in_one_line(cluster):
    message = r"the worker on \S+ does not see the store memory://here; it must be a folder that all machines share"
    with pytest.raises(ValueError, match=message):
        swept(runs_of(1), lab.store_at("memory://here"), cluster.address)


def test_a_task_of_a_driver_that_has_taken_its_mark_back_is_given_again(cluster, store):
    (run,) = runs_of(1)
    left = _worker.Order(store.address, "left", ".sweep-left", 30.0)
    with Client(cluster.address, set_as_default=False) as client:
        key = f"largeprompt-{run.key}-{_cluster._place(store)}"
        future = client.submit(_worker.run_task, run.canonical, left, key=key)
        assert future.result().status == "elsewhere"
        assert swept([run], store, cluster.address) == (1, 0, 1, ())
    assert store.finished(run.key)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://here:9"])
def test_a_wrong_scheduler_is_one_line(address, store, monkeypatch):
    monkeypatch.setattr(_cluster, "_CONNECT_SECONDS", 0.5)
    with pytest.raises(OSError, match=rf"^no Dask scheduler answers at '{address}': [^\n]*$"):
        swept(runs_of(1), store, address)


@pytest.mark.parametrize("address", ["nonsense", "nonsense://here", "tcp://127.0.0.1:port"])
def test_what_is_no_address_of_a_scheduler_is_said_at_once(address, store):
    with pytest.raises(
        ValueError, match=rf"^the scheduler is '{address}'; it must be an address such as tcp://HOST:8786$"
    ):
        swept(runs_of(1), store, address)


def test_without_dask_the_extra_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"needs Dask: pip install 'largeprompt\[cluster\]'"):
        swept(runs_of(1), store)


def died():
    worker: Any = SimpleNamespace(address="")
    return SimpleNamespace(status="error", exception=lambda: KilledWorker("key", worker, 3))


def test_a_scheduler_that_is_gone_is_one_line(store):
    def gone():
        raise OSError("Timed out\nat length")

    order = _worker.Order(str(store.folder), "session", "mark", 0.0)
    driver = _cluster._Driver(SimpleNamespace(nthreads=gone), order, store, lab.Progress(), threading.Event())
    with pytest.raises(OSError, match=r"^the scheduler is gone: Timed out; what is finished is in the store, [^\n]*$"):
        driver.run(list(runs_of(1)))


@pytest.mark.usefixtures("quick")
def test_a_run_whose_workers_die_is_tried_again_as_long_as_it_gets_on(store):
    (run,) = runs_of(1)
    order = _worker.Order(str(store.folder), "session", "mark", 0.0)
    driver = _cluster._Driver(None, order, store, lab.Progress(), threading.Event())
    keys = [driver._key(run)]
    for goal in (100, 200):
        stop = threading.Event()

        class StopAt(lab.Progress):
            def step(self, name, done, note=""):
                if done >= goal:  # noqa: B023
                    stop.set()  # noqa: B023

        with pytest.raises(lab.Interrupted):
            lab.train(run, store, progress=StopAt(), stop=stop)
        assert not driver._is_lost(run, died())
        driver._tries[run.key] = driver._tries.get(run.key, 0) + 1
        keys.append(driver._key(run))
    assert len(set(keys)) == 3
    assert driver._is_lost(run, died())
    assert store.failure(run.key)["error"].startswith("4 workers died while they ran it")
    assert store.status(run.key).stage == "failed"
    lab.train(run, store)
    assert store.failure(run.key) == {}


def test_longer_runs_are_a_larger_part_of_the_work_of_a_sweep():
    (run,) = runs_of(1)
    longer: tuple[dict[str, Any], ...] = ({"steps": 2 * run.steps}, {"batch": 2 * run.batch})
    for more in longer:
        assert _cluster._work(dataclasses.replace(run, **more)) == 2 * _cluster._work(run)
    of_length = {L: _cluster._work(dataclasses.replace(run, attention="softmax", L=L)) for L in (10, 1000, math.inf)}
    assert of_length[1000] > 40 * of_length[10] > 40 * of_length[math.inf] / 4


def test_the_script_for_slurm_is_the_one_on_the_page():
    docs = HERE.parents[1] / "docs"
    script = (docs / "assets" / "slurm_sweep.py").read_text()
    compile(script, "slurm_sweep.py", "exec")
    assert f"```py\n{script}```\n" in (docs / "cluster.md").read_text()
