"""Runs on a GPU: many side by side, each in its own block of threads, in launches of about a second."""

import itertools
import math
import warnings
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from largeprompt import _device
from largeprompt._compiled import without_garbage_collection
from largeprompt.dynamics import FAR, AbstractTrainer, Layers, State, Training

from ._batch import Law
from ._gpu_program import prepare
from ._gpu_shapes import (
    BLOCKS,
    DIVERGED,
    INTEGERS,
    MARK,
    MOST_PARTS,
    MOST_REGISTERS,
    OTHER_DIVERGED,
    PROMPTS,
    REGISTERS_OF_A_PROCESSOR,
    STEP,
    STOP,
    KernelShape,
    LayerShape,
)
from ._head_arrays import Weights
from ._target import PLAIN_PYTHON, WARP
from ._tokens import SHORT
from ._training_arrays import TrainingArrays, refusal
from ._update import coefficients

SECONDS = 1.0  # of a launch: what an interrupt or a progress bar waits for
_KEPT_BYTES = 2**28  # of states kept in a launch
_TOKENS_OF_ONE_THREAD = 96  # from which on a prompt has several
_WITHOUT_TOKENS = 300.0  # what a step costs beside its tokens, in tokens


# The arrays of `Weights` for many runs, which come first in each.
_ARRAYS = [name for name, kind in Weights.__annotations__.items() if kind is np.ndarray]
_Room = namedtuple("_Room", _ARRAYS)  # pyrefly: ignore[bad-class-definition]


class GpuRun(NamedTuple):
    """A training to run from a state to `stop`, which keeps the states after the steps in `marks`, in order."""

    training: Training
    state: State
    stop: int
    marks: Sequence[int] | np.ndarray = ()


class Segment(NamedTuple):
    """What one launch did for a training: its state then, and those kept on the way, steps first in every array."""

    state: State
    steps: np.ndarray
    kept: Layers


class GpuBatch:
    """Trainings of any lengths, laws and shapes that run together on one GPU.

    Where few of them share the card (`among` so many), each with long prompts has several of its processors.
    """

    def __init__(self, runs: Sequence[GpuRun], among: int | None = None):
        for run in runs:
            steps = [run.state.step, *run.marks]
            if any(later <= step for step, later in itertools.pairwise(steps)) or steps[-1] > run.stop:
                raise ValueError(f"marks are {run.marks}; they must increase from above {steps[0]} to {run.stop}")
        self._arrays = [TrainingArrays(run.training, run.state.layers) for run in runs]
        room = _processors() // max(1, among or len(runs))
        shapes = [_shape_of(run.training, arrays, room) for run, arrays in zip(runs, self._arrays, strict=True)]
        groups = []
        for shape in dict.fromkeys(shapes):
            numbers = [i for i, other in enumerate(shapes) if other == shape]
            groups.append((numbers, _Group(*shape, [(runs[i], self._arrays[i]) for i in numbers])))
        self._groups = sorted(groups, key=lambda group: -group[1].longest)
        self._running: list[tuple[list[int], _Group]] = []
        self._layers, self._moments = [run.state.layers for run in runs], [run.state.moments for run in runs]

    @property
    def shares(self) -> list[float]:
        """The share of the card that each training takes while it runs."""
        found = {i: group.share for numbers, group in self._groups for i in numbers}
        return [found[i] for i in range(len(found))]

    def advance(self, seconds: float = SECONDS) -> dict[int, Segment]:
        """Launch for about that long, wait, and return what was done."""
        self.launch(seconds)
        return self.collect()

    def launch(self, seconds: float = SECONDS) -> None:
        """Start all trainings that are not at their end for about that long, without waiting for them.

        Those with most to do come first: where a card cannot hold all at once, others follow as these end.
        """
        self._running = [group for group in self._groups if group[1].prepare()]
        if not self._running:
            return
        self._deadline = self._running[0][1].on_card(np.zeros(1, np.int64))
        for _, group in self._running:  # before a clock runs
            group.compile(self._deadline)
        for _, group in self._running:  # only now: a copy to the card waits for all that was launched before
            group.launch(seconds, self._deadline)

    def collect(self) -> dict[int, Segment]:
        """Wait for the launch; return the trainings that it advanced, by number: none where all are at their end."""
        segments = {}
        for numbers, group in self._running:
            for i, (step, vector, diverged, steps, kept) in group.collect().items():
                arrays, layers = self._arrays[numbers[i]], self._layers[numbers[i]]
                weights, moments = np.split(vector, [kept.shape[-1]])
                carried = arrays.moments(self._moments[numbers[i]], moments)
                state = State(step, arrays.layers(layers, weights), arrays.in_order(diverged), carried)
                segments[numbers[i]] = Segment(state, steps, arrays.layers(layers, kept))
        return segments


def _processors() -> int:
    """The multiprocessors of the card; of a simulated one, which runs blocks one after the other, none."""
    from ._cuda import cuda

    return 0 if PLAIN_PYTHON else cuda.get_current_device().MULTIPROCESSOR_COUNT


def _shape_of(training: Training, arrays: TrainingArrays, room: int = 0) -> tuple[KernelShape, int]:
    """The shape of its kernel and the number of threads of each prompt, with room on so many multiprocessors."""
    softmax, linear = (
        None if w is None else LayerShape(w.K.shape[0], w.K.shape[1], w.V.shape[1], w.learns_K, w.learns_O)
        for w in (arrays.softmax, arrays.linear)
    )
    prompts = min(PROMPTS, -(-training.batch // WARP) * WARP)
    few, parts = softmax is not None and 4 * softmax.number > training.L, len(arrays.weights)
    if softmax is not None and softmax.number == 1 and not few and math.inf != training.L:
        parts = 2
        while parts < MOST_PARTS and _TOKENS_OF_ONE_THREAD * parts < training.L:
            parts *= 2
    infinite, moments = math.inf == training.L, training.optimiser.moments
    shape = KernelShape(training.task.dim - 1, softmax, linear, prompts, few, infinite, moments)
    blocks = next((blocks for blocks in BLOCKS if blocks <= room), 1)
    if blocks > 1 and SHORT < training.L < math.inf and shape.can_spread:
        shape = shape._replace(blocks=blocks)
        parts = shape.readers
    if room > 0:
        warps = -(-shape.own * parts // (4 * WARP)) * 4  # dealt out to the four parts of a multiprocessor
        most = REGISTERS_OF_A_PROCESSOR // (WARP * warps) // 8 * 8
        shape = shape._replace(registers=min(most, MOST_REGISTERS))
    return shape, parts


class _Group:
    """Trainings that one kernel runs, and what the card holds of them."""

    def __init__(self, shape: KernelShape, parts: int, members: Sequence[tuple[GpuRun, TrainingArrays]]):
        from ._gpu_kernel import cuda, train  # imports what is an extra

        self._cuda, self._shape, self._loop = cuda, shape, train(shape)
        self._threads, self._shared = shape.own * parts, shape.shared_bytes(parts)
        self._stream = self._cuda.stream()
        self._stops = np.array([run.stop for run, _ in members])
        self._marks = [np.asarray(run.marks, np.int64) for run, _ in members]
        self._seen = np.zeros(len(members), np.int64)
        cost = np.array(
            [_WITHOUT_TOKENS + (arrays.length if arrays.softmax is not None else 0.0) for _, arrays in members]
        )
        cost *= self._stops - np.array([run.state.step for run, _ in members])
        self.longest, self._ranked = float(np.max(cost)), np.argsort(-cost, kind="stable")
        self._integers = np.zeros((len(members), len(INTEGERS)), np.int64)
        for i, (run, arrays) in enumerate(members):
            training, step = run.training, run.state.step
            diverged = [-1 if at is None else at for at in arrays.ordered(run.state.diverged)]
            seed = training.seed & 0xFFFFFFFF, training.seed >> 32
            self._integers[i] = (arrays.length, training.batch, *seed, step, step, 0, diverged[0], diverged[-1])
        self._laws = Law(
            *(self.on_card(np.stack(parts)) for parts in zip(*(arrays.law for _, arrays in members), strict=True))
        )
        self._rates = self.on_card(np.array([run.training.rate * run.training.loss_factor for run, _ in members]))
        self._scales = self.on_card(np.array([[w.scale for w in arrays.weights] for _, arrays in members]))
        self._coefficients = self.on_card(np.stack([coefficients(run.training) for run, _ in members]))
        states = [(arrays.vector(run.state.layers), arrays.vectors(run.state.moments)) for run, arrays in members]
        self._states = self.on_card(np.stack([np.concatenate(both) for both in states]))
        self._rooms = [self._room(layer) for layer in shape.layers]
        together = len(members) if shape.blocks > 1 else 1
        self._exchanged = together, max(1, shape.exchanged)

    def _room(self, layer: LayerShape) -> _Room:
        runs = 1 if self._shape.on_chip else len(self._stops)
        shapes = layer.arrays(self._shape.d + 1).items()
        return _Room(**{name: self.on_card(np.zeros((runs, *shape), kind)) for name, (shape, kind) in shapes})

    def prepare(self) -> bool:
        """Bring what a launch needs to the card, the longest runs first; whether there is any to launch."""
        if not np.any(self._left() > 0):
            return False
        most = max(1, int(_KEPT_BYTES // (8 * self._shape.size * len(self._stops))))
        window = [marks[seen : seen + most] for marks, seen in zip(self._marks, self._seen, strict=True)]
        width = max(1, *(len(marks) for marks in window))
        marks = np.full((len(window), width), -1, np.int64)
        for i, row in enumerate(window):
            marks[i, : len(row)] = row
            beyond = self._seen[i] + most < len(self._marks[i])
            self._integers[i, STOP] = row[-1] if beyond else self._stops[i]
        self._integers[:, MARK] = 0
        self._window = window
        order = self._ranked[self._left()[self._ranked] > 0]
        self._on_card = self.on_card(self._integers), self._cuda.device_array((len(window), width, self._shape.size))
        self._order, self._marks_on_card, self._launched = self.on_card(order), self.on_card(marks), order
        self._readings = self.on_card(np.zeros(self._exchanged, np.int64))
        return True

    def on_card(self, array: np.ndarray) -> Any:
        """A copy in the card's memory."""
        return self._cuda.to_device(array)

    def compile(self, deadline: Any) -> None:
        """Have the loop compiled, or loaded."""
        if not PLAIN_PYTHON:
            with without_garbage_collection():
                prepare(self._loop, self._shape, self._arguments(deadline, 1, 1.0))

    def launch(self, seconds: float, deadline: Any) -> None:
        """Start the blocks; they stop at the deadline that the first of them sets."""
        budget, speed = 1, 1.0  # of a simulated clock
        if not PLAIN_PYTHON:
            budget, speed = int(seconds * 1e9), self._cuda.get_current_device().CLOCK_RATE / 1e6
        blocks = len(self._launched) * self._shape.blocks
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Grid size")  # one run leaves most of a card idle
            loop = self._loop[blocks, self._threads, self._stream, self._shared]
            loop(*self._arguments(deadline, budget, speed))

    def _arguments(self, deadline: Any, budget: int, speed: float) -> tuple[Any, ...]:
        integers, kept = self._on_card
        return (
            self._order,
            integers,
            self._rates,
            self._coefficients,
            self._scales,
            self._laws,
            self._rooms[0],
            self._rooms[-1],
            self._states,
            self._marks_on_card,
            kept,
            self._readings,
            FAR,
            deadline,
            budget,
            speed,
        )

    def collect(self) -> dict[int, tuple]:
        """Wait for the launch; return what became of each training that was in it."""
        self._stream.synchronize()
        integers, kept = (part.copy_to_host() for part in self._on_card)
        states = self._states.copy_to_host()
        found = {}
        for i in self._launched[integers[self._launched, STEP] > self._integers[self._launched, STEP]]:
            self._integers[i] = integers[i]
            diverged = integers[i, [DIVERGED, OTHER_DIVERGED][: len(self._shape.layers)]]
            steps, rows = self._window[i][: integers[i, MARK]], kept[i, : integers[i, MARK]]
            if np.all(diverged >= 0):  # the loop has ended, and all stays as it is
                rest, weights = self._marks[i][self._seen[i] + len(steps) :], states[i, : self._shape.size]
                steps, rows = np.append(steps, rest), np.concatenate([rows, np.tile(weights, (len(rest), 1))])
                self._integers[i, STEP] = self._stops[i]
            self._seen[i] += len(steps)
            ends = tuple(None if at < 0 else int(at) for at in diverged)
            found[int(i)] = int(self._integers[i, STEP]), states[i], ends, steps, rows
        return found

    @property
    def share(self) -> float:
        """The share of the card that a run takes, by registers or by memory of the processors of its blocks."""
        at_once = REGISTERS_OF_A_PROCESSOR // (self._shape.registers * self._threads)
        if PLAIN_PYTHON:
            return self._shape.blocks / max(1, at_once)
        card = self._cuda.get_current_device()
        bytes_of_block = self._shape.fixed_bytes + self._shared
        at_once = min(at_once, card.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // bytes_of_block)
        return self._shape.blocks / max(1, at_once) / card.MULTIPROCESSOR_COUNT

    def _left(self) -> np.ndarray:
        return self._stops - self._integers[:, STEP]


class GpuTrainer(AbstractTrainer):
    """One training on a GPU: the random numbers of `FusedTrainer`, the same sums in another order."""

    name = "fused"

    def __init__(self, training: Training, layers: Layers):
        reason = refusal(training, layers) or _device.gpu_refusal("cuda")
        if reason:
            raise ValueError(f"the fused engine does not apply on a GPU: {reason}")
        super().__init__(training, layers)

    def _advance(self, state: State, stop: int) -> State:
        batch = GpuBatch([GpuRun(self._training, state, stop)])
        while segments := batch.advance():
            state = segments[0].state
        return state._replace(step=stop)
