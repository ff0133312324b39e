"""What a job has to do, who is told of it, and the training that goes on in the background."""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, Literal

import xarray as xr

from largeprompt import lab
from largeprompt.lab import Progress, Run, Store, duration
from largeprompt.paper.pieces import AbstractPiece, Needed


class Listener(Progress):
    """Is told how the job goes on, besides the runs of training; this one keeps still."""

    def planned(self, plan: "Plan") -> None:
        """The job is about to begin."""

    def began(self, piece: AbstractPiece) -> None:
        """A piece is being computed."""

    def part(self, piece: AbstractPiece, what: str) -> None:
        """A part of it is done."""

    def made(self, piece: AbstractPiece, found: bool) -> None:
        """A piece is there, or was `found` on the shelf."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What there is to do, and about what it takes."""

    runs: tuple[Run, ...]
    pieces: tuple[AbstractPiece, ...]
    seconds_of_run: Mapping[Run, float]
    pieces_to_do: tuple[AbstractPiece, ...]
    jobs: int
    memory: float
    disk: float
    device: Literal["cpu", "gpu"] = "cpu"

    @property
    def seconds(self) -> float:
        """About how long it takes: the work shared out over the cores, but at least its longest part."""
        training, pieces = sum(self.seconds_of_run.values()), sum(piece.seconds for piece in self.pieces_to_do)
        longest = max([*self.seconds_of_run.values(), pieces, 0.0])
        if self.device == "gpu":  # runs side by side there, pieces here
            return longest
        return max((training + pieces) / self.jobs, longest)

    @property
    def sentence(self) -> str:
        """The cost in words."""
        there = len(self.runs) - len(self.seconds_of_run) + len(self.pieces) - len(self.pieces_to_do)
        known = f"; {there} are there already" if there else ""
        what = f"{len(self.runs)} training runs and {len(self.pieces)} computations{known}"
        if not self.seconds_of_run and not self.pieces_to_do:
            return f"{what}: nothing to compute"
        sizes = f"{self.memory / 2**20:.0f} MB of memory, {self.disk / 2**20:.0f} MB of disk"
        cores = f"{self.jobs} core{'s' if self.jobs > 1 else ''}"
        where = f"the GPU and {cores}" if self.device == "gpu" else cores
        return f"{what}: about {duration(self.seconds)} on {where}, {sizes}"


class Training:
    """The runs of a plan, carried out by other threads from the moment this is made."""

    def __init__(self, plan: Plan, store: Store, progress: Progress):
        self._plan, self._store, self._progress = plan, store, progress
        self._stop, self._done = threading.Event(), threading.Event()
        self._results: list[xr.Dataset] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="training")
        self._thread.start()

    def _work(self) -> None:
        plan = self._plan
        try:
            options: Any = {
                "progress": self._progress,
                "jobs": plan.jobs,
                "seconds": plan.seconds_of_run,
                "device": plan.device,
            }
            self._results = lab.sweep(plan.runs, self._store, stop=self._stop, **options) if plan.runs else []
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def fail_if_it_failed(self) -> None:
        """Raise what a run has raised."""
        if self._error is not None:
            raise self._error

    def results(self) -> dict[Needed, xr.Dataset]:
        """All runs, once they are there."""
        while not self._done.wait(0.2):  # in short waits, so that Ctrl-C is heard
            pass
        self.fail_if_it_failed()
        return dict(zip(self._plan.runs, self._results, strict=True))

    def end(self) -> None:
        """Stop what is still at work; runs keep a checkpoint."""
        self._stop.set()
        self._thread.join()
