r"""What a weighted sample is worth: how many of its tokens carry an average, and how many carry its standard error.

For masses $a_l$ and summands $x_l = a_l\|z_l-m\|^p$ these are $1/\sum a_l^2$ and $(\sum x_l^2)^2/\sum x_l^4$. A tilt
far out leaves few of either; then the average is off by more than its standard error says.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

_FEWEST = 30.0  # tokens that carry an average
_FEWEST_FOR_ERROR = 10.0  # tokens that carry its standard error
_HEAVIEST = 0.5  # index of the weights' tail: beyond, the error of an average has no variance

_EVEN = 0.4  # effective tokens among all from which the weights' tail carries little, whatever its shape


class DoubtWarning(UserWarning):
    """A number, or its standard error, cannot be trusted."""


class FewTokensWarning(DoubtWarning):
    """Too few tokens of a sampler carry a tilt."""


@contextlib.contextmanager
def doubts() -> Iterator[list[str]]:
    """The warnings that numbers cannot be trusted, each once, in a list once the block has ended; others are issued."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DoubtWarning)
        yield found
    for each in caught:
        if not issubclass(each.category, DoubtWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif str(each.message) not in found:
            found.append(str(each.message))


class Worth(NamedTuple):
    """Tokens that carry an average, tokens that carry its standard error, the index of the weights' tail, and all."""

    effective: float
    carrying: float
    tail: float
    size: int

    @property
    def trusted(self) -> bool:
        """Whether the average is within what its standard error says."""
        light = self.tail <= _HEAVIEST or self.effective >= _EVEN * self.size
        return light and self.effective >= _FEWEST and self.carrying >= _FEWEST_FOR_ERROR

    @property
    def caution(self) -> float:
        """The factor that makes the standard error of an average cover as it should, when so few tokens carry it."""
        return math.sqrt(1 + 20 / self.carrying)

    @property
    def sentence(self) -> str:
        """What the tokens are worth, in words."""
        return (
            f"{self.size} tokens stand in for a law known by its sampler, and at this tilt they are worth "
            f"{self.effective:.3g} ({self.carrying:.3g} for the error, tail index {self.tail:.2f}): what follows from "
            "them cannot be trusted; give FromSampler a larger size, or use smaller tilts"
        )


def worth(masses: Float[np.ndarray, " n"], distances: Float[np.ndarray, " n"], power: int) -> Worth:
    """Of an average of |z - m|^power."""
    squares = (masses * distances**power) ** 2
    total = float(squares.sum())
    # all tokens at one point: their average has no error
    carrying = total**2 / float(np.sum(squares**2)) if total > 0 and np.sum(squares**2) > 0 else float(len(masses))
    return Worth(1 / float(np.sum(masses**2)), carrying, tail_index(masses), len(masses))


def tail_index(values: Float[np.ndarray, " n"]) -> float:
    """The shape of the law that the largest values follow."""
    return float(tail_indices(values[None], np.array([len(values)]))[0])


def tail_indices(values: Float[np.ndarray, "r N"], sizes: Int[np.ndarray, " r"]) -> Float[np.ndarray, " r"]:
    r"""The shape k of the generalised Pareto law that the largest values of each row follow (Zhang and Stephens, 2009).

    A row has the largest values of a sample of n = `sizes`, and may have others. The largest $\min(n/5, 3\sqrt n)$ of
    the sample are used; k is drawn towards ½ by ten observations' worth, as is usual for such diagnostics.
    """
    counts = np.minimum(sizes / 5, 3 * np.sqrt(sizes)).astype(int)[:, None]
    most = counts.max(initial=0)
    if most < 5:
        return np.full(len(values), 0.5)
    N = values.shape[1]
    largest = np.sort(np.partition(values, N - most - 1, axis=1)[:, N - most - 1 :], axis=1)[:, ::-1]
    x = largest[:, :-1] - np.take_along_axis(largest, counts, axis=1)
    x = np.where(np.arange(most) < counts, x, 0.0)
    m = np.sum(x > 0, axis=1, keepdims=True)
    able = m[:, 0] >= 5
    found = np.where((counts < 5)[:, 0], 0.5, 0.0)  # of too few, and of ties
    x, m = x[able], m[able]
    if not len(x):
        return found
    steps = 30 + np.sqrt(m).astype(int)
    grid = np.arange(1, steps.max() + 1)
    quartile = np.take_along_axis(x, m - np.maximum((m / 4 + 0.5).astype(int), 1), axis=1)
    b = 1 / x[:, :1] + (1 - np.sqrt(steps / (grid - 0.5))) / (3 * quartile)
    used = (grid <= steps) & (b != 0)  # at 0 the law is exponential, the limit of its neighbours
    b = np.where(used, b, -1 / quartile)
    shapes = np.log1p(-b[:, :, None] * x[:, None, :]).sum(axis=2) / m
    profile = np.where(used, m * (np.log(-b / shapes) - shapes - 1), -np.inf)
    weights = np.exp(profile - profile.max(axis=1, keepdims=True))
    best = np.sum(weights * b, axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True)
    k = np.log1p(-best * x).sum(axis=1) / m[:, 0]
    found[able] = (m[:, 0] * k + 10 * 0.5) / (m[:, 0] + 10)
    return found
