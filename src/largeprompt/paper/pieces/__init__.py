"""What figures and claims are computed from besides training runs: measurements and exact values, each kept once made."""

from ._piece import AbstractPiece as AbstractPiece
from ._piece import Done as Done
from ._piece import Needed as Needed
from ._piece import Shelf as Shelf
