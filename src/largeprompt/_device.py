"""Where work is carried out: on the processor, or on a GPU."""

from typing import Any, Literal, NamedTuple, get_args

import jax

Device = Literal["auto", "cpu", "gpu"]


class Place(NamedTuple):
    """A device that was found; `remark` is what a user should know of it, one line, where it is not what was asked."""

    device: Literal["cpu", "gpu"]
    remark: str | None = None


def checked_device(device: str) -> Device:
    """The device, if it is one."""
    if device not in get_args(Device):
        raise ValueError(f"device is {device!r}; it must be one of {', '.join(map(repr, get_args(Device)))}")
    return device  # pyright: ignore[reportReturnType]


def jax_gpu() -> Any:
    """The first GPU that JAX sees, if it sees one."""
    return next((found for found in jax.devices() if found.platform in ("gpu", "cuda", "rocm")), None)


def jax_place(device: str) -> Place:
    """Where JAX can carry it out: a GPU if there is one and it is not refused."""
    if checked_device(device) == "cpu":
        return Place("cpu")
    if jax_gpu() is not None:
        return Place("gpu")
    asked = f"no GPU: JAX sees {jax.devices()[0].platform} alone (install jax[cuda12]); carried out on the CPU"
    return Place("cpu", asked if device == "gpu" else None)
