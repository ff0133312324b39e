"""How far the runs of a sweep are."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from ._checkpoint import Damaged
from ._run import Run
from ._store import AbstractStore

STAGES = ("finished", "running", "interrupted", "begun", "failed", "not begun")


class Status(NamedTuple):
    """How far a run of a sweep is: its stage, the last step that is kept, and why it failed if it did.

    `begun` is unfinished in a store that does not know whether a process works on it. The title of a finished run that
    no grid names is not read.
    """

    key: str
    stage: str
    title: str = ""
    step: int = 0
    steps: int = 0
    message: str = ""


def statuses(store: AbstractStore, runs: Sequence[Run] | None = None, running: set[str] | None = None) -> list[Status]:
    """How far the runs of a sweep are, or all that a store knows of, by one listing and what is unfinished.

    `running` are the keys that a scheduler has given to workers, where one was asked.
    """
    kinds = store.kinds()
    if runs is None:
        return [_status(store, key, None, found, running) for key, found in sorted(kinds.items())]
    return [_status(store, run.key, run, kinds.get(run.key, frozenset()), running) for run in runs]


def counted(found: Sequence[Status]) -> dict[str, int]:
    """How many runs are at each stage that occurs."""
    counts = collections.Counter(status.stage for status in found)
    return {stage: counts[stage] for stage in STAGES if counts[stage]}


def _status(store: AbstractStore, key: str, run: Run | None, kinds: frozenset[str], running: set[str] | None) -> Status:
    title, steps = (run.title, run.steps) if run is not None else ("", 0)
    if "nc" in kinds:
        return Status(key, "finished", title, steps, steps)
    working = running is not None and key in running
    if not kinds:
        return Status(key, "running" if working else "not begun", title, 0, steps)
    message, step = str(store.failure(key).get("error", "")), 0
    if kinds & {"checkpoint", "failed"}:
        try:
            entry = store.entry(key)
            title, step, steps = entry.run.title, entry.step, entry.run.steps
        except FileNotFoundError:  # it has ended meanwhile
            return Status(key, "finished" if store.finished(key) else "not begun", title, 0, steps)
        except Damaged as error:
            message = str(error)
    stage = "running" if working else store.stage(key, "failed" in kinds)
    if running is not None and stage == "begun":
        stage = "interrupted"
    if stage == "interrupted" and kinds == {"lock"}:  # of a process that was killed before its first checkpoint
        stage = "not begun"
    return Status(key, stage, title, step, steps, message if stage != "running" else "")
