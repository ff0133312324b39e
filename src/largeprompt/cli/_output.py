"""What the commands share: progress, interrupts, files, tables, JSON."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ._app import errors, screen
from ._interrupts import interrupts

if TYPE_CHECKING:
    import xarray as xr


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar with the time left, on a terminal; what it yields is told of each piece of work done."""
    left = TextColumn("left"), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda description, work=1: progress.update(task, advance=work, description=description)


@contextmanager
def interruptible(bars: Any, kept: Callable[[], str]) -> Iterator[Any]:
    """Bars around work that keeps what is done: at Ctrl-C, or when a batch system ends it, one line and out."""
    from largeprompt.lab import Interrupted

    try:
        with interrupts.raised(), bars:
            yield bars
    except BaseException as error:
        # with a signal, whatever the error: a library may have turned the interrupt into one of its own
        if interrupts.number is None and not isinstance(error, Interrupted | KeyboardInterrupt):
            raise
        interrupts.leave(f"interrupted: {kept()}; the same command goes on")


def device_of(place: Any) -> Any:
    """The device that there is; where it is not the one asked for, a line says so."""
    import jax

    if place.device == "cpu" != jax.devices()[0].platform:
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    if place.remark is not None:
        errors.print(f"largeprompt: {place.remark}", highlight=False, soft_wrap=True, markup=False)
    return place.device


def records(data: "xr.Dataset") -> dict:
    """A dataset for JSON."""
    return {"settings": data.attrs, "rows": data.to_dataframe().reset_index().to_dict(orient="records")}


def rows(data: "xr.Dataset", by_length: bool) -> list[dict]:
    """What depends on the length, or what does not, for JSON."""
    names = [name for name, values in data.items() if ("L" in values.dims) == by_length]
    return data[names].to_dataframe().reset_index().to_dict(orient="records")


def part_done(part: int | str) -> str:
    """A part of a study, for its progress."""
    return f"predicted the {part}" if isinstance(part, str) else f"measured L = {part}"


def print_json(files: list[Path], numbers: dict[str, Any]) -> None:
    """All numbers on the output, and where the files are."""
    from largeprompt.paper.files import plain

    print(json.dumps(plain({"files": [str(file) for file in files], **numbers}), indent=1, allow_nan=False))


def show(parts, width: int = 76) -> None:
    """Tables and lines on the terminal."""
    # a table needs its width: on a narrower terminal lines wrap, but no digit is cut
    wide = screen if screen.width >= width else Console(width=width, emoji=False)
    for part in parts:
        wide.print(part)


def name_files(files: list[Path]) -> None:
    """Where the files are."""
    screen.print("written: " + ", ".join(str(file) for file in files), soft_wrap=True)
