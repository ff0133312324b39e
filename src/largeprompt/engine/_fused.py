import math
from collections.abc import Sequence

import equinox as eqx
import numpy as np

from largeprompt.attention import AbstractLayer, Head, LinearAttention, MultiHead, SoftmaxAttention
from largeprompt.dynamics import FAR, AbstractTrainer, Layers, State, Training
from largeprompt.icl import LinearRegression

from ._kernel import Law, trainer, workspace
from ._weights import Weights, weights


class FusedTrainer(AbstractTrainer):
    """Gaussian regression, compiled: the same law as the reference, through what a gradient sees of a prompt.

    One layer, or a softmax and a linear one on the same prompts; each of one head or of several of one shape, in (U, V)
    or in (K, Q, V, O) form. One core a run, and other threads go on meanwhile.
    """

    name = "fused"

    def __init__(self, training: Training, layers: Layers):
        reason = refusal(training, layers)
        if reason:
            raise ValueError(f"the fused engine does not apply: {reason}; use engine='reference'")
        super().__init__(training, layers)
        task = training.task
        assert isinstance(task, LinearRegression)
        self._law = _law(task)
        self._L = 0 if math.inf == training.L else int(training.L)
        self._order = sorted(range(len(layers)), key=lambda i: _kind(layers[i]) == "linear")
        kinds = [_kind(layers[i]) for i in self._order]
        self._softmax, self._linear = "softmax" in kinds, "linear" in kinds
        columns = {kind: 2 * len(_heads(layers[i])) for kind, i in zip(kinds, self._order, strict=True)}
        self._space = workspace(task.d, columns.get("softmax", 0), columns.get("linear", 0))

    def _advance(self, state: State, stop: int) -> State:
        training = self._training
        parts = [_weights(state.layers[i]) for i in self._order]
        diverged = np.array([-1 if state.diverged[i] is None else state.diverged[i] for i in self._order])
        trainer(self._softmax, self._linear)(
            state.step,
            stop,
            self._L,
            training.batch,
            training.rate * training.loss_factor,
            FAR,
            training.seed,
            self._law,
            parts[0],
            parts[-1],
            self._space,
            diverged,
        )
        layers, ends = list(state.layers), list(state.diverged)
        for i, part, end in zip(self._order, parts, diverged, strict=True):
            layers[i] = _with_weights(state.layers[i], part)
            ends[i] = None if end < 0 else int(end)
        return State(stop, tuple(layers), tuple(ends))


def refusal(training: Training, layers: Layers) -> str | None:
    """Why the fused engine cannot carry this training out; None where it can."""
    task = training.task
    if not isinstance(task, LinearRegression):
        return f"the task is {type(task).__name__}, not LinearRegression with its own loss"
    if task.targets != 1:
        return f"the task has {task.targets} targets, not one"
    kinds = []
    for layer in layers:
        if not isinstance(layer, Head | MultiHead | SoftmaxAttention | LinearAttention):
            return f"a layer is {type(layer).__name__}"
        parts = _heads(layer)
        if len({_kind(part) for part in parts}) > 1:
            return "a layer mixes softmax and linear heads"
        if len({_shape(part) for part in parts}) > 1:
            return "the heads of a layer differ in shape or scale"
        kinds.append(_kind(layer))
    if sorted(kinds) not in (["softmax"], ["linear"], ["linear", "softmax"]):
        return f"the layers are {', '.join(kinds)}, not one or a softmax and a linear one"
    if math.inf > training.L >= 2**32:
        return f"L is {training.L}, not below 2**32"
    return None


def _heads(layer: AbstractLayer) -> Sequence[AbstractLayer]:
    return layer.heads if isinstance(layer, MultiHead) else (layer,)


def _kind(layer: AbstractLayer) -> str:
    first = _heads(layer)[0]
    if isinstance(first, Head):
        return first.kind
    return "softmax" if isinstance(first, SoftmaxAttention) else "linear"


def _shape(head: AbstractLayer) -> object:
    return (head.K.shape, head.V.shape, head.O is None, head.scale) if isinstance(head, Head) else None


def _weights(layer: AbstractLayer) -> Weights:
    parts = _heads(layer)
    first = parts[0]
    if not isinstance(first, Head):
        assert isinstance(layer, SoftmaxAttention | LinearAttention)
        one = np.eye(layer.dim)[None]
        return weights(one, np.asarray(layer.U)[None], np.asarray(layer.V)[None, -1:], np.ones((1, 1)), False, False, 1)
    K, Q, V = (np.stack([np.asarray(getattr(head, name)) for head in parts]) for name in "KQV")
    if first.O is None:
        O = np.tile(np.eye(V.shape[1])[-1], (len(parts), 1))
        return weights(K, Q, V, O, True, False, first.scale)
    O = np.stack([np.asarray(head.O)[-1] for head in parts if isinstance(head, Head) and head.O is not None])
    return weights(K, Q, V, O, True, True, first.scale)


def _with_weights(layer: AbstractLayer, w: Weights) -> AbstractLayer:
    if isinstance(layer, MultiHead):
        heads = tuple(_with_head(head, w, h) for h, head in enumerate(layer.heads))
        return eqx.tree_at(lambda tree: tree.heads, layer, heads)
    if isinstance(layer, Head):
        return _with_head(layer, w, 0)
    assert isinstance(layer, SoftmaxAttention | LinearAttention)
    return eqx.tree_at(lambda tree: (tree.U, tree.V), layer, (w.Q[0].copy(), _last_row(layer.V, w.V[0, 0])))


def _with_head(head: Head, w: Weights, h: int) -> Head:
    parts = w.K[h].copy(), w.Q[h].copy(), w.V[h].copy()
    head = eqx.tree_at(lambda tree: (tree.K, tree.Q, tree.V), head, parts)
    return head if head.O is None else eqx.tree_at(lambda tree: tree.O, head, _last_row(head.O, w.O[h]))


def _last_row(matrix, row: np.ndarray) -> np.ndarray:
    changed = np.array(matrix, dtype=np.float64)
    changed[-1] = row
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
