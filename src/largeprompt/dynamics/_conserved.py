import math

import jax.numpy as jnp
from jaxtyping import Array

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, Head, Lengths, MultiHead, kind_of, merged_form
from largeprompt.icl import AbstractTask, LinearRegression


def conserved_quantities(layers: AbstractLayer, task: AbstractTask, L: int | float | Lengths) -> dict[str, Array]:
    r"""What no gradient flow of the risk changes, for a layer or a stack of layers along the first axis.

    The risk sees K and Q through $K^\top Q$ alone, and V and O through $OV$, so that $KK^\top - QQ^\top$ and
    $O^\top O - VV^\top$ stay; where the output is bilinear in (U, V), that is for linear attention and for softmax
    attention on Gaussian regression at infinite length, $\|U\|_F^2 - \|V\|_F^2$ stays. For other kinds of attention
    in (U, V) nothing is known to stay.
    """
    if type(layers) is MultiHead:
        return {
            f"head {i}: {name}": value
            for i, head in enumerate(layers.heads)
            for name, value in conserved_quantities(head, task, L).items()
        }
    if type(layers) is Head:
        K, Q, V, O = layers.K, layers.Q, layers.V, layers.O
        conserved = {"K Kᵀ − Q Qᵀ": _gram(K) - _gram(Q)}
        if O is not None:
            conserved["Oᵀ O − V Vᵀ"] = _gram(jnp.swapaxes(O, -1, -2)) - _gram(V)
        return conserved
    kind, limit = kind_of(layers), type(task) is LinearRegression and math.inf == L
    if kind == "linear" or (kind == "softmax" and limit):
        U, V = merged_form(layers).U, merged_form(layers).V
        library = checks.library(U, V)
        sizes = [library.sum(library.square(M), axis=(-2, -1)) for M in (U, V)]
        return {"‖U‖² − ‖V‖²": jnp.asarray(sizes[0] - sizes[1])}
    return {}


def _gram(M: Array) -> Array:
    return M @ jnp.swapaxes(M, -1, -2)
