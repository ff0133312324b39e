"""What goes to disk: a figure with its data in every format, and plain data as JSON, each file written at once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from largeprompt.lab import replacing
from largeprompt.lab._files import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SUFFIXES = (".svg", ".pdf", ".png", ".csv", ".nc")


def write(out: Path, stem: str, figure: "Figure", data: xr.Dataset) -> list[Path]:
    """Write a figure and its data in every format."""
    from largeprompt.paper.drawing import save

    writers = {
        **{suffix: lambda path: save(figure, path) for suffix in (".svg", ".pdf", ".png")},
        ".csv": lambda path: data.to_dataframe().to_csv(path),
        ".nc": lambda path: data.to_netcdf(path, engine="scipy"),
    }
    files = [out / f"{stem}{suffix}" for suffix in SUFFIXES]
    for file in files:
        with replacing(file) as path:
            writers[file.suffix](path)
    return files


def write_json(path: Path, value: Any) -> Path:
    """Plain data in a file, written at once; `inf` and what is not a number as text and null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    return path


def plain(value: Any) -> Any:
    """With `inf` as text and null for what is not a number, which JSON cannot say."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None if np.isnan(value) else str(value)
    return value


def read_json(path: Path) -> Any:
    """Plain data from a file; one that cannot be read as JSON is named."""
    try:
        with about(path):
            return json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON; run the command that made it again") from None
