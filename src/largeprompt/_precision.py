"""The one place where the floating-point width of the mathematics is chosen."""

import jax


def use_float64() -> None:
    """Make JAX compute in float64. Call it once, before anything else; importing the package never does."""
    jax.config.update("jax_enable_x64", True)
