"""How much memory a computation takes, known before it begins: sizes of blocks, and what does not fit is refused."""

import contextlib
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from largeprompt.measures import AbstractMeasure

_BYTES = 8  # of a number
_ROOM = 2**25  # numbers held at once for a block of queries
_CHUNK = 2**19  # numbers of tokens that a moment holds at once
_MATRICES = 16  # of the size of U, held beside everything else


def queries_at_once(mu: AbstractMeasure, most: int) -> int:
    """How many queries' constants to compute side by side."""
    tokens = max((leaf.size for leaf in jax.tree.leaves(mu) if isinstance(leaf, jax.Array)), default=0)
    held = 6 * min(tokens, _CHUNK) + 12 * mu.dim**2
    return 2 ** int(math.log2(min(max(1, _ROOM // held), most)))


def refuse_what_does_not_fit(what: str, dim: int, numbers: int) -> None:
    """Refuse, before any work, what would hold so many numbers beside the matrices of tokens of dimension `dim`."""
    needed, free = _BYTES * (numbers + _MATRICES * dim**2), free_memory()
    if needed > free:
        raise ValueError(
            f"{what} with tokens of dimension {dim} takes about {_gigabytes(needed)}, and {_gigabytes(free)} are free; "
            "use fewer prompts or queries, or a smaller dimension"
        )


def free_memory() -> float:
    """Bytes that can still be had where JAX computes now; infinite where the system does not say."""
    there = jnp.zeros(()).device
    known = there.memory_stats() if isinstance(there, jax.Device) and there.platform != "cpu" else None
    if known:
        return known.get("bytes_limit", math.inf) - known.get("bytes_in_use", 0)
    return min(_free_on_machine(), _left_to_process())


def _free_on_machine() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024.0 * int(line.split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def _left_to_process() -> float:
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource  # not on every system

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            return float(limit - taken)
    return math.inf


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
