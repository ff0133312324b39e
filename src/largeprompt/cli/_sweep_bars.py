"""A sweep on a terminal: one bar with the workers and the time left; a line a minute elsewhere."""

import time
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from largeprompt.lab import SweepWatcher, duration

from ._app import errors

_EVERY = 60.0  # seconds between lines where there is no terminal


class SweepBars(SweepWatcher):
    """Runs that have ended, workers, and the time left."""

    def __init__(self):
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
        rest = TextColumn("{task.fields[rest]}")
        self._progress = Progress(*columns, rest, console=errors, transient=True, disable=not errors.is_terminal)
        self._bar = self._progress.add_task("", total=None, rest="")
        self._runs = self._found = 0
        self._told = time.monotonic()

    def __enter__(self) -> "SweepBars":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def began(self, runs: int, found: int) -> None:
        self._runs, self._found = runs, found
        self._progress.update(self._bar, total=runs, completed=found, description=f"{found} of {runs} runs")

    def went_on(self, ended: int, failed: int, threads: int, seconds_left: float | None) -> None:
        done = self._found + ended
        runs = f"{done} of {self._runs} runs" + (f", {failed} failed" if failed else "")
        left = "" if seconds_left is None else f"; about {duration(seconds_left)} left"
        rest = f"{threads} worker{'' if threads == 1 else 's'}{left}"
        self._progress.update(self._bar, completed=done, description=runs, rest=rest)
        if not errors.is_terminal and time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            errors.print(f"{runs}, {rest}", highlight=False, soft_wrap=True)

    def noticed(self, message: str) -> None:
        errors.print(f"largeprompt: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)
