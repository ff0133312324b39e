r"""The lengths at which a gap $g(L)$ that may change its sign is small: the first, and that from which on all are.

$g$ is smooth in $\ln L$ and changes over factors of L, so a scan finds every stretch of lengths with $|g|\le\epsilon$:
two lengths for each doubling up to 64, then one for each, and beyond a thousand in steps that grow with $\ln L$. Where
$|g|$ has an extremum near $\epsilon$ between lengths of the scan, the extremum is looked for as well.
"""

import math
from collections.abc import Callable, Iterator

from scipy import optimize

LONGEST = 1e60
_BEYOND = math.log(1000.0)  # the scan goes on by this factor past the last length that does not do
_EVALUATIONS = 12  # for an extremum


def lengths_for_a_gap(gap: Callable[[int], float], epsilon: float) -> tuple[int | float, int | float]:
    r"""The least L with $|g(L)|\le\epsilon$, and the least from which on all have it; infinite where there is none."""
    known: dict[int, float] = {}

    def at(L: int) -> float:
        if L not in known:
            known[L] = gap(L)
        return known[L]

    last, done = 0.0, False
    for L in _grid():
        if not abs(at(L)) <= epsilon:  # nan counts as not small
            last = math.log(L)
        elif math.log(L) - last > _BEYOND:
            done = True
            break
    _add_extrema(at, known, epsilon)
    lengths = sorted(known)
    inside = [abs(known[L]) <= epsilon for L in lengths]
    first = _first(at, lengths, inside, epsilon)
    if not (done or inside[-1]):
        return first, math.inf
    outside = max((i for i, small in enumerate(inside) if not small), default=-1)
    if outside < 0:
        return first, 1
    # back from the first that does: all between it and the crossing do
    low, high = lengths[outside], lengths[outside + 1]
    return first, bisected(low, high, lambda L: abs(at(L)) <= epsilon)


def _grid() -> Iterator[int]:
    L = 1
    while L < LONGEST:
        yield L
        step = math.log(2) / 2 if L < 64 else math.log(2) if L < 1000 else 0.1 * math.log(L)
        L = max(L + 1, round(L * math.exp(step)))
    yield round(LONGEST)


def _add_extrema(at: Callable[[int], float], known: dict[int, float], epsilon: float) -> None:
    """Look between the lengths of the scan for a dip below epsilon, or a rise above it, that all of them miss."""
    lengths = sorted(known)
    for a, b, c in zip(lengths, lengths[1:], lengths[2:], strict=False):
        low, middle, high = (abs(known[L]) for L in (a, b, c))
        same = known[a] * known[b] > 0 and known[b] * known[c] > 0
        dip = middle > epsilon and middle <= min(low, high) and same and middle < 2 * epsilon
        rise = middle <= epsilon and middle >= max(low, high) and middle > epsilon / 2
        if c - a > 2 and (dip or rise):
            sign = 1 if dip else -1
            optimize.minimize_scalar(
                lambda log_L, sign=sign: sign * abs(at(round(math.exp(log_L)))),
                bounds=(math.log(a), math.log(c)),
                method="bounded",
                options={"maxiter": _EVALUATIONS},
            )


def _first(at: Callable[[int], float], lengths: list[int], inside: list[bool], epsilon: float) -> int | float:
    if inside[0]:
        return lengths[0]
    for i, L in enumerate(lengths[:-1]):
        after = lengths[i + 1]
        sign = math.copysign(1.0, at(L))
        if not (inside[i + 1] or at(after) * sign < 0):
            continue
        # the gap falls from above epsilon to below it, or through it to the other side
        found = bisected(L, after, lambda middle, sign=sign: sign * at(middle) <= epsilon)
        if not abs(at(found)) <= epsilon and inside[i + 1]:  # through it to the other side, and back
            found = bisected(L, after, lambda middle: abs(at(middle)) <= epsilon)
        if abs(at(found)) <= epsilon:
            return found
    return math.inf


def bisected(low: int, high: int, holds: Callable[[int], bool], resolution: float = 1e-6) -> int:
    """The least length above `low`, where it does not hold, up to `high`, where it does; to this part of it."""
    while high - low > max(1, resolution * low):
        middle = round(math.sqrt(low) * math.sqrt(high))
        middle = min(max(middle, low + 1), high - 1)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
