"""What the numbers of a claim can decide, and how claims are counted by it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Role = Literal["test", "identity", "bound", "context"]
ROLES: dict[Role, str] = {
    "test": "a test of the paper: the numbers could have come out against it",
    "identity": "proved exactly: a difference would be a misprint, or an error of this software",
    "bound": "a proved bound with decades of room, which numbers cannot break: they check this software",
    "context": "a comparison for context, which says nothing about the paper",
}
_GROUPS: dict[str, tuple[Role, ...]] = {
    "tests of the paper": ("test",),
    "identities and bounds with room, which check this software": ("identity", "bound"),
    "for context": ("context",),
}


def role_in_words(entry: Mapping[str, Any]) -> str:
    """The role of a line of the ledger; of a bound, with its room."""
    room = entry.get("room")
    return entry["role"] if room is None else f"{entry['role']}, {room:.0f} decades of room"


def counted(entries: Sequence[Mapping[str, Any]], verdicts: Sequence[str]) -> list[str]:
    """How many claims of each group have which verdict, tests of the paper apart from the rest."""
    lines = []
    for name, roles in _GROUPS.items():
        found = [entry["verdict"] for entry in entries if entry["role"] in roles]
        counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in verdicts if verdict in found)
        lines += [f"{len(found)} {name}: {counts}"] if found else []
    return lines
