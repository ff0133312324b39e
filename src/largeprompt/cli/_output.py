"""What the commands share: progress, interrupts, files, tables, JSON."""

import _thread
import json
import os
import signal
import sys
import threading
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


@contextmanager
def interruptible(bars: Any, kept: Callable[[], str]) -> Iterator[Any]:
    """Bars around work that keeps what is done: at Ctrl-C, or when a batch system ends it, one line and out."""
    from largeprompt.lab import Interrupted

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)  # what batch systems send first
    try:
        with bars:
            yield bars
    except (Interrupted, KeyboardInterrupt):
        errors.print(f"largeprompt: interrupted: {kept()}; the same command goes on", highlight=False, soft_wrap=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # XLA's threads may be at work, and taking the interpreter down around them crashes
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupts_brought_back() -> Iterator[None]:
    """One that meets Python inside a callback, such as the garbage collector's, is dropped there, with a traceback."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        ends_too = callable(signal.getsignal(signal.SIGTERM))  # heard even where Ctrl-C is not, in a shell's background
        # a moment later, when the callback is over
        again = threading.Timer(0.05, _thread.interrupt_main, [signal.SIGTERM if ends_too else signal.SIGINT])
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def device_of(place: Any) -> Any:
    """The device that there is; where it is not the one asked for, a line says so."""
    import jax

    if place.device == "cpu" != jax.devices()[0].platform:
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    if place.remark is not None:
        errors.print(f"largeprompt: {place.remark}", highlight=False, soft_wrap=True, markup=False)
    return place.device


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
