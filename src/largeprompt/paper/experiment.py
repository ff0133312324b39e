"""What an experiment is: computations kept by their content, one dataset made of them, its chart and its summary."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import xarray as xr

from largeprompt import __version__
from largeprompt.lab import Progress, Run
from largeprompt.paper.chart import Chart
from largeprompt.paper.choice import ISOTROPIC, Choice, covariates


@dataclasses.dataclass(frozen=True)
class Computation:
    """One measurement or exact computation as data: its fields say all of it, and it gives one dataset.

    A kind defines its `words`, which may name fields in braces, `_compute`, and `seconds` if it takes long; it raises
    its `version` when the same fields come to give other numbers. Fields are numbers, texts, tuples of them, and
    frozen dataclasses of such.
    """

    words: ClassVar[str]
    version: ClassVar[int] = 1

    @property
    def title(self) -> str:
        """What is computed, in a few words, for a progress bar."""
        return self.words.format(**vars(self))

    @property
    def seconds(self) -> float:
        """About how long it takes on one core, compilation included."""
        return 4.0

    def compute(self, progress: Progress | None = None) -> xr.Dataset:
        """The dataset, with the settings it comes from."""
        return self._compute(progress or Progress()).assign_attrs(experiment=self.canonical)

    def _compute(self, progress: Progress) -> xr.Dataset:
        raise NotImplementedError

    @property
    def canonical(self) -> str:
        """Kind and fields as JSON in one fixed spelling."""
        what = {"kind": type(self).__name__, "version": self.version, "package": __version__}
        what |= dataclasses.asdict(self)
        return json.dumps(what, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def key(self) -> str:
        """The SHA-256 of the canonical text, under which the dataset is kept."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()


Needed = Run | Computation


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One question: what it needs, the dataset made of that, how it is drawn, and its main numbers.

    The anisotropic experiment is the same one with another `covariance`. A kind says in `words` what it shows, which
    may name the `{covariates}`, and in `advice` what a reader should look for. One that is not `drawn` is for claims.
    """

    key: str
    covariance: str = ISOTROPIC
    drawn: ClassVar[bool] = True
    words: ClassVar[str] = ""
    advice: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """Its figure, as the report and the command line call it."""
        return f"Figure {self.key}"

    @property
    def title(self) -> str:
        """What it shows, in a line."""
        return self.words.format(covariates=covariates(self.covariance))

    @property
    def look(self) -> str:
        """What a reader should look for, in a sentence or two."""
        return self.advice

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        """The training runs and computations that it is made from."""
        raise NotImplementedError

    def dataset(self, choice: Choice, results: "Results") -> xr.Dataset:
        """All that is drawn or judged, labelled."""
        raise NotImplementedError

    def chart(self, data: xr.Dataset) -> Chart:
        """How it is drawn."""
        raise NotImplementedError

    def summary(self, data: xr.Dataset) -> list[str]:
        """Its main numbers, a sentence each."""
        raise NotImplementedError


Results = Mapping[Needed, xr.Dataset]


@dataclasses.dataclass(frozen=True)
class Measurement(Experiment):
    """An experiment whose dataset is one computation as it is; most are not drawn."""

    drawn: ClassVar[bool] = False
    computation: Callable[[Choice], Computation] = dataclasses.field(kw_only=True)

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (self.computation(choice),)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        return results[self.computation(choice)]


def join(parts: list[str]) -> str:
    """One, two and three."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def places(error: float) -> int:
    """The decimal places that show the first digit of this standard error; at most five, as of an exact number."""
    return min(5, max(0, -math.floor(math.log10(error)))) if 0 < error < math.inf else 5


def with_error(value: float, error: float) -> str:
    """A number and its standard error, up to the first digit of the error; without it if all five places are exact."""
    digits = places(error)
    said = f"{error:.{digits}f}"
    return f"{value:.{digits}f}" + (f" ± {said}" if float(said) else "")
