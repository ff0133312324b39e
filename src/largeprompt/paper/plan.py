"""What a job has to do and about what it takes, and the training that runs in the background."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import xarray as xr

from largeprompt import lab
from largeprompt._device import DeviceName
from largeprompt.lab import Interrupted, Progress, Run, Store
from largeprompt.paper.experiment import Computation, Needed


@dataclasses.dataclass(frozen=True)
class Plan:
    """What there is to do, and about what it takes."""

    runs: tuple[Run, ...]
    computations: tuple[Computation, ...]
    seconds_of_run: Mapping[Run, float]
    to_compute: tuple[Computation, ...]
    jobs: int
    memory: float
    disk: float
    device: DeviceName = "cpu"

    @property
    def seconds(self) -> float:
        """About how long it takes: the work shared out over the cores, but at least its longest part."""
        training, computing = sum(self.seconds_of_run.values()), sum(item.seconds for item in self.to_compute)
        longest = max([*self.seconds_of_run.values(), computing, 0.0])
        if self.device == "gpu":  # runs side by side there, computations here
            return longest
        return max((training + computing) / self.jobs, longest)

    @property
    def sentence(self) -> str:
        """The cost in words."""
        there = len(self.runs) - len(self.seconds_of_run) + len(self.computations) - len(self.to_compute)
        known = f"; {there} are there already" if there else ""
        what = f"{len(self.runs)} training runs and {len(self.computations)} computations{known}"
        if not self.seconds_of_run and not self.to_compute:
            return f"{what}: nothing to compute"
        sizes = f"{self.memory / 2**20:.0f} MB of memory, {self.disk / 2**20:.0f} MB of disk"
        cores = f"{self.jobs} core{'s' if self.jobs > 1 else ''}"
        where = f"the GPU and {cores}" if self.device == "gpu" else cores
        return f"{what}: about {lab.duration(self.seconds)} on {where}, {sizes}"


class _Training:
    """The runs of a plan, trained by other threads from the moment this is made."""

    def __init__(self, plan: Plan, store: Store, progress: Progress):
        self._plan, self._store, self._progress = plan, store, progress
        self._stop, self._done = threading.Event(), threading.Event()
        self._results: list[xr.Dataset] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="training")
        self._thread.start()

    def _work(self) -> None:
        plan = self._plan
        options: Any = {"jobs": plan.jobs, "seconds": plan.seconds_of_run, "device": plan.device}
        try:
            if plan.runs:
                self._results = lab.sweep(plan.runs, self._store, progress=self._progress, stop=self._stop, **options)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def raise_if_failed(self) -> None:
        """Raise what a run has raised."""
        if self._error is not None:
            raise self._error

    def results(self) -> dict[Needed, xr.Dataset]:
        """All runs, once they are there."""
        while not self._done.wait(0.2):  # in short waits, so that Ctrl-C is heard
            pass
        self.raise_if_failed()
        return dict(zip(self._plan.runs, self._results, strict=True))

    def end(self) -> None:
        """Stop the runs under way; they keep a checkpoint."""
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def training_of(plan: Plan, store: Store, progress: Progress) -> Iterator[_Training]:
    """Training in the background of a block; it ends with the block."""
    training = _Training(plan, store, progress)
    try:
        yield training
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        training.end()
