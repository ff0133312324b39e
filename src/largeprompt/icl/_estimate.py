from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown


class Estimate(AbstractShown):
    """A number and its standard error, 0 where the number is exact; `method` says how it was found, `reason` why so."""

    value: Float[Array, "*shape"]
    stderr: Float[Array, "*shape"]
    method: str = eqx.field(static=True)
    reason: str = eqx.field(static=True, default="")

    def __repr__(self) -> str:
        error = "" if self.exact else f" ± {self.stderr}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{type(self).__name__}({self.value}{error}, {self.method}{reason})"

    @property
    def exact(self) -> bool:
        """Whether no sampling error is left."""
        return not bool(np.any(np.asarray(self.stderr) > 0))


def exactly(value: Any, method: str) -> Estimate:
    """An estimate with no error."""
    value = jnp.asarray(value, float)
    return Estimate(value, jnp.asarray(checks.library(value).zeros(value.shape, value.dtype)), method)


class Gradient(AbstractShown):
    """A gradient in a layer's parameters: `layer` has the layer's own shape, and so has `stderr`."""

    layer: Any
    stderr: Any
    method: str = eqx.field(static=True)
    reason: str = eqx.field(static=True, default="")

    def norm(self) -> Float[Array, ""]:
        """The Euclidean norm over all parameters."""
        return norm(self.layer)


def norm(tree: Any) -> Float[Array, ""]:
    """The Euclidean norm of all the arrays of a tree."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    library = checks.library(leaves)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = library.stack([library.sum(library.square(leaf)) for leaf in leaves])
        return jnp.asarray(library.sqrt(squares.sum()))
