r"""Softmax attention with $P = C = 0$ at finite length: $\nu = x^\top A^\top\Sigma Ax$ does not depend on $W$.

So the average over $W$ is closed, and that over $x$ is one of functions of a quadratic form; with $h = \Sigma Ax$,

$$2R_L = \|R\|_F^2\,E\{(\tau_1+s^2)Q + K_2\,h^\top\Omega h\} - 2\,\mathrm{tr}R\,E\{(1-Q)\,h^\top\Omega x\}
+ k\,\mathrm{tr}\,\Sigma_q\Omega
+ ks^2.$$

In the axes of the form, $x = X\xi$ with $\xi$ standard normal, the slope in $A$ is one of fourth moments of $\xi$.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt.attention import WeightMoments

from ._chi_squared import quadratic_form_averages
from ._closed_forms import Blocks
from ._regression import LinearRegression, root

METHOD = "exact over prompts, one-dimensional quadrature over x"
Matrix = Float[np.ndarray, "d d"]


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

    def __init__(self, task: LinearRegression, moments: WeightMoments):
        self.Sigma, self.Omega, query = (np.asarray(m, float) for m in (task.Sigma, task.Omega, task.query_Sigma))
        self.query_root = np.asarray(root(task.query_Sigma), float)
        noise = float(task.noise)
        self.label = float(np.sum(self.Sigma * self.Omega)) + noise  # the variance of a label
        self.constant = task.targets * (float(np.sum(query * self.Omega)) + noise) / 2
        self.moments = moments

    def coefficients(self, A: Matrix) -> Coefficients:
        """By one-dimensional quadrature."""
        weights, x, h = self._axes(A)
        means, squares, _ = quadratic_form_averages(weights, lambda nu: np.stack(self.moments.shares_of_many(nu)))
        hOh, hOx = np.sum(h * (self.Omega @ h), axis=0), np.sum(h * (self.Omega @ x), axis=0)
        return Coefficients((self.label * means[0] + hOh @ squares[2]) / 2, hOx @ squares[1], self.constant)

    def with_slopes(self, A: Matrix) -> tuple[Coefficients, Slopes]:
        """The same and its derivatives, by the same quadrature."""
        weights, x, h = self._axes(A)
        averages = quadratic_form_averages(weights, self._shares_and_slopes, fourths=True)
        means, (_, unheld, K2, dQ, _) = averages.means, averages.squares
        assert averages.fourths is not None
        hOh, hOx = h.T @ self.Omega @ h, h.T @ self.Omega @ x
        found = Coefficients(
            (self.label * means[0] + np.diag(hOh) @ K2) / 2, float(np.diag(hOx) @ unheld), self.constant
        )
        SO, SAx = self.Sigma @ self.Omega, self.Sigma @ A @ x
        through_form = self.label * np.diag(dQ) + _contracted(averages.fourths[4], hOh)
        quadratic = (SAx @ through_form + SO @ (SAx * K2)) @ x.T
        linear = (SO @ (x * unheld) - 2 * SAx @ _contracted(averages.fourths[3], (hOx + hOx.T) / 2)) @ x.T
        return found, Slopes(quadratic, linear)

    def _axes(self, A: Matrix) -> tuple[Float[np.ndarray, " d"], Matrix, Matrix]:
        """The weights of ν in its axes, these axes as queries, and h at them."""
        with np.errstate(over="ignore", invalid="ignore"):
            h = self.Sigma @ A @ self.query_root
            form = self.query_root @ A.T @ h
        checks.result("the risk", jnp.asarray(form))
        weights, vectors = np.linalg.eigh((form + form.T) / 2)
        return weights, self.query_root @ vectors, h @ vectors

    def _shares_and_slopes(self, nu: Float[np.ndarray, " m"]) -> Float[np.ndarray, "5 m"]:
        """Q, 1 − Q, K₂, dQ/dν and dK₂/dν."""
        padded = np.zeros(960 << (-(-len(nu) // 960) - 1).bit_length())  # few lengths to compile
        padded[: len(nu)] = nu
        return np.asarray(_shares_and_slopes(self.moments, padded))[:, : len(nu)]


@jax.jit
def _shares_and_slopes(moments: WeightMoments, nu: Float[Array, " m"]) -> Float[Array, "5 m"]:
    (Q, unheld, K2, _), (dQ, _, dK2, _) = jax.jvp(moments.shares, (nu,), (jnp.ones_like(nu),))
    return jnp.stack([Q, unheld, K2, dQ, dK2])


def _contracted(fourths: Matrix, form: Matrix) -> Matrix:
    """E f ξξᵀ(ξᵀ form ξ) of a symmetric form: what is odd in any coordinate has mean 0."""
    found = 2 * fourths * form
    np.fill_diagonal(found, fourths @ np.diag(form))
    return found


def aligned_risk(parts: Blocks, task: LinearRegression, moments: WeightMoments) -> Float[Array, ""]:
    """R_L itself."""
    found = AlignedRisk(task, moments).coefficients(np.asarray(parts.A, float))
    with np.errstate(over="ignore", invalid="ignore"):
        return jnp.sum(parts.R**2) * found.quadratic - jnp.trace(parts.R) * found.linear + found.constant
