"""Whether a standard error can be believed: the tail of the influences, two methods against each other, curvature."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from largeprompt.measures._worth import tail_indices

HEAVIEST = 0.5  # tail index of the influences: beyond, their sum of squares has no mean
FEWEST = 5.0  # groups that carry a sum of squares
APART = 2.0  # ratio of standard errors by two methods
LARGEST_BIAS = 1.0  # in standard errors


def tail_of(centred: Float[np.ndarray, "p n"]) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    """The tail index of the influences' sizes, and how many groups carry the sum of their squares."""
    sizes = np.abs(centred)
    squares = np.maximum(np.sum(sizes**2, axis=1), np.finfo(float).tiny)
    carrying = squares**2 / np.maximum(np.sum(sizes**4, axis=1), np.finfo(float).tiny)
    return tail_indices(sizes, np.full(len(sizes), sizes.shape[1])), carrying


def doubts(
    stderr_by: Mapping[str, Float[np.ndarray, " p"]],
    bias: Float[np.ndarray, " p"],
    tail: tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]] | None,
) -> tuple[str, ...]:
    """For each output, in words, why its standard error should not be trusted; empty where it should."""
    used, *others = stderr_by.values()
    found = []
    for i, stderr in enumerate(used):
        if tail is not None and tail[0][i] > HEAVIEST and tail[1][i] < FEWEST:
            found.append(f"single groups decide: {tail[1][i]:.2g} of them carry the variance, tail {tail[0][i]:.2f}")
        elif any(max(other[i], stderr) > APART * min(other[i], stderr) for other in others):
            by = ", ".join(f"{value[i]:.3g} by {name}" for name, value in stderr_by.items())
            found.append(f"two methods disagree on the standard error: {by}")
        elif abs(bias[i]) > LARGEST_BIAS * stderr:
            found.append(f"the output changes with the number of groups: {bias[i]:+.3g} on prompts drawn again")
        else:
            found.append("")
    return tuple(found)
