"""The numbers that decide between what is printed and its correction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Relation = Literal["<", ">", "="]
Pairs = Sequence[tuple[float, float]]
Numbers = tuple[Pairs, Pairs]
"""The numbers of the comparisons against what is printed, and of those for its repair, in the order of their names."""


@dataclass(frozen=True)
class Comparison:
    """Two named numbers and the relation they are said to have.

    `=` means |x − y| ≤ tolerance · max(|x|, |y|), and |x| ≤ tolerance where y is 0.
    """

    left: str
    x: float
    relation: Relation
    y: float
    right: str
    tolerance: float = 1e-6

    @property
    def holds(self) -> bool:
        """Whether the numbers, as measured, have the stated relation."""
        if self.relation == "=":
            scale = max(abs(self.x), abs(self.y)) if self.y != 0 else 1.0
            return bool(abs(self.x - self.y) <= self.tolerance * scale)
        return bool(self.x < self.y if self.relation == "<" else self.x > self.y)


@dataclass(frozen=True)
class Evidence:
    """Comparisons on one example: `against` what is printed, or that a step is missing, and for the `repair`."""

    against: tuple[Comparison, ...]
    repair: tuple[Comparison, ...]

    @classmethod
    def read(cls, kept: dict[str, Any]) -> "Evidence":
        """The same from plain data, as `dataclasses.asdict` gives it."""
        return cls(*(tuple(Comparison(**each) for each in kept[name]) for name in ("against", "repair")))

    @property
    def confirmed(self) -> bool:
        """The rule of every erratum: every comparison of both lists holds, and neither list is empty."""
        return all(rows and all(comparison.holds for comparison in rows) for rows in (self.against, self.repair))


def compared(names: Iterable[Sequence[Any]], pairs: Pairs) -> tuple[Comparison, ...]:
    """Comparisons from their names (left, relation, right and perhaps a tolerance) and their numbers, in one order."""
    rows = zip(names, pairs, strict=True)
    return tuple(Comparison(left, x, relation, y, *right) for (left, relation, *right), (x, y) in rows)
