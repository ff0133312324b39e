"""Trainings and runs that the GPU engine carries out in a simulator, and the processor's engine beside it."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import largeprompt as lp
from catalogue import matrix
from engine_catalogue import CASES, KMS, head_pair, heads, pair
from largeprompt import lab
from largeprompt.dynamics import Adam, Layers, Momentum, State, Training
from largeprompt.engine import FusedTrainer, GpuRun
from largeprompt.icl import LinearRegression, kms

STEPS = (1, 3)  # after which states are compared


class Trial(NamedTuple):
    """A training to run on both, from a step on, with other values for constants of the GPU's modules."""

    training: Training
    layers: Layers
    constants: Mapping[str, int] = MappingProxyType({})
    first: int = 0
    rounding: float = 1e-5  # of a layer's change: both add up in float32, in another order

    @property
    def start(self) -> State:
        """Where it begins."""
        return FusedTrainer(self.training, self.layers).start()._replace(step=self.first)

    @property
    def stops(self) -> tuple[int, ...]:
        """After which steps its states are compared."""
        return tuple(self.first + step for step in STEPS)


def training(L: int | float, task: LinearRegression = KMS, **options: Any) -> Training:
    """A small one; a simulated thread costs milliseconds."""
    usual: dict[str, Any] = {"batch": 3, "rate": 0.02, "seed": 3}
    return Training(task, L, **usual | options)


def one_head(outputs: int, with_O: bool = True) -> Layers:
    """K Q V O of softmax and of linear attention, with more values than one."""
    shapes = ((2, 3), (2, 3), (2 if with_O else outputs, 3), (outputs, 2))
    both = [[matrix(60 + 10 * kind + i, *shape) for i, shape in enumerate(shapes)] for kind in range(2)]
    return tuple(
        lp.Head(K, Q, V, O if with_O else None, 0.7, kind)
        for (K, Q, V, O), kind in zip(both, ("softmax", "linear"), strict=True)
    )


SOFTMAX, LINEAR = pair(3)
HARD = pair(3, 15.0)
THREE = LinearRegression(kms(3, 0.5), 0.1)
MANY_PARTS = {"_gpu._TOKENS_OF_ONE_THREAD": 1, "_gpu_prompts.SHORT": 4}
ADAM = Adam(0.7, 0.9, 1e-3)  # with such an ε rounding of small gradients stays small
UNSTEADY = ("two heads, hard maximum", "three heads, more columns than dimensions")  # at the rate of the others
TRIALS = {
    name: Trial(training(case.L, case.task, rate=5e-4 if name in UNSTEADY else 0.02), case.layers)
    for name, case in CASES.items()
} | {
    "softmax alone, three tokens": Trial(training(3), (SOFTMAX,)),
    "softmax alone": Trial(training(6), (SOFTMAX,)),
    "softmax alone, infinitely many tokens": Trial(training(math.inf), (SOFTMAX,)),
    "softmax alone, two heads": Trial(training(9, THREE), (heads(2, 4, "softmax", 50, rank=3),)),
    "linear alone, one token": Trial(training(1), (LINEAR,)),
    "linear alone": Trial(training(6), (LINEAR,)),
    "linear alone, infinitely many tokens": Trial(training(math.inf), (LINEAR,)),
    "linear alone, two heads": Trial(training(9, THREE), (heads(2, 4, "linear", 90, rank=3),)),
    "linear before softmax": Trial(training(6), (LINEAR, SOFTMAX)),
    "K Q V O": Trial(training(6), one_head(1)),
    "K Q V O with a token of outputs": Trial(training(6), one_head(3)),
    "K Q V without O": Trial(training(6), one_head(3, with_O=False)),
    "more prompts than threads": Trial(training(6, batch=18), pair(3)),
    "one prompt": Trial(training(6, batch=1), pair(3)),
    "more tokens than are added up in float32": Trial(training(99, batch=4), pair(3), {"_gpu_prompts.CHUNK": 2}),
    "four threads a prompt": Trial(training(23), pair(3), MANY_PARTS),
    "four threads a prompt, more prompts than threads": Trial(training(10, batch=18), pair(3), MANY_PARTS),
    "four threads a prompt, softmax alone": Trial(training(23), (SOFTMAX,), MANY_PARTS),
    "four threads a prompt, K Q V O": Trial(training(23), one_head(1), MANY_PARTS),
    "some tokens drawn ahead": Trial(training(9), pair(3), {"_gpu_shapes.KernelShape.pairs_ahead": 2}),
    "no token drawn ahead": Trial(training(9), pair(3), {"_gpu_shapes.KernelShape.pairs_ahead": 0}),
    "four threads a prompt, as many sums as there are": Trial(
        training(99), pair(3), MANY_PARTS | {"_gpu_tokens._TOKENS": 1}
    ),
    "four threads a prompt, sixteen sums": Trial(training(15), pair(3), MANY_PARTS | {"_gpu_tokens._TOKENS": 1}),
    "threads without a token": Trial(training(5), pair(3), MANY_PARTS),
    # f counted from 0, not from that of the largest score: and no linear head, which would follow rounding alone
    "threads without a token, hard maximum": Trial(training(5), HARD[:1], MANY_PARTS, rounding=1e-3),
    "four threads a prompt, hard maximum": Trial(training(23), HARD[:1], MANY_PARTS, rounding=1e-3),
    "one thread draws all of a prompt": Trial(training(23), pair(3), MANY_PARTS | {"_gpu_shapes._DRAWN_BYTES": 0}),
    "weights in the card's memory": Trial(training(6), pair(3), {"_gpu_shapes._ON_CHIP_BYTES": 0}),
    "weights in the card's memory, two heads": Trial(
        training(9, THREE), head_pair(2, 4, rank=3), {"_gpu_shapes._ON_CHIP_BYTES": 0}
    ),
    "one prompt at a time shares its readings": Trial(training(6), pair(3), {"_gpu_shapes._SHARED_BYTES": 0}),
    "few prompts at a time share their readings": Trial(
        training(6, batch=18), pair(3), {"_gpu_shapes.KernelShape.staged": 3}
    ),
    "both halves of a seed, and another loss": Trial(training(6, seed=2**40 + 12345, loss_factor=2.0), pair(3)),
    "the last steps there are": Trial(training(6), pair(3), first=2**32 - 5),
    "momentum": Trial(training(6, optimiser=Momentum(0.8), loss_factor=2.0), pair(3)),
    "Adam": Trial(training(6, optimiser=ADAM, loss_factor=2.0), pair(3)),
    "Adam, K Q V O": Trial(training(6, optimiser=ADAM), one_head(3)),
    "Adam, two heads": Trial(training(9, THREE, optimiser=ADAM), head_pair(2, 4, rank=3)),
    "momentum, weights in the card's memory": Trial(
        training(6, optimiser=Momentum()), (LINEAR, SOFTMAX), {"_gpu_shapes._ON_CHIP_BYTES": 0}
    ),
}


def unlike() -> list[GpuRun]:
    """Trainings of several kinds, lengths, laws, seeds, steps and numbers of marks."""
    other = LinearRegression(kms(2, -0.6), 0.3, [[1.5, 0.4], [0.4, 0.3]])
    trials = [
        (Trial(training(5, seed=1), pair(3)), 4, ()),
        (Trial(training(9, other, seed=2, rate=0.05), pair(3, 1.0), first=7), 10, (8, 9, 10)),
        (Trial(training(math.inf, seed=2), pair(3)), 2, (1, 2)),
        (Trial(training(6, batch=18), (SOFTMAX,)), 2, (2,)),
        (Trial(training(9, THREE), head_pair(2, 4, rank=3)), 3, (1, 2)),
        (Trial(training(5, seed=1), (LINEAR, SOFTMAX)), 3, (3,)),
        (Trial(training(5, seed=1, optimiser=ADAM), pair(3)), 4, (2,)),
        (Trial(training(9, seed=2, optimiser=Adam(0.5, 0.9)), (LINEAR, SOFTMAX)), 3, (1,)),
        (Trial(training(5, seed=1, optimiser=Momentum()), pair(3)), 3, ()),
    ]
    return [GpuRun(trial.training, trial.start, stop, marks) for trial, stop, marks in trials]


LARGE = lp.SoftmaxAttention(4e8 * np.eye(3), SOFTMAX.V)
DIVERGING = {
    "linear": Trial(training(6, batch=8, rate=0.3), (lp.LinearAttention(3 * LINEAR.U, 3 * LINEAR.V), SOFTMAX)),
    "softmax": Trial(training(6), (LARGE, LINEAR)),
    "both": Trial(training(6, rate=1e9), pair(3)),
}
DIVERGING_STOP, DIVERGING_MARKS = 12, (1, 4, 11, 12)
RECORD = lab.Record(what=("norms", "parameters"), points=3, draws=64)
RUN = lab.Run(L=3, d=2, batch=6, rate=0.02, steps=6, record=RECORD)
RUNS = [
    RUN,
    dataclasses.replace(RUN, weight_seed=1, data_seed=1),
    dataclasses.replace(RUN, L=math.inf, sigma="kms:0.5"),
    dataclasses.replace(RUN, L=math.inf, sigma="kms:0.5", rate=1e9),  # diverges
    dataclasses.replace(RUN, weight_seed=2, steps=0),
]
