"""What a GPU kernel is compiled for: the shapes of the runs it takes, and where their numbers lie."""

from typing import NamedTuple

import numpy as np

from ._gpu_tokens import MOST_SUB_SUMS
from ._head_arrays import array_shapes
from ._target import WARP
from ._tokens import SHORT, SUMS

PROMPTS = 4 * WARP  # at most, that a block has threads for at a time
MOST_PARTS = 4  # threads of a prompt, where a block has the whole batch
BLOCKS = 16, 8  # that share the prompts of a run which has much of the card to itself, the most that there is room for
_READERS = 8 * WARP  # threads of each of them
REGISTERS = 128  # of a thread: a block of the most threads takes all that there are
MOST_REGISTERS = 255  # where a block has a processor to itself and fewer threads
REGISTERS_OF_A_PROCESSOR = 2**16
GROUPED = 3  # columns of a sum over prompts that one thread adds up
CHAINS = 16  # of prompts: each is added up by itself, and blocks of one run share them
FLAGS = 3  # that a block shares: whether each layer has diverged, and whether no time is left
LATE = 2  # the last of them
_MOST_BYTES = 48 * 1024 - 4 * FLAGS - 8  # that a block shares beside them without asking the driver for more
_SHARED_BYTES = 47 * 1024  # of them, in what follows
_ON_CHIP_BYTES = 8 * 1024  # of weights: more than that would leave no room beside it
_DRAWN_BYTES = 22 * 1024  # handed over between the threads of a prompt

# What a run's row of integers holds; `LOW` and `HIGH` are the halves of its seed, `MARK` counts the states kept so far.
INTEGERS = LENGTH, BATCH, LOW, HIGH, STEP, STOP, MARK, DIVERGED, OTHER_DIVERGED = tuple(range(9))


class LayerShape(NamedTuple):
    """The shapes of one layer's weights."""

    number: int
    rank: int
    values: int
    learns_K: bool
    learns_O: bool

    def arrays(self, D: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and type of every array of `Weights`."""
        return array_shapes(self.number, self.rank, self.values, D)

    def size(self, D: int) -> int:
        """How many numbers the weights are."""
        return self.number * (2 * self.rank * D + self.values * (D + 1))

    def bytes(self, D: int) -> int:
        """The size of all arrays."""
        return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in self.arrays(D).values())


class KernelShape(NamedTuple):
    """What a kernel is compiled for: its runs differ in length, law, seed and rate alone."""

    d: int
    softmax: LayerShape | None
    linear: LayerShape | None
    prompts: int
    few: bool = False  # tokens: fewer than there are directions that they would be drawn along
    infinite: bool = False  # many
    moments: int = 0  # that the optimiser carries of each weight
    blocks: int = 1  # that share the prompts of a run
    registers: int = REGISTERS  # of a thread, at most

    @property
    def own(self) -> int:
        """How many prompts a block has threads for, of those that its run reads at a time."""
        return self.prompts // self.blocks

    @property
    def readers(self) -> int:
        """How many threads of a prompt read tokens, at most."""
        return MOST_PARTS if self.blocks == 1 else _READERS // self.own

    @property
    def helper(self) -> int:
        """Which thread of a prompt draws for the first: one of another warp, which goes its own way."""
        return 1 if self.blocks == 1 else WARP // self.own

    @property
    def can_spread(self) -> bool:
        """Whether a run may have several blocks, each with all weights and the readings of all prompts at once."""
        return self.helped and self.on_chip and self.staged == self.prompts == PROMPTS and not self.moments

    @property
    def exchanged(self) -> int:
        """How many numbers the blocks of a run give to one another, twice, so that none waits for those who read.

        They are sums over chains of prompts, and whether time is over.
        """
        return 2 * (len(self.layers) * CHAINS * (self.d + 1) ** 2 + 1) if self.blocks > 1 else 0

    @property
    def columns(self) -> tuple[int, int]:
        """How many columns softmax and linear heads have, two per head."""
        softmax, linear = (0 if heads is None else 2 * heads.number for heads in (self.softmax, self.linear))
        return softmax, linear

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The layers there are, softmax first."""
        return tuple(heads for heads in (self.softmax, self.linear) if heads is not None)

    @property
    def size(self) -> int:
        """How many numbers a state is."""
        return sum(heads.size(self.d + 1) for heads in self.layers)

    @property
    def width(self) -> int:
        """How many threads go along the columns of matrices: a power of two, a warp's at most."""
        return min(WARP, 2 ** max(self.d, 1).bit_length())

    @property
    def single(self) -> bool:
        """Whether no thread has more than one entry of a matrix."""
        tallest = max(self.d + 1, *(max(heads.rank, heads.values) for heads in self.layers))
        return self.on_chip and self.d < self.width and tallest * self.width <= self.prompts

    @property
    def on_chip(self) -> bool:
        """Whether the weights fit beside what else a block shares."""
        return self._all_weights_bytes <= _ON_CHIP_BYTES

    @property
    def _all_weights_bytes(self) -> int:
        """The size of the weights and of the law of the prompts."""
        D, d = self.d + 1, self.d
        law = 8 * (D * D + D * d + d) + 4 * 2 * d * d
        return sum(heads.bytes(D) for heads in self.layers) + law

    @property
    def _weights_bytes(self) -> int:
        return self._all_weights_bytes if self.on_chip else 0

    @property
    def fixed_bytes(self) -> int:
        """What every block takes: for weights, for what is handed over, and for which layer has diverged."""
        totals = 8 * (len(SUMS) * self.own if self.blocks > 1 else 1)
        return self._weights_bytes + 4 * max(self.drawn_rows, 1) * self.own + totals + 4 * FLAGS

    @property
    def staged(self) -> int:
        """Prompts whose readings a block shares at a time."""
        lanes = self.prompts
        while lanes > 1 and self._of_readings(lanes) > self._room:
            lanes = -(-lanes // 2)
        return lanes

    @property
    def _room(self) -> int:
        """Bytes that are left beside weights and what is handed over."""
        return _SHARED_BYTES - (_ON_CHIP_BYTES if self.on_chip else 0) - 4 * self.drawn_rows * self.own

    @property
    def rows_across(self) -> int:
        """How many rows are drawn across the columns of one head of each layer."""
        return (2 * (1 + (self.linear is not None)) + 2 * (self.linear is not None)) * (self.d + 1)

    @property
    def helped(self) -> bool:
        """Whether a second thread of a prompt draws for the first: then a block shares what it draws."""
        one_head = self.softmax is not None and all(heads.number == 1 for heads in self.layers)
        if self.few or self.infinite or not one_head:
            return False
        drawn, sums = (4 * self.prompts * rows for rows in (3 + self.rows_across + 4, len(SUMS) * (MOST_PARTS - 1)))
        return drawn <= _DRAWN_BYTES and self._weights_bytes + drawn + sums <= _MOST_BYTES

    @property
    def instance_rows(self) -> int:
        """How many rows that thread draws for the query, its label and the task."""
        return -(-(2 * self.d + 1) // 4) * 4

    @property
    def pairs_ahead(self) -> int:
        """How many pairs of tokens it draws while the first thread finds the directions to read them along.

        Short prompts alone. They lie where the thread that reads them then puts readings: it must not meet another's.
        """
        rows = self._room // (4 * (self.own + 1)) - self.instance_rows
        return min(max(0, rows) // 4, SHORT // 2) if self.helped and self.staged == self.prompts else 0

    @property
    def drawn_rows(self) -> int:
        """How many rows the threads of a prompt hand over to one another."""
        one_head = self.softmax is not None and self.softmax.number == 1
        return 3 + (self.rows_across + 4 if self.helped else 0) if one_head else 0

    @property
    def reading_rows(self) -> int:
        """How many rows the query and the readings of one head of each layer are."""
        return self.d + 2 * len(self.layers) * (self.d + 1)

    def _of_readings(self, lanes: int) -> int:
        """Bytes of these rows, and of sums of them in pieces."""
        pieces = len(self.layers) * self.pieces * (self.d + 1) ** 2 if self.pieces > 1 else 0
        return 4 * ((lanes + 1) * self.reading_rows + pieces)

    @property
    def groups(self) -> int:
        """Into how many groups of `GROUPED` the columns of a sum over prompts are cut; a thread has one of them."""
        return -(-(self.d + 1) // GROUPED)

    @property
    def pieces(self) -> int:
        """Into how many sums each sum over prompts is cut, so that each thread has a group of one: a power of two."""
        most = self.prompts // ((self.d + 1) * self.groups)
        return 8 if most >= 8 else 4 if most >= 4 else 2 if most >= 2 else 1

    def shared_bytes(self, parts: int) -> int:
        """What a block takes for readings, for what is drawn ahead, or for sums over tokens of that many threads."""
        ahead = (self.own + 1) * (self.instance_rows + 4 * self.pairs_ahead) if self.helped else 0
        sums = MOST_SUB_SUMS if self.blocks > 1 else MOST_PARTS - 1 if parts > 1 else 0
        return max(self._of_readings(self.staged), 4 * ahead, 4 * self.own * len(SUMS) * sums)
