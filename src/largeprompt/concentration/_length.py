import math
import warnings
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._device import Device, resolve_device
from largeprompt._display import AbstractShown
from largeprompt.attention import AbstractLayer
from largeprompt.measures._worth import FewTokensWarning

from . import bounds
from ._deviation import LONGEST as LONGEST_DRAWN
from ._deviation import deviation
from ._gap_lengths import lengths_for_a_gap
from ._prediction import Prediction, predict
from ._problem import OF_RISK, NotPredictedError, Queries, Tokens
from ._regime import LONGEST, Regime

_AFFORDABLE, _SEARCHED = 2**33, 2**30  # tokens that a check may draw, and each step of a search
_RESOLUTION = 0.05  # of a length that is found by measuring
_LEAST = 1e-150  # of epsilon: its square is a number still


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
    does, and where nothing is predicted: a layer of another kind than softmax or linear attention, a risk of several
    heads or of another task. Checked by measuring at that length unless it is too long or `replicates` is below 2; and
    from the paper's bound. `device` is where measurements are made.
    """
    epsilon = float(checks.number("epsilon", epsilon))
    if not _LEAST <= epsilon <= 1 / _LEAST:
        raise ValueError(f"epsilon is {epsilon:g}; it must be from {_LEAST:g} to {1 / _LEAST:g}")
    if not isinstance(quantity, str):
        raise ValueError(f"quantity is {quantity!r}; a length is of one quantity, such as 'output'")
    device = resolve_device(device)
    generator = checks.key_or_default(key)
    replicates = checks.count("replicates", replicates, at_least=0)

    def at(L: int) -> Prediction:
        return predict(layer, mu, nu, [L], quantity, generator, query_in_prompt=query_in_prompt)

    def measure(L: int) -> tuple[float, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error is told
            warnings.simplefilter("default", FewTokensWarning)  # which that error does not tell of
            fresh = jax.random.fold_in(generator, 1)
            options: Any = {"replicates": replicates, "query_in_prompt": query_in_prompt, "device": device}
            found = deviation(layer, mu, nu, [L], quantity, fresh, **options)
        return float(found.mean_square[0]), float(found.stderr[0])

    try:
        prediction = at(1)
        regime, method = prediction.regime, prediction.method
        known = prediction.exact or quantity in OF_RISK  # at every L; else as c/L
        if quantity in OF_RISK:
            L, lasting = lengths_for_a_gap(lambda L: _gap(at(L)), epsilon)
        else:
            L = lasting = _least(at, float(prediction.mean_square[0]), epsilon**2, known)
        doubtful = math.isinf(prediction.stderr[0])
        searched = math.isnan(L) or doubtful or (not known and regime.onset > L)
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
        square = (lambda L: sum(measure(L))) if quantity in OF_RISK else (lambda L: measure(L)[0])
        L, method = _measured_length(square, epsilon**2, regime.exponent, _longest(_SEARCHED, replicates))
        lasting = math.nan if quantity in OF_RISK else L
    measured, error, reason = math.nan, math.nan, _unchecked(L, replicates)
    if not reason:
        try:
            measured, error = measure(int(L))
        except ValueError as failure:  # a length that is predicted, but cannot be drawn for this layer
            reason = str(failure)
    log10, refusal = _bounded(layer, mu, nu, quantity, epsilon, query_in_prompt)
    found = (measured, error, not reason, log10, refusal, quantity, lasting, reason)
    return PromptLength(epsilon, L, method, regime.at(L), *found)


def _gap(prediction: Prediction) -> float:
    assert prediction.gap is not None  # of risks
    return float(prediction.gap[0])


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


def _least(at, start: float, target: float, known: bool) -> int | float:
    """The predicted length, nan where nothing is predicted at finite lengths; `start` is the mean square at L = 1."""
    if start <= target:
        return 1
    if not known:  # c/L itself
        return start if math.isnan(start) else math.ceil(start / target) if start / target <= LONGEST else math.inf
    low, high, longest = 0.0, 1.0, math.log(LONGEST) - 1e-9
    while at(_whole(high)).mean_square[0] > target:
        if high == longest:
            return math.inf
        low, high = high, min(2 * high, longest)
    while _whole(high) - _whole(low) > max(1, 1e-6 * _whole(low)):
        middle = (low + high) / 2
        low, high = (low, middle) if at(_whole(middle)).mean_square[0] <= target else (middle, high)
    return _whole(high)


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
    while L - below > max(1, _RESOLUTION * below):
        middle = min(max(round(math.sqrt(below * L)), below + 1), L - 1)
        below, L = (below, middle) if measured(middle) <= target else (middle, L)
    return L, "measured"


def _whole(log_L: float) -> int:
    return max(1, round(math.exp(log_L)))


def _bounded(layer, mu, nu, quantity: str, epsilon: float, query_in_prompt: bool) -> tuple[float, str]:
    def at(L: bounds.LogLength) -> bounds.Bound:
        return bounds.bound(layer, mu, nu, L, quantity, query_in_prompt=query_in_prompt)

    try:
        log_L = bounds.length_for(at, epsilon if quantity in OF_RISK else epsilon**2)
    except (ValueError, OverflowError) as error:
        return math.nan, str(error)
    return log_L / math.log(10), ""
