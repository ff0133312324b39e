"""What an erratum is: a place, what it says, what is right, and numbers that decide between the two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

Kind = Literal["error", "gap", "typo"]
Relation = Literal["<", ">", "="]


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
    """Numbers measured on one example: `against` what is printed, and `repair`, for what should stand there."""

    setting: str
    against: tuple[Comparison, ...]
    repair: tuple[Comparison, ...]

    @property
    def refuted(self) -> bool:
        """The printed statement fails here (of a gap: the step it leaves out is really missing)."""
        return bool(self.against) and all(comparison.holds for comparison in self.against)

    @property
    def repaired(self) -> bool:
        """The corrected statement holds on the same example."""
        return bool(self.repair) and all(comparison.holds for comparison in self.repair)

    @property
    def confirmed(self) -> bool:
        """The rule of every erratum: every comparison of both lists holds, and neither list is empty."""
        return self.refuted and self.repaired


@dataclass(frozen=True)
class Erratum:
    """One place of the paper that is not right, or not complete, as it stands.

    `error`: a statement that is false. `gap`: a step or a hypothesis that is missing. `typo`: a slip of the pen.
    """

    HEADINGS: ClassVar[dict[Kind, tuple[str, str, str]]] = {
        "error": ("Wrong because", "printed fails", "corrected holds"),
        "gap": ("What is missing", "gap shown", "gap closed"),
        "typo": ("Wrong because", "printed fails", "corrected holds"),
    }
    """What the reason and the two lists of evidence are called."""

    key: str
    kind: Kind
    place: str
    summary: str
    printed: str
    why: str
    correction: str
    evidence: Callable[[], Evidence]
