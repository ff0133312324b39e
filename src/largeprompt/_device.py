"""Which device does the work: the processor, or a GPU. It is resolved once, by the outermost call."""

import warnings
from typing import Any, Literal, get_args

import jax

Device = Literal["auto", "cpu", "gpu"]
DeviceName = Literal["cpu", "gpu"]
Library = Literal["jax", "cuda"]


class NoGpu(ValueError):
    """A GPU was asked for, and there is none; `reason` says why."""

    def __init__(self, reason: str):
        super().__init__(f"device is 'gpu' and there is no GPU: {reason}; 'auto' takes one where there is one")
        self.reason = reason


def resolve_device(device: str, library: Library = "jax") -> DeviceName:
    """The device that a library can use: JAX, or the compiled loops by CUDA. `auto` is a GPU where there is one."""
    if device not in get_args(Device):
        raise ValueError(f"device is {device!r}; it must be one of {', '.join(map(repr, get_args(Device)))}")
    if device == "cpu":
        return "cpu"
    reason = gpu_refusal(library)
    if reason is not None and device == "gpu":
        raise NoGpu(reason)
    return "gpu" if reason is None else "cpu"


def gpu_refusal(library: Library) -> str | None:
    """Why a library has no GPU; None where it has one."""
    if library == "jax":
        platform = jax.devices()[0].platform
        return None if jax_gpu() is not None else f"JAX sees {platform} alone (install jax[cuda12])"
    try:
        cuda = numba_cuda()
    except ImportError:
        return "numba-cuda is not installed (it comes with largeprompt[cuda])"
    except Exception as error:  # newer versions look for CUDA's libraries as soon as they are imported
        return f"numba-cuda cannot be imported: {_first_line(error)} (largeprompt[cuda] installs what it needs)"
    try:
        found = cuda.is_available()
    except Exception as error:  # whatever a driver raises
        return f"CUDA does not answer: {_first_line(error)}"
    return None if found else "CUDA finds no device and driver"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def numba_cuda() -> Any:
    """Numba's CUDA, which is an extra and takes long to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses what newer NumPy is about to drop
        from numba import cuda
    return cuda


def jax_gpu() -> Any:
    """The first GPU that JAX sees, or None."""
    return next((found for found in jax.devices() if found.platform in ("gpu", "cuda", "rocm")), None)
