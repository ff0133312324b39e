r"""A regression in units of its own: covariates of covariance I, labels of variance 1.

With $x = Sx'$, $x_q = cSx_q'$ and $y = ty'$, where $S = \Sigma^{1/2}$, a layer has the same scores and the same
relative error as one with
$$A' = cSAS,\quad C' = ctCS,\quad P' = PS/(ct),\quad R' = R/c,\qquad R_L = (ct)^2(R_L' - ks'^2/2) + ks^2/2.$$
What is small or flat in these units is so for the risk, not for a choice of units; and covariances $\Sigma$ and
$\Omega$ that do not commute do so there when queries are distributed like tokens.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._blocks import Blocks
from .._regression import LinearRegression

_UNSEEN = 1e-12  # of the largest eigenvalue of Σ: a direction in which covariates do not vary

Square = Float[np.ndarray, "d d"]


class Standard(NamedTuple):
    """The regression in these units, and the way there and back."""

    task: LinearRegression
    given: LinearRegression
    root: Square
    inverse: Square
    query: float
    label: float

    def into(self, parts: Blocks) -> Blocks:
        """A layer of the given task as one of the standard task."""
        A, C, P, R = (np.asarray(block) for block in parts)
        S, c, t = self.root, self.query, self.label
        return _blocks(c * S @ A @ S, c * t * C @ S, P @ S / (c * t), R / c)

    def out(self, parts: Blocks) -> Blocks:
        """A layer of the standard task as one of the given task."""
        A, C, P, R = (np.asarray(block) for block in parts)
        S, c, t = self.inverse, self.query, self.label
        return _blocks(S @ A @ S / c, C @ S / (c * t), P @ S * (c * t), R * c)

    @property
    def factor(self) -> float:
        """What differences of risks are multiplied with on the way back."""
        return (self.query * self.label) ** 2

    def risk_out(self, value: float) -> float:
        """A risk of the standard task as one of the given task."""
        floors = [task.targets * float(task.noise) / 2 for task in (self.task, self.given)]
        return self.factor * (value - floors[0]) + floors[1]


def standardised(task: LinearRegression) -> Standard:
    """The task in units of its own; directions in which its covariates do not vary keep theirs."""
    Sigma, Omega, Sq, noise = (np.asarray(m, float) for m in (task.Sigma, task.Omega, task.query_Sigma, task.noise))
    values, vectors = np.linalg.eigh(Sigma)
    seen = values > _UNSEEN * max(float(values[-1]), 0.0)
    sizes = np.sqrt(np.where(seen, values, values[-1] if values[-1] > 0 else 1.0))
    S, inverse = (vectors * sizes) @ vectors.T, (vectors / sizes) @ vectors.T
    tau1, asked = float(np.sum(Sigma * Omega)), float(np.sum(Sq * Omega))
    c = math.sqrt(asked / tau1) if asked > 0 and tau1 > 0 else 1.0
    t = math.sqrt(tau1 + float(noise)) or 1.0
    covariates = np.eye(len(S)) if seen.all() else vectors[:, seen] @ vectors[:, seen].T
    same = Sq is Sigma or np.array_equal(Sq, Sigma)
    queries = covariates / c**2 if same else _symmetric(inverse @ Sq @ inverse) / c**2
    weights = _symmetric(S @ Omega @ S) / t**2
    standard = LinearRegression(covariates, float(noise) / t**2, weights, queries, task.targets)
    return Standard(standard, task, S, inverse, c, t)


def _symmetric(matrix: Square) -> Square:
    return (matrix + matrix.T) / 2


def _blocks(*parts: np.ndarray) -> Blocks:
    return Blocks(*(jnp.asarray(part) for part in parts))
