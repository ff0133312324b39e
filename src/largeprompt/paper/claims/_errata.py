"""The errata with their evidence, as plain data for the ledger."""

import dataclasses
import json
from typing import Any

import xarray as xr

from largeprompt.paper.errata import ERRATA, Comparison, Erratum, Evidence, prose

_TEXTS = ("key", "kind", "place", "summary", "printed", "why", "correction")


def entries(dataset: xr.Dataset) -> list[dict[str, Any]]:
    """Each erratum with its numbers, from the dataset of the piece `Errata`."""
    found = json.loads(dataset.attrs["evidence"])
    return [_entry(erratum, _evidence(found[erratum.key])) for erratum in ERRATA]


def _evidence(kept: dict[str, Any]) -> Evidence:
    against, repair = (tuple(Comparison(**each) for each in kept[role]) for role in ("against", "repair"))
    return Evidence(kept["setting"], against, repair)


def _entry(erratum: Erratum, evidence: Evidence) -> dict[str, Any]:
    texts = {name: prose(getattr(erratum, name)) for name in _TEXTS}
    return texts | {
        "setting": prose(evidence.setting),
        "against": [_numbers(comparison) for comparison in evidence.against],
        "repair": [_numbers(comparison) for comparison in evidence.repair],
        "confirmed": evidence.confirmed,
    }


def _numbers(comparison: Comparison) -> dict[str, Any]:
    numbers = dataclasses.asdict(comparison) | {"holds": comparison.holds}
    return {name: numbers[name] for name in ("left", "x", "relation", "y", "right", "holds")}
