"""The GPU engine in Numba's simulator of a GPU: `python gpu_in_simulation.py FOLDER` writes down what it finds there.

The simulator is chosen when Numba is imported, so this is a process of its own, with NUMBA_ENABLE_CUDASIM=1 and
NUMBA_DISABLE_JIT=1. The kernel then is plain Python and every thread of a GPU one of Python's. Memory that no one has
written holds NaN. What is to be compared with the processor's engine is a `Trial`, which both processes know.
"""

import contextlib
import dataclasses
import io
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import largeprompt as lp
from engine_catalogue import flat, pair
from gpu_trials import DIVERGING, DIVERGING_MARKS, DIVERGING_STOP, RUNS, TRIALS, Trial, training, unlike
from largeprompt import lab
from largeprompt._device import numba_cuda
from largeprompt.dynamics import Layers
from largeprompt.engine import GpuBatch, GpuRun, GpuTrainer, trainer_for


class Watching(lab.Progress):
    """Writes down what is reported to it; has Ctrl-C pressed, or fails, when a run has come to a step."""

    def __init__(self, pressed_at: int | None = None, fails_at: int | None = None):
        self.risks, self.ends, self._pressed_at, self._fails_at = {}, [], pressed_at, fails_at

    def step(self, name, done, note=""):
        if name == "training":
            return
        risks = note.partition("risk ")[2]
        if risks:
            self.risks[name] = (done, *map(float, risks.split(", ")))
        if self._pressed_at == done:
            os.kill(os.getpid(), signal.SIGINT)
        if self._fails_at == done:
            raise OSError("the terminal is gone")

    def close(self, name, outcome=""):
        if name != "training":
            self.ends.append(outcome == "found")


@contextlib.contextmanager
def constants(values: Mapping[str, int]) -> Iterator[None]:
    """Other values for constants of the engine's modules, and loops made with them."""
    from largeprompt.engine._gpu_kernel import train

    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(patch(f"largeprompt.engine.{name}", value))
        train.cache_clear()
        yield
    train.cache_clear()


@contextlib.contextmanager
def launches_of(steps: int) -> Iterator[None]:
    """A clock by which some threads of a block see the end of a launch after so many steps, others later."""
    from largeprompt.engine import _gpu_kernel

    def cycles():
        thread: Any = threading.current_thread()
        thread.asked = getattr(thread, "asked", -1) + 1
        return thread.asked // (steps + thread.threadIdx.x % 2)

    with patch.object(_gpu_kernel, "cycles", cycles):
        yield


@contextlib.contextmanager
def blocks_in_turn() -> Iterator[None]:
    """A clock by which all blocks but the first begin after the deadline."""
    from largeprompt.engine import _gpu_kernel

    def nanoseconds():
        thread: Any = threading.current_thread()
        return 5 * thread.blockIdx.x

    with patch.object(_gpu_kernel, "nanoseconds", nanoseconds):
        yield


class AtOnce(Executor):
    """Carries out what it is given before it gives back its future."""

    def submit(self, what, /, *arguments, **named):
        done = Future()
        try:
            done.set_result(what(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def nothing_late() -> Iterator[None]:
    """Risks can be evaluated when the first launch lands, and results are written at once, however slow the machine."""
    from largeprompt.lab import _gpu_batch

    move = _gpu_batch._Work._move

    def moved(self, i, segment):
        self._prepared.wait()
        return move(self, i, segment)

    with (
        patch.object(_gpu_batch._Work, "_move", moved),
        patch.object(_gpu_batch, "ThreadPoolExecutor", lambda threads: AtOnce()),
    ):
        yield


def poison() -> None:
    """Memory that nothing was written to holds NaN; and an array that threads share is made by one of them."""
    numba_cuda()  # with what it warns of silenced
    from numba.cuda.simulator import kernelapi

    local: Any = kernelapi.FakeCUDALocal
    shared: Any = kernelapi.FakeCUDAShared
    lock = threading.Lock()
    make_local, make_shared, begin = local.array, shared.array, shared.__init__

    def array(self, *arguments):
        found = make_local(self, *arguments)
        found[...] = np.nan
        return found

    def begin_poisoned(self, size):
        begin(self, size)
        self._dynshared[:] = -1  # all bits: not a number in any of the types

    def shared_array(self, shape, kind):
        if shape == 0:
            return make_shared(self, shape, kind)
        caller = sys._getframe(1)
        key = caller.f_code.co_filename, caller.f_lineno
        with lock:
            if key not in self._allocations:
                self._allocations[key] = np.full(shape, np.nan if "float" in str(kind) else -(2**31), str(kind))
            return self._allocations[key]

    local.array, shared.array, shared.__init__ = array, shared_array, begin_poisoned


def wake_one_another() -> None:
    """Threads of a block wait at a barrier; the simulator has one more thread ask all the time which of them wait."""
    from numba.cuda.simulator import kernel

    def run(self, place, *arguments):
        barrier = threading.Barrier(math.prod(self._block_dim), timeout=60)

        def thread():
            try:
                self._f(*arguments)
            except BaseException:
                barrier.abort()  # so that no other waits for this one
                raise

        self.barrier = barrier
        threads = [kernel.BlockThread(thread, self, place, own, self._debug) for own in np.ndindex(*self._block_dim)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        failed = [error for each in threads if each.exception for error in each.exception[:1]]
        for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error

    block: Any = kernel.BlockManager
    member: Any = kernel.BlockThread
    block.run, member.syncthreads = run, lambda self: self._manager.barrier.wait()


def journey(runs: Sequence[GpuRun]) -> tuple[list[dict[str, np.ndarray]], int]:
    """What becomes of trainings run together, as arrays, and in how many launches."""
    batch, launches = GpuBatch(runs), 0
    found: list[dict[str, Any]] = [{"steps": [], "kept": [], "way": []} for _ in runs]
    while segments := batch.advance():
        launches += 1
        for i, segment in segments.items():
            own = found[i]
            own["steps"].extend(segment.steps)
            own["kept"].extend(flat(_one(segment.kept, j)) for j in range(len(segment.steps)))
            own["way"].append(segment.state.step)
            own["end"], own["diverged"] = flat(segment.state.layers), [_number(at) for at in segment.state.diverged]
    return [{name: np.array(value) for name, value in own.items()} for own in found], launches


def _one(layers: Layers, i: int) -> Any:
    import equinox as eqx
    import jax

    return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, layers)


def _number(step: int | None) -> int:
    return -1 if step is None else step


class Findings(dict[str, np.ndarray]):
    """Arrays by name."""

    def put(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Several arrays under one name."""
        self.update({f"{name}/{part}": np.asarray(array) for part, array in arrays.items()})

    def of(self, name: str) -> dict[str, np.ndarray]:
        """What was put under that name."""
        return {part.removeprefix(f"{name}/"): array for part, array in self.items() if part.startswith(f"{name}/")}


def trials(found: Findings) -> None:
    """Every trial; what was kept on the way and where it ended."""
    for name, trial in TRIALS.items():
        with constants(trial.constants):
            ((own,), _) = journey([GpuRun(trial.training, trial.start, trial.stops[-1], trial.stops)])
            found.put(f"trial/{name}", own | {"kind": _kind(trial)})
    for name, trial in DIVERGING.items():
        ((own,), _) = journey([GpuRun(trial.training, trial.start, DIVERGING_STOP, DIVERGING_MARKS)])
        found.put(f"diverging/{name}", own)


KIND = ("prompts", "staged", "on_chip", "helped", "parts")


def _kind(trial: Trial) -> list[int]:
    """How a trial is run."""
    from largeprompt.engine import _gpu, _training_arrays

    kind, parts = _gpu._shape_of(trial.training, _training_arrays.TrainingArrays(trial.training, trial.layers))
    return [*(int(getattr(kind, name)) for name in KIND[:-1]), parts]


def pieces(found: Findings) -> None:
    """One training in one go, by stopping at every mark, in launches of few steps, and with room for two marks."""
    stop, marks, trial = 9, (1, 2, 4, 5, 8), TRIALS["general prior"]
    whole = GpuRun(trial.training, trial.start, stop, marks)
    beside = GpuRun(trial.training.with_seed(8), trial.start, 3)
    for name, around in {
        "whole": contextlib.nullcontext(),
        "launches of one step": launches_of(1),
        "launches of four steps": launches_of(4),
        "blocks in turn": blocks_in_turn(),
        "room for two marks": patch("largeprompt.engine._gpu._KEPT_BYTES", 2 * 2 * 8 * 2 * (2 * 9 + 3 + 1)),
    }.items():
        with around:
            (own, other), launches = journey([whole, beside])
            found.put(
                f"pieces/{name}", own | {"launches": launches, "beside": other["end"], "way beside": other["way"]}
            )
    trainer = GpuTrainer(trial.training, trial.layers)
    state, states = trainer.start(), []
    for mark in (*marks, stop):
        state = trainer.advance(state, mark)
        states.append(flat(state.layers))
    found.put("pieces/stopping", {"kept": states[:-1], "end": states[-1]})


def batches(found: Findings) -> None:
    """Unlike trainings together and alone."""
    runs = unlike()
    alone = [journey([run])[0][0] for run in runs]
    together, _ = journey(runs)
    with launches_of(1):
        cut, _ = journey(runs)
    for i in range(len(runs)):
        for name, own in (("alone", alone), ("together", together), ("cut", cut)):
            found.put(f"batch/{name}/{i}", own[i])


def sweeps(found: Findings, folder: Path) -> None:
    """The same through the lab, in stores of their own."""
    watching = Watching()
    store = lab.Store(folder / "whole")
    began = time.monotonic()
    lab.sweep(RUNS, store, device="gpu", progress=watching)
    seconds = time.monotonic() - began
    found.put("sweep/whole", {"found": watching.ends, "seconds": seconds})
    found["sweep/whole/risks"] = np.array([watching.risks[run.name] for run in RUNS[:3]])
    with patch.object(GpuBatch, "launch", side_effect=AssertionError("a result was there already")):
        again = Watching()
        lab.sweep(RUNS, store, device="gpu", progress=again)
        found.put("sweep/again", {"found": again.ends})

    store = lab.Store(folder / "interrupted")
    with launches_of(2), nothing_late(), contextlib.suppress(lab.Interrupted):
        lab.sweep(RUNS, store, device="gpu", progress=Watching(pressed_at=2))  # the launch after that is under way
        found["sweep/interrupted/not"] = np.array(True)

    store = lab.Store(folder / "failed")
    with launches_of(2), nothing_late():
        try:
            lab.sweep(RUNS, store, device="gpu", progress=Watching(fails_at=4))
        except OSError as error:
            found["sweep/failed/said"] = np.array(str(error))

    store = lab.Store(folder / "full")
    full = patch.object(lab.Store, "save", side_effect=OSError(28, "No space left on device"))
    with launches_of(1), nothing_late(), full:
        try:
            lab.sweep(RUNS[-1:] + RUNS[:1], store, device="gpu")
        except OSError as error:
            found["sweep/full/said"] = np.array(str(error))

    store = lab.Store(folder / "no risk")
    from largeprompt.lab import _gpu_batch

    def only_isotropic(courses, stretches, gpu=None):
        if any(course.run.sigma != "identity" for course in courses):
            raise MemoryError("too many nodes")
        return evaluated(courses, stretches, gpu)

    evaluated = _gpu_batch.risks_of
    with launches_of(2), nothing_late(), patch.object(_gpu_batch, "risks_of", only_isotropic):
        try:
            lab.sweep(RUNS[:3], store, device="gpu")
        except MemoryError as error:
            found["sweep/no risk/said"] = np.array(str(error))

    store = lab.Store(folder / "claimed")
    run = RUNS[0].resolved
    with store.claim(run.key):
        from largeprompt.lab._gpu_batch import run_together

        results = run_together(RUNS[:2], store, Watching(), threading.Event(), 30.0)
    found.put("sweep/claimed", {"mine": [data is not None for data in results]})


def command_line(found: Findings, folder: Path) -> None:
    """The estimate of `largeprompt train --device gpu`, and which trainers devices have."""
    from largeprompt.cli import main

    settings = folder / "run.toml"
    settings.write_text(lab.as_toml(dataclasses.replace(RUNS[0], attention="linear")))
    said = io.StringIO()
    arguments = ["train", "--config", str(settings), "--device", "gpu", "--store", str(folder / "none"), "--estimate"]
    with patch.object(sys, "argv", ["largeprompt", *arguments]), patch("sys.stdout", said):
        try:
            main()
        except SystemExit as end:
            found["command line/code"] = np.array(end.code)
    found["command line/said"] = np.array(said.getvalue())
    devices = ("auto", "gpu", "cpu")
    found["choice"] = np.array([type(trainer_for(training(5), pair(3), device=one)).__name__ for one in devices])


def main(folder: Path) -> None:
    """Everything that is to be found."""
    # with 32-bit words as numbers of NumPy, what wraps around on purpose is a warning
    warnings.filterwarnings("ignore", message="overflow encountered in scalar add")
    lp.use_float64()
    poison()
    wake_one_another()
    found = Findings()
    trials(found)
    pieces(found)
    batches(found)
    sweeps(found, folder)
    command_line(found, folder)
    arrays: dict[str, Any] = dict(found)
    np.savez(folder / "found.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
