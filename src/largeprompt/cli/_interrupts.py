"""Ctrl-C and SIGTERM, from the first instruction on: one line, and 128 plus the number of the signal as exit status.

Nothing that takes time is imported here: what does is imported once interrupts are heard.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what batch systems send first
_AGAIN = 0.1  # seconds after which an interrupt that was dropped comes again
_ONE_WISH = 1.0  # seconds within which two signals are one: `timeout` sends a second to the whole group
_SENTENCE = "interrupted; files already written are whole"


class Interrupts:
    """What an interrupt does: end the process at once, or inside `raised` be raised until something handles it.

    An exception may be dropped on its way: by callbacks (of the garbage collector, of weak references, of C code), by
    an `except` around an import. So none is raised where nothing has to be put in order, and elsewhere it comes again
    as long as the main thread is not handling it.
    """

    def __init__(self):
        self.number: int | None = None  # of the signal that came
        self._since, self._depth = 0.0, 0

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Interrupts end the process, until the block ends."""
        self.number, hook, before = None, sys.unraisablehook, {}
        handlers: dict[int, Any] = dict.fromkeys(_SIGNALS, self._hear)
        if hasattr(signal, "SIGALRM"):  # not on Windows
            handlers[signal.SIGALRM] = self._hear_again
        for number, handler in handlers.items():
            # one that is ignored stays so: a shell's background jobs do not hear Ctrl-C
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        # of interrupts that a callback has dropped nothing is reported: they come again
        sys.unraisablehook = lambda dropped: None if issubclass(dropped.exc_type, KeyboardInterrupt) else hook(dropped)
        try:
            yield
        finally:
            sys.unraisablehook = hook
            _set_timer(0.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Interrupts are raised, until the block ends: it has files, locks or processes to put in order."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self.number is not None and not self._depth and not _is_handled():
                self.leave()  # it was dropped, and the block ended before it came again

    def leave(self, sentence: str = _SENTENCE) -> None:
        """Say one line and end the process, whatever its other threads are doing."""
        terminal = b"\r\x1b[2K\x1b[?25h" if os.isatty(2) else b""  # over a progress bar, which hides the cursor
        with contextlib.suppress(OSError):  # not through a buffer, which may be in use
            os.write(2, terminal + f"largeprompt: {sentence}\n".encode())
        # not sys.exit: XLA's threads may be running, and taking the interpreter down around them crashes
        os._exit(128 + (signal.SIGINT if self.number is None else self.number))

    def _hear(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.number is not None and now - self._since < _ONE_WISH:
            return
        self.number, self._since = number, now
        if not self._depth:
            self.leave()
        _set_timer(_AGAIN)
        raise KeyboardInterrupt

    def _hear_again(self, *_: object) -> None:
        if self.number is not None and not _is_handled():
            raise KeyboardInterrupt


def _is_handled() -> bool:
    """Whether this thread is inside an `except` or `finally` that an interrupt has led to."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _set_timer(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


interrupts = Interrupts()
