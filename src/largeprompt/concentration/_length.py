import math
import warnings
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer

from . import bounds
from ._deviation import Queries, Tokens, deviation
from ._prediction import LONGEST, Prediction, predict
from ._quantities import laws
from ._regime import Regime

_AFFORDABLE = 2**33  # tokens that a check may draw


class PromptLength(eqx.Module):
    r"""The least L with a root mean square error of at most `epsilon`: predicted, measured there, and as bounded.

    `L` is a float beyond 2^53, and infinite where no length up to 1e60 does. `measured` is the mean square at L with
    its standard error, nan where L is too long to draw (`checked` says). `bound_log10_L` is the logarithm of the length
    from which the paper's bound guarantees as much; where its assumptions fail it is nan, and `bound_refusal` says
    which.
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
) -> PromptLength:
    r"""How long a prompt must be for $\sqrt{E\|X_L-X\|^2} \le \epsilon$; for risks, for $|R_L-R_\infty| \le \epsilon$.

    From the prediction, by bisection where that is exact at every L and as $c/\epsilon^2$ where it is $c/L$; checked by
    measuring at that length unless it is too long or `replicates` is 0; and from the paper's bound.
    """
    epsilon = float(checks.number("epsilon", epsilon))
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon:g}; it must be above 0")
    generator = checks.key_or_default(key)
    replicates = checks.count("replicates", replicates, at_least=0)

    def at(L: int) -> Prediction:
        return predict(layer, mu, nu, [L], quantity, generator, query_in_prompt=query_in_prompt)

    def measure(L: int) -> tuple[float, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error is told
            fresh = jax.random.fold_in(generator, 1)
            options: Any = {"replicates": replicates, "query_in_prompt": query_in_prompt}
            found = deviation(layer, mu, nu, [L], quantity, fresh, **options)
        return float(found.mean_square[0]), float(found.stderr[0])

    prediction = at(1)
    L, method = _least(at, prediction, epsilon**2), prediction.method
    if math.isnan(L) and replicates > 1:
        L, method = _measured_length(measure, epsilon**2, prediction.regime.exponent, _AFFORDABLE // replicates)
    measured, error = math.nan, math.nan
    checked = replicates > 1 and L * replicates <= _AFFORDABLE
    if checked:
        measured, error = measure(int(L))
    log10, refusal = _bounded(layer, mu, nu, quantity, epsilon, query_in_prompt)
    regime = prediction.regime.at(L)
    return PromptLength(epsilon, L, method, regime, measured, error, checked, log10, refusal, quantity)


def _least(at, first: Prediction, target: float) -> int | float:
    """The predicted length, nan where nothing is predicted at finite lengths."""
    start = float(first.mean_square[0])
    if start <= target:
        return 1
    if not first.exact:  # c/L itself
        return start if math.isnan(start) else math.ceil(start / target) if start / target <= LONGEST else math.inf
    low, high = 0.0, 1.0
    while at(_whole(high)).mean_square[0] > target:
        low, high = high, 2 * high
        if high > math.log(LONGEST):
            return math.inf
    while _whole(high) - _whole(low) > max(1, 1e-4 * _whole(low)):
        middle = (low + high) / 2
        low, high = (low, middle) if at(_whole(middle)).mean_square[0] <= target else (middle, high)
    return _whole(high)


def _measured_length(measure, target: float, exponent: float, longest: int) -> tuple[int | float, str]:
    """By measuring at longer and longer prompts; beyond what can be drawn, by the regime's exponent."""
    before, L = None, 10
    while True:
        square, _ = measure(L)
        if square <= target:
            if before is None:
                return L, "measured"
            share = math.log(before[1] / target) / math.log(before[1] / square)
            return math.ceil(before[0] * (L / before[0]) ** share), "measured, between two lengths"
        before = (L, square)
        if longest < 4 * L:
            log_L = math.log(L) + math.log(square / target) / exponent
            length = math.ceil(math.exp(log_L)) if log_L <= math.log(LONGEST) else math.inf
            return length, f"measured up to L = {L}, beyond by the exponent {exponent:.3f}"
        L *= 4


def _whole(log_L: float) -> int:
    return max(1, round(math.exp(log_L)))


def _bounded(layer, mu, nu, quantity: Any, epsilon: float, query_in_prompt: bool) -> tuple[float, str]:
    if query_in_prompt:
        return math.nan, "the paper's bounds are for a query outside of the prompt"
    of_risk = {"risk": bounds.risk_bound, "risk-gradient": bounds.risk_gradient_bound}
    try:
        if quantity in of_risk:
            log_L = bounds.length_for(lambda log_L: of_risk[quantity](layer, mu, log_L=log_L), epsilon)
        else:
            _, tokens, queries = laws(layer, mu, nu)
            log_L = bounds.length_for(
                lambda log_L: bounds.bound(layer, tokens, queries, quantity=quantity, log_L=log_L), epsilon**2
            )
    except ValueError as error:
        return math.nan, str(error)
    return log_L / math.log(10), ""
