"""What a reproduction is asked for: preset, seeds, conventions, figures and claims; and the training runs of that."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from largeprompt import _checks as checks
from largeprompt.lab import Record, Run

ISOTROPIC, ANISOTROPIC = "identity", "kms:0.5"
COVARIANCES = (ISOTROPIC, ANISOTROPIC)
MEMBERS = ("softmax", "linear")  # of a pair
NAMES = {ISOTROPIC: "isotropic covariates", ANISOTROPIC: "anisotropic covariates, Σᵢⱼ = 0.5^|i−j|"}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The training of a preset. Paper: Section 6 and Appendix A.

    `seeds` are trained at each of the `lengths`, of which `flow_seeds` beside their population flow; `starts` are more
    seeds, by covariance and length, to count those that miss the optimum. `errata`: whether their evidence is computed.
    """

    lengths: tuple[int, ...]
    steps: int
    seeds: int
    starts: tuple[tuple[str, int, int], ...]
    flow_seeds: int
    record: Record
    errata: bool = True


_TENS, _HUNDREDS = tuple(range(10, 100, 10)), tuple(range(100, 1001, 100))
PRESETS = {
    "smoke": Protocol(
        lengths=(10, 40),
        steps=2000,
        seeds=2,
        starts=(),
        flow_seeds=1,
        record=Record(points=12, draws=2**10),
        errata=False,
    ),
    "quick": Protocol(
        lengths=(10, 30, 100, 300, 1000),
        steps=100_000,
        seeds=3,
        starts=((ISOTROPIC, 100, 12),),
        flow_seeds=1,
        record=Record(points=40, every=5000),
    ),
    "paper": Protocol(
        lengths=_TENS + _HUNDREDS,
        steps=500_000,
        seeds=1,
        starts=tuple((cov, L, seeds) for cov in COVARIANCES for L, seeds in ((10, 20), (100, 20), (1000, 8))),
        flow_seeds=8,
        record=Record(points=60, every=10_000),
    ),
}
"""The training of each preset; the other sizes of an experiment stand in its own module."""


@dataclasses.dataclass(frozen=True)
class Conventions:
    """Factor of the scores, factor of the loss ½(ŷ−y)², covariance of queries; the paper's text by default."""

    score_scale: float = 1.0
    loss_factor: float = 1.0
    query_sigma: str | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is asked for: how much, from how many seeds (None: the preset's), by which conventions, and of what.

    `figures` None means all of them. `claims` None means those that the figures decide by themselves: all claims and
    the errata where all figures are made.
    """

    preset: str = "quick"
    seeds: int | None = None
    conventions: Conventions = Conventions()
    figures: tuple[str, ...] | None = None
    claims: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.preset not in PRESETS:
            raise ValueError(f"preset is {self.preset!r}; it must be one of {', '.join(PRESETS)}")
        if self.seeds is not None:
            checks.count("seeds", self.seeds)
        if self.conventions != Conventions():
            self.runs(ISOTROPIC, self.protocol.lengths[:1], 1)  # refuses conventions that make no run

    @property
    def protocol(self) -> Protocol:
        """The training of the preset, from the seeds chosen."""
        found = PRESETS[self.preset]
        return found if self.seeds is None else dataclasses.replace(found, seeds=self.seeds)

    def runs(self, covariance: str, lengths: Iterable[int], seeds: int | None = None) -> tuple[Run, ...]:
        """The pairs of softmax and linear attention trained at each length, from each seed."""
        own = self.protocol
        of_seeds = range(own.seeds if seeds is None else seeds)
        return tuple(_run(covariance, L, own.steps, own.record, s, self.conventions) for L in lengths for s in of_seeds)

    def all_runs(self, covariance: str, lengths: Iterable[int]) -> dict[int, tuple[Run, ...]]:
        """The runs at each length from all seeds that are trained there, `starts` among them."""
        own = self.protocol
        more = {L: seeds for name, L, seeds in own.starts if name == covariance}
        return {L: self.runs(covariance, (L,), max(own.seeds, more.get(L, 0))) for L in lengths}

    @property
    def stamp(self) -> dict[str, Any]:
        """What all numbers of a folder must have in common, as plain data."""
        conventions = dataclasses.asdict(self.conventions)
        return {"preset": self.preset, "seeds": self.protocol.seeds, "conventions": conventions}

    @property
    def options(self) -> list[str]:
        """The options of the command line that give these numbers, whatever is made of them."""
        differ = {"seeds": self.protocol.seeds} if self.protocol.seeds != PRESETS[self.preset].seeds else {}
        usual, own = dataclasses.asdict(Conventions()), dataclasses.asdict(self.conventions)
        differ |= {name: value for name, value in own.items() if value != usual[name]}
        given = [part for name, value in differ.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return ["--preset", self.preset, *given]


@functools.lru_cache(maxsize=4096)  # a run is checked when it is made, and figures and claims ask for the same ones
def _run(covariance: str, L: int, steps: int, record: Record, seed: int, conventions: Conventions) -> Run:
    given: Any = dataclasses.asdict(conventions)
    return Run(L=L, sigma=covariance, d=5, steps=steps, record=record, weight_seed=seed, data_seed=seed, **given)


def keys_among(what: str, keys: Iterable[str], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys among the known, in their order; a figure's number stands for its parts."""
    found = set()
    for key in map(str, keys):
        matches = {name for name in known if name.lower() == key.lower()} or {
            name for name in known if name[:-1] == key and name[-1] in "ab"
        }
        if not matches:
            raise ValueError(f"{what} {key!r} is not one; they are {', '.join(known)}")
        found |= matches
    return tuple(name for name in known if name in found)


def covariates(covariance: str) -> str:
    """A covariance in words."""
    return NAMES.get(covariance, f"covariance {covariance}")
