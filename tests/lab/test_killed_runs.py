"""Processes that are killed, interrupted, or work on the same runs at once."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from forks import Forks

from largeprompt import lab

KILLS = 12
START = {"K": np.eye(3)[:1].tolist(), "Q": np.eye(3)[:1].tolist(), "V": np.eye(3)[2:].tolist(), "O": [[0.5]]}
SETTINGS = {"L": 4, "d": 2, "attention": "linear", "batch": 8, "start": START, "engine": "reference"}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    """Children of one process that has everything imported."""
    nursery = Forks(Path(__file__).parent / "nursery.py", tmp_path_factory.mktemp("compiled"))
    yield nursery
    nursery.close()


def settings_of(seed, steps=30_000):
    return {**SETTINGS, "steps": steps, "seed": seed, "record": {"points": 0, "every": 300}}


def test_a_run_killed_at_any_moment_ends_bit_for_bit_as_one_left_alone(nursery, tmp_path):
    moments = np.random.default_rng(0)
    reached = []
    for seed in range(100):
        (run,) = lab.runs_from(settings_of(seed))
        request = {"settings": settings_of(seed), "checkpoint_seconds": 0.0}
        alone, killed = lab.Store(tmp_path / f"alone-{seed}"), lab.Store(tmp_path / f"killed-{seed}")
        undisturbed = nursery.start(store=str(alone.folder), log=str(tmp_path / "log"), **request)
        assert nursery.status(undisturbed) == 0, (tmp_path / "log").read_text()
        while not killed.path(run.key).exists():
            log = tmp_path / f"log-{seed}-{len(reached)}"
            pid = nursery.start(store=str(killed.folder), log=str(log), **request)
            if len(reached) % 6:  # every sixth is killed while it is still finding its feet
                nursery.wait_for("working", log, pid)
            if nursery.status(pid, timeout=moments.uniform(0, 0.12)) is None and len(reached) < KILLS:
                os.kill(pid, signal.SIGKILL)
            status = nursery.status(pid)
            assert status in (0, -signal.SIGKILL), log.read_text()
            assert "noticed" not in log.read_text()
            if status:
                found = killed.load_checkpoint(run.key)
                reached.append((seed, found and found.header["step"]))
        ended, expected = killed.load(run.key), alone.load(run.key)
        assert ended is not None
        assert expected is not None
        assert ended.identical(expected)
        assert [path.suffix for path in sorted(killed.folder.iterdir())] == [".json", ".nc"]
        if len(reached) >= KILLS:
            break
    assert len(reached) >= KILLS
    assert len(set(reached)) > KILLS / 2  # they struck all along the way


def test_two_processes_given_the_same_runs_share_them(nursery, tmp_path):
    settings = settings_of([0, 1, 2, 3, 4, 5], steps=3000)
    logs = [tmp_path / "log-a", tmp_path / "log-b"]
    pids = [nursery.start(store=str(tmp_path / "runs"), log=str(log), settings=settings) for log in logs]
    assert [nursery.status(pid) for pid in pids] == [0, 0], [log.read_text() for log in logs]
    done = [[line.split()[1] for line in log.read_text().splitlines() if line.startswith("done")] for log in logs]
    store = lab.Store(tmp_path / "runs")
    assert sorted(done[0] + done[1]) == [
        key[:8] for key in store.run_keys()
    ]  # each run by one of them, and by one only
    assert all(done)
    assert all(store.log(address)["sittings"] == 1 for address in store.run_keys())
    assert all(store.load(address) is not None for address in store.run_keys())


def test_a_run_whose_process_was_killed_is_taken_over_by_one_that_waits_for_it(nursery, tmp_path):
    request = {"store": str(tmp_path / "runs"), "settings": settings_of(0, steps=5_000_000), "checkpoint_seconds": 0.0}
    logs = [tmp_path / "log-a", tmp_path / "log-b"]
    first = nursery.start(log=str(logs[0]), **request)
    nursery.wait_for("working", logs[0], first)
    second = nursery.start(log=str(logs[1]), **{**request, "settings": settings_of(0, steps=5_000_000)})
    assert nursery.status(second, timeout=1.0) is None
    assert "working" not in logs[1].read_text()
    os.kill(first, signal.SIGKILL)
    nursery.wait_for("working", logs[1], second)
    os.kill(second, signal.SIGKILL)
    assert nursery.status(second) == -signal.SIGKILL


def test_an_interrupt_keeps_checkpoints_and_the_same_command_goes_on(nursery, tmp_path):
    config = tmp_path / "run.toml"
    (run,) = lab.runs_from(settings_of(0, steps=5_000_000))
    config.write_text(lab.as_toml(run))
    store, log = lab.Store(tmp_path / "runs"), tmp_path / "log"
    arguments = ["train", "--config", str(config), "--store", str(store.folder), "--out", str(tmp_path), "--jobs", "1"]
    pid = nursery.start(arguments=arguments, log=str(log))
    while (kept := store.load_checkpoint(run.key)) is None or kept.header["step"] < 1000:
        assert nursery.status(pid, timeout=0.01) is None, log.read_text()
    os.kill(pid, signal.SIGINT)
    assert nursery.status(pid) == 130, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    line = f"largeprompt: interrupted: 0 of 1 runs are finished, the others kept in {store.folder}"
    assert said.splitlines()[-1] == f"{line}; the same command goes on"
    assert [path.suffix for path in store.folder.iterdir()] == [".checkpoint"]
    assert store.status(run.key).stage == "interrupted"
    assert 1000 <= store.status(run.key).step < 5_000_000
