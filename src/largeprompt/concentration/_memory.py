"""How much memory a computation takes, known before it begins: sizes of blocks, and what does not fit is refused."""

import math

import jax

from largeprompt._device import DeviceName
from largeprompt._memory import free_memory
from largeprompt.measures import AbstractMeasure

_BYTES = 8  # of a number
_ROOM = 2**25  # numbers held at once for a block of queries
_PROMPTS = {"cpu": 2**21, "gpu": 2**26}  # numbers held at once for a batch of prompts
_CHUNKS = (64, 512, 4096)  # tokens drawn at once: few sizes, since each is compiled
_LARGEST = 2**25  # numbers held for a chunk
_MOMENT = 2**19  # numbers of tokens that a moment holds at once
_WORK = 2**36  # products of numbers that an average over drawn queries may cost
_FEWEST = 2**10  # of drawn queries
_MATRICES = 16  # of the size of U, held beside everything else


def chunk_for(L: int, queries: int, dim: int, slopes: bool) -> int:
    """How many tokens of a prompt to draw at once."""
    most = _LARGEST // chunk_numbers(1, queries, dim, slopes)
    return max((chunk for chunk in _CHUNKS if chunk <= min(L, most)), default=_CHUNKS[0])


def chunk_numbers(chunk: int, queries: int, dim: int, slopes: bool) -> int:
    """How many numbers a chunk of tokens takes with what is computed from it."""
    return chunk * (3 * dim + 3 * queries + (dim * min(dim, queries) if slopes else 0))


def side_by_side(held: int, device: DeviceName) -> int:
    """How many prompts to draw at once, a power of two, where each holds so many numbers."""
    return 2 ** int(math.log2(max(1, _PROMPTS[device] // held)))


def queries_at_once(mu: AbstractMeasure, most: int, held: int = 0) -> int:
    """How many queries' constants to compute side by side, each of which holds so many numbers besides its own."""
    return 2 ** int(math.log2(min(max(1, _ROOM // (_of_query(mu) + held)), most)))


def queries_to_draw(mu: AbstractMeasure, most: int) -> int:
    """How many queries to average over: fewer where the tokens of the law make each of them long work."""
    affordable = _WORK // max(1, _tokens(mu) * mu.dim)
    return min(most, max(_FEWEST, 2 ** int(math.log2(max(1, affordable)))))


def _tokens(mu: AbstractMeasure) -> int:
    """How many numbers the law's own tokens are."""
    return sum(leaf.size for leaf in jax.tree.leaves(mu) if isinstance(leaf, jax.Array))


def _of_query(mu: AbstractMeasure) -> int:
    return 6 * min(_tokens(mu), _MOMENT) + 12 * mu.dim**2


def refuse_what_does_not_fit(what: str, mu: AbstractMeasure, numbers: int = 0) -> None:
    """Refuse, before any work, what would hold so many numbers beside those of one query and the layer's matrices."""
    needed, free = _BYTES * (max(numbers, _of_query(mu)) + _MATRICES * mu.dim**2), free_memory()
    if needed > free:
        raise ValueError(
            f"{what} with tokens of dimension {mu.dim} takes about {_gigabytes(needed)} of memory, and "
            f"{_gigabytes(free)} are free; use a smaller dimension, or fewer prompts and queries"
        )


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
