import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from largeprompt._device import Device

from ._engines import with_engines
from ._run import Run
from ._store import AbstractStore
from ._sweep import place_for
from ._weights import matrices

_MEASURE_SECONDS = 0.1
_LAUNCH_SECONDS = 0.5  # on a GPU, where the runs of a sweep go side by side
_MOST = 512  # of them are timed


class Forecast(NamedTuple):
    """What a sweep will take: seconds on the wall, bytes of memory and of disk, and the seconds of each run to do."""

    seconds: float
    memory: int
    disk: int
    each: dict[Run, float]


def forecast(
    runs: Sequence[Run],
    store: AbstractStore,
    jobs: int,
    measured: Callable[[Run, float], None] = lambda run, speed: None,
    device: Device = "cpu",
) -> Forecast:
    """Time a few steps of each kind of run that is not in the store yet; `measured` is told the steps a second."""
    named = dict(zip(runs, with_engines(runs), strict=True))
    to_do = [run for run in runs if not store.finished(named[run].hash)]
    on_gpu = place_for(device).device == "gpu"
    together = [run for run in to_do if on_gpu and named[run].engine == "fused"]
    speeds: dict[tuple, float] = {}
    for run, speed in zip(together, _speeds_on_gpu(together[:_MOST]) if together else [], strict=False):
        if _kind(named[run]) not in speeds:
            measured(run, speed)
        speeds[_kind(named[run])] = speed
    each, sizes = {}, []
    for run in to_do:
        kind = _kind(named[run])
        if kind not in speeds:
            speeds[kind] = _speed(run)
            measured(run, speeds[kind])
        each[run] = (run.steps - _done(named[run], store)) / speeds[kind]
        sizes.append(recorded_bytes(run))
    # rows as they come, once more as one array, once more as the file's bytes
    held = 3 * sum(sorted(sizes, reverse=True)[: max(jobs, min(len(together), _MOST))])
    seconds = max((each[run] for run in together), default=0.0) * math.ceil(len(together) / _MOST)
    seconds += _makespan([each[run] for run in to_do if not (on_gpu and named[run].engine == "fused")], jobs)
    return Forecast(seconds, _peak_memory() + held, sum(sizes), each)


def _speeds_on_gpu(runs: Sequence[Run]) -> list[float]:
    """Steps a second of each run when all go side by side."""
    from largeprompt.engine import Fleet, Voyage  # imports a compiler

    with jax.default_device(jax.devices("cpu")[0]):
        voyages = [Voyage(run.training(), run.trainer().start(), max(run.steps, 1)) for run in runs]
    fleet = Fleet(voyages)
    legs = fleet.advance(_LAUNCH_SECONDS / 10)  # compiles
    before = {i: leg.state.step for i, leg in legs.items()}
    began = time.monotonic()
    after = {i: leg.state.step for i, leg in fleet.advance(_LAUNCH_SECONDS).items()}
    taken = max(time.monotonic() - began, 1e-9)
    found = [(after.get(i, before[i]) - before[i]) / taken for i in range(len(runs))]
    return [speed or before[i] / _LAUNCH_SECONDS for i, speed in enumerate(found)]


def recorded_bytes(run: Run) -> int:
    """The size of what a run records."""
    size = sum(matrix.size for matrix in matrices(run.layers()[0]).values()) if "parameters" in run.record.what else 0
    circuits = run.heads * 2 * run.dim**2 if "circuits" in run.record.what else 0
    return 8 * len(run.record.steps(run.steps)) * len(run.members) * (size + circuits + 9)


def _peak_memory() -> int:
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kind(run: Run) -> tuple:
    """What the speed of a run depends on."""
    run = run.resolved
    return run.engine, run.attention, run.parameters, run.heads, run.head_dim, run.outputs, run.L, run.batch, run.d


def _speed(run: Run) -> float:
    trainer = run.trainer()
    state = trainer.advance(trainer.start(), min(1, run.steps))  # compiles
    steps, speed = 1, 1.0
    while state.step < run.steps:
        began, first = time.monotonic(), state.step
        state = trainer.advance(state, min(run.steps, first + steps))
        taken = max(time.monotonic() - began, 1e-9)
        speed = (state.step - first) / taken
        if taken >= _MEASURE_SECONDS:
            break
        steps *= 2
    return speed


def _done(run: Run, store: AbstractStore) -> int:
    try:
        checkpoint = store.checkpoint(run.hash)
    except ValueError:  # damaged: named once the run begins
        checkpoint = None
    return 0 if checkpoint is None else int(checkpoint.header["step"])


def _makespan(seconds: list[float], jobs: int) -> float:
    """When the last of the workers ends, each taking the longest run that is left."""
    ends = [0.0] * max(1, jobs)
    for length in sorted(seconds, reverse=True):
        ends[ends.index(min(ends))] += length
    return max(ends)


def duration(seconds: float) -> str:
    """A time in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
