r"""Prompts drawn again from the groups at hand, as weights; and what the spread of their outputs says of real redraws.

For $n$ groups drawn independently from a population, the variance of the outputs over such weights is, to first order
in the weights, the variance over redraws of the whole prompt times

- $(n-1)/n$ for counts of $n$ draws with replacement (the bootstrap),
- $(n-m)/m$ for $m$ groups without replacement (the jackknife that deletes $n-m$ of them).
"""

import numpy as np
from jaxtyping import Float

KEPT = 0.8  # share of the groups in a subset


def counts(rng: np.random.Generator, draws: int, n: int) -> Float[np.ndarray, "r n"]:
    """How often each group comes among n draws with replacement."""
    return rng.multinomial(n, np.full(n, 1 / n), draws).astype(float)


def subsets(rng: np.random.Generator, draws: int, n: int, size: int) -> Float[np.ndarray, "r n"]:
    """Weight 1 on as many groups, drawn without replacement, and 0 on the others."""
    ranks = np.argsort(rng.random((draws, n)), axis=1).argsort(axis=1)
    return (ranks < size).astype(float)


def subset_size(n: int) -> int:
    """How many groups a subset has, of n: four fifths, at least one fewer than all."""
    return min(n - 1, max(1, round(KEPT * n)))
