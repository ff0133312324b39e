"""Many runs together on a GPU: launches of a second or so, and beside them risks, progress and checkpoints.

While the GPU works on a launch, the processor records the results of the one before. Only risks are evaluated in
between, by the GPU: of a run at its end, and now and then of all.
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

from ._grid import with_engines
from ._history import States, one_state, risks, risks_of, warm_up
from ._run import Run
from ._session import Interrupted, RunSession, claimed_unless_found, note, reported
from ._store import AbstractStore
from ._yardstick import bayes, yardstick

SECONDS, LONGEST = 1.0, 3.0  # of a launch
RECORDED_EVERY = 15.0  # seconds
PATIENCE = 10.0  # seconds that an interrupt waits for what is needed to record where runs are


def run_together(
    runs: Sequence[Run], store: AbstractStore, progress: Progress, stop: threading.Event, checkpoint_seconds: float
) -> list[xr.Dataset | None]:
    """The results of runs that the compiled loops apply to; None for those that another process runs."""
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
                session = RunSession(run, store, progress, "gpu")
                claim.enter_context(reported(run, progress))
                work.take(i, session, claim)
        try:
            work.run()
        except BaseException:  # an interrupt, or the failure of one: the others keep what they have
            try:
                work.record()
            finally:
                work.save()
            raise
    return [found if found is not None else work.results.get(i) for i, found in enumerate(results)]


class _Work:
    """The runs that this process has claimed, by their number."""

    def __init__(self, progress: Progress, stop: threading.Event, checkpoint_seconds: float):
        self._progress, self._stop, self._every = progress, stop, checkpoint_seconds
        self._gpu, self._preparing, self._prepared = jax_gpu(), False, threading.Event()
        self._sessions: dict[int, RunSession] = {}
        self._claims: dict[int, contextlib.ExitStack] = {}
        self._ahead: dict[int, tuple[State, list[States]]] = {}  # its state, and states to record
        self._failed: set[int] = set()  # to be written
        self.results: dict[int, xr.Dataset] = {}

    def take(self, i: int, session: RunSession, claim: contextlib.ExitStack) -> None:
        """Add a run."""
        self._sessions[i], self._claims[i] = session, claim
        if session.history.due == session.state.step:
            self._ahead[i] = session.state, [one_state(session.state)]

    def run(self) -> None:
        """Run all of them to their end, or until `stop` is set."""
        if not self._sessions:
            return
        numbers = list(self._sessions)
        batch = GpuBatch([self._gpu_run(self._sessions[i]) for i in numbers])
        began = launched = saved = recorded = time.monotonic()
        ending, speeds = [], {}
        with ThreadPoolExecutor(4) as writers:
            batch.launch(SECONDS)
            self._preparing = True
            threading.Thread(target=self._prepare, daemon=True).start()  # only now: compiling wants the processor
            while self._sessions:
                segments = {numbers[i]: segment for i, segment in batch.collect().items()}
                collected = time.monotonic()
                speeds |= {
                    i: self._move(i, segment) / max(collected - launched, 1e-9) for i, segment in segments.items()
                }
                for i in segments:  # its share of the GPU's time
                    self._sessions[i].seconds += (collected - launched) / len(segments)
                if self._stop.is_set():
                    raise Interrupted
                # all, or those at their end, once risks are functions; or because nothing else is left to do
                whole = collected - recorded >= RECORDED_EVERY
                chosen = [
                    i for i, (state, _) in self._ahead.items() if whole or state.step == self._sessions[i].run.steps
                ]
                if segments and not self._prepared.is_set():
                    chosen = []
                values = self._risks(chosen)
                pause, launched = time.monotonic() - collected, time.monotonic()
                # pauses are to be a small part of the time, and an interrupt is to be heard soon
                batch.launch(min(LONGEST, max(SECONDS, 8 * pause, (collected - began) / 15)))
                reached = {i: self._ahead[i][0].step for i in dict.fromkeys([*segments, *chosen])}
                self._record(chosen, values)
                recorded = collected if whole and chosen else recorded
                for i, step in reached.items():
                    session = self._sessions[i]
                    self._progress.step(session.run.name, step, note(speeds.get(i, 0.0), session.history.risk))
                for i, session in list(self._sessions.items()):
                    if session.history.due is None and i not in self._failed:
                        ending.append(writers.submit(self._finish, i, self._sessions.pop(i)))
                for end in [end for end in ending if end.done()]:
                    end.result()  # or what went wrong
                if time.monotonic() - saved >= self._every:
                    self.save()
                    saved = time.monotonic()
        for end in ending:
            end.result()

    def record(self) -> None:
        """Record where all runs are, as far as that is possible and does not take long."""
        if self._preparing and not self._prepared.wait(PATIENCE):
            self._progress.warn("stopped before risks could be evaluated: runs go on from their last checkpoint")
        elif self._preparing:
            for setting in {self._sessions[i].history.setting for i in self._ahead}:
                chosen = [i for i in self._ahead if self._sessions[i].history.setting == setting]
                with contextlib.suppress(Exception):  # one that cannot be evaluated costs no other
                    self._record(chosen, self._risks(chosen))

    def _move(self, i: int, segment: Segment) -> int:
        """Keep the states of a run after a launch; returned is the number of its steps."""
        state, waiting = self._ahead.get(i, (self._sessions[i].state, []))
        self._ahead[i] = segment.state, [*waiting, States(segment.steps, segment.kept, segment.state.diverged)]
        return segment.state.step - state.step

    def _risks(self, chosen: Sequence[int]) -> list[np.ndarray]:
        histories = [self._sessions[i].history for i in chosen for _ in self._ahead[i][1]]
        return risks_of(histories, [states for i in chosen for states in self._ahead[i][1]], self._gpu)

    def _record(self, chosen: Sequence[int], values: Sequence[np.ndarray]) -> None:
        left = iter(values)
        for i in chosen:
            session, (state, waiting) = self._sessions[i], self._ahead.pop(i)
            for states in waiting:
                session.history.extend(states, *next(left))
            session.state = state

    def _gpu_run(self, session: RunSession) -> GpuRun:
        later = session.history.all_due[session.history.all_due > session.state.step]
        return GpuRun(session.run.training(), session.state, session.run.steps, later)

    def _finish(self, i: int, session: RunSession) -> None:
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                self.results[i] = session.finish()
        except BaseException:
            self._failed.add(i)
            self._sessions[i] = session  # its checkpoint is kept with the others'
            raise
        self._claims.pop(i).close()

    def _prepare(self) -> None:
        """Make the risk functions and the optima that results are compared with, while the GPU trains."""
        settings = list(dict.fromkeys(session.history.setting for session in list(self._sessions.values())))
        # what goes wrong here goes wrong again where it is needed, and is reported there
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
        """Save a checkpoint of each run that is under way."""
        failures = []
        for session in list(self._sessions.values()):
            try:
                session.save()
            except OSError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
