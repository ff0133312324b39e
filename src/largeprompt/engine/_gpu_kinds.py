"""What a GPU is given: kinds of runs that one compiled loop carries out, and how their numbers are laid out."""

from typing import NamedTuple

import numpy as np

from ._gpu_tokens import SUMS
from ._target import WARP

f32, f64 = np.float32, np.float64
PROMPTS = 4 * WARP  # at most, that a block has threads for at a time
MOST_PARTS = 4  # threads of a prompt
REGISTERS = 128  # of a thread: a block of the most threads takes all that there are
_SHARED_BYTES = 47 * 1024  # of a block, without asking the driver for more
_ON_CHIP_BYTES = 24 * 1024  # of weights

# what a run's rows of whole numbers and of numbers hold
WHOLE = LENGTH, BATCH, LOW, HIGH, PLAIN, DIAGONAL, STEP, STOP, MARK, DIVERGED, OTHER_DIVERGED = tuple(range(11))
NUMBERS = NOISE, RATE, SCALE, OTHER_SCALE = tuple(range(4))


def width_for(D: int) -> int:
    """How many threads go along the columns of matrices of that dimension: a power of two, a warp's at most."""
    return min(WARP, 2 ** max(D - 1, 1).bit_length())


class Heads(NamedTuple):
    """The shapes of one layer's weights."""

    count: int
    rank: int
    values: int
    learns_K: bool
    learns_O: bool

    def fields(self, D: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and type of every array of `Weights`."""
        h, k, r = self.count, self.rank, self.values
        wide = {
            "K": (h, k, D),
            "Q": (h, k, D),
            "V": (h, r, D),
            "O": (h, r),
            "K_hat": (h, k, D),
            "Q_hat": (h, k, D - 1),
            "v": (h, D),
            "U_hat": (h, D, D - 1),
            "v_hat": (h, D),
            "dU": (h, D, D - 1),
            "dv": (h, D),
            "dK": (k, D),
            "dQ": (k, D),
            "moved": (self.size(D),),
        }
        return {name: (shape, f32 if name in ("U_hat", "v_hat") else f64) for name, shape in wide.items()}

    def size(self, D: int) -> int:
        """How many numbers the weights are."""
        return self.count * (2 * self.rank * D + self.values * (D + 1))

    def bytes(self, D: int) -> int:
        """Of all arrays."""
        return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in self.fields(D).values())


class Kind(NamedTuple):
    """What is compiled: runs of one kind differ in length, law, seed and rate alone."""

    d: int
    softmax: Heads | None
    linear: Heads | None
    prompts: int

    @property
    def layers(self) -> tuple[Heads, ...]:
        """The layers there are, softmax first."""
        return tuple(heads for heads in (self.softmax, self.linear) if heads is not None)

    @property
    def size(self) -> int:
        """How many numbers a state is."""
        return sum(heads.size(self.d + 1) for heads in self.layers)

    @property
    def on_chip(self) -> bool:
        """Whether the weights fit beside what else a block shares."""
        return sum(heads.bytes(self.d + 1) for heads in self.layers) <= _ON_CHIP_BYTES

    @property
    def staged(self) -> int:
        """Prompts whose readings a block shares at a time."""
        room = _SHARED_BYTES - (_ON_CHIP_BYTES if self.on_chip else 0) - 2048
        lanes = self.prompts
        while lanes > 1 and 4 * (lanes + 1) * 3 * (self.d + 1) > room:
            lanes = -(-lanes // 2)
        return lanes

    @property
    def pieces(self) -> int:
        """Into how many sums each sum over prompts is cut, so that each thread has one."""
        return max(1, min(self.prompts // (self.d + 1) ** 2, 8))

    def shared_bytes(self, parts: int) -> int:
        """Of readings, or of the sums over tokens of so many threads a prompt."""
        D = self.d + 1
        readings = 4 * ((self.staged + 1) * 3 * D + (self.pieces * D * D if self.pieces > 1 else 0))
        return max(readings, 8 * self.prompts * (SUMS + 1) * (parts - 1))
