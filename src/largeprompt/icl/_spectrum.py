r"""The eigenvalues of $\Sigma\Omega$ through factors of both, so that no condition number is squared.

With $\Sigma = F_\Sigma F_\Sigma^\top$ and $\Omega = F_\Omega F_\Omega^\top$ the singular values of
$F_\Sigma^\top F_\Omega = X\,\mathrm{diag}(\sigma)\,Y^\top$ are their roots, $\sigma_i^2 = \lambda_i$.
All is NumPy in float64, whatever the precision of the task.
"""

from typing import NamedTuple

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from largeprompt import _checks as checks

Matrix = Float[np.ndarray, "d d"]
_SMALL_IS_EXACT = 2  # of LAPACK's gejsv: small singular values of a matrix with scaled columns, to their own rounding


class Factor(NamedTuple):
    r"""A covariance as $FF^\top$; the columns of $F$ past its `rank` are 0.

    Eigenvalues of the matrix of correlations below `rounding` count as 0: that of the entries could make them. A small
    variance counts however small it is, in float32 too.
    """

    F: Matrix
    inverse: Matrix  # the pseudo-inverse of F
    rank: int
    rounding: float
    doubtful: float  # the largest eigenvalue of the correlations that is neither surely 0 nor known to a per cent, or 0

    @property
    def projection(self) -> Matrix:
        """The orthogonal projection on the range of the covariance."""
        return projection(self.F[:, : self.rank])


def factor(covariance: Float[Array, "d d"]) -> Factor:
    """A covariance through the eigenvectors of its matrix of correlations."""
    d, rounding = len(covariance), 10 * len(covariance) * float(np.finfo(covariance.dtype).eps)
    matrix = np.asarray(covariance, float)
    scale = np.sqrt(np.maximum(np.diag(matrix), 0))
    divisor = np.where(scale > 0, scale, 1)
    # what meets a variance of 0 is rounding
    correlation = np.where((scale > 0) & (scale > 0)[:, None], matrix / divisor / divisor[:, None], 0)
    values, vectors = np.linalg.eigh(correlation)
    values, vectors = values[::-1], vectors[:, ::-1]
    rank = int(np.sum(values > rounding))
    roots = np.sqrt(np.maximum(values, 0)) * (np.arange(d) < rank)
    F, inverse = scale[:, None] * vectors * roots, np.zeros((d, d))
    if rank == d:
        inverse = (vectors / roots).T / scale
    else:
        Q, R = np.linalg.qr(F[:, :rank])
        inverse[:rank] = np.linalg.solve(R, Q.T)
    doubtful = values[(values > rounding / 5) & (values <= max(rounding, 100 * d * np.finfo(float).eps))]
    return Factor(F, inverse, rank, rounding, float(doubtful.max(initial=0.0)))


def projection(columns: Float[np.ndarray, "d n"]) -> Matrix:
    """The orthogonal projection on the span of independent columns."""
    if columns.shape[1] == len(columns):
        return np.eye(len(columns))
    basis, _ = np.linalg.qr(columns)
    return basis @ basis.T


class Spectrum(NamedTuple):
    r"""Factors of $\Sigma$ and $\Omega$ and the singular values of $F_\Sigma^\top F_\Omega$; `rank` are not 0."""

    of_Sigma: Factor
    of_Omega: Factor
    left: Matrix
    roots: Float[np.ndarray, " d"]
    right: Matrix
    rank: int

    @property
    def values(self) -> Float[np.ndarray, " d"]:
        r"""The eigenvalues of $\Sigma\Omega$, largest first."""
        return self.roots**2

    @property
    def modes(self) -> Matrix:
        r"""$F_\Omega Y$: $w = F_\Omega Y\zeta$ with independent $\zeta_i$, of which a prompt teaches each by itself."""
        return self.of_Omega.F @ self.right


def spectrum(Sigma: Float[Array, "d d"], Omega: Float[Array, "d d"]) -> Spectrum:
    """That of a task with these covariances of its covariates and its coefficients."""
    first, second = factor(Sigma), factor(Omega)
    # small singular values keep their digits: columns scaled by both scales, pivots that order the rows of R alike, and
    # a product whose rows are then scaled as those of R
    scale = np.linalg.norm(second.F, axis=1)
    Q, R, order = scipy.linalg.qr(first.F.T * scale, pivoting=True)
    rest = (second.F / np.where(scale > 0, scale, 1)[:, None])[order]
    (decompose,) = scipy.linalg.get_lapack_funcs(("gejsv",), (R,))
    scaled, right, left, work, _, failed = decompose((R @ rest).T, joba=_SMALL_IS_EXACT)
    if failed:
        raise ValueError("Sigma and Omega have no singular value decomposition in float64; rescale them")
    roots = scaled * (work[0] / work[1])
    # a product of full rank has no singular value of 0; of the others, those that the rounding of Σ and Ω could make
    least = max(first.rounding, second.rounding) * np.linalg.norm(first.F, 2) * np.linalg.norm(second.F, 2)
    certain = first.rank + second.rank - len(roots)
    possible = min(first.rank, second.rank)
    index = np.arange(len(roots))
    kept = (roots > 0) & (index < possible) & ((index < certain) | (roots > least))
    return Spectrum(first, second, Q @ left, np.where(kept, roots, 0), right, int(np.sum(kept)))


def refuse_a_doubtful_rank(name: str, found: Factor, covariance: Float[Array, "d d"]) -> None:
    """What is read off best depends on the least eigenvalue, unless it is 0."""
    if found.doubtful > 0:
        raise ValueError(
            f"{name} has correlations with the eigenvalue {found.doubtful:.2g}, which is lost in the rounding of "
            f"{covariance.dtype}; make it 0 or larger" + ("" if covariance.dtype.itemsize == 8 else ", or use float64")
        )


def refuse_a_traced_task(task: object, what: str) -> None:
    """Decompositions in NumPy need values."""
    if any(checks.is_traced(leaf) for leaf in jax.tree.leaves(task)):
        raise ValueError(f"{what} is not traced; call it outside of jit, vmap and grad")
