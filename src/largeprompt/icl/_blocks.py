"""The blocks of U and V through which a layer predicts in a regression."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt.attention import AbstractAttention, Merged

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
