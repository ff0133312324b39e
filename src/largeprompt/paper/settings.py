"""What a reproduction runs: presets, and conventions in which code of this lineage differs from the paper's text."""

import dataclasses
import functools
from typing import Any, Literal

from largeprompt import _checks as checks
from largeprompt.lab import Record, Run

ISOTROPIC, ANISOTROPIC = "identity", "kms:0.5"
COVARIANCES = (ISOTROPIC, ANISOTROPIC)
MEMBERS = ("softmax", "linear")  # of a pair


@dataclasses.dataclass(frozen=True)
class Conventions:
    """Factor of the scores, factor of the loss ½(ŷ−y)², covariance of queries; the paper's text by default."""

    score_scale: float = 1.0
    loss_factor: float = 1.0
    query_sigma: str | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes of a reproduction. Paper: Section 6 and Appendix A.

    Training: `lengths` of Figures 2 and 6, of which `paths` are drawn in Figures 3 and 7 and `courses` in 4 and 8, from
    `seeds` seeds, of which `flow_seeds` beside their population flow; `starts` are more seeds, by covariance and
    length, to count those that miss the optimum; `traps` the lengths, by covariance, at which spurious minima of
    softmax attention are looked for. At initialisation: `short_to_long` lengths, `heads` draws of weights, `prompts`
    sampled for each. `law_prompts` for each of the `laws` of tokens and each of `law_lengths`; flows along a `ladder`
    of lengths up to `flow_time`, those of risks that must not rise in `flow_parameters`. `errata`: whether their
    evidence is recomputed.
    """

    preset: str
    lengths: tuple[int, ...]
    paths: tuple[int, ...]
    courses: tuple[int, ...]
    steps: int
    seeds: int
    starts: tuple[tuple[str, int, int], ...]
    traps: tuple[tuple[str, tuple[int, ...]], ...]
    short_to_long: tuple[int, ...]
    heads: int
    prompts: int
    laws: tuple[str, ...]
    law_lengths: tuple[int, ...]
    law_prompts: int
    ladder: tuple[int, ...]
    flow_time: float
    flow_parameters: tuple[Literal["UV", "KQVO"], ...]
    flow_seeds: int
    record: Record
    errata: bool = True
    conventions: Conventions = Conventions()

    def __post_init__(self):
        checks.count("seeds", self.seeds)
        if self.conventions != Conventions():  # the paper's make runs; presets build none when they are imported
            self.runs(COVARIANCES[0], self.lengths[:1], 1)  # refuses conventions that make no run

    def runs(self, covariance: str, lengths: tuple[int, ...], seeds: int | None = None) -> tuple[Run, ...]:
        """The pairs of softmax and linear attention trained at each length, from each seed."""
        of_seeds = range(self.seeds if seeds is None else seeds)
        return tuple(
            _run(covariance, L, self.steps, self.record, s, self.conventions) for L in lengths for s in of_seeds
        )

    def seeds_at(self, covariance: str, L: int) -> int:
        """How many seeds are trained with a covariance at a length."""
        return max([self.seeds, *(seeds for at in self.starts for seeds in at[2:] if at[:2] == (covariance, L))])


@functools.lru_cache(maxsize=4096)  # a run is checked when it is made, and figures and claims ask for the same ones
def _run(covariance: str, L: int, steps: int, record: Record, seed: int, conventions: Conventions) -> Run:
    given: Any = dataclasses.asdict(conventions)
    return Run(L=L, sigma=covariance, d=5, steps=steps, record=record, weight_seed=seed, data_seed=seed, **given)


_TENS, _HUNDREDS = tuple(range(10, 100, 10)), tuple(range(100, 1001, 100))
PRESETS = {
    "smoke": Settings(
        preset="smoke",
        lengths=(10, 40),
        paths=(10, 40),
        courses=(10, 40),
        steps=2000,
        seeds=2,
        starts=(),
        traps=(),
        short_to_long=(10, 40),
        heads=2,
        prompts=200,
        laws=("Gaussian", "Rademacher", "KMS, unscaled"),
        law_lengths=(20, 60),
        law_prompts=100,
        ladder=(10, 100),
        flow_time=3.0,
        flow_parameters=("UV",),
        flow_seeds=1,
        record=Record(points=12, draws=2**10),
        errata=False,
    ),
    "quick": Settings(
        preset="quick",
        lengths=(10, 30, 100, 300, 1000),
        paths=(10, 30, 100, 300, 1000),
        courses=(10, 100, 1000),
        steps=100_000,
        seeds=3,
        starts=((ISOTROPIC, 100, 12),),
        traps=((ISOTROPIC, (1000,)),),
        short_to_long=(10, 30, 100, 300, 1000, 3000, 10_000),
        heads=8,
        prompts=4000,
        laws=("Gaussian", "KMS", "mixture", "Rademacher", "KMS, unscaled"),
        law_lengths=(10, 30, 100, 300, 1000, 3000, 10_000),
        law_prompts=600,
        ladder=(10, 100, 1000, 10_000),
        flow_time=1000.0,
        flow_parameters=("UV",),
        flow_seeds=1,
        record=Record(points=40, every=5000),
    ),
    "paper": Settings(
        preset="paper",
        lengths=_TENS + _HUNDREDS,
        paths=(10, 20, 50, 100, 200, 500, 1000),
        courses=(10, 100, 1000),
        steps=500_000,
        seeds=1,
        starts=tuple((cov, L, seeds) for cov in COVARIANCES for L, seeds in ((10, 20), (100, 20), (1000, 8))),
        traps=tuple((covariance, (10, 100, 200, 500, 1000)) for covariance in COVARIANCES),
        short_to_long=(10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000),
        heads=32,
        prompts=20_000,
        laws=("Gaussian", "KMS", "mixture", "Rademacher", "cube", "sphere", "KMS, unscaled"),
        law_lengths=(10, 30, 100, 300, 1000, 3000, 10_000),
        law_prompts=2000,
        ladder=(10, 100, 1000, 10_000, 100_000),
        flow_time=1000.0,
        flow_parameters=("UV", "KQVO"),
        flow_seeds=8,
        record=Record(points=60, every=10_000),
    ),
}
