"""A training as the compiled loops see it: its law in whitened coordinates, its layers as stacked arrays."""

import math
from collections.abc import Sequence
from typing import cast

import equinox as eqx
import numpy as np

from largeprompt.attention import AbstractLayer, Head, LinearAttention, MultiHead, SoftmaxAttention, kind_of
from largeprompt.attention._forms import described
from largeprompt.dynamics import Layers, Training
from largeprompt.icl import LinearRegression

from ._batch import Law
from ._head_arrays import Weights, weights
from ._update import OPTIMISERS

_COUNTERS = 2**32  # of a step's random numbers
# A prompt of so many tokens differs from its law by a 10⁻⁹th, less than float32 can hold: longer ones are read as this.
_LONGEST = 2**62


class TrainingArrays:
    """The law and the weights of a training, softmax attention before linear attention; `length` is 0 for L = inf."""

    def __init__(self, training: Training, layers: Layers):
        self.law = _law(cast(LinearRegression, training.task))
        self.length = 0 if math.inf == training.L else min(int(training.L), _LONGEST)
        kinds = [kind_of(_heads(layer)[0]) for layer in layers]
        self._order = sorted(range(len(layers)), key=lambda i: kinds[i] == "linear")
        self.weights = self.weights_of(layers)
        self.softmax = self.weights[0] if "softmax" in kinds else None
        self.linear = self.weights[-1] if "linear" in kinds else None

    def ordered(self, items: Sequence) -> tuple:
        """What belongs to each layer, in our order."""
        return tuple(items[i] for i in self._order)

    def in_order(self, items: Sequence) -> tuple:
        """The same, in the order in which the layers were given."""
        return tuple(items[self._order.index(i)] for i in range(len(self._order)))

    def weights_of(self, layers: Layers) -> tuple[Weights, ...]:
        """The weights of layers like these, in our order."""
        return tuple(_weights(layer) for layer in self.ordered(layers))

    def vector(self, layers: Layers) -> np.ndarray:
        """All weights that are learnt, and those that stay, as one row."""
        return np.concatenate([np.ravel(array) for w in self.weights_of(layers) for array in (w.K, w.Q, w.V, w.O)])

    def vectors(self, moments: Sequence[Layers]) -> np.ndarray:
        """What an optimiser carries of all weights, one moment after the other."""
        return np.concatenate([np.empty(0), *map(self.vector, moments)])

    def moments(self, like: Sequence[Layers], vectors: np.ndarray | None) -> tuple[Layers, ...]:
        """The moments of such a row."""
        if not like or vectors is None:
            return ()
        return tuple(self.layers(layers, row) for layers, row in zip(like, np.split(vectors, len(like)), strict=True))

    def layers(self, like: Layers, vector: np.ndarray) -> Layers:
        """The layers of such a row, or of many, with as many entries first in each of their arrays."""
        found, at, rows = [], 0, vector.shape[:-1]
        for w in self.weights:
            arrays = []
            for part in (w.K, w.Q, w.V, w.O):
                arrays.append(vector[..., at : at + part.size].reshape(*rows, *part.shape))
                at += part.size
            found.append(arrays)
        return tuple(with_arrays(layer, *arrays) for layer, arrays in zip(like, self.in_order(found), strict=True))


def refusal(training: Training, layers: Layers) -> str | None:
    """Why the fused engine cannot run this training; None where it can.

    This is its only door: exactly softmax and linear attention come in, and heads of these.
    """
    task, optimiser = training.task, type(training.optimiser)
    if optimiser not in OPTIMISERS:
        return f"the optimiser is {optimiser.__name__}, not SGD, Momentum or Adam"
    if type(task) is not LinearRegression:
        return f"the task is {type(task).__name__}, not LinearRegression with its own loss"
    if task.targets != 1:
        return f"the task has {task.targets} targets, not one"
    kinds, counters = [], 1
    for layer in layers:
        heads = _heads(layer)
        of_heads = {kind_of(head) for head in heads}
        if None in of_heads:
            return f"a layer is {described(layer)}, not softmax or linear attention or heads of these"
        if len(of_heads) > 1:
            return "a layer mixes softmax and linear heads"
        if len({_shape(head) for head in heads}) > 1:
            return "the heads of a layer differ in shape or scale"
        kinds.append(kind_of(heads[0]))
        if kinds[-1] == "softmax":  # one head draws two tokens a counter, m columns take (m + 3) // 4 counters a token
            counters = (2 * len(heads) + 3) // 4
    if sorted(kinds) not in (["softmax"], ["linear"], ["linear", "softmax"]):
        return f"the layers are {', '.join(map(str, kinds))}, not one or a softmax and a linear one"
    if "softmax" in kinds and math.inf > training.L >= _COUNTERS // counters:
        return f"L is {training.L:.4g}, and the tokens of softmax attention are counted below {_COUNTERS // counters}"
    return None


def _heads(layer: AbstractLayer) -> Sequence[AbstractLayer]:
    return layer.heads if type(layer) is MultiHead else (layer,)


def _shape(head: AbstractLayer) -> object:
    return (head.K.shape, head.V.shape, head.O is None, head.scale) if type(head) is Head else None


def _weights(layer: AbstractLayer) -> Weights:
    if type(layer) is SoftmaxAttention or type(layer) is LinearAttention:
        identity, U, v = np.eye(layer.dim)[None], np.asarray(layer.U)[None], np.asarray(layer.V)[None, -1:]
        return weights(identity, U, v, np.ones((1, 1)), False, False, 1)
    heads = cast(Sequence[Head], _heads(layer))
    K, Q, V = (np.stack([np.asarray(getattr(head, name)) for head in heads]) for name in "KQV")
    learns_O = heads[0].O is not None
    last = [np.eye(V.shape[1])[-1] if head.O is None else np.asarray(head.O)[-1] for head in heads]
    return weights(K, Q, V, np.stack(last), True, learns_O, heads[0].scale)


def with_arrays(layer: AbstractLayer, K: np.ndarray, Q: np.ndarray, V: np.ndarray, O: np.ndarray) -> AbstractLayer:
    """The layer with its learnt parts replaced; whatever axes come before those of `Weights` come first."""
    if type(layer) is SoftmaxAttention or type(layer) is LinearAttention:
        parts = Q[..., 0, :, :].copy(), _last_row(layer.V, V[..., 0, 0, :])
        return eqx.tree_at(lambda tree: (tree.U, tree.V), layer, parts)
    heads = cast(Sequence[Head], _heads(layer))
    changed = tuple(_with_head(head, K, Q, V, O, h) for h, head in enumerate(heads))
    return eqx.tree_at(lambda tree: tree.heads, layer, changed) if type(layer) is MultiHead else changed[0]


def _with_head(head: Head, K: np.ndarray, Q: np.ndarray, V: np.ndarray, O: np.ndarray, h: int) -> Head:
    parts = tuple(array[..., h, :, :].copy() for array in (K, Q, V))
    head = eqx.tree_at(lambda tree: (tree.K, tree.Q, tree.V), head, parts)
    return head if head.O is None else eqx.tree_at(lambda tree: tree.O, head, _last_row(head.O, O[..., h, :]))


def _last_row(matrix, row: np.ndarray) -> np.ndarray:
    changed = np.array(np.broadcast_to(matrix, (*row.shape[:-1], *np.shape(matrix))), dtype=np.float64)
    changed[..., -1, :] = row
    return changed


def _law(task: LinearRegression) -> Law:
    r"""Coordinates in which tokens and queries are standard normal, and ŵ is independent wherever that can be had.

    With $\Sigma_q=\Sigma$ they are those of the eigenvectors of $\Sigma^{1/2}\Omega\Sigma^{1/2}$, and
    $w\cdot x_q = \hat w\cdot\hat x$.
    """
    d = task.d
    Sigma, Omega, query = (np.asarray(part, np.float64) for part in (task.Sigma, task.Omega, task.query_Sigma))
    root, diagonal = _root(Sigma), np.array_equal(Sigma, query)
    if diagonal:
        values, rotation = np.linalg.eigh(root @ Omega @ root)
        if np.array_equal(root, np.diag(np.diag(root))) and np.array_equal(Omega, np.diag(np.diag(Omega))):
            values, rotation = np.diag(root @ Omega @ root), np.eye(d)
        scales = np.sqrt(np.maximum(values, 0))
        x, xq, F, Fq = root @ rotation, root @ rotation, np.diag(scales), np.diag(scales)
    else:
        x, xq = root, _root(query)
        F, Fq, scales = root @ _root(Omega), xq @ _root(Omega), np.zeros(d)
    B = np.eye(d + 1)
    B[:d, :d] = x
    Bq = np.vstack([xq, np.zeros((1, d))])
    plain = bool(np.array_equal(x, np.eye(d)) and np.array_equal(xq, np.eye(d)))
    F, Fq = (np.ascontiguousarray(part, np.float32) for part in (F, Fq))
    return Law(B, Bq, F, Fq, scales, math.sqrt(float(task.noise)), plain, diagonal)


def _root(cov: np.ndarray) -> np.ndarray:
    if np.array_equal(cov, np.diag(np.diag(cov))):
        return np.diag(np.sqrt(np.diag(cov)))
    values, vectors = np.linalg.eigh(cov)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
