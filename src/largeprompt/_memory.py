"""How much memory there is."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp


def machine_memory() -> float:
    """The bytes of this machine's memory, infinite where the system does not say."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def free_memory() -> float:
    """Bytes that can still be had where JAX computes now; infinite where the system does not say."""
    there: Any = jnp.zeros(()).device
    known = there.memory_stats() if there.platform != "cpu" else None
    if known:
        return known.get("bytes_limit", math.inf) - known.get("bytes_in_use", 0)
    return min(_free_on_machine(), _left_to_process())


def _free_on_machine() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024.0 * int(line.split()[1])
    return machine_memory()


def _left_to_process() -> float:
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource  # not on every system

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            return float(limit - taken)
    return math.inf
