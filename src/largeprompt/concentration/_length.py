import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray
from scipy import optimize

from largeprompt import _checks as checks
from largeprompt._device import Device, resolve_device
from largeprompt._display import AbstractShown
from largeprompt.attention import AbstractLayer
from largeprompt.measures._worth import FewTokensWarning

from . import bounds
from ._deviation import LONGEST as LONGEST_DRAWN
from ._deviation import deviation
from ._prediction import law_of
from ._problem import OF_RISK, NotPredictedError, Queries, RiskProblem, Tokens, problem_of
from ._regime import LONGEST, Regime

_AFFORDABLE, _SEARCHED = 2**33, 2**30  # tokens that a check may draw, and each step of a search
_RESOLUTION = 0.05  # of a length that is found by measuring
_LEAST = 1e-150  # of epsilon: its square is a number still
_BEYOND = math.log(1000.0)  # a scan goes on by this factor past the last length that does not do
_EVALUATIONS = 12  # for an extremum


class PromptLength(AbstractShown):
    r"""The least L with a root mean square error of at most `epsilon`: predicted, measured there, and as bounded.

    `L` is known to one part in a million, and infinite where no length up to 1e60 does. `lasting` is the least length
    from which on every longer prompt does too. Mean squares fall with the length, and the two are the same; the gap of
    two risks may change its sign, be small at L, grow again and come back, and then `lasting` is the larger one. It is
    nan where a length for risks was found by measuring, which says nothing of longer prompts. `measured` is the mean
    square at L with its standard error, nan where that was not measured; then `checked` is False and
    `unchecked_reason` says why. `bound_log10_L` is the logarithm of the length from which the paper's bound guarantees
    as much; where its assumptions fail it is nan, and `bound_refusal` says which.
    """

    epsilon: float
    L: int | float
    method: str = eqx.field(static=True)
    regime: Regime
    measured: float
    measured_stderr: float
    checked: bool = eqx.field(static=True)
    bound_log10_L: float
    bound_refusal: str = eqx.field(static=True)
    quantity: str = eqx.field(static=True)
    lasting: int | float = math.nan
    unchecked_reason: str = eqx.field(static=True, default="")


def prompt_length_for(
    epsilon: float,
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries = None,
    quantity: str = "output",
    key: PRNGKeyArray | None = None,
    *,
    query_in_prompt: bool = False,
    replicates: int = 1000,
    device: Device = "auto",
) -> PromptLength:
    r"""How long a prompt must be for $\sqrt{E\|X_L-X\|^2} \le \epsilon$; for risks, for $|R_L-R_\infty| \le \epsilon$.

    `L` is the least such length, `lasting` the least from which on every length will do (see `PromptLength`). From the
    prediction, by bisection where that is exact at every L (for risks from a scan of lengths, since the gap may change
    its sign) and as $c/\epsilon^2$ where it is $c/L$; by measuring where 1/L has not set in at that length or never
    does, and where nothing is predicted: a layer that is no sum of heads, a risk of several heads or of another task.
    Checked by measuring at that length unless it is too long or `replicates` is below 2; and from the paper's bound.
    `device` is where measurements are made.
    """
    epsilon = float(checks.number("epsilon", epsilon))
    if not _LEAST <= epsilon <= 1 / _LEAST:
        raise ValueError(f"epsilon is {epsilon:g}; it must be from {_LEAST:g} to {1 / _LEAST:g}")
    if not isinstance(quantity, str):
        raise ValueError(f"quantity is {quantity!r}; a length is of one quantity, such as 'output'")
    device = resolve_device(device)
    generator = checks.key_or_default(key)
    replicates = checks.count("replicates", replicates, at_least=0)

    def measure(L: int) -> tuple[float, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error is returned
            warnings.simplefilter("default", FewTokensWarning)  # which that error does not contain
            fresh = jax.random.fold_in(generator, 1)
            options: Any = {"replicates": replicates, "query_in_prompt": query_in_prompt, "device": device}
            found = deviation(layer, mu, nu, [L], quantity, fresh, **options)
        return float(found.mean_square[0]), float(found.stderr[0])

    problem = problem_of(layer, mu, nu, 1, quantity, query_in_prompt)
    of_risk, target = isinstance(problem, RiskProblem), epsilon**2
    try:
        law = law_of(problem, quantity, generator)
        regime, method, first = law.regime, law.method, law.at(1)
        if of_risk:
            L, lasting = lengths_for_a_gap(lambda L: law.at(L).value, epsilon)
        else:
            L = lasting = _least(lambda L: law.at(L).value, target, bool(law.exact))
        searched = math.isnan(L) or math.isinf(first.stderr) or (not law.exact and not of_risk and regime.onset > L)
    except NotPredictedError:
        regime, searched = Regime("measured only", math.nan, math.nan, math.nan, math.nan), True
        L, lasting, method = math.nan, math.nan, ""
    if searched:
        if replicates < 2:
            raise ValueError(
                f"replicates is {replicates}; where no law of 1/L is known to hold the length for {quantity} is "
                "measured, which takes at least 2"
            )
        # the square of a gap that is lost in its error may come out as 0: its error counts as well
        square = (lambda L: sum(measure(L))) if of_risk else (lambda L: measure(L)[0])
        L, method = _measured_length(square, target, regime.exponent, _longest(_SEARCHED, replicates))
        lasting = math.nan if of_risk else L
    measured, error, reason = math.nan, math.nan, _unchecked(L, replicates)
    if not reason:
        try:
            measured, error = measure(int(L))
        except ValueError as failure:  # a length that is predicted, but cannot be drawn for this layer
            reason = str(failure)
    log10, refusal = _bounded(layer, mu, nu, quantity, epsilon, query_in_prompt)
    found = (measured, error, not reason, log10, refusal, quantity, lasting, reason)
    return PromptLength(epsilon, L, method, regime.at(L), *found)


def _unchecked(L: int | float, replicates: int) -> str:
    """Why the error at the length found is not measured; nothing where it is."""
    if replicates < 2:
        return f"replicates is {replicates}, and a measurement takes at least 2"
    if math.inf == L:
        return "no finite length was found"
    longest = _longest(_AFFORDABLE, replicates)
    return f"{replicates} prompts are drawn of up to {longest} tokens each, and L is longer" if longest < L else ""


def _longest(tokens: int, replicates: int) -> int:
    """The length of prompts up to which so many are drawn."""
    return min(tokens // replicates, LONGEST_DRAWN)


def _least(at: Callable[[int], float], target: float, exact: bool) -> int | float:
    """The predicted length for a mean square, nan where nothing is predicted at finite lengths."""
    if (first := at(1)) <= target:
        return 1
    if not exact:  # c/L itself
        return first if math.isnan(first) else math.ceil(first / target) if first / target <= LONGEST else math.inf
    low, high = 1, 2
    while at(high) > target:
        if high >= LONGEST:
            return math.inf
        low, high = high, min(high**2, round(LONGEST))
    return bisected(low, high, lambda L: at(L) <= target)


def _measured_length(measured, target: float, exponent: float, longest: int) -> tuple[int | float, str]:
    """By measuring at longer and longer prompts; beyond what can be drawn, by the regime's exponent."""
    below, L = 0, 1
    while (square := measured(L)) > target:
        if longest < 4 * L:
            if math.isnan(exponent):
                raise ValueError(
                    f"epsilon is {math.sqrt(target):.3g}; at L = {L}, the longest prompts drawn for this, the error is "
                    f"still {math.sqrt(square):.3g}, and how it falls beyond is not known: ask for a larger epsilon"
                )
            log_L = math.log(L) + math.log(square / target) / exponent
            length = math.ceil(math.exp(log_L)) if log_L <= math.log(LONGEST) else math.inf
            return length, f"measured up to L = {L}, beyond by the exponent {exponent:.3f}"
        below, L = L, 4 * L
    return bisected(below, L, lambda L: measured(L) <= target, _RESOLUTION), "measured"


def _bounded(layer, mu, nu, quantity: str, epsilon: float, query_in_prompt: bool) -> tuple[float, str]:
    def at(L: bounds.LogLength) -> bounds.Bound:
        return bounds.bound(layer, mu, nu, L, quantity, query_in_prompt=query_in_prompt)

    try:
        log_L = bounds.length_for(at, epsilon if quantity in OF_RISK else epsilon**2)
    except (ValueError, OverflowError) as error:
        return math.nan, str(error)
    return log_L / math.log(10), ""


def lengths_for_a_gap(gap: Callable[[int], float], epsilon: float) -> tuple[int | float, int | float]:
    r"""The least L with $|g(L)|\le\epsilon$, and the least from which on all have it; infinite where there is none.

    The gap may change its sign. It is smooth in $\ln L$ and changes over factors of L, so a scan finds every range of
    lengths where it is small: two lengths for each doubling up to 64, then one for each, and beyond a thousand in steps
    that grow with $\ln L$. Where $|g|$ has an extremum near $\epsilon$ between them, that is looked for as well.
    """
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
