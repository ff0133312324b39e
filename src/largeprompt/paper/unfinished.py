"""A job under way: its figures drawn and its page written as datasets come, in a thread beside the computations."""

import contextlib
import dataclasses
import datetime
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import xarray as xr

from largeprompt.paper.plan import Followed, Plan

_EVERY = 10.0  # seconds after which the page is written again though nothing new is there: time goes on


@dataclasses.dataclass(frozen=True)
class HowFar:
    """How far an unfinished job has come: the time, the share of its work, seconds left, whether it has stopped."""

    written: str
    share: float
    left: float
    stopped: bool = False


class Writer:
    """Draws each figure whose dataset comes, and writes the page of what is there, in a thread of its own.

    `draw(key, data)` writes the files of a figure and says whether it is one; `write(datasets, how_far)` writes the
    page. What they raise is raised by `add`, or where `running` ends.
    """

    def __init__(
        self,
        plan: Plan,
        followed: Followed,
        draw: Callable[[str, xr.Dataset], bool],
        write: Callable[[dict[str, xr.Dataset], HowFar], Any],
    ):
        self._plan, self._followed, self._draw, self._write = plan, followed, draw, write
        self._began, self._stopped = time.monotonic(), False
        self._come: queue.SimpleQueue[tuple[str, xr.Dataset] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def add(self, key: str, data: xr.Dataset) -> None:
        """Take a dataset that is done."""
        self._raise_if_failed()
        self._come.put((key, data))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Draw and write during the block, and to its end all that has come; if it fails, the page says: stopped."""
        thread = threading.Thread(target=self._run, name="report", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._come.put(None)
            while thread.is_alive():
                thread.join(0.2)  # in short waits, so that Ctrl-C is heard
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        datasets: dict[str, xr.Dataset] = {}
        try:
            self._write(datasets, self._how_far())
            while True:
                try:
                    come = self._come.get(timeout=_EVERY)
                except queue.Empty:
                    self._write(datasets, self._how_far())
                    continue
                if come is None or self._stopped:
                    break
                drawn = self._draw(*come)
                datasets[come[0]] = come[1]
                if drawn or self._come.empty():  # else with what comes next
                    self._write(datasets, self._how_far())
            if self._stopped:
                self._write(datasets, self._how_far())
        except BaseException as error:  # for the thread that waits for this one
            self._error = error

    def _how_far(self) -> HowFar:
        """Where the work stands, with the time left: by the plan at first, and the more is done by the pace so far."""
        work = sum(self._plan.seconds_of_run.values()) + sum(item.seconds for item in self._plan.to_compute)
        done = sum(self._followed.done.get(name, 0.0) for name in ("training", "computing"))
        share = min(done / work, 1.0) if work else 1.0
        spent = time.monotonic() - self._began
        # `share` times spent * (1 / share - 1), which the pace says, and the rest times what the plan says
        left = (1 - share) * (spent + (1 - share) * self._plan.seconds)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return HowFar(now, share, left, self._stopped)
