import collections
from collections.abc import Sequence
from typing import NamedTuple

from ._checkpoint import Damaged
from ._run import Run
from ._store import AbstractStore

STAGES = ("finished", "running", "interrupted", "begun", "failed", "not begun")


class Standing(NamedTuple):
    """How far a run of a sweep is: its stage, the last step that is kept, and why it failed if it did.

    `begun` is unfinished in a store that cannot tell whether someone works on it. Of finished runs that no grid names,
    the title is not read.
    """

    key: str
    stage: str
    title: str = ""
    step: int = 0
    steps: int = 0
    message: str = ""


def standings(
    store: AbstractStore, runs: Sequence[Run] | None = None, at_work: set[str] | None = None
) -> list[Standing]:
    """How far the runs of a sweep are, or all that a store knows of, by one listing and what is unfinished.

    `at_work` are the hashes that a scheduler has given to workers, where one was asked.
    """
    kinds = store.kinds()
    if runs is None:
        return [_standing(store, key, None, found, at_work) for key, found in sorted(kinds.items())]
    return [_standing(store, run.key, run, kinds.get(run.key, frozenset()), at_work) for run in runs]


def counted(found: Sequence[Standing]) -> dict[str, int]:
    """How many runs are at each stage that occurs."""
    counts = collections.Counter(standing.stage for standing in found)
    return {stage: counts[stage] for stage in STAGES if counts[stage]}


def _standing(
    store: AbstractStore, key: str, run: Run | None, kinds: frozenset[str], at_work: set[str] | None
) -> Standing:
    title, steps = (run.title, run.steps) if run is not None else ("", 0)
    if "nc" in kinds:
        return Standing(key, "finished", title, steps, steps)
    working = at_work is not None and key in at_work
    if not kinds:
        return Standing(key, "running" if working else "not begun", title, 0, steps)
    message, step = str(store.failure(key).get("error", "")), 0
    if kinds & {"checkpoint", "failed"}:
        try:
            entry = store.entry(key)
            title, step, steps = entry.run.title, entry.step, entry.run.steps
        except FileNotFoundError:  # it has ended meanwhile
            return Standing(key, "finished" if store.finished(key) else "not begun", title, 0, steps)
        except Damaged as error:
            message = str(error)
    stage = "running" if working else store.stage(key, "failed" in kinds)
    if at_work is not None and stage == "begun":
        stage = "interrupted"
    if stage == "interrupted" and kinds == {"lock"}:  # of a process that was killed before its first checkpoint
        stage = "not begun"
    return Standing(key, stage, title, step, steps, message if stage != "running" else "")
