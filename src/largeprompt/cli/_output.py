"""What the commands share: progress, interrupts, files, tables, JSON."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ._app import errors, screen
from ._interrupts import interrupts
from ._view import View

if TYPE_CHECKING:
    import xarray as xr

    from largeprompt._device import DeviceName, Library
    from largeprompt.lab import AbstractStore, Run


def runs_kept(store: "AbstractStore", runs: "Sequence[Run]") -> str:
    """How many of the runs are finished, and where the others go on."""
    done = len(store.finished_of([run.key for run in runs]))
    return f"{done} of {len(runs)} runs are finished, the others kept in {store.location}"


@contextmanager
def interruptible(view: View, kept: Callable[[], str]) -> Iterator[Any]:
    """A view of work that keeps what is done: at Ctrl-C, or when a batch system ends it, one line and out."""
    from largeprompt.lab import Interrupted

    try:
        with interrupts.raised(), view:
            yield view
    except BaseException as error:
        # with a signal, whatever the error: a library may have turned the interrupt into one of its own
        if interrupts.number is None and not isinstance(error, Interrupted | KeyboardInterrupt):
            raise
        interrupts.leave(f"interrupted: {kept()}; the same command goes on")


def remark(message: str) -> None:
    """Something that a user should know, on one line of the error stream."""
    errors.print(f"largeprompt: {message}", markup=False, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """What is wrong, on one line of the error stream."""
    errors.print(f"largeprompt: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def in_one_line(error: Exception) -> str:
    """What went wrong, with the file that it is about before what the system says of it."""
    if isinstance(error, OSError) and error.strerror is not None:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*names[-1:], error.strerror])
    return " ".join(str(error).split()) or type(error).__name__


def ready(out: Path, stem: str) -> None:
    """See, before any work, that a figure and its data can be written."""
    from largeprompt.lab import writable_folder
    from largeprompt.paper.files import SUFFIXES

    writable_folder(out, "--out", files=[f"{stem}{suffix}" for suffix in SUFFIXES])


def written(out: Path, stem: str, figure: Any, data: "xr.Dataset") -> list[Path]:
    """Write a figure and its data; an interrupt leaves no file half written."""
    from largeprompt.paper.files import write

    with interrupts.raised():
        return write(out, stem, figure, data)


def device_for(asked: str, library: "Library") -> "DeviceName":
    """The device that there is; where it is not the one asked for, a line says so."""
    import jax

    from largeprompt._device import NoGpu, resolve_device

    try:
        found = resolve_device(asked, library)
    except NoGpu as error:
        remark(f"no GPU: {error.reason}; the CPU does the work")
        found = "cpu"
    if found == "cpu" != jax.devices()[0].platform:
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return found


def records(data: "xr.Dataset") -> dict:
    """A dataset for JSON."""
    return {"settings": data.attrs, "rows": data.to_dataframe().reset_index().to_dict(orient="records")}


def rows(data: "xr.Dataset", by_length: bool) -> list[dict]:
    """What depends on the length, or what does not, for JSON."""
    names = [name for name, values in data.items() if ("L" in values.dims) == by_length]
    return data[names].to_dataframe().reset_index().to_dict(orient="records")


def print_result(
    as_json: bool, numbers: dict[str, Any], parts: Iterable[Any], files: Sequence[Path] = (), *, width: int = 76
) -> None:
    """All numbers as JSON, or tables and lines on the terminal; and where the files are."""
    if as_json:
        print_json(files, numbers)
        return
    show(parts, width)
    if files:
        name_files(files)


def print_json(files: Sequence[Path], numbers: dict[str, Any]) -> None:
    """All numbers on the output, and where the files are."""
    from largeprompt.paper.files import plain

    print(json.dumps(plain({"files": [str(file) for file in files], **numbers}), indent=1, allow_nan=False))


def show(parts: Iterable[Any], width: int = 76) -> None:
    """Tables and lines on the terminal."""
    # a table needs its width: on a narrower terminal lines wrap, but no digit is cut
    wide = screen if screen.width >= width else Console(width=width, emoji=False)
    for part in parts:
        wide.print(part)


def name_files(files: Sequence[Path]) -> None:
    """Where the files are."""
    screen.print("written: " + ", ".join(str(file) for file in files), soft_wrap=True)
