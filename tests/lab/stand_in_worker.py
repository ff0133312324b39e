"""What the workers of a test's cluster load first: a trainer that compiles nothing, writes down its runs, and obeys.

In the folder TROUBLE a line goes to `begun` for each run that begins or goes on: process, seed of its data, step. A run
of a seed from 100 on waits after a hundred steps for the file `gate`. One of seed 13 fails.
"""

import os
import time
from pathlib import Path
from typing import Any

import stand_in
from largeprompt import engine
from largeprompt.dynamics import Layers, Training

TROUBLE = Path(os.environ["TROUBLE"])


class Troubled(stand_in.StandIn):
    _begun = False

    def _advance(self, state, stop):
        seed = self._training.seed
        if not self._begun:
            self._begun = True
            with open(TROUBLE / "begun", "a") as file:
                file.write(f"{os.getpid()} {seed} {state.step}\n")
        if seed == 13:
            raise RuntimeError("an unlucky run\nwith a second line")
        if seed >= 100 and state.step >= 100 and not (TROUBLE / "gate").exists():
            time.sleep(0.01)
            return state
        return super()._advance(state, stop)


def trainer_for(training: Training, layers: Layers, *_: Any, **__: Any) -> Troubled:
    return Troubled(training, layers)


engine.trainer_for = trainer_for
