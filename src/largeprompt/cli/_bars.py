"""Training on a terminal: a bar for each run at work and one for all."""

from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from largeprompt.lab import Run, Watcher

from ._app import errors


def in_words(risk: Sequence[float]) -> str:
    """The latest risk of each member of a run; nothing before one is known."""
    return "risk " + ", ".join(f"{value:.4f}" for value in risk) if risk else ""


class Bars(Watcher):
    """Steps a second, time left and the latest risk of every run at work; nothing where there is no terminal."""

    def __init__(self, runs: Sequence[Run]):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}% {task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[risk]}"),
        )
        self._progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        steps = sum(run.steps for run in runs)
        self._all = self._progress.add_task(f"0 of {len(runs)} runs", total=steps, speed="", risk="")
        self._bars: dict[str, TaskID] = {}
        self._steps: dict[str, int] = {}
        self._ended, self._runs = 0, len(runs)

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def moved(self, run: Run, step: int, speed: float, risk: tuple[float, ...]) -> None:
        if run.hash not in self._bars:
            self._bars[run.hash] = self._progress.add_task(run.title, total=run.steps, speed="", risk="")
        self._progress.update(self._bars[run.hash], completed=step, speed=f"{speed:.0f}/s", risk=in_words(risk))
        self._go_on(run, step)

    def ended(self, run: Run, found: bool) -> None:
        self._ended += 1
        self._progress.update(self._all, description=f"{self._ended} of {self._runs} runs")
        if run.hash in self._bars:
            self._progress.remove_task(self._bars.pop(run.hash))
        self._go_on(run, run.steps)

    def noticed(self, message: str) -> None:
        errors.print(f"largeprompt: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _go_on(self, run: Run, step: int) -> None:
        self._progress.advance(self._all, step - self._steps.get(run.hash, 0))
        self._steps[run.hash] = step
