"""Whether a standard error can be believed: the tail of the influences, and two methods against each other."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from largeprompt.measures._worth import tail_indices

HEAVIEST = 0.5  # tail index of the influences: beyond, their sum of squares has no mean
FEWEST = 5.0  # groups that carry a sum of squares
APART = 3.0  # ratio of standard errors by two methods


def tail_of(centred: Float[np.ndarray, "p n"]) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    """The tail index of the influences' sizes, and how many groups carry the sum of their squares."""
    sizes = np.abs(centred)
    squares = np.maximum(np.sum(sizes**2, axis=1), np.finfo(float).tiny)
    carrying = squares**2 / np.maximum(np.sum(sizes**4, axis=1), np.finfo(float).tiny)
    return tail_indices(sizes, np.full(len(sizes), sizes.shape[1])), carrying


def doubts(
    method: str,
    stderr_by: Mapping[str, Float[np.ndarray, " p"]],
    tail: tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]] | None,
) -> tuple[str, ...]:
    """For each output, in words, why its standard error should not be trusted; empty where it should."""
    found = []
    for i, stderr in enumerate(stderr_by[method]):
        both = [by[i] for by in stderr_by.values()]
        if not stderr > 0:
            found.append("the output does not depend on the groups")
        elif method == "influence" and tail is not None and tail[0][i] > HEAVIEST and tail[1][i] < FEWEST:
            found.append(f"single groups decide: {tail[1][i]:.2g} of them carry the variance, tail {tail[0][i]:.2f}")
        elif max(both) > APART * min(both):
            by = ", ".join(f"{by[i]:.3g} by {name}" for name, by in stderr_by.items())
            found.append(f"two methods disagree on the standard error: {by}")
        else:
            found.append("")
    return tuple(found)
