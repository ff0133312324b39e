"""The progress of a reproduction: a bar for training and one for computations."""

from largeprompt.paper import Listener, Plan
from largeprompt.paper.pieces import AbstractPiece

from ._view import View

_COMPUTING = "computing"


class PaperBars(View, Listener):
    """Both kinds of work, with the time left."""

    def __init__(self, plan: Plan):
        super().__init__()
        self._seconds = {piece.name: piece.seconds for piece in plan.pieces_to_do}
        self._plan, self._made, self._done = plan, 0, 0.0
        self.start(_COMPUTING, max(sum(self._seconds.values()), 1e-9))

    def began(self, piece: AbstractPiece) -> None:
        self.step(_COMPUTING, self._done, piece.title)

    def part(self, piece: AbstractPiece, what: str) -> None:
        self.step(_COMPUTING, self._done, f"{piece.title}: {what}")

    def made(self, piece: AbstractPiece, found: bool) -> None:
        self._made += 1
        self._done += 0.0 if found else self._seconds.get(piece.name, 0.0)
        self.step(_COMPUTING, self._done, f"{self._made} of {len(self._plan.pieces)}")
