"""The blocks of U and V through which a layer predicts in a regression."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
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
    library = checks.library(attention.U, attention.V)
    U, V = library.asarray(attention.U), library.asarray(attention.V)[attention.outputs - k :]
    return Blocks(*map(jnp.asarray, (U[:d, :d], U[d:, :d], V[:, :d], V[:, d:])))


def aligned_blocks(A: Float[Array, "d d"], r: Float[Array, ""] | float, task: AbstractRegression) -> Blocks:
    """The blocks of a layer that scores covariates by covariates and reads labels only: P = C = 0, R = rI."""
    k, library = task.targets, checks.library(A, r)
    zero = jnp.asarray(library.zeros((k, task.d), A.dtype))
    return Blocks(A, zero, zero, jnp.asarray(library.asarray(r, A.dtype) * library.eye(k, dtype=A.dtype)))


def from_blocks(parts: Blocks, kind: type[Merged]) -> Merged:
    """The layer of these blocks, with zeros where U meets the zeros of the query."""
    d, k, library = parts.A.shape[0], parts.R.shape[0], checks.library(*parts)
    left = library.concatenate([parts.A, parts.C])
    U = library.concatenate([left, library.zeros((d + k, k), left.dtype)], axis=1)
    return kind(U, library.concatenate([parts.P, parts.R], axis=1))


def head_from_blocks(parts: Blocks, kind: str = "softmax", head_dim: int | None = None) -> Head:
    """The head of these blocks with balanced keys and queries, `head_dim` of them, in which P = C = 0 can be seen."""
    A, C, P, R = (np.asarray(block, float) for block in parts)
    scored = C if C.any() else C[:0]  # labels that are not scored have no rounding errors
    left, widths, right = np.linalg.svd(np.concatenate([A, scored]), full_matrices=False)
    roots, empty = np.sqrt(widths), np.zeros((len(A), len(R)))
    K = (left * roots).T
    return Head(
        np.hstack([K, empty])[:head_dim, : len(A) + len(R)],
        np.hstack([roots[:, None] * right, empty])[:head_dim],
        np.hstack([P, R]),
        kind=kind,
    )
