"""What a claim is, and the one rule by which it is judged."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from largeprompt.paper.pieces import Needed, Results
from largeprompt.paper.settings import Settings

from ._roles import Role

Verdict = Literal["holds", "holds within error", "not settled at this preset", "does not hold"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds within error", "not settled at this preset", "does not hold")
ERRORS = 3.0  # standard errors that decide
RULE = (
    "A claim comes down to checks. A check holds a measured number with its standard error against a target: greater, "
    "less, or equal within a stated tolerance. Its margin is by how much the number is on the right side. It holds if "
    "the margin exceeds three standard errors and does not hold if it is below minus three. Between, an equality holds "
    "within error, and an inequality is not settled. An error contains what varies: seeds, the noise of training, the "
    "choice of runs. That of a mean over few seeds is widened by Student's law, so that three of it are as rare as for "
    "many, and that of the worst of several numbers likewise. Counts and shares, which tie, have the error that they "
    "would have if the target were true, and at least one step of one seed: fewer than ten seeds settle nothing of "
    "them, equal or not. Where the number could not be measured, one seed leaves its error unknown, or the error "
    "exceeds what the check would resolve, it is not settled at this preset. A claim has the worst verdict among its "
    "checks: if one fails, it fails. Only tests of the paper could have failed on its account; identities and bounds "
    "with room check this software."
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A number that was measured, with its standard error, and what it is held against.

    `=` asks for a difference of at most `tolerance`. An error above `resolution` settles nothing.
    """

    label: str
    measured: float
    relation: Literal["<", ">", "="]
    target: float
    error: float = 0.0
    tolerance: float = 0.0
    resolution: float = math.inf

    def __post_init__(self):
        if self.error < 0:
            raise ValueError(f"{self.label}: its error is {self.error}; it must not be negative")

    @property
    def margin(self) -> float:
        """By how much the number is on the right side of its target."""
        if self.relation == "=":
            return self.tolerance - abs(self.measured - self.target)
        return (self.measured - self.target) * (1 if self.relation == ">" else -1)

    @property
    def verdict(self) -> Verdict:
        """By the rule."""
        known = all(math.isfinite(value) for value in (self.measured, self.target, self.error, self.margin))
        if not known or self.error > self.resolution:
            return "not settled at this preset"
        equality, reach = self.relation == "=", ERRORS * self.error
        if self.margin > reach or (equality and self.margin == reach == 0):
            return "holds"
        if self.margin < -reach:
            return "does not hold"
        return "holds within error" if equality else "not settled at this preset"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of a claim: its checks, the first of them the one to show, a remark, a bound's decades of room."""

    checks: tuple[Check, ...]
    remark: str = ""
    room: float | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks'; without any, nothing is settled."""
        found = [VERDICTS.index(check.verdict) for check in self.checks]
        return VERDICTS[max(found)] if found else "not settled at this preset"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of the paper: where it stands, what is measured for it, how numbers decide, and what they can decide.

    Its `role` is one of `ROLES`.
    """

    key: str
    place: str
    statement: str
    measured: str
    needs: Callable[[Settings], tuple[Needed, ...]]
    judge: Callable[[Settings, Results], Finding]
    figures: tuple[str, ...] = ()
    seeds: int = 1  # fewest that can settle it
    role: Role = "test"

    def entry(self, settings: Settings, results: Results) -> dict[str, Any]:
        """Its line of the ledger, as plain data; the checks that decide come first."""
        finding = self.judge(settings, results)
        worst_first = sorted(finding.checks, key=lambda check: -VERDICTS.index(check.verdict))
        checks = [_plain(check) | {"verdict": check.verdict} for check in worst_first]
        return {
            "key": self.key,
            "place": self.place,
            "role": self.role,
            "room": finding.room,
            "statement": self.statement,
            "measured": self.measured,
            "verdict": finding.verdict,
            "remark": finding.remark,
            "figures": list(self.figures),
            "checks": checks,
        }


def _plain(check: Check) -> dict[str, Any]:
    """Its fields, None where a number is not known."""
    fields = dataclasses.asdict(check)
    unknown = [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]
    return fields | dict.fromkeys(unknown)


def not_settled(remark: str) -> Finding:
    """For a preset that cannot decide."""
    return Finding((), remark)
