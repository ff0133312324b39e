import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import xarray as xr

from largeprompt import __version__
from largeprompt.lab import Run, digest, leftovers, replacing

Done = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class AbstractPiece:
    """One measurement or computation as data: its fields say all of it, and it gives one dataset.

    A kind defines `title`, `seconds` (about how long it takes on one core, compilation included) and `_compute`; it
    raises its `version` when the same fields come to give other numbers. Fields are numbers, texts, tuples of them, and
    frozen dataclasses of such.
    """

    version: ClassVar[int] = 1

    @property
    def title(self) -> str:
        """A few words for a progress bar."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """About how long it takes on one core."""
        raise NotImplementedError

    def compute(self, done: Done = lambda what: None) -> xr.Dataset:
        """The dataset, with the settings it comes from; `done` hears of each part."""
        return self._compute(done).assign_attrs(piece=self.canonical)

    def _compute(self, done: Done) -> xr.Dataset:
        raise NotImplementedError

    @property
    def canonical(self) -> str:
        """Kind and fields as JSON in one fixed spelling."""
        what = {"kind": type(self).__name__, "version": self.version, "package": __version__}
        what |= dataclasses.asdict(self)
        return json.dumps(what, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def name(self) -> str:
        """A file name: the kind and a hash of the fields."""
        return f"{type(self).__name__.lower()}-{hashlib.sha256(self.canonical.encode()).hexdigest()[:16]}"


Needed = Run | AbstractPiece
Results = Mapping[Needed, xr.Dataset]


class Shelf:
    """Pieces in a folder, each in a file of its name, written at once."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def path(self, piece: AbstractPiece) -> Path:
        """The file of a piece."""
        return self.folder / f"{piece.name}.nc"

    def load(self, piece: AbstractPiece) -> xr.Dataset | None:
        """A piece that was kept; None if there is none that can be used."""
        path = self.path(piece)
        if not path.exists():
            return None
        try:
            data = xr.load_dataset(io.BytesIO(path.read_bytes()), engine="scipy", decode_times=False)
            kept = data.attrs.pop("digest")
        except OSError:
            raise
        except Exception:  # damaged in one of many ways: it is computed anew
            return None
        return data if data.attrs.get("piece") == piece.canonical and kept == digest(data) else None

    def keep(self, piece: AbstractPiece, data: xr.Dataset) -> xr.Dataset:
        """Write a piece; what is given back is what will be read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in leftovers(self.path(piece)):  # what a killed writer left half done
            path.unlink(missing_ok=True)
        as_read = xr.load_dataset(io.BytesIO(data.to_netcdf(engine="scipy")), engine="scipy", decode_times=False)
        with replacing(self.path(piece)) as path:
            as_read.assign_attrs(digest=digest(as_read)).to_netcdf(path, engine="scipy")
        return as_read
