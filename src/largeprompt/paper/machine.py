"""The machine and the versions that a job ran with."""

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from largeprompt import __version__


def machine(cores: int, device: str = "cpu") -> dict[str, Any]:
    """The processor and system, and the GPU where runs were trained on one."""
    gpu = {"gpu": gpu_name()} if device == "gpu" else {}
    return {
        **gpu,
        "processor": processor(),
        "cores": cores,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def processor() -> str:
    """The name of the processor, as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or os.name


def gpu_name() -> str:
    """The name of the GPU in use."""
    from numba import cuda

    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else str(name)


def versions() -> dict[str, str]:
    """The versions of all that the numbers depend on."""
    others = ("jax", "numba", "numpy", "xarray")
    return {"largeprompt": __version__} | {name: metadata.version(name) for name in others}
