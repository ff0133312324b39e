"""Runs on a GPU: many side by side in one launch, each a block of threads, in launches of a second or so."""

import contextlib
import gc
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from largeprompt import _device
from largeprompt.dynamics import FAR, AbstractTrainer, Layers, State, Training

from ._form import Form, refusal
from ._gpu_kinds import (
    DIVERGED,
    MARK,
    MOST_PARTS,
    NUMBERS,
    OTHER_DIVERGED,
    PROMPTS,
    REGISTERS,
    STEP,
    STOP,
    WHOLE,
    Heads,
    Kind,
)
from ._target import PLAIN_PYTHON, WARP

SECONDS = 1.0  # of a launch: what an interrupt or a progress bar waits for
_KEPT_BYTES = 2**28  # of states kept in a launch
_REGISTERS_OF_A_PROCESSOR = 2**16
_TOKENS_OF_ONE_THREAD = 96  # from which on a prompt has several
_WITHOUT_TOKENS = 300.0  # what a step costs beside its tokens, in tokens


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of garbage: compiling makes millions of objects that it would look through many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Laws(NamedTuple):
    """`Law` for many runs, each array with runs first."""

    B: Any
    Bq: Any
    F: Any
    Fq: Any
    scales: Any


class Room(NamedTuple):
    """The arrays of `Weights` for many runs."""

    K: Any
    Q: Any
    V: Any
    O: Any
    K_hat: Any
    Q_hat: Any
    v: Any
    U_hat: Any
    v_hat: Any
    dU: Any
    dv: Any
    dK: Any
    dQ: Any
    moved: Any


class GpuRun(NamedTuple):
    """A training to carry out: from a state to `stop`, keeping the states after the steps in `marks`, in order."""

    training: Training
    state: State
    stop: int
    marks: Sequence[int] | np.ndarray = ()


class Segment(NamedTuple):
    """How far a launch has brought a training: its state, and what was kept on the way, steps first in every array."""

    state: State
    steps: np.ndarray
    kept: Layers


_compiled: set[Any] = set()  # loops


class GpuBatch:
    """Trainings of any lengths, laws and shapes on one GPU."""

    def __init__(self, runs: Sequence[GpuRun]):
        for run in runs:
            steps = [run.state.step, *run.marks]
            if any(later <= step for step, later in itertools.pairwise(steps)) or steps[-1] > run.stop:
                raise ValueError(f"marks are {run.marks}; they must increase from above {steps[0]} to {run.stop}")
        self._forms = [Form(run.training, run.state.layers) for run in runs]
        kinds = [_kind(run.training, form) for run, form in zip(runs, self._forms, strict=True)]
        groups = []
        for kind in dict.fromkeys(kinds):
            numbers = [i for i, other in enumerate(kinds) if other == kind]
            groups.append((numbers, _Group(*kind, [(runs[i], self._forms[i]) for i in numbers])))
        self._groups = sorted(groups, key=lambda group: -group[1].longest)
        self._running: list[tuple[list[int], _Group]] = []
        self._layers = [run.state.layers for run in runs]

    @property
    def shares(self) -> list[float]:
        """Of the card, that each training takes while it is under way."""
        found = {i: group.share for numbers, group in self._groups for i in numbers}
        return [found[i] for i in range(len(found))]

    def advance(self, seconds: float = SECONDS) -> dict[int, Segment]:
        """A launch of about that long, and what came of it."""
        self.launch(seconds)
        return self.collect()

    def launch(self, seconds: float = SECONDS) -> None:
        """Set all trainings that are not at their end to work for about that long, without waiting for them.

        Those with most to do come first: where a card cannot hold all at once, others follow as these end.
        """
        self._running = [group for group in self._groups if group[1].prepare()]
        if not self._running:
            return
        for _, group in self._running:  # before a clock runs
            group.compile()
        self._deadline = self._running[0][1].on_card(np.zeros(1, np.int64))
        for _, group in self._running:  # only now: a copy to the card waits for all that was launched before
            group.launch(seconds, self._deadline)

    def collect(self) -> dict[int, Segment]:
        """Wait for the launch; the trainings that it moved, by their number. None is left: an empty one."""
        segments = {}
        for numbers, group in self._running:
            for i, (step, vector, diverged, steps, kept) in group.collect().items():
                form, layers = self._forms[numbers[i]], self._layers[numbers[i]]
                state = State(step, form.layers(layers, vector), form.in_order(diverged))
                segments[numbers[i]] = Segment(state, steps, form.layers(layers, kept))
        return segments


def _kind(training: Training, form: Form) -> tuple[Kind, int]:
    """What carries it out, and the threads of a prompt."""
    softmax, linear = (
        None if w is None else Heads(w.K.shape[0], w.K.shape[1], w.V.shape[1], w.learns_K, w.learns_O)
        for w in (form.softmax, form.linear)
    )
    prompts = min(PROMPTS, -(-training.batch // WARP) * WARP)
    few, parts = softmax is not None and 4 * softmax.number > training.L, len(form.weights)
    if softmax is not None and softmax.number == 1 and not few and math.inf != training.L:
        parts = 2
        while parts < MOST_PARTS and _TOKENS_OF_ONE_THREAD * parts < training.L:
            parts *= 2
    return Kind(training.task.dim - 1, softmax, linear, prompts, few, math.inf == training.L), parts


class _Group:
    """Trainings of one kind, and what the card holds of them."""

    def __init__(self, kind: Kind, parts: int, members: Sequence[tuple[GpuRun, Form]]):
        from ._gpu_kernel import cuda, train  # imports what is an extra

        self._cuda, self._kind, self._loop = cuda, kind, train(kind)
        self._threads, self._shared = kind.prompts * parts, kind.shared_bytes(parts)
        self._stream = self._cuda.stream()
        self._stops = np.array([run.stop for run, _ in members])
        self._marks = [np.asarray(run.marks, np.int64) for run, _ in members]
        self._seen = np.zeros(len(members), np.int64)
        cost = np.array([_WITHOUT_TOKENS + (form.length if form.softmax is not None else 0.0) for _, form in members])
        cost *= self._stops - np.array([run.state.step for run, _ in members])
        self.longest, self._ranked = float(np.max(cost)), np.argsort(-cost, kind="stable")
        self._whole = np.zeros((len(members), len(WHOLE)), np.int64)
        numbers = np.zeros((len(members), len(NUMBERS)))
        for i, (run, form) in enumerate(members):
            training, law = run.training, form.law
            seed = training.seed
            diverged = [-1 if at is None else at for at in form.ordered(run.state.diverged)]
            of_law = (int(law.plain), int(law.diagonal))
            at = (run.state.step, run.state.step, 0, diverged[0], diverged[-1])
            self._whole[i] = (form.length, training.batch, seed & 0xFFFFFFFF, seed >> 32, *of_law, *at)
            scales = [w.scale for w in form.weights]
            numbers[i] = (law.noise, training.rate * training.loss_factor, scales[0], scales[-1])
        to_card = self._cuda.to_device
        laws = Laws(*(np.stack([getattr(form.law, name) for _, form in members]) for name in Laws._fields))
        self._laws, self._numbers = Laws(*map(to_card, laws)), to_card(numbers)
        self._states = to_card(np.stack([form.vector(run.state.layers) for run, form in members]))
        self._rooms = [self._room(heads) for heads in kind.layers]

    def _room(self, heads: Heads) -> Room:
        runs = 1 if self._kind.on_chip else len(self._stops)
        fields = heads.fields(self._kind.d + 1).values()
        return Room(*(self._cuda.to_device(np.zeros((runs, *shape), kind)) for shape, kind in fields))

    def prepare(self) -> bool:
        """Bring what a launch needs to the card, the longest runs first; whether there is any to launch."""
        if not np.any(self._left() > 0):
            return False
        most = max(1, int(_KEPT_BYTES // (8 * self._kind.size * len(self._stops))))
        window = [marks[seen : seen + most] for marks, seen in zip(self._marks, self._seen, strict=True)]
        width = max(1, *(len(marks) for marks in window))
        marks = np.full((len(window), width), -1, np.int64)
        for i, row in enumerate(window):
            marks[i, : len(row)] = row
            beyond = self._seen[i] + most < len(self._marks[i])
            self._whole[i, STOP] = row[-1] if beyond else self._stops[i]
        self._whole[:, MARK] = 0
        self._window = window
        order = self._ranked[self._left()[self._ranked] > 0]
        to_card = self._cuda.to_device
        self._on_card = to_card(self._whole), self._cuda.device_array((len(window), width, self._kind.size))
        self._order, self._marks_on_card, self._moved = to_card(order), to_card(marks), order
        return True

    def on_card(self, array: np.ndarray) -> Any:
        """A copy in the card's memory."""
        return self._cuda.to_device(array)

    def compile(self) -> None:
        """Have the loop compiled, by a launch in which no run has a step to do."""
        if self._loop in _compiled:
            return
        whole = self._whole.copy()
        whole[:, STOP] = whole[:, STEP]
        self._call(1, self.on_card(whole), self.on_card(np.zeros(1, np.int64)), 1, 1.0)
        self._stream.synchronize()
        _compiled.add(self._loop)

    def launch(self, seconds: float, deadline: Any) -> None:
        """Set the blocks to work, until the deadline that the first of them sets."""
        budget, speed = 1, 1.0  # of a simulated clock
        if not PLAIN_PYTHON:
            budget, speed = int(seconds * 1e9), self._cuda.get_current_device().CLOCK_RATE / 1e6
        self._call(len(self._moved), self._on_card[0], deadline, budget, speed)

    def _call(self, blocks: int, whole: Any, deadline: Any, budget: int, speed: float) -> None:
        with _uncollected(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Grid size")  # one run leaves most of a card idle
            self._loop[blocks, self._threads, self._stream, self._shared](
                self._order,
                whole,
                self._numbers,
                self._laws,
                self._rooms[0],
                self._rooms[-1],
                self._states,
                self._marks_on_card,
                self._on_card[1],
                FAR,
                deadline,
                budget,
                speed,
            )

    def collect(self) -> dict[int, tuple]:
        """Wait for the launch; what became of each training that was in it."""
        self._stream.synchronize()
        whole, kept = (part.copy_to_host() for part in self._on_card)
        states = self._states.copy_to_host()
        found = {}
        for i in self._moved[whole[self._moved, STEP] > self._whole[self._moved, STEP]]:
            self._whole[i] = whole[i]
            diverged = whole[i, [DIVERGED, OTHER_DIVERGED][: len(self._kind.layers)]]
            steps, rows = self._window[i][: whole[i, MARK]], kept[i, : whole[i, MARK]]
            if np.all(diverged >= 0):  # the loop has ended, and all stays as it is
                rest = self._marks[i][self._seen[i] + len(steps) :]
                steps, rows = np.append(steps, rest), np.concatenate([rows, np.tile(states[i], (len(rest), 1))])
                self._whole[i, STEP] = self._stops[i]
            self._seen[i] += len(steps)
            ends = tuple(None if at < 0 else int(at) for at in diverged)
            found[int(i)] = int(self._whole[i, STEP]), states[i], ends, steps, rows
        return found

    @property
    def share(self) -> float:
        """Of the card, that a block takes: of the registers or of the memory of one of its processors."""
        at_once = _REGISTERS_OF_A_PROCESSOR // (REGISTERS * self._threads)
        if PLAIN_PYTHON:
            return 1 / max(1, at_once)
        card = self._cuda.get_current_device()
        bytes_of_block = self._kind.fixed_bytes + self._shared
        at_once = min(at_once, card.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // bytes_of_block)
        return 1 / max(1, at_once) / card.MULTIPROCESSOR_COUNT

    def _left(self) -> np.ndarray:
        return self._stops - self._whole[:, STEP]


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
