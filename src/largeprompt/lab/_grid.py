"""Runs of one grid: the product over every setting that is a list, and the engine that each of them is for."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._lengths import listed_lengths
from ._run import Run, record_from, twin
from ._settings import COVARIANCES, Table

SEEDS = ("weight_seed", "data_seed")
_FIELDS = tuple(field.name for field in dataclasses.fields(Run))
_BUT_FOR_SEEDS = tuple(name for name in _FIELDS if name not in SEEDS)
_ALWAYS = ("sigma", "L")


def runs_from(settings: Mapping[str, Any]) -> tuple[Run, ...]:
    """The runs of some settings: the product over every setting that is a list, `seed` standing for both seeds."""
    Table("", settings).holds(*_FIELDS, "seed", "seeds")
    settings = dict(settings)
    record = record_from(settings.pop("record", {}))
    seeds = _seeds(settings)
    axes = {name: _choices(name, value) for name, value in settings.items()}
    runs = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        both: dict[str, Any] = {} if seeds[0] is None else dict.fromkeys(SEEDS, seeds[0])
        first = Run(**both | chosen, record=record)
        free = [name for name in SEEDS if name not in chosen]
        runs += [first, *(twin(first, **dict.fromkeys(free, seed)) for seed in seeds[1:])]
    return tuple(dict.fromkeys(runs))


def _seeds(settings: dict[str, Any]) -> list[Any]:
    """The seeds that stand for both; None for the seeds of the settings."""
    seed, count = settings.pop("seed", None), settings.pop("seeds", None)
    if seed is not None and count is not None:
        raise ValueError(
            f"seed is {seed!r} and seeds is {count!r}; give the seeds themselves or their number, not both"
        )
    if count is not None:
        return list(range(Table("", {"seeds": count}).count("seeds") or 0))
    if seed is None:
        return [None]
    return [Table("", {"weight_seed": one}).count("weight_seed", at_least=0) for one in _choices("seed", seed)]


def _choices(name: str, value: Any) -> list[Any]:
    """What a setting runs over: the entries of a list, or the value itself; rows of numbers are one matrix."""
    if name == "L":
        return listed_lengths(value)
    if name == "start" and isinstance(value, tuple):  # arrays, as a run keeps them
        return [value]
    if not isinstance(value, list | tuple | range) or (name in COVARIANCES and value and all(map(_is_row, value))):
        return [value]
    if not value:
        raise ValueError(f"{name} is an empty list; it must have at least one entry")
    return list(value)


def _is_row(part: Any) -> bool:
    return isinstance(part, list | tuple) and not any(isinstance(entry, list | tuple | str) for entry in part)


def with_engines(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Each run `resolved`, at the price of one per kind: which engine a run is for does not depend on its seeds."""
    known: dict[tuple, Any] = {}
    found = []
    for run in runs:
        kind = _but_for_seeds(run)
        if kind not in known:
            known[kind] = run.resolved.engine
        found.append(run if run.engine == known[kind] else twin(run, engine=known[kind]))
    return tuple(found)


def without_fused(runs: Iterable[Run]) -> dict[str, int]:
    """Why the fused engine does not apply to runs that leave the engine open, and to how many."""
    from largeprompt.engine import refusal  # imports a compiler

    kinds: dict[tuple, list[Run]] = {}
    for run in runs:
        kinds.setdefault(_but_for_seeds(run), []).append(run)
    reasons: dict[str, int] = {}
    for first, *others in kinds.values():
        if first.engine != first.resolved.engine != "fused":
            reason = refusal(first.training(), first.layers())
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1 + len(others)
    return reasons


def _but_for_seeds(run: Run) -> tuple:
    return tuple(getattr(run, name) for name in _BUT_FOR_SEEDS)


def varying(runs: Sequence[Run]) -> tuple[str, ...]:
    """The settings that distinguish the rows of a summary: covariance, length, and whatever else differs but seeds.

    An optimiser other than SGD is shown even where all runs have it.
    """
    names = [name for name in _FIELDS if name not in (*_ALWAYS, *SEEDS, "attention", "record")]
    values = {name: {getattr(run, name) for run in runs} for name in names}
    unusual = values["optimiser"] != {"sgd"}
    return _ALWAYS + tuple(name for name in names if len(values[name]) > 1 or (name == "optimiser" and unusual))
