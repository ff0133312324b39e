"""How a long computation reports its progress: one protocol for all of them."""

import contextlib
import warnings
from collections.abc import Callable, Iterator


class Progress:
    """Receives the progress of named pieces of work; this one is silent, except for warnings.

    Several pieces may be under way at once, also from several threads, and some of them under the same name. A piece
    ends by `close`.
    """

    def start(self, name: str, total: float) -> None:
        """A piece of work begins; `total` is its amount, in any unit."""

    def step(self, name: str, done: float, note: str = "") -> None:
        """So much of the piece is done; `note` is a few words on its state."""

    def close(self, name: str, outcome: str = "") -> None:
        """The piece has ended; `outcome` is one word, such as finished, found or failed."""

    def warn(self, message: str) -> None:
        """Something that a user should know; here a Python warning."""
        warnings.warn(message, stacklevel=2)

    @contextlib.contextmanager
    def task(self, name: str, total: float) -> Iterator[Callable[..., None]]:
        """A piece of work from start to end; it yields `advance(amount=1, note="")`, which adds to what is done."""
        done = 0.0

        def advance(amount: float = 1.0, note: str = "") -> None:
            nonlocal done
            done += amount
            self.step(name, done, note)

        self.start(name, total)
        try:
            yield advance
        except BaseException:
            self.close(name, "failed")
            raise
        self.close(name, "finished")
