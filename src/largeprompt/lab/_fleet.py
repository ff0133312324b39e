"""Runs carried out together on a GPU: launches of a second or so, and beside them risks, progress and checkpoints.

While the GPU is at a launch, the processor records what came of the one before. Only risks are evaluated in between, by
the GPU: of a run at its end, and now and then of all.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import xarray as xr

from largeprompt._device import jax_gpu
from largeprompt._progress import Progress
from largeprompt.dynamics import State
from largeprompt.engine import GpuBatch, GpuRun, Segment

from ._course import Stretch, alone, risks, risks_of, warm_up
from ._engines import with_engines
from ._execution import claimed_unless_found, note, reported
from ._run import Run
from ._sitting import Interrupted, Sitting
from ._store import AbstractStore
from ._yardstick import bayes, yardstick

SECONDS, LONGEST = 1.0, 3.0  # of a launch
RECORDED_EVERY = 15.0  # seconds
PATIENCE = 10.0  # seconds that an interrupt waits for what is needed to record where runs are


def carried_out_together(
    runs: Sequence[Run], store: AbstractStore, progress: Progress, stop: threading.Event, checkpoint_seconds: float
) -> list[xr.Dataset | None]:
    """The results of runs that the compiled loops apply to; None for those that another process is at."""
    results: list[xr.Dataset | None] = [None] * len(runs)
    # many small operations: the processor is faster at them than a GPU at being asked for them
    with jax.default_device(jax.devices("cpu")[0]), contextlib.ExitStack() as all_claims:
        work = _Work(progress, stop, checkpoint_seconds)
        for i, run in enumerate(with_engines(runs)):
            if stop.is_set():
                raise Interrupted
            claim = all_claims.enter_context(contextlib.ExitStack())
            found, alone = claim.enter_context(claimed_unless_found(run, store, progress))
            results[i] = found
            if alone:
                sitting = Sitting(run, store, progress, "gpu")
                claim.enter_context(reported(run, progress))
                work.take(i, sitting, claim)
        try:
            work.carry_out()
        except BaseException:  # an interrupt, or the failure of one: the others keep what they have
            try:
                work.record()
            finally:
                work.save()
            raise
    return [found if found is not None else work.results.get(i) for i, found in enumerate(results)]


class _Work:
    """The runs that are this process's to carry out, by their number."""

    def __init__(self, progress: Progress, stop: threading.Event, checkpoint_seconds: float):
        self._progress, self._stop, self._every = progress, stop, checkpoint_seconds
        self._gpu, self._preparing, self._prepared = jax_gpu(), False, threading.Event()
        self._sittings: dict[int, Sitting] = {}
        self._claims: dict[int, contextlib.ExitStack] = {}
        self._ahead: dict[int, tuple[State, list[Stretch]]] = {}  # where a run is, and what is not recorded of its way
        self._failed: set[int] = set()  # to be written
        self.results: dict[int, xr.Dataset] = {}

    def take(self, i: int, sitting: Sitting, claim: contextlib.ExitStack) -> None:
        """A run to carry out."""
        self._sittings[i], self._claims[i] = sitting, claim
        if sitting.course.due == sitting.state.step:
            self._ahead[i] = sitting.state, [alone(sitting.state)]

    def carry_out(self) -> None:
        """All of them, or as far as they have come when `stop` is set."""
        if not self._sittings:
            return
        numbers = list(self._sittings)
        fleet = GpuBatch([self._voyage(self._sittings[i]) for i in numbers])
        began = launched = saved = recorded = time.monotonic()
        ending, speeds = [], {}
        with ThreadPoolExecutor(4) as writers:
            fleet.launch(SECONDS)
            self._preparing = True
            threading.Thread(target=self._prepare, daemon=True).start()  # only now: compiling wants the processor
            while self._sittings:
                legs = {numbers[i]: leg for i, leg in fleet.collect().items()}
                landed = time.monotonic()
                speeds |= {i: self._move(i, leg) / max(landed - launched, 1e-9) for i, leg in legs.items()}
                for i in legs:  # its share of the GPU's time
                    self._sittings[i].seconds += (landed - launched) / len(legs)
                if self._stop.is_set():
                    raise Interrupted
                # all, or those at their end, once risks are functions; or because nothing else is left to do
                whole = landed - recorded >= RECORDED_EVERY
                chosen = [i for i in self._ahead if whole or self._is_at_its_end(i)]
                if legs and not self._prepared.is_set():
                    chosen = []
                values = self._risks(chosen)
                pause, launched = time.monotonic() - landed, time.monotonic()
                # pauses are to be a small part of the time, and an interrupt is to be heard soon
                fleet.launch(min(LONGEST, max(SECONDS, 8 * pause, (landed - began) / 15)))
                told = {i: self._ahead[i][0].step for i in dict.fromkeys([*legs, *chosen])}
                self._record(chosen, values)
                recorded = landed if whole and chosen else recorded
                for i, step in told.items():
                    sitting = self._sittings[i]
                    self._progress.step(sitting.run.name, step, note(speeds.get(i, 0.0), sitting.course.risk))
                for i in [i for i in list(self._sittings) if self._is_to_be_written(i)]:
                    ending.append(writers.submit(self._finish, i, self._sittings.pop(i)))
                for end in [end for end in ending if end.done()]:
                    end.result()  # or what went wrong
                if time.monotonic() - saved >= self._every:
                    self.save()
                    saved = time.monotonic()
        for end in ending:
            end.result()

    def record(self) -> None:
        """Take down where all runs are, as far as that can be done and does not take long."""
        if self._preparing and not self._prepared.wait(PATIENCE):
            self._progress.warn("stopped before risks could be evaluated: runs go on from their last checkpoint")
        elif self._preparing:
            for setting in {self._sittings[i].course.setting for i in self._ahead}:
                chosen = [i for i in self._ahead if self._sittings[i].course.setting == setting]
                with contextlib.suppress(Exception):  # one that cannot be evaluated costs no other
                    self._record(chosen, self._risks(chosen))

    def _is_to_be_written(self, i: int) -> bool:
        return self._sittings[i].course.due is None and i not in self._failed

    def _is_at_its_end(self, i: int) -> bool:
        return self._ahead[i][0].step == self._sittings[i].run.steps

    def _move(self, i: int, leg: Segment) -> int:
        """Take down where a launch has brought a run; how many steps that are."""
        state, stretches = self._ahead.get(i, (self._sittings[i].state, []))
        self._ahead[i] = leg.state, [*stretches, Stretch(leg.steps, leg.kept, leg.state.diverged)]
        return leg.state.step - state.step

    def _risks(self, chosen: Sequence[int]) -> list[np.ndarray]:
        courses = [self._sittings[i].course for i in chosen for _ in self._ahead[i][1]]
        return risks_of(courses, [stretch for i in chosen for stretch in self._ahead[i][1]], self._gpu)

    def _record(self, chosen: Sequence[int], values: Sequence[np.ndarray]) -> None:
        left = iter(values)
        for i in chosen:
            sitting, (state, stretches) = self._sittings[i], self._ahead.pop(i)
            for stretch in stretches:
                sitting.course.extend(stretch, *next(left))
            sitting.state = state

    def _voyage(self, sitting: Sitting) -> GpuRun:
        later = sitting.course.all_due[sitting.course.all_due > sitting.state.step]
        return GpuRun(sitting.run.training(), sitting.state, sitting.run.steps, later)

    def _finish(self, i: int, sitting: Sitting) -> None:
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                self.results[i] = sitting.finish()
        except BaseException:
            self._failed.add(i)
            self._sittings[i] = sitting  # its checkpoint is kept with the others'
            raise
        self._claims.pop(i).close()

    def _prepare(self) -> None:
        """Risks as functions, and what results are held against: sought by the processor while the GPU trains."""
        settings = list(dict.fromkeys(sitting.course.setting for sitting in list(self._sittings.values())))
        # what goes wrong here goes wrong again where it is needed, and is told there
        with jax.default_device(jax.devices("cpu")[0]), contextlib.suppress(Exception):
            try:
                for setting in settings:
                    risks(setting)
            finally:  # on a thread of its own, since it waits for the GPU
                threading.Thread(target=self._warm_up, args=(settings[0],), daemon=True).start()
            for setting in settings:
                for member in setting.members:
                    yardstick(setting, member)
                bayes(setting)

    def _warm_up(self, setting: Run) -> None:
        with contextlib.suppress(Exception):
            if self._gpu:
                warm_up(setting, self._gpu)
        self._prepared.set()

    def save(self) -> None:
        """Keep a checkpoint of each that is under way."""
        failures = []
        for sitting in list(self._sittings.values()):
            try:
                sitting.save()
            except OSError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
