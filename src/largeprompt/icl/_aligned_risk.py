r"""Softmax attention with $P = C = 0$ at finite length: $\nu = x^\top A^\top\Sigma Ax$ does not depend on $W$.

So the average over $W$ is closed, and that over $x$ is one of functions of a quadratic form; with $h = \Sigma Ax$,

$$2R_L = \|R\|_F^2\,E\{(\tau_1+s^2)Q + K_2\,h^\top\Omega h\} - 2\,\mathrm{tr}R\,E\{(1-Q)\,h^\top\Omega x\}
+ k\,\mathrm{tr}\,\Sigma_q\Omega
+ ks^2.$$
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt.attention import WeightMoments

from ._chi_squared import quadratic_form_averages
from ._closed_forms import Blocks
from ._regression import LinearRegression, root


class Coefficients(NamedTuple):
    """The risk as a function of R alone: ‖R‖² quadratic − tr R linear + constant."""

    quadratic: float
    linear: float
    constant: float


def aligned_coefficients(A: Float[Array, "d d"], task: LinearRegression, moments: WeightMoments) -> Coefficients | None:
    """By one-dimensional quadrature; None where the form ν is too anisotropic for its series."""
    scores, Sigma, Omega, query = (np.asarray(m, float) for m in (A, task.Sigma, task.Omega, task.query_Sigma))
    S = np.asarray(root(task.query_Sigma), float)
    with np.errstate(over="ignore", invalid="ignore"):
        h = Sigma @ scores @ S
        form = S @ scores.T @ h
    checks.result("the risk", jnp.asarray(form))
    weights, vectors = np.linalg.eigh((form + form.T) / 2)
    h, x = h @ vectors, S @ vectors

    averages = quadratic_form_averages(weights, lambda nu: np.stack(moments.shares_of_many(nu)))
    if averages is None:
        return None
    mean, squares = averages
    hOh, hOx = np.sum(h * (Omega @ h), axis=0), np.sum(h * (Omega @ x), axis=0)
    total, noise = float(np.sum(Sigma * Omega)) + float(task.noise), float(task.noise)
    return Coefficients(
        (total * mean[0] + hOh @ squares[2]) / 2,
        hOx @ squares[1],
        task.targets * (float(np.sum(query * Omega)) + noise) / 2,
    )


def aligned_risk(parts: Blocks, task: LinearRegression, moments: WeightMoments) -> Float[Array, ""] | None:
    """R_L itself, by the same quadrature."""
    found = aligned_coefficients(parts.A, task, moments)
    if found is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return jnp.sum(parts.R**2) * found.quadratic - jnp.trace(parts.R) * found.linear + found.constant
