"""Gradients of one batch by both engines, many times over, and the layers and tasks to compare them on."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import largeprompt as lp
from catalogue import matrix
from largeprompt.dynamics import Layers, State, Training
from largeprompt.dynamics._sgd import _after_a_step, batch_gradient
from largeprompt.engine import FusedTrainer, GpuBatch, GpuRun, _fused
from largeprompt.engine._training_arrays import with_arrays
from largeprompt.icl import LinearRegression, kms


def flat(layers) -> np.ndarray:
    """All parameters of layers, or of their gradients, in one row."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(layers)])


def fused_gradients(training: Training, layers: Layers, n: int) -> np.ndarray:
    """The batch gradients of the steps 0 to n - 1, all at the same parameters, a row each."""
    trainer = FusedTrainer(training, layers)
    start = trainer.start()
    with mock.patch.object(_fused, "with_arrays", lambda layer, *arrays: arrays):  # put into layers once for all
        ends = [trainer.advance(start._replace(step=i), i + 1).layers for i in range(n)]
    assert training.rate == 1.0
    moved = tuple(
        with_arrays(layer, *map(np.stack, zip(*arrays, strict=True)))
        for layer, arrays in zip(start.layers, zip(*ends, strict=True), strict=True)
    )
    return flat(layers) - np.concatenate([np.reshape(leaf, (n, -1)) for leaf in jax.tree.leaves(moved)], axis=1)


def gpu_gradients(training: Training, layers: Layers, n: int) -> np.ndarray:
    """The same on a GPU, side by side."""
    start = FusedTrainer(training, layers).start()
    return _moved(training, ends_on_gpu([GpuRun(training, start._replace(step=i), i + 1) for i in range(n)]), layers)


def ends_on_gpu(runs: Sequence[GpuRun], seconds: float = 1.0) -> list[State]:
    """Where trainings end that go side by side, in launches of so many seconds."""
    batch, ends = GpuBatch(runs), [run.state for run in runs]
    while segments := batch.advance(seconds):
        for i, segment in segments.items():
            ends[i] = segment.state
    return ends


def _moved(training: Training, ends: Sequence[State], layers: Layers) -> np.ndarray:
    assert training.rate == 1.0
    return flat(layers) - np.array([flat(end.layers) for end in ends])


def reference_gradients(training: Training, layers: Layers, n: int) -> np.ndarray:
    """As many independent ones by the reference."""
    return np.asarray(_reference(training, layers, jax.random.split(jax.random.key(9), n)))


@eqx.filter_jit
def _reference(training, layers, keys):
    def one(key):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(batch_gradient(training, layers, key))])

    return jax.vmap(one)(keys)


def reference_ends(training: Training, layers: Layers, steps: int, runs: int) -> Layers:
    """Where the reference comes to in some steps, as many times; runs first in every array."""

    @eqx.filter_jit
    def descend(moving, keys, t):
        gradient = jax.vmap(lambda layers, key: batch_gradient(training, layers, key))(moving[0], keys)
        return _after_a_step(training, *moving, gradient=gradient, t=t)

    found = jax.tree.map(lambda leaf: np.tile(leaf, (runs, 1, 1)), layers)
    moving = (found, *(jax.tree.map(np.zeros_like, found),) * training.optimiser.moments)
    for t, keys in enumerate(jax.random.split(jax.random.key(4), (steps, runs)), 1):
        moving = descend(moving, keys, jnp.asarray(t, float))
    return moving[0]


def readings(layers: Layers) -> np.ndarray:
    """A few numbers of each layer, rows, for a stack of them."""
    rows = []
    for layer in layers:
        assert isinstance(layer, lp.SoftmaxAttention | lp.LinearAttention)
        U, v = np.asarray(layer.U), np.asarray(layer.V)[:, 0]
        rows += [np.trace(U, axis1=1, axis2=2), U[:, 2, 0], v[:, 2], v[:, 0], np.einsum("bi,bij,bj->b", v, U, v)]
    return np.array(rows)


Form = TypeVar("Form", lp.SoftmaxAttention, lp.LinearAttention)
Pair = tuple[lp.SoftmaxAttention, lp.LinearAttention]


def uv(kind: type[Form], seed: int, D: int, size: float = 0.5) -> Form:
    return kind(size * matrix(seed, D, D), matrix(seed + 1, 1, D) / math.sqrt(D))


def pair(D: int, size: float = 0.5) -> Pair:
    return uv(lp.SoftmaxAttention, 40, D, size), uv(lp.LinearAttention, 42, D)


def heads(
    n: int, D: int, kind: Literal["softmax", "linear"], seed: int, *, rank: int, size: float = 1.0, scale: float = 0.8
) -> lp.MultiHead:
    """Heads with matrices of that many rows and one output."""

    def head(seed):
        K, Q, V = (size * matrix(seed + i, rank, D) / D**0.5 for i in range(3))
        return lp.Head(K, Q, V, matrix(seed + 3, 1, rank), scale, kind)

    return lp.MultiHead([head(seed + 10 * h) for h in range(n)])


def head_pair(n: int, D: int, *, rank: int, size: float = 1.0) -> Layers:
    return heads(n, D, "softmax", 50, rank=rank, size=size), heads(n, D, "linear", 90, rank=rank)


class Case(NamedTuple):
    """A task, a prompt length and a softmax and a linear layer."""

    task: LinearRegression
    L: int | float
    layers: Layers


KMS = LinearRegression(kms(2, 0.5), 0.1)
ZERO, MATRIX, ROW = np.zeros((3, 3)), 0.5 * matrix(44, 3, 3), [[0.5, -1.0, 0.3]]
CASES = {
    "one token": Case(KMS, 1, pair(3)),
    "two tokens": Case(KMS, 2, pair(3)),
    "three tokens": Case(KMS, 3, pair(3)),
    "infinitely many tokens": Case(LinearRegression(kms(2, -0.6), 0.3, kms(2, 0.4)), math.inf, pair(3)),
    "one covariate": Case(LinearRegression([[1.5]], 0.2), 4, pair(2)),
    "correlated": Case(KMS, 5, pair(3)),
    "general prior": Case(LinearRegression(kms(2, -0.6), 0.3, [[1.5, 0.4], [0.4, 0.3]]), 5, pair(3)),
    "other queries": Case(LinearRegression(kms(2, 0.5), 0.2, kms(2, 0.3), [[0.7, -0.5], [-0.5, 1.4]]), 5, pair(3)),
    "singular": Case(LinearRegression(np.ones((2, 2)), 0.2, query_Sigma=np.ones((2, 2))), 5, pair(3)),
    "noiseless": Case(LinearRegression(np.diag([1.0, 0.4]), 0.0), 5, pair(3)),
    "hard maximum": Case(KMS, 5, pair(3, 15.0)),
    "harder maximum": Case(KMS, 5, pair(3, 1000.0)),
    "U = 0": Case(KMS, 5, (lp.SoftmaxAttention(ZERO, ROW), lp.LinearAttention(ZERO, ROW))),
    "V = 0": Case(KMS, 5, (lp.SoftmaxAttention(MATRIX, ZERO[:1]), lp.LinearAttention(MATRIX, ZERO[:1]))),
    "five covariates": Case(LinearRegression(kms(5, 0.3), 0.1, np.eye(5) / 5), 8, pair(6, 0.4)),
    "twenty covariates": Case(LinearRegression(kms(20, 0.5), 0.1, np.eye(20) / 20), 40, head_pair(1, 21, rank=2)),
    "two heads": Case(LinearRegression(kms(3, 0.5), 0.1), 10, head_pair(2, 4, rank=3)),
    "two heads, hard maximum": Case(LinearRegression(kms(3, 0.5), 0.1), 10, head_pair(2, 4, rank=3, size=6.0)),
    "three heads, more columns than dimensions": Case(LinearRegression(kms(3, 0.5), 0.1), 14, head_pair(3, 4, rank=2)),
}
