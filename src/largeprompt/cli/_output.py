"""What the commands share: progress, files, tables, JSON."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ._app import errors, screen


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar with the time left, on a terminal; what it yields is told of each piece of work done."""
    left = TextColumn("left"), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda description, work=1: progress.update(task, advance=work, description=description)


def write(out: Path, stem: str, figure, data: xr.Dataset) -> list[Path]:
    """Write a figure and its data in every format, each file at once."""
    from largeprompt.lab import replacing
    from largeprompt.paper.drawing import save

    writers = {
        **{suffix: lambda path: save(figure, path) for suffix in (".svg", ".pdf", ".png")},
        ".csv": lambda path: data.to_dataframe().to_csv(path),
        ".nc": lambda path: data.to_netcdf(path, engine="scipy"),
    }
    files = [out / f"{stem}{suffix}" for suffix in writers]
    for file in files:
        with replacing(file) as path:
            writers[file.suffix](path)
    return files


def records(data: xr.Dataset) -> dict:
    """A dataset for JSON."""
    return {"settings": data.attrs, "rows": data.to_dataframe().reset_index().to_dict(orient="records")}


def rows(data: xr.Dataset, by_length: bool) -> list[dict]:
    """What depends on the length, or what does not, for JSON."""
    names = [name for name, values in data.items() if ("L" in values.dims) == by_length]
    return data[names].to_dataframe().reset_index().to_dict(orient="records")


def part_done(part: int | str) -> str:
    """A part of a study, for its progress."""
    return f"predicted the {part}" if isinstance(part, str) else f"measured L = {part}"


def print_json(files: list[Path], numbers: dict[str, Any]) -> None:
    """All numbers on the output, and where the files are."""
    print(json.dumps(_plain({"files": [str(file) for file in files], **numbers}), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    """With `inf` as text and null for what is not a number, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def show(parts, width: int = 76) -> None:
    """Tables and lines on the terminal."""
    # a table needs its width: on a narrower terminal lines wrap, but no digit is cut
    wide = screen if screen.width >= width else Console(width=width, emoji=False)
    for part in parts:
        wide.print(part)


def name_files(files: list[Path]) -> None:
    """Where the files are."""
    screen.print("written: " + ", ".join(str(file) for file in files), soft_wrap=True)
