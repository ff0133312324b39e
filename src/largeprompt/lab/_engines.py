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
        kind = tuple(getattr(run, name) for name in _FIELDS)
        if kind not in known:
            known[kind] = run.resolved.engine
        found.append(run if run.engine == known[kind] else twin(run, engine=known[kind]))
    return tuple(found)
