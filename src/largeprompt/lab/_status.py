"""How far the runs of a sweep are."""

import collections
from collections.abc import Sequence

from ._checkpoint import Damaged
from ._run import Run
from ._store import AbstractStore, Status

STAGES = ("finished", "running", "interrupted", "begun", "failed", "not begun")


def statuses(store: AbstractStore, runs: Sequence[Run] | None = None, running: set[str] | None = None) -> list[Status]:
    """How far the runs of a sweep are, or all in a store, by one listing and by reading what is unfinished.

    Of a finished run that no grid names, the settings are not read. `running` are the keys that a scheduler has given
    to workers, where one was asked.
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
    if "nc" in kinds:
        return Status(key, "finished", run, run.steps if run is not None else 0)
    if running is not None and key in running and not kinds:
        return Status(key, "running", run)
    found = Status(key, store.stage(key, "failed" in kinds) if kinds else "not begun", run)
    if kinds & {"checkpoint", "failed"}:
        try:
            found = store.status(key)
        except FileNotFoundError:  # it has ended meanwhile
            return Status(key, "finished" if store.finished(key) else "not begun", run)
        except Damaged as error:
            found = found._replace(message=str(error))
    elif found.stage == "interrupted":  # a lock alone: its process was killed before the first checkpoint
        found = found._replace(stage="not begun")
    if running is not None and (key in running or found.stage == "begun"):
        found = found._replace(stage="running" if key in running else "interrupted")
    return found._replace(message="") if found.stage == "running" else found
