r"""Softmax attention with $P = C = 0$ at finite length: $\nu = x^\top A^\top\Sigma Ax$ does not depend on $W$.

So the average over $W$ is closed, and that over $x$ is one of functions of a quadratic form; with $h = \Sigma Ax$,

$$2R_L = \|R\|_F^2\,E\{(\tau_1+s^2)Q + K_2\,h^\top\Omega h\} - 2\,\mathrm{tr}R\,E\{(1-Q)\,h^\top\Omega x\}
+ k\,\mathrm{tr}\,\Sigma_q\Omega
+ ks^2.$$

In the axes of the form, $x = X\xi$ with $\xi$ standard normal, the slope in $A$ is one of fourth moments of $\xi$.
The same holds of a pair of heads, $(A, R/2)$ and $(-A, -R/2)$, with q and k of a pair in place of Q and $K_2$, but not
of $1-Q$.
The quadrature is NumPy in float64, whatever the precision of the layer; JAX calls it back.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt.attention import AbstractLayer, WeightMoments, heads_of
from largeprompt.attention._pair import PairTable, pair_shares

from .._blocks import Blocks, blocks
from .._quadratic_forms import quadratic_form_averages
from .._regression import LinearRegression
from ._abstract import AbstractGaussianRisk, AbstractHeadRisk

METHOD = "exact over prompts, one-dimensional quadrature over x"
Matrix = Float[np.ndarray, "d d"]
Table = Float[np.ndarray, "terms 2 panels"]
_STEP = 1e-5  # of the differences that stand for second derivatives, relative to A


class Coefficients(NamedTuple):
    """The risk as a function of R alone: ‖R‖² quadratic − tr R linear + constant."""

    quadratic: float
    linear: float
    constant: float


class Slopes(NamedTuple):
    """The derivatives of the first two in A."""

    quadratic: Matrix
    linear: Matrix


class AlignedRisk:
    """The coefficients as functions of A, on one task at one length."""

    def __init__(
        self,
        Sigma: Matrix,
        Omega: Matrix,
        query_Sigma: Matrix,
        noise: float,
        targets: int,
        table: Table,
        pair: PairTable | None = None,
    ):
        self.Sigma, self.Omega, self.query_root = Sigma, Omega, _root(query_Sigma)
        self.label = float(np.sum(Sigma * Omega)) + noise  # the variance of a label
        self.constant = targets * (float(np.sum(query_Sigma * Omega)) + noise) / 2
        self.table, self.pair = table, pair

    @classmethod
    def of(cls, task: LinearRegression, moments: WeightMoments, pair: PairTable | None = None) -> "AlignedRisk":
        """That of a task, at the length of the moments; with the table of pairs, of a pair of heads."""
        arrays = task.Sigma, task.Omega, task.query_Sigma, moments.table
        Sigma, Omega, query, table = (np.asarray(array, float) for array in arrays)
        return cls(Sigma, Omega, query, float(task.noise), task.targets, table, pair)

    def coefficients(self, A: Matrix) -> Coefficients:
        """By one-dimensional quadrature; NaN where ν overflows."""
        return self._found(A, slopes=False)[0]

    def with_slopes(self, A: Matrix) -> tuple[Coefficients, Slopes]:
        """The same and its derivatives, by the same quadrature."""
        return self._found(A, slopes=True)

    def _found(self, A: Matrix, slopes: bool) -> tuple[Coefficients, Slopes]:
        with np.errstate(over="ignore", invalid="ignore"):
            h = self.Sigma @ A @ self.query_root
            form = self.query_root @ A.T @ h
        if not np.isfinite(form).all():
            lost = np.full_like(form, np.nan)
            return Coefficients(np.nan, np.nan, self.constant), Slopes(lost, lost)
        weights, vectors = np.linalg.eigh((form + form.T) / 2)
        x, h = self.query_root @ vectors, h @ vectors
        means, squares, fourths = quadratic_form_averages(
            weights, lambda nu: shares_and_slopes(self.table, nu, self.pair), fourths=2 if slopes else 0
        )
        (Q, *_), (_, unheld, K2, dQ, *_) = means, squares
        hOh, hOx = h.T @ self.Omega @ h, h.T @ self.Omega @ x
        found = Coefficients(float(self.label * Q + np.diag(hOh) @ K2) / 2, float(np.diag(hOx) @ unheld), self.constant)
        if not slopes:
            return found, Slopes(np.zeros_like(A), np.zeros_like(A))
        SO, SAx = self.Sigma @ self.Omega, self.Sigma @ A @ x
        through_form = self.label * np.diag(dQ) + _contracted(fourths[1], hOh)
        quadratic = (SAx @ through_form + SO @ (SAx * K2)) @ x.T
        linear = (SO @ (x * unheld) + 2 * SAx @ _contracted(fourths[0], (hOx + hOx.T) / 2)) @ x.T
        return found, Slopes(quadratic, linear)


def _root(covariance: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def _contracted(fourths: Matrix, form: Matrix) -> Matrix:
    """E f ξξᵀ(ξᵀ form ξ) of a symmetric form: what is odd in any coordinate has mean 0."""
    found = 2 * fourths * form
    np.fill_diagonal(found, fourths @ np.diag(form))
    return found


def shares_and_slopes(
    table: Table, nu: Float[np.ndarray, " m"], pair: PairTable | None = None
) -> Float[np.ndarray, "6 m"]:
    """Q, 1 − Q, K₂, and the derivatives of Q, 1 − Q and K₂ in ν; of a pair, q and k in place of Q and K₂.

    `WeightMoments` by NumPy: a callback of JAX must not wait for JAX.
    """
    y = 1 / np.sqrt(1 + nu / 2)
    panels = table.shape[-1]
    panel = np.minimum((y * panels).astype(int), panels - 1)
    position = 2 * (y * panels - panel) - 1
    p, dp = np.zeros((2, len(nu))), np.zeros((2, len(nu)))
    for coefficients in table[::-1]:
        dp = dp * position + p
        p = p * position + coefficients[:, panel]
    dp *= 2 * panels
    power = np.stack([y, y**2])
    # held : spread = 1 : yᵏ(eᵖ − 1)
    held, spread = np.exp(-p), -power * np.expm1(-p)
    share, rest = held / (held + spread), spread / (held + spread)
    # the logarithm of spread : held has the slope k/y + p′/(1 − e⁻ᵖ) in y, and y has −y³/4 in ν
    log_slope = np.stack([1 / y, 2 / y]) + dp / np.maximum(-np.expm1(-p), 1e-300)
    slope = share * rest * log_slope * (y**3 / 4)
    if pair is not None:
        q, k, dq, dk = pair_shares(pair, nu)
        return np.stack([q, rest[0], k, dq, -slope[0], dk])
    return np.stack([share[0], rest[0], rest[1], slope[0], -slope[0], -slope[1]])


class AlignedQuadrature(AbstractHeadRisk):
    """Softmax attention with P = C = 0 at finite length: exact over prompts and over W, a quadrature over x.

    A gradient flow in (U, V) keeps P = C = 0. The function holds of such layers only.
    """

    task: LinearRegression
    moments: WeightMoments
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return METHOD

    def of_blocks(self, parts):
        return _of_blocks(parts, self.task, (self.moments.table,))


class PairQuadrature(AbstractGaussianRisk):
    """Two softmax heads with P = C = 0, opposite scores and opposite values, (A, R/2) and (-A, -R/2), at finite length.

    By symmetry a gradient flow keeps such a pair. The function holds of pairs only.
    """

    task: LinearRegression
    moments: WeightMoments
    pair: Float[Array, "pair_terms 2 pair_panels"]
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return METHOD

    def of_layer(self, layer: AbstractLayer):
        one, other = (blocks(head, self.task) for head in heads_of(layer) or ())
        # half the slope belongs to each head: the part of its gradient in which the two move alike is 0 by symmetry
        parts = one._replace(A=(one.A - other.A) / 2, R=one.R - other.R)
        return _of_blocks(parts, self.task, (self.moments.table, self.pair))


def _of_blocks(parts: Blocks, task: LinearRegression, tables: tuple[Array, ...]) -> Float[Array, " 1"]:
    quadratic, linear = _coefficients((task.Sigma, task.Omega, task.query_Sigma, task.noise, *tables), parts.A)
    constant = task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2
    return (jnp.sum(parts.R**2) * quadratic - jnp.trace(parts.R) * linear + constant)[None]


def _on_the_host(setting, A):
    """The two coefficients, and their slopes in A, through a callback."""
    number, matrix = jax.ShapeDtypeStruct((), A.dtype), jax.ShapeDtypeStruct(A.shape, A.dtype)

    def found(setting, A):
        Sigma, Omega, query, noise, *tables = (np.asarray(part, float) for part in setting)
        aligned = AlignedRisk(Sigma, Omega, query, float(noise), 1, *tables)
        (quadratic, linear, _), slopes = aligned.with_slopes(np.asarray(A, float))
        return tuple(np.asarray(part, A.dtype) for part in (quadratic, linear, *slopes))

    return jax.pure_callback(found, (number, number, matrix, matrix), setting, A, vmap_method="sequential")


@jax.custom_jvp
def _coefficients(setting, A: Float[Array, "d d"]) -> tuple[Array, ...]:
    return _coefficients_and_slopes(setting, A)[:2]


@_coefficients.defjvp
def _coefficients_jvp(primals, tangents):
    (setting, A), (_, dA) = primals, tangents
    quadratic, linear, *slopes = _coefficients_and_slopes(setting, A)
    return (quadratic, linear), tuple(jnp.sum(slope * dA) for slope in slopes)


@jax.custom_jvp
def _coefficients_and_slopes(setting, A: Float[Array, "d d"]) -> tuple[Array, ...]:
    return _on_the_host(setting, A)


@_coefficients_and_slopes.defjvp
def _coefficients_and_slopes_jvp(primals, tangents):
    # second derivatives serve the Newton steps of an implicit solver only: differences are good enough
    (setting, A), (_, dA) = primals, tangents
    size = jnp.linalg.norm(dA)
    step = _STEP * (1 + jnp.linalg.norm(A)) / jnp.where(size > 0, size, 1)
    ahead, behind = _on_the_host(setting, A + step * dA), _on_the_host(setting, A - step * dA)
    return _on_the_host(setting, A), tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))
