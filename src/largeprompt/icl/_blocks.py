"""The blocks of U and V through which a layer predicts in a regression."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt.attention import AbstractAttention, Head, Merged

from ._regression import AbstractRegression


class Blocks(NamedTuple):
    r"""$U = \begin{pmatrix}A & *\\ C & *\end{pmatrix}$, the starred columns meeting the zeros of the query, and the
    rows $V = (P, R)$ of the predicted coordinates.
    """

    A: Float[Array, "d d"]
    C: Float[Array, "k d"]
    P: Float[Array, "k d"]
    R: Float[Array, "k k"]


def blocks(attention: AbstractAttention, task: AbstractRegression) -> Blocks:
    """The blocks of a layer whose last outputs are the prediction."""
    d, k = task.d, task.targets
    V = attention.V[attention.outputs - k :]
    return Blocks(attention.U[:d, :d], attention.U[d:, :d], V[:, :d], V[:, d:])


def aligned_blocks(A: Float[Array, "d d"], r: Float[Array, ""] | float, task: AbstractRegression) -> Blocks:
    """The blocks of a layer that scores covariates by covariates and reads labels only: P = C = 0, R = rI."""
    k = task.targets
    zero = jnp.zeros((k, task.d), A.dtype)
    return Blocks(A, zero, zero, r * jnp.eye(k, dtype=A.dtype))


def from_blocks(parts: Blocks, kind: type[Merged]) -> Merged:
    """The layer of these blocks, with zeros where U meets the zeros of the query."""
    d, k = parts.A.shape[0], parts.R.shape[0]
    left = jnp.concatenate([parts.A, parts.C])
    U = jnp.concatenate([left, jnp.zeros((d + k, k), left.dtype)], axis=1)
    return kind(U, jnp.concatenate([parts.P, parts.R], axis=1))


def head_from_blocks(parts: Blocks, kind: str = "softmax") -> Head:
    """The head of these blocks with balanced keys and queries, in which P = C = 0 can be seen."""
    A, C, P, R = (np.asarray(block, float) for block in parts)
    scored = C if C.any() else C[:0]  # labels that are not scored have no rounding errors
    left, widths, right = np.linalg.svd(np.concatenate([A, scored]), full_matrices=False)
    roots, empty = np.sqrt(widths), np.zeros((len(A), len(R)))
    K = (left * roots).T
    return Head(
        np.hstack([K, empty])[:, : len(A) + len(R)],
        np.hstack([roots[:, None] * right, empty]),
        np.hstack([P, R]),
        kind=kind,
    )
