"""Where a measurement is carried out. Its numbers are the same to rounding: so are the random ones behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import jax
import jax.numpy as jnp

from largeprompt._device import Device, jax_place

Found = Literal["cpu", "gpu"]


@contextmanager
def carried_out_on(device: Device) -> Iterator[Found]:
    """What JAX computes inside is computed there; a GPU that is asked for and not there is refused."""
    found = jax_place(device).device
    if found != device != "auto":
        raise ValueError(f"device is {device!r} and JAX sees no GPU; 'auto' takes one where there is one")
    there = jax.devices(found)[0]
    if jnp.zeros(()).device == there:  # a context of its own would have all compiled anew
        yield found
        return
    with jax.default_device(there):
        yield found
