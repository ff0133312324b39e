r"""What a law known by its sampler adds to the error of a deviation or of a constant.

Its limit is that of the tokens that stand in for it. Other tokens would have given another limit: the stand-in's tokens
are weighted by exponential variables, again and again, and the root mean square of what changes is its share of the
standard error. Where too few tokens carry the tilts of the queries that matter, no such error is large enough, and the
number is not to be trusted.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from largeprompt.attention import AbstractAttention
from largeprompt.measures import AbstractMeasure
from largeprompt.measures._from_sampler import sampled_parts
from largeprompt.measures._worth import Worth

_RESAMPLES = 24
_CHOSEN = 32  # queries at which the tokens' worth is looked at
_DOUBTFUL = 0.05  # share of a mean that may come from tilts that too few tokens carry


def changes(found: Callable[[PRNGKeyArray | None], Sequence[Any]], key: PRNGKeyArray) -> Float[np.ndarray, " k"]:
    """The root mean square of what changes in some numbers or vectors when the tokens of the law are resampled.

    `found(None)` are those of the law as it is, `found(key)` those of a law that was resampled with this key.
    """
    before = found(None)
    others = [found(one) for one in jax.random.split(key, _RESAMPLES)]
    squares = [[np.sum((a - b) ** 2) for a, b in zip(other, before, strict=True)] for other in others]
    return np.sqrt(np.mean(squares, axis=0))


def chosen_queries(shares: Float[np.ndarray, " n"]) -> list[int]:
    """Which queries to look at, drawn in proportion to what each contributes to a mean."""
    total = float(np.sum(shares))
    even = np.full(len(shares), 1 / len(shares))
    rng = np.random.default_rng(0)
    return rng.choice(len(shares), _CHOSEN, p=shares / total if 0 < total < math.inf else even).tolist()


def doubt_at(
    mu: AbstractMeasure, heads: Sequence[AbstractAttention], z: Float[np.ndarray, "n D"], slopes: bool, order: int
) -> tuple[Worth | None, float]:
    """What too few tokens are worth where they carry what some head reads along these queries, and else None.

    Then a factor for the error that they show. `order` is 1 for readings and 2 for their squares. Kinds of attention
    whose weights do not grow like e^s tilt nothing, and average at most zzᵀ.
    """
    caution = 1.0
    for head in heads:
        thetas = order * z @ np.asarray(head.U, float).T if head.exponential else 0 * z
        doubt, factor = worth_at(mu, thetas, order * (1 if head.exponential and not slopes else 2))
        if doubt is not None:
            return doubt, factor
        caution = max(caution, factor)
    return None, caution


def worth_at(mu: AbstractMeasure, thetas: Float[np.ndarray, "n D"], power: int) -> tuple[Worth | None, float]:
    """What too few tokens are worth, where they carry the tilts of more than a few of the queries, and else None.

    Then a factor for the error that they show.
    """
    unique, which = np.unique(thetas, axis=0, return_inverse=True)
    parts = [sampled_parts(mu._tilt(jax.numpy.asarray(theta))) for theta in unique]
    worths = [[part._worth(power) for part in tilted] for tilted in parts]
    worst = [min(found, key=lambda one: (one.trusted, one.carrying)) for found in worths]
    found = sorted((worst[i] for i in which.ravel()), key=lambda one: one.carrying)
    poor = [one for one in found if not one.trusted]
    doubt = poor[len(poor) // 2] if len(poor) > _DOUBTFUL * len(thetas) else None
    return doubt, found[len(found) // 2].caution
