import contextlib
import platform
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xarray as xr

from largeprompt import __version__
from largeprompt._progress import Progress
from largeprompt.dynamics import State

from ._checkpoint import Checkpoint, Damaged, layers_in
from ._course import Course
from ._result import result
from ._run import Run
from ._store import AbstractStore
from ._weights import matrices


class Interrupted(Exception):
    """Work stopped on request; what was done is kept."""


class Sitting:
    """One process at work on one run, from its last checkpoint to its end or to an interrupt: what it has and keeps."""

    def __init__(self, run: Run, store: AbstractStore, progress: Progress, device: str):
        self.run, self._store, self._device = run, store, device
        self.trainer = run.trainer()
        self.state = self.trainer.start()
        self.course = Course(run, self.state)
        self.seconds, self._sittings, self._saved_step = 0.0, 1, 0
        self._earlier: dict[str, float] = {"seconds": 0.0, "gpu_seconds": 0.0}  # by other sittings
        self._resume(progress)

    def _resume(self, progress: Progress) -> None:
        found: Checkpoint | None = unless_damaged(self._store, self.run, "checkpoint", progress)
        if found is None:
            return
        header = found.header
        layers = layers_in(found, self.state.layers)
        self.state = State(header["step"], layers, tuple(header["diverged"]))
        self.course.restore({name: array for name, array in found.arrays.items() if not name.startswith("state ")})
        self._earlier = {name: header.get(name, 0.0) for name in self._earlier}
        self._sittings = header["sittings"] + 1
        self._saved_step = self.state.step

    def save(self) -> None:
        """Keep a checkpoint."""
        header = {
            "hash": self.run.key,
            "run": self.run.canonical,
            "step": self.state.step,
            "diverged": self.state.diverged,
            "sittings": self._sittings,
            **self._spent(),
        }
        arrays = {
            f"state {i} {name}": matrix
            for i, layer in enumerate(self.state.layers)
            for name, matrix in matrices(layer).items()
        }
        with self._explaining_a_full_disk():
            self._store.keep(self.run.key, Checkpoint(header, arrays | self.course.arrays()))
        self._saved_step = self.state.step

    def finish(self) -> xr.Dataset:
        """Keep the result of a run that has come to its end."""
        data = result(self.run, self.course, self.state.diverged)
        versions = {"largeprompt": __version__, "numpy": np.__version__, "jax": jax.__version__}
        where = {"machine": platform.node(), "device": self._device}
        log = {**self._spent(), "sittings": self._sittings, **where, "versions": versions}
        with self._explaining_a_full_disk():
            return self._store.save(self.run, data, log)

    def _spent(self) -> dict[str, float]:
        """Seconds of all sittings at this run, and how many of them were a GPU's."""
        own = {"seconds": self.seconds, "gpu_seconds": self.seconds if self._device == "gpu" else 0.0}
        return {name: self._earlier[name] + own[name] for name in own}

    @contextlib.contextmanager
    def _explaining_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"run {self.run.key[:12]} is kept up to step {self._saved_step} in {self._store.location}"
            why = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None)
            raise OSError(f"{why}: {what}, and goes on from there once it can be written") from error


def unless_damaged(store: AbstractStore, run: Run, suffix: str, progress: Progress) -> Any:
    """What the store has of a run; a file that cannot be used is named and set aside."""
    try:
        return store.load(run.key) if suffix == "nc" else store.checkpoint(run.key)
    except Damaged as error:
        kept = store.set_aside(run.key, suffix)
        progress.warn(f"{error}; kept as {kept}, and the run begins again")
        return None
