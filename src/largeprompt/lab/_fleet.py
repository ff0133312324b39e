"""Runs carried out together on a GPU: launches of a second, and in between risks, progress and checkpoints for all."""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import xarray as xr

from largeprompt._device import jax_gpu
from largeprompt.engine import Fleet, Voyage

from ._course import Course, Stretch, add, alone, risks
from ._engines import with_engines
from ._execution import claimed_unless_found
from ._run import Run
from ._sitting import Interrupted, Sitting, Watcher
from ._store import AbstractStore
from ._verdict import bayes, yardstick

MOST = 512  # runs at a time: each holds a file open, its lock
SECONDS, LONGEST = 1.0, 3.0  # of a launch


def carried_out_together(
    runs: Sequence[Run], store: AbstractStore, watcher: Watcher, stop: threading.Event, checkpoint_seconds: float
) -> list[xr.Dataset | None]:
    """The results of runs that the compiled loops apply to; None for those that another process is at."""
    results: list[xr.Dataset | None] = [None] * len(runs)
    # many small operations: the processor is faster at them than a GPU at being asked for them
    with jax.default_device(jax.devices("cpu")[0]), contextlib.ExitStack() as all_claims:
        work = _Work(watcher, stop, checkpoint_seconds)
        for i, run in enumerate(with_engines(runs)):
            if stop.is_set():
                raise Interrupted
            claim = all_claims.enter_context(contextlib.ExitStack())
            found, alone = claim.enter_context(claimed_unless_found(run, store, watcher))
            results[i] = found
            if alone:
                work.take(i, Sitting(run, store, watcher, "gpu"), claim)
        try:
            work.carry_out()
        except BaseException:  # an interrupt, or the failure of one: the others keep what they have
            work.save()
            raise
    return [found if found is not None else work.results.get(i) for i, found in enumerate(results)]


class _Work:
    """The runs that are this process's to carry out, by their number."""

    def __init__(self, watcher: Watcher, stop: threading.Event, checkpoint_seconds: float):
        self._watcher, self._stop, self._every = watcher, stop, checkpoint_seconds
        self._gpu = jax_gpu()
        self._sittings: dict[int, Sitting] = {}
        self._claims: dict[int, contextlib.ExitStack] = {}
        self.results: dict[int, xr.Dataset] = {}

    def take(self, i: int, sitting: Sitting, claim: contextlib.ExitStack) -> None:
        """A run to carry out."""
        self._sittings[i], self._claims[i] = sitting, claim

    def carry_out(self) -> None:
        """All of them, or as far as they have come when `stop` is set."""
        if not self._sittings:
            return
        threading.Thread(target=_prepare, args=([s.course for s in self._sittings.values()],), daemon=True).start()
        numbers = list(self._sittings)
        fleet = Fleet([self._voyage(self._sittings[i]) for i in numbers])
        began = saved = time.monotonic()
        before = {i: sitting.seconds for i, sitting in self._sittings.items()}
        starts = {i: alone(s.state) for i, s in self._sittings.items() if s.course.due == s.state.step}
        seconds, ending = SECONDS, []
        with ThreadPoolExecutor(4) as writers:
            while self._sittings:
                launched = time.monotonic()
                legs = {numbers[i]: leg for i, leg in fleet.advance(seconds).items()}
                landed = time.monotonic()
                self._record(starts)
                self._record({i: Stretch(leg.steps, leg.kept, leg.state.diverged) for i, leg in legs.items()})
                starts = {}
                steps = {i: leg.state.step - self._sittings[i].state.step for i, leg in legs.items()}
                for i, leg in legs.items():
                    self._sittings[i].state, self._sittings[i].seconds = leg.state, before[i] + landed - began
                for i, n in steps.items():
                    sitting, speed = self._sittings[i], n / max(landed - launched, 1e-9)
                    self._watcher.moved(sitting.run, sitting.state.step, speed, sitting.course.risk)
                for i in [i for i, sitting in list(self._sittings.items()) if sitting.course.due is None]:
                    ending.append(writers.submit(self._finish, i, self._sittings.pop(i)))
                for end in [end for end in ending if end.done()]:
                    end.result()  # or what went wrong
                if self._stop.is_set():
                    raise Interrupted
                if time.monotonic() - saved >= self._every:
                    self.save()
                    saved = time.monotonic()
                # the card waits meanwhile: a small part of the time
                seconds = min(LONGEST, max(SECONDS, 8 * (time.monotonic() - landed)))
        for end in ending:
            end.result()

    def _record(self, stretches: dict[int, Stretch]) -> None:
        add([self._sittings[i].course for i in stretches], list(stretches.values()), self._gpu)

    def _voyage(self, sitting: Sitting) -> Voyage:
        later = sitting.course.all_due[sitting.course.all_due > sitting.state.step]
        return Voyage(sitting.run.training(), sitting.state, sitting.run.steps, later)

    def _finish(self, i: int, sitting: Sitting) -> None:
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                self.results[i] = sitting.finish()
        except BaseException:
            self._sittings[i] = sitting  # its checkpoint is kept with the others'
            raise
        self._claims.pop(i).close()
        self._watcher.ended(sitting.run, found=False)

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


def _prepare(courses: Sequence[Course]) -> None:
    """Risks as functions, and what results are held against: sought by the processor while the GPU trains."""
    # what goes wrong here goes wrong again where it is needed, and is told there
    with jax.default_device(jax.devices("cpu")[0]), contextlib.suppress(Exception):
        settings = dict.fromkeys(course.setting for course in courses)
        for setting in settings:
            risks(setting)
        for setting in settings:
            for member in setting.members:
                yardstick(setting, member)
            bayes(setting)
