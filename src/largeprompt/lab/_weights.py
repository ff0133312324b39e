"""Layers and their matrices by name: K, Q, V, O (each with an axis of heads where there are several), or U, V."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import numpy as np

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, Head, LinearAttention, MultiHead, SoftmaxAttention

Matrices = dict[str, np.ndarray]
Merged = SoftmaxAttention | LinearAttention
FORMS = {"KQVO": ("K", "Q", "V", "O"), "UV": ("U", "V")}


def matrices(layer: AbstractLayer) -> Matrices:
    """The parameters of a layer by name."""
    if isinstance(layer, MultiHead):
        each = [matrices(head) for head in layer.heads]
        return {name: np.stack([one[name] for one in each]) for name in each[0]}
    names = FORMS["KQVO" if isinstance(layer, Head) else "UV"]
    return {name: np.asarray(getattr(layer, name)) for name in names if getattr(layer, name) is not None}


def with_matrices(layer: AbstractLayer, arrays: Mapping[str, np.ndarray]) -> Any:
    """A layer of the same kind with other parameters."""
    if isinstance(layer, MultiHead):
        heads = [
            with_matrices(head, {name: array[i] for name, array in arrays.items()})
            for i, head in enumerate(layer.heads)
        ]
        return eqx.tree_at(lambda several: several.heads, layer, tuple(heads))
    names = list(matrices(layer))
    return eqx.tree_at(lambda one: [getattr(one, name) for name in names], layer, [arrays[name] for name in names])


def of_kind(layer: AbstractLayer, kind: str) -> Any:
    """The same weights in softmax or in linear attention."""
    if isinstance(layer, MultiHead):
        return MultiHead([of_kind(head, kind) for head in layer.heads])
    if isinstance(layer, Head):
        return Head(layer.K, layer.Q, layer.V, layer.O, layer.scale, "softmax" if kind == "softmax" else "linear")
    assert isinstance(layer, Merged)
    return (SoftmaxAttention if kind == "softmax" else LinearAttention)(layer.U, layer.V)


def described(layer: AbstractLayer, scale_given: bool = True) -> str:
    """A layer's kind, the shapes of its matrices and the factor of its scores, in words."""
    shapes = ", ".join(f"{name} {' × '.join(map(str, array.shape))}" for name, array in matrices(layer).items())
    if isinstance(layer, Head):
        default = "" if scale_given else " by default"
        return f"{layer.kind} attention with {shapes}; scores times {layer.scale:g}{default}"
    kind = "linear" if isinstance(layer, LinearAttention) else "softmax"
    return f"{kind} attention with {shapes}; U holds the scale of the scores"


def circuits(layer: AbstractLayer) -> Matrices:
    """What the layer is as a map: QK, the matrix U of its scores, and OV, what a token is written out as."""
    if isinstance(layer, MultiHead):
        each = [circuits(head) for head in layer.heads]
        return {name: np.stack([one[name] for one in each]) for name in each[0]}
    if isinstance(layer, Head):
        K, Q, V = (np.asarray(matrix) for matrix in (layer.K, layer.Q, layer.V))
        return {"QK": layer.scale * K.T @ Q, "OV": V if layer.O is None else np.asarray(layer.O) @ V}
    found = matrices(layer)
    return {"QK": found["U"], "OV": found["V"]}


def given_layer(arrays: Mapping[str, Any], parameters: str, dim: int, heads: int, scale: float) -> AbstractLayer:
    """The softmax layer of arrays given by a user, once their names and shapes are right."""
    wanted = FORMS[parameters]
    needed = [name for name in wanted if name != "O"]
    if not set(needed) <= set(arrays) <= set(wanted):
        raise ValueError(
            f"start has the arrays {', '.join(sorted(arrays)) or 'none'}; "
            f"with parameters = {parameters!r} it must have {', '.join(wanted)}"
        )
    axis = (heads,) if heads > 1 else ()

    def checked(name: str, rows: int | None, columns: int) -> np.ndarray:
        return np.asarray(checks.array(f"start.{name}", arrays[name], (*axis, rows, columns)))

    if parameters == "UV":
        return SoftmaxAttention(checked("U", dim, dim), _outputs(checked("V", None, dim), "V", dim))
    K = checked("K", None, dim)
    Q = checked("Q", K.shape[-2], dim)
    V = checked("V", None, dim)
    O = checked("O", None, V.shape[-2]) if "O" in arrays else None
    if O is None:
        _outputs(V, "V", dim)
    else:
        _outputs(O, "O", dim)
    if heads == 1:
        return Head(K, Q, V, O, scale)
    return MultiHead([Head(K[i], Q[i], V[i], None if O is None else O[i], scale) for i in range(heads)])


def _outputs(array: np.ndarray, name: str, dim: int) -> np.ndarray:
    if array.shape[-2] not in (1, dim):
        raise ValueError(f"start.{name} has {array.shape[-2]} rows; it must have 1, or {dim} of which the last counts")
    return array
