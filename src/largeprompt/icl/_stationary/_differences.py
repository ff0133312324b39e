"""Derivatives of the risk of several softmax heads near P = C = 0, from differences of exact gradients.

Automatic differentiation of their gradients takes minutes to compile. By the symmetry W → −W, which the nodes have, the
gradient in (P, C) vanishes at P = C = 0, and the Hessian has one block for (A, R) and one for (P, C).
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from .._regression import LinearRegression
from .._risk._heads import OverHeads
from ._symmetries import all_flat, apart, stacked

Vector = Float[np.ndarray, " n"]
_STEP = 2e-3  # long enough that nodes at which one table of joint moments meets the other do not count
_RULES = {2: {1: 1 / 2}, 4: {1: 2 / 3, 2: -1 / 12}}  # weights of g(jh) − g(−jh), over h


class Differences(NamedTuple):
    """The risk, its gradient and its Hessian over each replicate of the nodes."""

    values: Float[np.ndarray, " r"]
    gradients: Float[np.ndarray, "r n"]
    hessians: Float[np.ndarray, "r n n"]

    def errors(self, directions: Float[np.ndarray, "n m"]) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
        """The standard errors of the slopes and of the curvatures along the directions."""
        slopes = self.gradients @ directions
        curvatures = np.einsum("nm,rnl,lm->rm", directions, self.hessians, directions)
        of_mean = math.sqrt(len(slopes))
        return slopes.std(axis=0, ddof=1) / of_mean, curvatures.std(axis=0, ddof=1) / of_mean


@eqx.filter_jit
def replicate_gradients(function: OverHeads, x) -> tuple[Float[Array, " r"], Float[Array, "r n"]]:
    """The risk of softmax heads and its gradient over each replicate of the nodes."""
    d, k = function.task.d, function.task.targets

    def of_replicate(nodes):
        return jax.value_and_grad(lambda x: function.over_heads(nodes, stacked(x, d, k)))(x)

    return jax.vmap(of_replicate)(function.nodes)


def differences(function: OverHeads, x: Vector, *, order: int = 4) -> Differences:
    """The derivatives at P = C = 0 in the blocks that the function is of: (A, R) or, over nodes of (W, x), (P, C)."""
    values, gradients = (np.asarray(part) for part in replicate_gradients(function, x))
    kept = _is_aligned(function.task, x) == function.aligned
    hessians = np.zeros((len(values), x.size, x.size))
    rule, h = _RULES[order], _STEP
    for i in np.flatnonzero(kept):
        for j, weight in rule.items():
            ahead, behind = (
                np.asarray(replicate_gradients(function, x + sign * j * h * np.eye(x.size)[i])[1]) for sign in (1, -1)
            )
            hessians[:, i] += weight / h * (ahead - behind) * kept
    return Differences(values, gradients * kept, (hessians + hessians.swapaxes(1, 2)) / 2)


def in_all_blocks(aligned: OverHeads, full: OverHeads, x: Vector) -> Differences:
    """The derivatives at P = C = 0, over nodes of x in (A, R) and over nodes of (W, x) in (P, C)."""
    within, across = differences(aligned, x), differences(full, x)
    return within._replace(hessians=within.hessians + across.hessians)


def _is_aligned(task: LinearRegression, x: Vector) -> Bool[np.ndarray, " n"]:
    """Which entries are of A or R."""
    parts = apart(np.ones_like(x), task.d, task.targets)
    return all_flat(one._replace(C=0 * one.C, P=0 * one.P) for one in parts) > 0
