"""The progress of long computations: bars with the time left on a terminal, a line now and then elsewhere."""

import threading
import time
from collections import defaultdict
from types import TracebackType

from rich import progress as rich

from largeprompt._progress import Progress

from ._app import errors

_FIRST, _EVERY = 15.0, 60.0  # seconds until the first line, and between lines, where there is no terminal


class View(Progress):
    """Shows every piece of work that is under way, those that started first on top."""

    def __init__(self):
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=20),
            rich.TextColumn("{task.percentage:>3.0f}%"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[note]}", markup=False),
        )
        self._bars = rich.Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self._tasks: defaultdict[str, list[rich.TaskID]] = defaultdict(list)  # of one name, there may be several
        self._over = threading.Event()

    def __enter__(self) -> "View":
        self._bars.start()
        if not errors.is_terminal:
            threading.Thread(target=self._print_lines, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._bars.stop()

    def start(self, name: str, total: float) -> None:
        self._tasks[name].append(self._bars.add_task(name, total=total, note=""))

    def step(self, name: str, done: float, note: str = "") -> None:
        self._bars.update(self._tasks[name][-1], completed=done, note=note)

    def close(self, name: str, outcome: str = "") -> None:
        self._bars.remove_task(self._tasks[name].pop())

    def warn(self, message: str) -> None:
        errors.print(f"largeprompt: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _print_lines(self) -> None:
        began, seconds = time.monotonic(), _FIRST
        while not self._over.wait(seconds):
            for task in self._bars.tasks[:1]:
                errors.print(_line(task, time.monotonic() - began), highlight=False, soft_wrap=True, markup=False)
            seconds = _EVERY


def _line(task: rich.Task, seconds: float) -> str:
    from largeprompt.lab import duration  # imports JAX

    note = f", {task.fields['note']}" if task.fields["note"] else ""
    share = task.completed / task.total if task.total else 0.0
    left = f"; about {duration(seconds * (1 / share - 1))} left" if share > 0 else ""
    return f"largeprompt: {task.description}: {task.percentage:.0f} % done after {seconds:.0f} s{note}{left}"
