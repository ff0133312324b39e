r"""The continuous symmetries of a regression's risk, as tangent vectors at a layer's blocks.

Every one of them is a zero mode of the Hessian at a stationary point: a minimum is strict once there are no others.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from .._blocks import Blocks
from .._regression import LinearRegression

_NEGLIGIBLE = 1e-10  # of the largest singular value: what eigenvectors in float64 leave of an exact 0


def flat(parts: Iterable[Any]) -> Float[np.ndarray, " n"]:
    """The blocks as one vector."""
    return np.concatenate([np.ravel(block) for block in parts])


def from_flat(x: Float[Array, " n"] | Float[np.ndarray, " n"], d: int, k: int) -> Blocks:
    """The blocks of a vector."""
    a, c, p = d * d, d * d + k * d, d * d + 2 * k * d
    parts: Any = x[:a].reshape(d, d), x[a:c].reshape(k, d), x[c:p].reshape(k, d), x[p:].reshape(k, k)
    return Blocks(*parts)


def tangents(parts: Blocks, task: LinearRegression, *, scale: bool, error: float = 0.0) -> Float[np.ndarray, "n m"]:
    r"""An orthonormal basis of the directions in which a continuous symmetry moves the blocks.

    Rotations of the covariates that leave all three covariances alone, $\delta A = KA-AK$, $\delta C = -CK$,
    $\delta P = -PK$; rotations of the targets, $\delta C = KC$, $\delta P = KP$, $\delta R = KR-RK$; translations by
    what no covariate meets, where $\Sigma$ or $\Sigma_q$ is singular; and with `scale` $(U, V)\to(sU, V/s)$. What moves
    blocks known to within `error` by no more than that does not count.
    """
    A, C, P, R = (np.asarray(block) for block in parts)
    still = [np.zeros_like(block) for block in (A, C, P, R)]
    moves = [(K @ A - A @ K, -C @ K, -P @ K, still[3]) for K in _rotations(task)]
    moves += [(still[0], K @ C, K @ P, K @ R - R @ K) for K in _antisymmetric(len(R))]
    unseen, unasked = _kernel(np.asarray(task.Sigma)), _kernel(np.asarray(task.query_Sigma))
    d, k = len(A), len(R)
    moves += [(np.outer(u, e), *still[1:]) for u in unseen for e in np.eye(d)]
    moves += [(np.outer(e, u), *still[1:]) for u in unasked for e in np.eye(d)]
    moves += [(still[0], np.outer(e, u), *still[2:]) for u in unasked for e in np.eye(k)]
    moves += [(*still[:2], np.outer(e, u), still[3]) for u in unseen for e in np.eye(k)]
    if scale:
        moves.append((A, C, -P, -R))
    vectors = np.stack([flat(move) for move in moves], axis=1) if moves else np.zeros((flat(parts).size, 0))
    left, moved, _ = np.linalg.svd(vectors, full_matrices=False)
    return left[:, moved > max(error, _NEGLIGIBLE * max(1.0, float(np.linalg.norm(flat(parts)))))]


def least(x: Float[np.ndarray, " n"], task: LinearRegression) -> Float[np.ndarray, " n"]:
    r"""The least of the layers that differ by what no covariate meets."""
    A, C, P, R = (np.asarray(block) for block in from_flat(x, task.d, task.targets))
    unseen, unasked = _kernel(np.asarray(task.Sigma)), _kernel(np.asarray(task.query_Sigma))
    seen, asked = np.eye(task.d) - unseen.T @ unseen, np.eye(task.d) - unasked.T @ unasked
    return flat((seen @ A @ asked, C @ asked, P @ seen, R))


def balanced(x: Float[np.ndarray, " n"], d: int, k: int) -> Float[np.ndarray, " n"]:
    """The same layer with the norms of U and V equal, as gradient flow from small weights leaves them."""
    split = d * (d + k)
    U, V = np.linalg.norm(x[:split]), np.linalg.norm(x[split:])
    if not U * V > 0:
        return x
    s = math.sqrt(V / U)
    return np.concatenate([s * x[:split], x[split:] / s])


def sizes(x: Float[np.ndarray, " n"], task: LinearRegression, *, scale: bool) -> Float[np.ndarray, " 4"]:
    """The norms of the blocks, which no symmetry of a task in standard units changes; with `scale`, once balanced."""
    x = least(x, task)
    parts = from_flat(balanced(x, task.d, task.targets) if scale else x, task.d, task.targets)
    return np.array([float(np.linalg.norm(block)) for block in parts])


def _antisymmetric(d: int) -> list[Float[np.ndarray, "d d"]]:
    """A basis of the antisymmetric matrices."""
    units = np.eye(d)
    pairs = ((i, j) for i in range(d) for j in range(i))
    return [(np.outer(units[i], units[j]) - np.outer(units[j], units[i])) / math.sqrt(2) for i, j in pairs]


def _rotations(task: LinearRegression) -> list[Float[np.ndarray, "d d"]]:
    """A basis of the antisymmetric matrices that commute with the covariances."""
    basis = _antisymmetric(task.d)
    matrices = [np.asarray(m) / max(float(np.abs(m).max()), 1e-300) for m in (task.Sigma, task.Omega, task.query_Sigma)]
    if not basis:
        return []
    conditions = np.stack([np.concatenate([(K @ m - m @ K).ravel() for m in matrices]) for K in basis], axis=1)
    _, sizes, right = np.linalg.svd(conditions)
    return [np.tensordot(row, np.stack(basis), 1) for row in right[np.count_nonzero(sizes > _NEGLIGIBLE) :]]


def _kernel(matrix: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "m d"]:
    values, vectors = np.linalg.eigh(matrix)
    return vectors.T[values <= _NEGLIGIBLE * max(float(values[-1]), 1e-300)]
