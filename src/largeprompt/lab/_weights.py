"""Layers and their matrices by name: K, Q, V, O (each with an axis of heads where there are several), or U, V."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import numpy as np

from largeprompt import _checks as checks
from largeprompt.attention import Head, MultiHead, SoftmaxAttention, heads_of

Matrices = dict[str, np.ndarray]
FORMS = {"KQVO": ("K", "Q", "V", "O"), "UV": ("U", "V")}


def matrices(layer: Any) -> Matrices:
    """The parameters of a layer by name."""
    return {name: np.asarray(matrix) for name, matrix in layer.parameters.items()}


def circuits(layers: Any, heads: int) -> Matrices:
    """The maps of many layers: QK, the matrix U of the scores, and OV, what a token is written out as."""
    merged = eqx.filter_vmap(lambda layer: [(head.U, head.V) for head in heads_of(layer) or ()])(layers)
    QK, OV = (np.stack([np.asarray(head[i]) for head in merged], axis=1) for i in (0, 1))
    return {"QK": QK, "OV": OV} if heads > 1 else {"QK": QK[:, 0], "OV": OV[:, 0]}


def described(layer: Any, kind: str, scale_given: bool = True) -> str:
    """A layer's kind, the shapes of its matrices and the factor of its scores, in words."""
    shapes = ", ".join(f"{name} {' × '.join(map(str, array.shape))}" for name, array in layer.parameters.items())
    default = "" if scale_given else " by default"
    scale = "U holds the scale of the scores" if "U" in layer.parameters else f"scores times {layer.scale:g}{default}"
    return f"{kind} attention with {shapes}; {scale}"


def given_layer(arrays: Mapping[str, Any], parameters: str, dim: int, heads: int, scale: float) -> Any:
    """The layer of softmax attention with these arrays, once they are all there and of the right shapes."""
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
        found: dict[str, Any] = {"U": checked("U", dim, dim), "V": checked("V", None, dim)}
    else:
        found = {"K": (K := checked("K", None, dim)), "Q": checked("Q", K.shape[-2], dim)}
        found["V"] = V = checked("V", None, dim)
        found |= {"O": checked("O", None, V.shape[-2])} if "O" in arrays else {}
    last = list(found)[-1]
    if (rows := found[last].shape[-2]) not in (1, dim):
        raise ValueError(f"start.{last} has {rows} rows; it must have 1, or {dim} of which the last counts")
    if parameters == "UV":
        return SoftmaxAttention(**found)
    if heads == 1:
        return Head(**found, scale=scale)
    return MultiHead([Head(**{name: stack[i] for name, stack in found.items()}, scale=scale) for i in range(heads)])
