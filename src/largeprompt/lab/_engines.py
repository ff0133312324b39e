import dataclasses
from collections.abc import Iterable
from typing import Any

from ._run import Run, twin

_SEEDS = ("weight_seed", "data_seed")
_FIELDS = tuple(field.name for field in dataclasses.fields(Run) if field.name not in _SEEDS)


def with_engines(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Each run `resolved`, at the price of one a kind: which engine a run is for does not depend on its seeds."""
    known: dict[tuple, Any] = {}
    found = []
    for run in runs:
        kind = _kind(run)
        if kind not in known:
            known[kind] = run.resolved.engine
        found.append(run if run.engine == known[kind] else twin(run, engine=known[kind]))
    return tuple(found)


def without_fused(runs: Iterable[Run]) -> dict[str, int]:
    """Of the runs that leave the engine open, why the fused one does not apply, and to how many."""
    from largeprompt.engine import refusal  # imports a compiler

    kinds: dict[tuple, list[Run]] = {}
    for run in runs:
        kinds.setdefault(_kind(run), []).append(run)
    reasons: dict[str, int] = {}
    for first, *others in kinds.values():
        if first.engine != first.resolved.engine != "fused":
            reason = refusal(first.training(), first.layers())
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1 + len(others)
    return reasons


def _kind(run: Run) -> tuple:
    return tuple(getattr(run, name) for name in _FIELDS)
