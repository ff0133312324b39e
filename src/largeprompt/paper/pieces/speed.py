"""How long the paper's training takes here."""

import dataclasses
import time

import numpy as np
import xarray as xr

from largeprompt.lab import Run
from largeprompt.paper.machine import processor

from ._piece import AbstractPiece, Done

_REPEATS = 4


@dataclasses.dataclass(frozen=True)
class Speed(AbstractPiece):
    """Minutes for 500 000 steps of a pair on one core, from the processor time of a few stretches of steps."""

    L: int
    steps: int = 1000
    processor: str = dataclasses.field(default_factory=processor)

    @property
    def title(self) -> str:
        return f"time of training at L = {self.L}"

    @property
    def seconds(self) -> float:
        return 3.0

    def _compute(self, done: Done) -> xr.Dataset:
        run = Run(L=self.L)
        trainer = run.trainer()
        state = trainer.advance(trainer.start(), 1)  # compiles
        taken = []
        for _ in range(_REPEATS):
            began = time.thread_time()
            state = trainer.advance(state, state.step + self.steps)
            taken.append((time.thread_time() - began) / self.steps * run.steps / 60)
        return xr.Dataset(
            {"minutes": ((), np.mean(taken)), "stderr": ((), np.std(taken, ddof=1) / _REPEATS**0.5), "L": ((), self.L)}
        )
