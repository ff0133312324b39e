"""Claim T15: how long does the paper's training take here?"""

import dataclasses
import time
from typing import ClassVar

import numpy as np
import xarray as xr

from largeprompt.lab import Progress, Run
from largeprompt.paper.claims import Check, Finding, claim
from largeprompt.paper.experiment import Computation, Measurement
from largeprompt.paper.machine import processor

_REPEATS = 4


@dataclasses.dataclass(frozen=True)
class Speed(Computation):
    """Minutes for 500 000 steps of a pair on one core, from the processor time of a few segments of steps."""

    words: ClassVar[str] = "time of training at L = {L}"

    L: int
    steps: int = 1000
    processor: str = dataclasses.field(default_factory=processor)

    def _compute(self, progress: Progress) -> xr.Dataset:
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


SPEED = Measurement("speed", computation=lambda choice: Speed(choice.protocol.lengths[-1]))


@claim("T15", "Appendix A.1", SPEED, role="context")
def _time_of_a_run(data: xr.Dataset) -> Finding:
    """A run of one architecture at one length takes about 30 minutes on a laptop.

    Minutes that one core of this machine takes for the whole protocol at the longest prompts, both attentions together:
    less than 30.
    """
    label = f"minutes of one core for 500 000 steps at L = {int(data.L)}, both attentions"
    check = Check(label, float(data.minutes), "<", 30.0, float(data.stderr))
    return Finding(
        (check,),
        f"{30 / float(data.minutes):.0f} times less than the paper says. This is another program on another machine: "
        "it says what a reader may expect, and nothing about the paper's laptop.",
    )
