"""The errata of the paper as data: each recomputes numbers that refute what is printed and support its correction."""

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from inspect import cleandoc
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import xarray as xr

from largeprompt.lab import Progress
from largeprompt.paper.experiment import Computation
from largeprompt.paper.page import environment

from . import _concentration, _in_context, _queries, _regression, _training
from ._evidence import Comparison as Comparison
from ._evidence import Evidence as Evidence
from ._evidence import Numbers, compared

Kind = Literal["error", "gap", "typo"]
HEADINGS: dict[Kind, tuple[str, str, str]] = {
    "error": ("Wrong because", "printed fails", "corrected holds"),
    "gap": ("What is missing", "gap shown", "gap closed"),
    "typo": ("Wrong because", "printed fails", "corrected holds"),
}
"""What the reason and the two lists of evidence are called."""


@dataclasses.dataclass(frozen=True)
class Erratum:
    """One place of the paper that is not right, or not complete, as it stands.

    `error`: a statement that is false. `gap`: a step or a hypothesis that is missing. `typo`: a slip of the pen. The
    texts are paragraphs: what is printed, why it is wrong, what is right, and the example whose numbers are computed.
    `against` and `repair` name what is compared with what.
    """

    key: str
    kind: Kind
    place: str
    summary: str
    printed: str
    why: str
    correction: str
    setting: str
    against: list[list[Any]]
    repair: list[list[Any]]
    numbers: Callable[[], Numbers]

    def evidence(self) -> Evidence:
        """The numbers that decide, computed again."""
        against, repair = self.numbers()
        return Evidence(compared(self.against, against), compared(self.repair, repair))


def _flowing(parts: dict[str, Any]) -> dict[str, Any]:
    """Texts without their line breaks, but for those between paragraphs; lists as they are."""
    texts = {name: cleandoc(text).split("\n\n") for name, text in parts.items() if isinstance(text, str)}
    return parts | {name: "\n\n".join(" ".join(part.split()) for part in text) for name, text in texts.items()}


def _errata() -> tuple[Erratum, ...]:
    """The texts of `errata.toml`, each with the function of its key that computes its numbers."""
    texts = tomllib.loads(resources.files(__name__).joinpath("errata.toml").read_text("utf-8"))
    modules = (_concentration, _queries, _in_context, _regression, _training)
    functions = {key: getattr(module, key) for key in texts for module in modules if hasattr(module, key)}
    return tuple(Erratum(key, numbers=functions[key], **_flowing(parts)) for key, parts in texts.items())


ERRATA = _errata()
"""Every erratum, numbered in one sequence; the letter is the kind (error, gap, typo)."""


def evidence() -> dict[str, Evidence]:
    """The evidence of every erratum, recomputed: about a minute, most of it compilation."""
    if jnp.zeros(()).dtype != jnp.float64:
        raise ValueError("JAX computes in float32, too coarse for this evidence; call largeprompt.use_float64() first")
    return {erratum.key: erratum.evidence() for erratum in ERRATA}


def markdown(evidence_by_key: Mapping[str, Evidence]) -> str:
    """The page docs/errata.md, from the given evidence."""
    page = environment(__name__, html=False).get_template("errata.md.jinja")
    text = page.render(errata=[(erratum, evidence_by_key[erratum.key]) for erratum in ERRATA], headings=HEADINGS)
    return text.replace("[μ](", "\\[μ](")  # not a link


@dataclasses.dataclass(frozen=True)
class Errata(Computation):
    """The evidence of every erratum, as JSON in the attribute `evidence`."""

    words: ClassVar[str] = "errata"

    keys: tuple[str, ...] = tuple(erratum.key for erratum in ERRATA)

    @property
    def seconds(self) -> float:
        return 15.0

    def _compute(self, progress: Progress) -> xr.Dataset:
        found = {key: dataclasses.asdict(each) for key, each in evidence().items()}
        return xr.Dataset(attrs={"evidence": json.dumps(found, ensure_ascii=False)})


def entries(dataset: xr.Dataset) -> list[dict[str, Any]]:
    """Each erratum with its numbers, as plain data for the ledger, from the dataset of `Errata`."""
    found = json.loads(dataset.attrs["evidence"])
    return [_entry(erratum, Evidence.read(found[erratum.key])) for erratum in ERRATA]


def _entry(erratum: Erratum, found: Evidence) -> dict[str, Any]:
    entry = {field.name: getattr(erratum, field.name) for field in dataclasses.fields(erratum)}
    del entry["numbers"]
    shown = ("left", "x", "relation", "y", "right", "holds")
    for name in ("against", "repair"):
        entry[name] = [{part: getattr(each, part) for part in shown} for each in getattr(found, name)]
    return entry | {"confirmed": found.confirmed}
