r"""What a claim is, the one rule by which it is judged, and errors that contain what varies, also where numbers tie.

A check decides at `ERRORS` standard errors, one chance in 740 for a normal law. So that this is the rate for few seeds
too, errors are widened until they are as rare:

- a mean of *continuous* numbers over $n$ seeds by Student's law. One seed, or seeds that agree to the last digit, leave
  it unknown; numbers that are read off a grid vary at least as much as rounding to it.
- a mean of *counts* (falls of a run, starts that fail), which tie, has the error that it would have if the target
  were true: the root of the mean square about the target, over $\sqrt n$. Wilson's error of a share is of this kind.
  $n$ equal seeds then lie $\sqrt n$ errors from the target, and settle nothing below ten. It is at least one step of
  one seed. Numbers of one seed at several lengths count as one.
- the worst of $m$ numbers is judged by errors that are as rare among $m$ as three are for one (Bonferroni).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.stats import norm
from scipy.stats import t as student

from largeprompt.paper.choice import Choice
from largeprompt.paper.experiment import Experiment, Needed

Verdict = Literal["holds", "holds within error", "not settled at this preset", "does not hold"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds within error", "not settled at this preset", "does not hold")
PENDING = "pending"  # in place of a verdict, while a job is unfinished
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

Role = Literal["test", "identity", "bound", "own", "context"]
ROLES: dict[Role, str] = {
    "test": "a test of the paper: the numbers could have come out against it",
    "identity": "proved exactly: a difference would be a misprint, or an error of this software",
    "bound": "a proved bound with decades of room, which numbers cannot break: they check this software",
    "own": "a statement of this library that the paper does not make: the numbers could have come out against it",
    "context": "a comparison for context, which says nothing about the paper",
}
"""What the numbers of a claim can decide."""


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
        """What the rule says of it."""
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
    """A statement of the paper: where it stands, what is measured for it, and how the datasets `of` experiments decide.

    `seeds` are the fewest that can settle it, `figures` those that it is about.
    """

    key: str
    place: str
    statement: str
    measured: str
    judge: Callable[..., Finding]
    of: tuple[Experiment, ...]
    figures: tuple[str, ...]
    seeds: int = 1
    role: Role = "test"

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        """All that its experiments need."""
        return tuple(dict.fromkeys(need for experiment in self.of for need in experiment.needs(choice)))

    def entry(self, datasets: Mapping[str, xr.Dataset]) -> dict[str, Any]:
        """Its line of the ledger, as plain data; the checks that decide come first."""
        finding = self.judge(*(datasets[experiment.key] for experiment in self.of))
        worst_first = sorted(finding.checks, key=lambda check: -VERDICTS.index(check.verdict))
        checks = [_plain(check) | {"verdict": check.verdict} for check in worst_first]
        return self._line(finding.verdict, finding.room, finding.remark, checks)

    @property
    def pending(self) -> dict[str, Any]:
        """Its line of the ledger before what it needs is there."""
        return self._line(PENDING)

    def _line(
        self, verdict: str, room: float | None = None, remark: str = "", checks: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        return {
            "key": self.key,
            "place": self.place,
            "role": self.role,
            "room": room,
            "statement": self.statement,
            "measured": self.measured,
            "verdict": verdict,
            "remark": remark,
            "figures": list(self.figures),
            "checks": list(checks),
        }


def claim(
    key: str,
    place: str,
    *of: Experiment,
    figures: tuple[str, ...] | None = None,
    seeds: int = 1,
    role: Role = "test",
    **words: str,
) -> Callable[[Callable[..., Finding]], Claim]:
    """Turn a function of datasets into the claim that it judges; its figures are the experiments that are drawn.

    Its docstring is the statement and, after an empty line, what is measured; `words` stand there in braces.
    """
    drawn = tuple(experiment.key for experiment in of if experiment.drawn) if figures is None else figures

    def judged(judge: Callable[..., Finding]) -> Claim:
        text = judge.__doc__ or ""
        for name, word in words.items():
            text = text.replace(f"{{{name}}}", word)
        statement, _, measured = (" ".join(part.split()) for part in text.partition("\n\n"))
        return Claim(key, place, statement, measured, judge, of, drawn, seeds, role)

    return judged


def _plain(check: Check) -> dict[str, Any]:
    """Its fields, None where a number is not known."""
    fields = dataclasses.asdict(check)
    unknown = [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]
    return fields | dict.fromkeys(unknown)


def equal(label: str, measured: float, target: float, within: float, error: float | None = None) -> Check:
    """A check of equality within a tolerance; where there is an error, one larger than that settles nothing."""
    resolution = math.inf if error is None else within
    return Check(label, measured, "=", target, error or 0.0, within, resolution)


def not_settled(remark: str) -> Finding:
    """For a preset that cannot decide."""
    return Finding((), remark)


_GROUPS: dict[str, tuple[Role, ...]] = {
    "tests of the paper": ("test",),
    "identities and bounds with room, which check this software": ("identity", "bound"),
    "statements of our own": ("own",),
    "for context": ("context",),
}


def counted(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many claims of each group have which verdict, tests of the paper apart from the rest."""
    lines = []
    for name, roles in _GROUPS.items():
        found = [entry["verdict"] for entry in entries if entry["role"] in roles]
        counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in (*VERDICTS, PENDING) if verdict in found)
        lines += [f"{len(found)} {name}: {counts}"] if found else []
    return lines


def role_in_words(entry: Mapping[str, Any]) -> str:
    """The role of a line of the ledger; of a bound, with its room."""
    room = entry.get("room")
    return entry["role"] if room is None else f"{entry['role']}, {room:.0f} decades of room"


@functools.cache
def widened(n: int) -> float:
    """By how much the error of a mean over n seeds is widened: three of it are then as rare as for many."""
    return float(student.isf(norm.sf(ERRORS), n - 1)) / ERRORS if n > 1 else math.inf


def mean_over_seeds(values: Any, rounding: float = 0.0) -> tuple[float, float]:
    """The mean of continuous numbers, one for each seed, and its error; `rounding` is the grid they are read off."""
    values = np.asarray(values, float)
    n = len(values)
    if n == 0 or not np.isfinite(values).all():
        return math.nan, math.inf
    spread = max(float(values.std(ddof=1)), rounding / math.sqrt(12)) if n > 1 else 0.0
    return float(values.mean()), widened(n) * spread / math.sqrt(n) if spread > 0 else math.inf


def mean_of_counts(
    values: Float[np.ndarray, "s *rest"], target: float, step: float, unknown: float = 0.0
) -> tuple[float, float]:
    """The mean of counts or shares that are multiples of `step`, with the error that it has if `target` is true.

    Rows are seeds; what was not run is NaN. A share `unknown` of them could be anything within a step.
    """
    values = np.asarray(values, float).reshape(len(values), -1)
    values = values[np.isfinite(values).any(axis=1)]
    n, total = len(values), int(np.isfinite(values).sum())
    if n < 2:
        return float(np.nanmean(values)) if n else math.nan, math.inf
    of_seeds = np.nansum(values - target, axis=1)
    about_target = max(float(np.linalg.norm(of_seeds)) / total, step / n)
    return target + float(of_seeds.sum()) / total, math.hypot(about_target, unknown * step)


@functools.cache
def _among(m: int) -> float:
    """By how much an error is widened, so that three of it are as rare among m numbers as for one."""
    return float(norm.isf(norm.sf(ERRORS) / m)) / ERRORS


def worst(
    label: str,
    values: Float[np.ndarray, " m"],
    errors: Float[np.ndarray, " m"],
    names: Sequence[Any],
    relation: Any = ">",
    target: float = 0.0,
) -> Check:
    """That all values are on one side of a target: the one that is least so, in errors. All must be known."""
    if len(values) == 0 or np.isnan(values).any():
        return Check(label, math.nan, relation, target, math.inf)
    wider = np.asarray(errors, float) * _among(len(values))
    margins = (np.asarray(values) - target) * (1 if relation == ">" else -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        i = int(np.nanargmin(np.where(wider > 0, margins / wider, np.sign(margins) * math.inf)))
    return Check(f"{label}, worst at {names[i]}", float(values[i]), relation, target, float(wider[i]))
