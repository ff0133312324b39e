"""What a bound is, and what its lemmas accept."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Logs = float | np.ndarray
Number = float | np.floating
Length = int | float | np.integer | np.floating | None
_LARGEST = math.log(np.finfo(float).max)


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


def bound_of(name: str, terms: Mapping[str, Logs], assumptions: Iterable[str] = ()) -> Bound:
    """The bound that is the sum of its terms."""
    scalars = {key: float(term) for key, term in terms.items()}
    return Bound(name, float(log_sum(scalars.values())), scalars, tuple(assumptions))


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


def log_length(L: Any, log_L: Any = None, *, at_least: int = 1) -> float:
    """ln L of a prompt length given as itself, or where it fits no float as `log_L`."""
    if (L is None) == (log_L is None):
        given = "neither is given" if L is None else "both are given"
        raise ValueError(f"a prompt length is L or its logarithm log_L; {given}")
    if log_L is None:
        if isinstance(L, float | np.floating) and not math.isfinite(L):
            raise ValueError(f"L is {L}; a bound is for finite prompts (for lengths beyond a float give log_L)")
        if at_least > L:
            raise ValueError(f"L is {L}; the bound holds from L = {at_least} on")
        return math.log(L)
    number = real("log_L", log_L)
    if number < math.log(at_least):
        raise ValueError(f"log_L is {number:g}; the bound holds from L = {at_least} on, log_L = {math.log(at_least):g}")
    return number
