"""The main job on a terminal: a bar for training and one for computations; a line a minute elsewhere."""

import threading
import time
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from largeprompt.lab import Run, duration
from largeprompt.paper import Listener, Plan
from largeprompt.paper.pieces import AbstractPiece

from ._app import errors
from ._bars import in_words

_EVERY = 60.0  # seconds between lines where there is no terminal


class PaperBars(Listener):
    """Both kinds of work in seconds of one core, with the time left."""

    def __init__(self, plan: Plan):
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f}%"))
        left = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
        self._progress = Progress(*columns, *left, console=errors, transient=True, disable=not errors.is_terminal)
        self._plan, self._lock = plan, threading.Lock()
        self._share: dict[str, float] = {}
        self._work = {run.hash: seconds for run, seconds in plan.seconds_of_run.items()}
        self._pieces = {piece.name: piece.seconds for piece in plan.pieces_to_do}
        self._runs_done = self._pieces_done = 0
        self._told = time.monotonic()
        totals = (sum(self._work.values()), sum(self._pieces.values()))
        self._training, self._computing = (
            self._progress.add_task(what, total=total or None, visible=total > 0, now="")
            for what, total in zip(("training", "computing"), totals, strict=True)
        )

    def __enter__(self) -> "PaperBars":
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def moved(self, run: Run, step: int, speed: float, risk: tuple[float, ...]) -> None:
        self._advance(run, step / max(run.steps, 1), ": ".join(filter(None, (run.title, in_words(risk)))))

    def ended(self, run: Run, found: bool) -> None:
        with self._lock:
            self._runs_done += 1
        self._advance(run, 1.0, "")

    def noticed(self, message: str) -> None:
        errors.print(f"largeprompt: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def began(self, piece: AbstractPiece) -> None:
        self._progress.update(self._computing, now=piece.title)
        self._tell()

    def part(self, piece: AbstractPiece, what: str) -> None:
        self._progress.update(self._computing, now=f"{piece.title}: {what}")
        self._tell()

    def made(self, piece: AbstractPiece, found: bool) -> None:
        self._pieces_done += 1
        description = f"computing: {self._pieces_done} of {len(self._plan.pieces)}"
        self._progress.update(self._computing, description=description, now="")
        if not found:
            self._progress.advance(self._computing, self._pieces.get(piece.name, 0.0))

    def _advance(self, run: Run, share: float, now: str) -> None:
        with self._lock:
            self._share[run.hash] = share
            done = sum(seconds * self._share.get(name, 0.0) for name, seconds in self._work.items())
            description = f"training: {self._runs_done} of {len(self._plan.runs)}"
        self._progress.update(self._training, completed=done, description=description, now=now)
        self._tell()

    def _tell(self) -> None:
        if errors.is_terminal or time.monotonic() - self._told < _EVERY:
            return
        self._told = time.monotonic()
        done = sum(seconds * self._share.get(name, 0.0) for name, seconds in self._work.items())
        left = (sum(self._work.values()) - done) / self._plan.jobs
        runs = f"{self._runs_done} of {len(self._plan.runs)} runs"
        pieces = f"{self._pieces_done} of {len(self._plan.pieces)} computations"
        errors.print(f"{runs}, {pieces}; about {duration(left)} of training left", highlight=False, soft_wrap=True)
