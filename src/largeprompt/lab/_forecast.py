"""What a sweep will take: a few steps of each kind of run are timed before it begins."""

import dataclasses
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax

from largeprompt._device import Device, resolve_device
from largeprompt._progress import Progress

from ._grid import with_engines
from ._run import Run
from ._store import AbstractStore
from ._sweep import MOST_ON_GPU
from ._weights import matrices

_MEASURE_SECONDS = 0.05  # at least, twice
_LAUNCH_SECONDS = 0.3  # on a GPU
_MANY = 1000  # runs
_AT_ONCE = 64  # kinds of runs timed side by side there, so that none has to wait
_TOKENS = 2**22  # in a step that is timed: the time of a longer one follows from one of so many


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
    progress: Progress | None = None,
    device: Device = "cpu",
) -> Forecast:
    """Time a few steps of each kind of run that is not in the store yet; the progress notes their steps per second."""
    named = dict(zip(runs, with_engines(runs), strict=True))
    finished, begun = _there(named.values(), store)
    to_do = [run for run in runs if not finished or named[run].key not in finished]
    on_gpu = resolve_device(device, "cuda") == "gpu"
    together = [run for run in to_do if on_gpu and named[run].engine == "fused"]
    kinds = {_kind(named[run]): run for run in reversed(to_do)}
    with (progress or Progress()).task("timing a few steps (the first time, compiling them)", len(kinds)) as advance:
        speeds, shares = _on_gpu({_kind(named[run]): run for run in reversed(together)}, len(together))
        for kind, run in kinds.items():
            if kind not in speeds:
                speeds[kind] = _speed(run)
            advance(1, f"{run.title}: {speeds[kind]:.0f} steps/s")
    each, sizes = {}, []
    size_of: dict[tuple, int] = {}
    for run in to_do:
        kind = _kind(named[run])
        if (kind, run.steps, run.record) not in size_of:
            size_of[kind, run.steps, run.record] = recorded_bytes(run)
        done = store.kept_step(named[run].key) if begun and named[run].key in begun else 0
        each[run] = (run.steps - done) / speeds[kind]
        sizes.append(size_of[kind, run.steps, run.record])
    # rows as they come, once more as one array, once more as the file's bytes
    held = 3 * sum(sorted(sizes, reverse=True)[: max(jobs, min(len(together), MOST_ON_GPU))])
    longest = max((each[run] for run in together), default=0.0)
    crowd = max(1.0, sum(each[run] * shares[_kind(named[run])] for run in together) / longest) if longest else 1.0
    each |= {run: each[run] * crowd for run in together}
    seconds = longest * max(crowd, math.ceil(len(together) / MOST_ON_GPU))
    seconds += _makespan([each[run] for run in to_do if not (on_gpu and named[run].engine == "fused")], jobs)
    return Forecast(seconds, _peak_memory() + held, sum(sizes), each)


def _there(runs: Collection[Run], store: AbstractStore) -> tuple[set[str], set[str]]:
    """The keys of the runs that are finished, and of those that have a checkpoint."""
    if len(runs) > _MANY and not store.kinds():  # then their keys, which take longest, are not needed
        return set(), set()
    keys = [run.key for run in runs]
    return store.finished_of(keys), store.begun_of(keys)


def _shorter(run: Run) -> tuple[Run, float]:
    """A run whose steps can be timed in a moment, and how many times faster they are: time goes with the tokens."""
    if run.attention == "linear" or math.inf == run.L or run.L * run.batch <= _TOKENS:
        return run, 1.0
    L = max(1024, _TOKENS // run.batch)
    return (dataclasses.replace(run, L=L, engine=run.resolved.engine), run.L / L) if L < run.L else (run, 1.0)


def _on_gpu(kinds: Mapping[tuple, Run], among: int) -> tuple[dict[tuple, float], dict[tuple, float]]:
    """Steps per second of a run of each kind among so many, and the share that it takes of a GPU meanwhile."""
    if not kinds:
        return {}, {}
    from largeprompt.engine import GpuBatch, GpuRun  # imports a compiler

    speeds, shares, names = {}, {}, list(kinds)
    while names:
        some = names[:_AT_ONCE]
        runs, factors = zip(*(_shorter(kinds[name]) for name in some), strict=True)
        with jax.default_device(jax.devices("cpu")[0]):
            batch = GpuBatch([GpuRun(run.training(), run.trainer().start(), max(run.steps, 1)) for run in runs], among)
        first = {i: segment.state.step for i, segment in batch.advance(_LAUNCH_SECONDS / 10).items()}  # compiles
        began = time.monotonic()
        then = {i: segment.state.step for i, segment in batch.advance(_LAUNCH_SECONDS).items()}
        taken = max(time.monotonic() - began, 1e-9)
        for i in sorted({*first, *then}):  # others had no room beside these
            moved, seconds = (then[i] - first.get(i, 0), taken) if i in then else (first[i], _LAUNCH_SECONDS / 10)
            speeds[some[i]], shares[some[i]] = moved / seconds / factors[i], batch.shares[i]
        names = [name for name in names if name not in speeds]
    return speeds, shares


def recorded_bytes(run: Run) -> int:
    """The size of what a run records."""
    size = sum(matrix.size for matrix in matrices(run.layers()[0]).values()) if "parameters" in run.record.what else 0
    circuits = run.heads * 2 * run.dim**2 if "circuits" in run.record.what else 0
    return 8 * len(run.record.steps(run.steps)) * len(run.members) * (size + circuits + 9)


def _peak_memory() -> int:
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kind(run: Run) -> tuple:
    """What the speed of a run, its engine named, depends on."""
    shape = run.parameters, run.heads, run.head_dim, run.outputs
    return run.engine, run.attention, *shape, run.L, run.batch, run.d, run.optimiser


def _speed(run: Run) -> float:
    run, factor = _shorter(run)
    trainer = run.trainer()
    state = trainer.advance(trainer.start(), min(1, run.steps))  # compiles
    steps, speed, enough = 1, 1.0, 0
    while state.step < run.steps and enough < 2:
        began, first = time.monotonic(), state.step
        state = trainer.advance(state, min(run.steps, first + steps))
        taken = max(time.monotonic() - began, 1e-9)
        found = (state.step - first) / taken
        speed = max(speed, found) if enough else found  # one may have taken long because it had to wait
        enough += taken >= _MEASURE_SECONDS
        steps *= 1 if taken >= _MEASURE_SECONDS else 2
    return speed / factor


def _makespan(seconds: list[float], jobs: int) -> float:
    """When the last of the workers ends, each taking the longest run that is left."""
    ends = [0.0] * max(1, jobs)
    for length in sorted(seconds, reverse=True):
        ends[ends.index(min(ends))] += length
    return max(ends)


def plural(count: int, noun: str, many: str = "") -> str:
    """A count with its noun: `1 run`, `2 runs`."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds >= 1e8:
        return f"{seconds / (365.25 * 86400):.3g} years"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
