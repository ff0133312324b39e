"""What a job has to do and about what it takes, and the training that runs in the background."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import xarray as xr

from largeprompt import lab
from largeprompt._device import DeviceName
from largeprompt.lab import Interrupted, Progress, Run, Store
from largeprompt.lab._forecast import plural
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
    def at_once(self) -> int:
        """How many computations go on at once: each compiles on several cores by itself."""
        return min(self.jobs, 2)

    @property
    def seconds(self) -> float:
        """About how long it takes: the work shared out over the cores, but at least its longest part."""
        training, each = sum(self.seconds_of_run.values()), [item.seconds for item in self.to_compute]
        computing = sum(each)
        longest = max([*self.seconds_of_run.values(), *each, computing / self.at_once])
        if self.device == "gpu":  # runs side by side there, computations here
            return longest
        return max((training + computing) / self.jobs, longest)

    @property
    def sentence(self) -> str:
        """The cost in words."""
        there = len(self.runs) - len(self.seconds_of_run) + len(self.computations) - len(self.to_compute)
        known = f"; {there} are there already" if there else ""
        computations = plural(len(self.computations), "computation")
        what = f"{plural(len(self.runs), 'training run')} and {computations}{known}"
        if not self.seconds_of_run and not self.to_compute:
            return f"{what}: nothing to compute"
        sizes = f"{self.memory / 2**20:.0f} MB of memory, {self.disk / 2**20:.0f} MB of disk"
        cores = plural(self.jobs, "core")
        where = f"the GPU and {cores}" if self.device == "gpu" else cores
        return f"{what}: about {lab.duration(self.seconds)} on {where}, {sizes}"


def cheapest_first(wanted: Sequence[Sequence[Needed]], seconds: Mapping[Needed, float]) -> tuple[Needed, ...]:
    """All that is needed, once, in the order that completes soonest what takes least beyond what was made before it.

    What one of them needs comes longest first: then little is waited for at the end.
    """
    left, order = list(wanted), dict[Needed, None]()
    while left:
        cheapest = min(left, key=lambda needs: sum(seconds.get(need, 0.0) for need in needs if need not in order))
        left.remove(cheapest)
        order |= dict.fromkeys(sorted(cheapest, key=lambda need: -seconds.get(need, 0.0)))
    return tuple(order)


class Followed(Progress):
    """Passes progress on, and keeps how much of each piece of work is done and which pieces have ended."""

    def __init__(self, progress: Progress | None = None):
        self._to = progress or Progress()
        self.done: dict[str, float] = {}
        self.ended: set[str] = set()

    def start(self, name: str, total: float) -> None:
        self._to.start(name, total)

    def step(self, name: str, done: float, note: str = "") -> None:
        self.done[name] = done
        self._to.step(name, done, note)

    def close(self, name: str, outcome: str = "") -> None:
        if outcome in ("finished", "found"):
            self.ended.add(name)
        self._to.close(name, outcome)

    def warn(self, message: str) -> None:
        self._to.warn(message)


@contextlib.contextmanager
def training_of(plan: Plan, store: Store, progress: Progress) -> Iterator[Future[list[xr.Dataset]]]:
    """The runs of a plan, trained in the background of a block; at its end those under way keep a checkpoint."""
    stop = threading.Event()
    options: Any = {"jobs": plan.jobs, "seconds": plan.seconds_of_run, "device": plan.device, "in_order": True}

    def train() -> list[xr.Dataset]:
        return lab.sweep(plan.runs, store, progress=progress, stop=stop, **options) if plan.runs else []

    with ThreadPoolExecutor(1, "training") as pool:
        try:
            yield pool.submit(train)
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            stop.set()
