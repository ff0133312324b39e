import dataclasses
from typing import Any

import numpy as np

from largeprompt import _checks as checks

QUANTITIES = ("norms", "distances", "parameters", "circuits")


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run keeps of its course, and at which steps: the first, the last, log-spaced ones and every n-th.

    Always the risk, exact wherever a closed form exists; of `what` any of `norms` of the matrices, `distances` (of
    softmax to linear attention in a pair, and to the start), `parameters`, and `circuits` (U = s KᵀQ and OV). `draws`
    is the number of nodes or prompts where the risk must be averaged over some.
    """

    what: tuple[str, ...] = ("norms", "distances", "parameters")
    points: int = 100
    every: int | None = None
    draws: int = 2**15

    def __post_init__(self):
        what: Any = self.what
        names = (what,) if isinstance(what, str) else tuple(what)
        for name in names:
            if name not in QUANTITIES:
                raise ValueError(f"record.what is {name!r}; it must be among {', '.join(QUANTITIES)}")
        object.__setattr__(self, "what", tuple(name for name in QUANTITIES if name in names))
        object.__setattr__(self, "points", checks.count("record.points", self.points, at_least=0))
        object.__setattr__(self, "draws", checks.count("record.draws", self.draws, at_least=2))
        if self.every is not None:
            object.__setattr__(self, "every", checks.count("record.every", self.every))

    def steps(self, last: int) -> np.ndarray:
        """The steps at which a run of `last` steps is recorded, in order; 0 is the start."""
        spaced = np.geomspace(1, last, self.points).round() if self.points and last else np.empty(0)
        regular = np.arange(0, last, self.every) if self.every else np.empty(0)
        return np.unique(np.concatenate([[0, last], spaced, regular]).astype(np.int64))
