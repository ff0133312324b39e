"""The evidence of every erratum, recomputed."""

import dataclasses
import json

import xarray as xr

from largeprompt.paper.errata import ERRATA, evidence

from ._piece import AbstractPiece, Done


@dataclasses.dataclass(frozen=True)
class Errata(AbstractPiece):
    """What `largeprompt.paper.errata.evidence` finds, as JSON in the attribute `evidence`."""

    keys: tuple[str, ...] = tuple(erratum.key for erratum in ERRATA)

    @property
    def title(self) -> str:
        return "errata"

    @property
    def seconds(self) -> float:
        return 30.0

    def _compute(self, done: Done) -> xr.Dataset:
        found = {key: dataclasses.asdict(each) for key, each in evidence().items()}
        return xr.Dataset(attrs={"evidence": json.dumps(found, ensure_ascii=False)})
