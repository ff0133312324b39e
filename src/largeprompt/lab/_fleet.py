"""Runs carried out together on a GPU: launches of a second, and in between risks, progress and checkpoints for all."""

import contextlib
import threading
import time
from collections.abc import Sequence

import jax
import xarray as xr

from largeprompt.engine import Fleet, Voyage

from ._course import Stretch, add, alone
from ._execution import claimed_unless_found
from ._run import Run
from ._sitting import Interrupted, Sitting, Watcher
from ._store import AbstractStore
from ._verdict import bayes, yardstick

MOST = 2048  # runs at a time


def carried_out_together(
    runs: Sequence[Run], store: AbstractStore, watcher: Watcher, stop: threading.Event, checkpoint_seconds: float
) -> list[xr.Dataset | None]:
    """The results of runs that the compiled loops apply to; None for those that another process is at."""
    results: list[xr.Dataset | None] = [None] * len(runs)
    with contextlib.ExitStack() as all_claims:
        work = _Work(store, watcher, stop, checkpoint_seconds)
        for i, run in enumerate(runs):
            claim = all_claims.enter_context(contextlib.ExitStack())
            found, alone = claim.enter_context(claimed_unless_found(run.resolved, store, watcher))
            results[i] = found
            if alone:
                work.take(i, Sitting(run.resolved, store, watcher, "gpu"), claim)
        work.carry_out()
    return [found if found is not None else work.results.get(i) for i, found in enumerate(results)]


class _Work:
    """The runs that are this process's to carry out, by their number."""

    def __init__(self, store: AbstractStore, watcher: Watcher, stop: threading.Event, checkpoint_seconds: float):
        self._store, self._watcher, self._stop, self._every = store, watcher, stop, checkpoint_seconds
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
        _search_for_optima([sitting.run for sitting in self._sittings.values()])
        self._record_what_is_due()
        numbers = list(self._sittings)
        fleet = Fleet([self._voyage(self._sittings[i]) for i in numbers])
        began = saved = time.monotonic()
        before = {i: sitting.seconds for i, sitting in self._sittings.items()}
        self._finish([i for i in numbers if self._sittings[i].course.due is None])
        while self._sittings:
            at = time.monotonic()
            legs = {numbers[i]: leg for i, leg in fleet.advance().items()}
            for i, leg in legs.items():
                sitting = self._sittings[i]
                speed = (leg.state.step - sitting.state.step) / max(time.monotonic() - at, 1e-9)
                sitting.state = leg.state
                sitting.seconds = before[i] + time.monotonic() - began
                self._watcher.moved(sitting.run, leg.state.step, speed, sitting.course.risk)
            courses = [self._sittings[i].course for i in legs]
            add(courses, [Stretch(leg.steps, leg.kept, leg.state.diverged) for leg in legs.values()])
            self._finish([i for i in legs if self._sittings[i].course.due is None])
            if self._stop.is_set():
                self._save()
                raise Interrupted
            if time.monotonic() - saved >= self._every:
                self._save()
                saved = time.monotonic()

    def _voyage(self, sitting: Sitting) -> Voyage:
        return Voyage(sitting.run.training(), sitting.state, sitting.run.steps, sitting.course.all_due)

    def _record_what_is_due(self) -> None:
        """The start, or where a checkpoint was made just before a record."""
        due = [sitting for sitting in self._sittings.values() if sitting.course.due == sitting.state.step]
        add([sitting.course for sitting in due], [alone(sitting.state) for sitting in due])

    def _finish(self, numbers: Sequence[int]) -> None:
        for i in numbers:
            sitting = self._sittings.pop(i)
            self.results[i] = sitting.finish()
            self._claims.pop(i).close()
            self._watcher.ended(sitting.run, found=False)

    def _save(self) -> None:
        for sitting in self._sittings.values():
            sitting.save()


def _search_for_optima(runs: Sequence[Run]) -> None:
    """What results are held against, sought by the processor while the GPU trains."""

    def search() -> None:
        with jax.default_device(jax.devices("cpu")[0]):
            for run in runs:
                for member in run.members:
                    yardstick(run, member)
                bayes(run)

    threading.Thread(target=search, daemon=True).start()
