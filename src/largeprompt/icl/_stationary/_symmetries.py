r"""The continuous symmetries of a regression's risk, as tangent vectors at the blocks of one or more heads.

Every one of them is a zero mode of the Hessian at a stationary point: a minimum is strict once there are no others.
The output of linear heads depends on $N = \sum_hV_h\otimes U_h$ alone, and only on what is symmetric in the two tokens
that the second moment of the prompt joins:
$$T = \sum_hV_h\hat SU_hz,\qquad N_{i,ab,j} = \tfrac12\sum_h(V_{h,ia}U_{h,bj} + V_{h,ib}U_{h,aj}).$$
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from .._blocks import Blocks
from .._regression import LinearRegression

_NEGLIGIBLE = 1e-10  # of the largest singular value: what eigenvectors in float64 leave of an exact 0
Vector = Float[np.ndarray, " n"]


def flat(parts: Iterable[Any]) -> Vector:
    """The blocks of a head as one vector."""
    return np.concatenate([np.ravel(block) for block in parts])


def all_flat(heads: Iterable[Iterable[Any]]) -> Vector:
    """The blocks of all heads as one vector, one head after another."""
    return np.concatenate([flat(parts) for parts in heads])


def from_flat(x: Float[Array, " n"] | Vector, d: int, k: int) -> Blocks:
    """The blocks of a vector."""
    a, c, p = d * d, d * d + k * d, d * d + 2 * k * d
    parts: Any = x[:a].reshape(d, d), x[a:c].reshape(k, d), x[c:p].reshape(k, d), x[p:].reshape(k, k)
    return Blocks(*parts)


def stacked(x: Float[Array, " n"], d: int, k: int) -> Blocks:
    """The blocks of all heads, stacked."""
    return jax.vmap(lambda row: from_flat(row, d, k))(x.reshape(-1, _size(d, k)))


def apart(x: Float[Array, " n"] | Vector, d: int, k: int) -> list[Blocks]:
    """The blocks of each head."""
    return [from_flat(row, d, k) for row in x.reshape(-1, _size(d, k))]


def _size(d: int, k: int) -> int:
    """How many numbers the blocks of a head have."""
    return d * d + 2 * d * k + k * k


def tangents(
    heads: Sequence[Blocks],
    task: LinearRegression,
    *,
    linear: bool,
    error: float = 0.0,
    hessian: Float[np.ndarray, "n n"] | None = None,
) -> Float[np.ndarray, "n m"]:
    r"""An orthonormal basis of the directions in which a continuous symmetry moves the blocks.

    Rotations of the covariates that leave all three covariances alone, $\delta A = KA-AK$, $\delta C = -CK$,
    $\delta P = -PK$; rotations of the targets, $\delta C = KC$, $\delta P = KP$, $\delta R = KR-RK$; translations by
    what no covariate meets, where $\Sigma$ or $\Sigma_q$ is singular. For `linear` heads also $U_h\to\sum_gG_{hg}U_g$,
    $V_h\to\sum_gG^{-1}_{gh}V_g$, and the changes of all $U_h$, or of all $V_h$, that leave N alone. These are straight
    lines of one risk, not always of stationary points: with a `hessian` only those in its kernel count. What moves
    blocks known to within `error` by no more than that does not count.
    """
    each = [tuple(np.asarray(block) for block in parts) for parts in heads]
    d, k, H = task.d, task.targets, len(each)
    x = all_flat(each)
    moves = [
        all_flat((K @ A - A @ K, -C @ K, -P @ K, np.zeros_like(R)) for A, C, P, R in each) for K in _rotations(task)
    ]
    moves += [
        all_flat((np.zeros_like(A), K @ C, K @ P, K @ R - R @ K) for A, C, P, R in each) for K in _antisymmetric(k)
    ]
    unseen, unasked = _kernel(np.asarray(task.Sigma)), _kernel(np.asarray(task.query_Sigma))
    still = [np.zeros_like(block) for block in each[0]]
    alone = [(np.outer(u, e), *still[1:]) for u in unseen for e in np.eye(d)]
    alone += [(np.outer(e, u), *still[1:]) for u in unasked for e in np.eye(d)]
    alone += [(still[0], np.outer(e, u), *still[2:]) for u in unasked for e in np.eye(k)]
    alone += [(*still[:2], np.outer(e, u), still[3]) for u in unseen for e in np.eye(k)]
    moves += [np.kron(unit, flat(move)) for move in alone for unit in np.eye(H)]
    if linear:
        moves += _of_factors(x, d, k)
        lines = _of_one_factor(x, d, k, max(error, _NEGLIGIBLE))
        if hessian is not None and lines.shape[1]:
            _, curved, right = np.linalg.svd(hessian @ lines)
            lines = lines @ right[np.count_nonzero(curved > _NEGLIGIBLE * np.abs(hessian).max()) :].T
        moves += list(lines.T)
    vectors = np.stack(moves, axis=1) if moves else np.zeros((x.size, 0))
    left, moved, _ = np.linalg.svd(vectors, full_matrices=False)
    return left[:, moved > max(error, _NEGLIGIBLE * max(1.0, float(np.linalg.norm(x))))]


def _of_factors(x: Vector, d: int, k: int) -> list[Vector]:
    """Changes of the heads among themselves that leave Σ V⊗U alone."""
    U, V = _matrices(x, d, k)
    moves = []
    for h, g in np.ndindex(len(U), len(U)):
        of_U, of_V = np.zeros_like(U), np.zeros_like(V)
        of_U[h], of_V[g] = U[g], -V[h]
        moves.append(_vector(of_U, of_V))
    return moves


def _of_one_factor(x: Vector, d: int, k: int, error: float) -> Float[np.ndarray, "n m"]:
    """An orthonormal basis of the changes of U alone, and of V alone, that leave N alone."""
    U, V = _matrices(x, d, k)
    lines = []
    for y in _without_symmetric_part(V.transpose(1, 0, 2), error):  # the same condition for every column of U
        lines += [_vector(np.einsum("hb,j->hbj", y, e), np.zeros_like(V)) for e in np.eye(d)]
    for y in _without_symmetric_part(U.transpose(2, 0, 1), error):
        lines += [_vector(np.zeros_like(U), np.einsum("i,ha->hia", e, y)) for e in np.eye(k)]
    return np.stack(lines, axis=1) if lines else np.zeros((x.size, 0))


def _without_symmetric_part(factors: Float[np.ndarray, "m h D"], error: float) -> Float[np.ndarray, "n h D"]:
    """A basis of the y with Σ_h f_h y_hᵀ antisymmetric for each of the m lists of f_h."""
    m, H, D = factors.shape
    conditions = np.einsum("mha,bc->mabhc", factors, np.eye(D))
    conditions = (conditions + conditions.transpose(0, 2, 1, 3, 4)).reshape(m * D * D, H * D)
    _, sizes, right = np.linalg.svd(conditions)
    return right[np.count_nonzero(sizes > error * max(1.0, float(sizes[0]))) :].reshape(-1, H, D)


def _matrices(x: Vector, d: int, k: int) -> tuple[Float[np.ndarray, "h D d"], Float[np.ndarray, "h k D"]]:
    """The columns of U that meet queries, and V, of all heads."""
    rows, split = x.reshape(-1, _size(d, k)), d * (d + k)
    U = rows[:, :split].reshape(-1, d + k, d)
    V = [np.concatenate([parts.P, parts.R], axis=1) for parts in apart(x, d, k)]
    return U, np.stack(V)


def _vector(U: Float[np.ndarray, "h D d"], V: Float[np.ndarray, "h k D"]) -> Vector:
    """The blocks of such matrices as one vector."""
    d = U.shape[-1]
    return all_flat((u, v[:, :d], v[:, d:]) for u, v in zip(U, V, strict=True))


def least(x: Vector, task: LinearRegression) -> Vector:
    r"""The least of the layers that differ by what no covariate meets."""
    unseen, unasked = _kernel(np.asarray(task.Sigma)), _kernel(np.asarray(task.query_Sigma))
    seen, asked = np.eye(task.d) - unseen.T @ unseen, np.eye(task.d) - unasked.T @ unasked
    return all_flat((seen @ A @ asked, C @ asked, P @ seen, R) for A, C, P, R in apart(x, task.d, task.targets))


def balanced(x: Vector, d: int, k: int) -> Vector:
    """The same linear heads, orthogonal and with norms of U and V equal: the factors of a singular value
    decomposition of ΣV⊗U, which for one head is what gradient flow from small weights leaves.
    """
    U, V = _matrices(x, d, k)
    H = len(U)
    (of_V, low_V), (of_U, low_U) = np.linalg.qr(V.reshape(H, -1).T), np.linalg.qr(U.reshape(H, -1).T)
    left, sizes, right = np.linalg.svd(low_V @ low_U.T)
    if not sizes[0] > 0:
        return x
    if H == 1 and right.item() * low_U.item() < 0:
        left, right = -left, -right  # a head keeps its sign
    root = np.sqrt(sizes)
    return _vector(((of_U @ right.T) * root).T.reshape(U.shape), ((of_V @ left) * root).T.reshape(V.shape))


def sizes(x: Vector, task: LinearRegression, *, linear: bool) -> Float[np.ndarray, " m"]:
    """Norms that no symmetry of a task in standard units changes.

    They are those of the blocks, of one `linear` head once it is balanced, and of several those of the blocks of N.
    """
    d, k = task.d, task.targets
    x = least(x, task)
    if linear and len(x) > _size(d, k):
        U, V = _matrices(x, d, k)
        N = np.einsum("hia,hbj->iabj", V, U)
        N = (N + N.swapaxes(1, 2)) / 2
        parts = N[:, :d, :d], N[:, :d, d:], N[:, d:, d:]
    else:
        parts = [np.stack(block) for block in zip(*apart(balanced(x, d, k) if linear else x, d, k), strict=True)]
    return np.array([float(np.linalg.norm(part)) for part in parts])


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
