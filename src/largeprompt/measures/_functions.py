from typing import Any

import equinox as eqx
import jax


def as_pytree(function: Any) -> Any:
    """A user's function as something that travels inside a measure through `jit` and `vmap`.

    A plain function becomes a `Partial`, a pytree without leaves; an Equinox module is one already.
    """
    return function if isinstance(function, eqx.Module) else jax.tree_util.Partial(function)
