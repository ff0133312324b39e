"""How much memory a computation takes, known before it begins: sizes of blocks, and what does not fit is refused."""

import math

import jax

from largeprompt._memory import free_memory
from largeprompt.measures import AbstractMeasure

_BYTES = 8  # of a number
_ROOM = 2**25  # numbers held at once for a block of queries
_CHUNK = 2**19  # numbers of tokens that a moment holds at once
_WORK = 2**36  # products of numbers that an average over drawn queries may cost
_FEWEST = 2**10  # of drawn queries
_MATRICES = 16  # of the size of U, held beside everything else


def queries_at_once(mu: AbstractMeasure, most: int) -> int:
    """How many queries' constants to compute side by side."""
    return 2 ** int(math.log2(min(max(1, _ROOM // _of_query(mu)), most)))


def queries_to_draw(mu: AbstractMeasure, most: int) -> int:
    """How many queries to average over: fewer where the tokens of the law make each of them long work."""
    affordable = _WORK // max(1, _tokens(mu) * mu.dim)
    return min(most, max(_FEWEST, 2 ** int(math.log2(max(1, affordable)))))


def _tokens(mu: AbstractMeasure) -> int:
    """How many numbers the law's own tokens are."""
    return sum(leaf.size for leaf in jax.tree.leaves(mu) if isinstance(leaf, jax.Array))


def _of_query(mu: AbstractMeasure) -> int:
    return 6 * min(_tokens(mu), _CHUNK) + 12 * mu.dim**2


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
