"""Where a measurement is carried out. Its numbers are the same to rounding: so are the random ones behind them."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from largeprompt._device import Device, DeviceName, resolve_device


@contextmanager
def carried_out_on(device: Device) -> Iterator[DeviceName]:
    """What JAX computes inside is computed there; a GPU that is asked for and not there is refused."""
    found = resolve_device(device)
    there = jax.devices(found)[0]
    if jnp.zeros(()).device == there:  # a context of its own would have all compiled anew
        yield found
        return
    with jax.default_device(there):
        yield found
