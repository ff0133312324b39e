"""What a bound is, what its lemmas accept, and the length from which on a bound is small."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Logs = float | np.ndarray
Number = float | np.floating
_LARGEST = math.log(np.finfo(float).max)
_GRID, _HALVINGS = 60, 44  # of the search for a length


class LogLength(NamedTuple):
    """The prompt length whose natural logarithm this is, for lengths beyond a float."""

    log: float


Length = int | float | np.integer | np.floating | LogLength


@dataclass(frozen=True)
class Bound:
    """An upper bound with its constants, kept as logarithms: most of those of the paper overflow a float.

    `name` is the item of the paper, `log` the natural logarithm of the bound, `terms` those of its parts, and
    `assumptions` say what it rests on, each checked or seen to.
    """

    name: str
    log: float
    terms: Mapping[str, float]
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, terms: Mapping[str, Logs], assumptions: Iterable[str] = ()) -> "Bound":
        """The bound that is the sum of its terms, which are logarithms."""
        scalars = {key: float(term) for key, term in terms.items()}
        return cls(name, float(log_sum(scalars.values())), scalars, tuple(assumptions))

    @property
    def value(self) -> float:
        """The bound itself, infinite where it does not fit a float."""
        return math.exp(self.log) if self.log < _LARGEST else math.inf

    @property
    def log10(self) -> float:
        """Its order of magnitude."""
        return self.log / math.log(10)

    def orders_above(self, measured: Number) -> float:
        """How many orders of magnitude it lies above what was measured."""
        measured = real("measured", measured)
        return self.log10 - math.log10(measured) if measured > 0 else math.inf

    def vacuous_against(self, trivial: Number) -> bool:
        """Whether it says no more than `trivial`, a bound that needs no theorem."""
        return self.log >= logarithm(real("trivial", trivial))


def log_sum(logs: Iterable[Logs]) -> np.ndarray:
    """The logarithm of a sum of numbers given by their logarithms."""
    return np.asarray(np.logaddexp.reduce(np.broadcast_arrays(*logs), axis=0))


def logarithm(x: float) -> float:
    """ln x, and -inf at 0."""
    return math.log(x) if x > 0 else -math.inf


def real(name: str, x: Any, *, at_least: float = 0.0) -> float:
    """`x` as a finite number of at least `at_least`."""
    try:
        number = float(x)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {x!r}; it must be a finite number") from None
    if not math.isfinite(number) or number < at_least:
        raise ValueError(f"{name} is {number:g}; it must be a finite number of at least {at_least:g}")
    return number


def probability(name: str, x: Any) -> float:
    """`x` as a number strictly between 0 and 1."""
    number = real(name, x)
    if not 0 < number < 1:
        raise ValueError(f"{name} is {number:g}; it must lie strictly between 0 and 1")
    return number


def degree(p: Any) -> int:
    """`p` as a degree of growth that Lemma C.4 knows."""
    if p not in (1, 2):
        raise ValueError(f"p is {p!r}; the lemma knows functions of growth ‖z‖ (p = 1) and ‖z‖² (p = 2)")
    return int(p)


def dimension(D: Any) -> int:
    """`D` as the dimension of a token."""
    if real("D", D, at_least=1) != int(D):
        raise ValueError(f"D is {D!r}; it must be a whole number of at least 1")
    return int(D)


def log_length(L: Any, at_least: int = 1) -> float:
    """ln L of a prompt length given as itself or as a `LogLength`."""
    if isinstance(L, LogLength):
        number = real("log L", L.log)
        if number < math.log(at_least):
            least = f"log L = {math.log(at_least):g}"
            raise ValueError(f"log L is {number:g}; the bound holds from L = {at_least} on, {least}")
        return number
    if isinstance(L, float | np.floating) and not math.isfinite(L):
        raise ValueError(f"L is {L}; a bound is for finite prompts (for lengths beyond a float give LogLength(ln L))")
    if at_least > L:
        raise ValueError(f"L is {L}; the bound holds from L = {at_least} on")
    return math.log(L)


def length_for(bound_function: Callable[[LogLength], Bound], target: Number, *, largest: float = 1e7) -> float:
    """ln of the length from which on a bound stays below a target, infinite where it never does up to ln L = `largest`.

    `bound_function` maps a length to a bound: `lambda L: output_bound(layer, mu, nu, L)`. Bounds may rise with L before
    they fall, so the last crossing on a grid of ln L is the one that is refined, by bisection in its logarithm.
    """
    goal = logarithm(real("target", target))

    def above(log_L: float) -> bool:
        return bound_function(LogLength(log_L)).log > goal

    grid = np.geomspace(math.log(2), real("largest", largest, at_least=1), _GRID).tolist()
    last = next((i for i in reversed(range(_GRID)) if above(grid[i])), None)
    if last is None:
        return grid[0]
    if last == _GRID - 1:
        return math.inf
    low, high = grid[last], grid[last + 1]
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if above(middle) else (low, middle)
    return high
