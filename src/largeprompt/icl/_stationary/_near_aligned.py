"""The risk of several softmax heads near P = C = 0, where a search stays: what a certificate in all blocks takes."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._blocks import Blocks
from .._regression import LinearRegression
from .._risk._heads import OverHeads


class NearAligned(eqx.Module):
    """The average over x alone at P = C = 0, and what P and C add to it, averaged over (W, x).

    By the symmetry W → −W, which the nodes have, the gradient in (P, C) vanishes at P = C = 0 and the Hessian has one
    block for (A, R), here that of the first average, and one for (P, C).
    """

    aligned: OverHeads
    full: OverHeads
    exact: ClassVar[bool] = False

    @property
    def task(self) -> LinearRegression:
        return self.aligned.task

    def of_heads(self, heads: Blocks) -> Float[Array, " r"]:
        """The risk of softmax heads with these blocks, stacked, over each replicate."""
        without = heads._replace(P=jnp.zeros_like(heads.P), C=jnp.zeros_like(heads.C))
        return self.aligned.of_heads(heads) + self.full.of_heads(heads) - self.full.of_heads(without)
