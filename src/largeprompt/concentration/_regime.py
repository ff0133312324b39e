r"""Which law the mean over queries follows as prompts grow.

At a query the squared error is $c(z)/L$ with $c$ of order $e^{\nu(z)}$, $\nu = (Uz)^\top\Gamma Uz$. Where queries end
in a Gaussian of covariance S, the mean of $c$ is finite exactly while $\theta^2 = \lambda_{\max}(S^{1/2}U^\top\Gamma
US^{1/2}) < \tfrac12$. Past that the rare queries rule for which single tokens carry all the weight: a query with $\nu =
x\ln L$ has the squared error $L^{-\rho(x)}$, $\rho = 1-x$ up to $x = \tfrac23$ and $(1-x/2)^2/(2x)$ up to 2, and the
probability $L^{-x/(2\theta^2)}$; the best x gives $L^{-c}$, $c = \tfrac12(\sqrt{1+4/\theta^2}-1)$. A heuristic, not a
proof, confirmed by exact quadrature up to $L = 10^{18}$. A query in the prompt has itself the weight $e^{r(z)}$ of a
typical token, $r = z^\top Uz-\nu/2$, and adds $L^{-1/(2\rho)}$, $\rho$ the largest eigenvalue of r's form over queries.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import numpy as np

from largeprompt._display import AbstractShown
from largeprompt.attention import AbstractAttention, AbstractLayer, kind_of
from largeprompt.measures import AbstractMeasure, Gaussian

from ._problem import Problem
from ._query_averages import Average, GaussianQueries, Nodes
from ._rates import Heads, summed_heads
from ._spectrum import spectrum
from ._squares import HeadsSquare, QuadraticForm

LONGEST = 1e60  # the exact moments are known up to here
_CLOSE = 0.1  # of c/L, where it begins to serve
_SECOND = 2.0  # the second order in 1/L is about this times e^{Λ(3θ)-Λ(2θ)-Λ(θ)}/L of the first, as for Gaussians


_SENTENCES = {
    "slower than any power": "slower than any power of L: the layer scores labels, and over tasks e^ν has no mean",
    "measured only": "how the error falls with L is not known for this layer, only measured",
    "too few tokens": "not known: too few tokens of the law's sampler carry the tilts of the queries",
    "unknown": "c/L at every query; how the law's tails weigh on the mean over queries is not known",
}
"""Of regimes whose words have no number in them."""


class Regime(AbstractShown):
    r"""How the mean square falls with L: like $L^{-e}$, $e$ the `exponent`.

    `spread` is $\theta^2$, whose threshold is ½; `onset` the length from which the first-order law is good to a tenth,
    `dominated` that up to which single tokens carry most of the weight, both nan where they are not known. For risks
    the square of the gap falls twice as fast as the gap, of which the sentence speaks: `power` is 2.
    """

    name: str = eqx.field(static=True)
    exponent: float
    spread: float
    onset: float
    dominated: float
    power: float = 1.0

    def at(self, L: float) -> "Regime":
        """The regime named for prompts of up to `L` tokens: heavy-tailed where the first-order law begins beyond."""
        if self.name not in ("1/L", "heavy-tailed") or math.isnan(L):
            return self
        return dataclasses.replace(self, name="heavy-tailed" if self.onset > L else "1/L")

    @property
    def sentence(self) -> str:
        """The regime in words."""
        if self.name == "slower than 1/L":
            rate = self.exponent / self.power
            return f"slower than 1/L, exponent {rate:.3f} (θ² = {self.spread:.3g}, the threshold is 0.5)"
        if self.name in _SENTENCES:
            return _SENTENCES[self.name]
        known = f" (θ² = {self.spread:.3g}, below 0.5)" if self.spread > 0 else ""
        if self.name == "heavy-tailed":
            dominated = f"heavy-tailed: single tokens dominate up to L ≈ {self.dominated:.2g}"
            return f"{dominated}; 1/L from L ≈ {self.onset:.2g}{known}"
        return f"1/L{known}" + (f", from L ≈ {self.onset:.2g}" if self.onset > 1 else "")


class Law(NamedTuple):
    """How a quantity falls with the length: `at` gives its mean square, of risks instead the gap itself.

    `exact` is whether that is exact at every length; None where it is wherever there is no standard error.
    """

    at: Callable[[int], Average]
    constant: float
    constant_stderr: float
    regime: Regime
    method: str
    exact: bool | None


def spread(layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure) -> float:
    r"""$\theta^2$, the largest over the Gaussians in which tokens and queries end; nan where these are not known.

    Of several softmax heads the largest; 0 for kinds of attention whose weights do not grow like $e^s$, and nan for
    such kinds other than softmax.
    """
    return _over_heads(summed_heads(layer), mu, nu, lambda Gamma, U: U.T @ Gamma @ U, max)


def own_weight(heads: Heads, mu: AbstractMeasure, nu: AbstractMeasure) -> float:
    r"""$\rho$, that of the query's own weight: the largest eigenvalue over queries of $z^\top Uz-\nu/2$, at least 0."""
    found = _over_heads(heads, mu, nu, lambda Gamma, U: (U + U.T - U.T @ Gamma @ U) / 2, min)
    return found if math.isnan(found) else max(found, 0.0)


def _over_heads(heads: Heads, mu: AbstractMeasure, nu: AbstractMeasure, form, over_tokens) -> float:
    found = [_largest(mu, nu, form, over_tokens, head) for head in heads if head.exponential]
    return float(np.max(found)) if found else 0.0  # keeps nan


def _largest(mu: AbstractMeasure, nu: AbstractMeasure, form, over_tokens, head: AbstractAttention) -> float:
    tokens, queries = mu.tails(), nu.tails()
    if queries is not None and all(not np.any(np.asarray(S)) for S in queries):
        return 0.0
    if tokens is None or queries is None or kind_of(head) != "softmax":
        return math.nan
    U = np.asarray(head.U, float)
    return max(
        over_tokens(float(spectrum(form(np.asarray(Gamma, float), U), S)[0][-1]) for Gamma in tokens) for S in queries
    )


def breakdown_exponent(spread: float) -> float:
    r"""$c$ of $E\|T_L-T\|^2 = L^{-c+o(1)}$: 1 up to $\theta^2 = \tfrac12$, $\tfrac12(\sqrt{1+4/\theta^2}-1)$ beyond."""
    return 1.0 if spread <= 0.5 else 2 / (spread * (math.sqrt(1 + 4 / spread) + 1))


def exponent(spread: float, rho: float) -> float:
    """The exponent with the query's own weight, where it is in the prompt: the slower of the two."""
    own = math.inf if not rho > 0 else 1 / (2 * rho)
    return min(breakdown_exponent(spread) if not math.isnan(spread) else 1.0, own)


def regime_of(
    problem: Problem,
    heads: Heads,
    square: HeadsSquare,
    queries: Nodes | GaussianQueries,
    constant: Average,
    spread: float,
) -> Regime:
    """The regime of a mean over queries with this constant and this spread."""
    rho = own_weight(heads, problem.mu, problem.nu) if problem.query_in_prompt else 0.0
    power = exponent(spread, rho)
    if spread >= 0.5 or power < 1:
        return Regime("slower than 1/L", power, spread, math.nan, math.nan)
    if all(kind_of(head) == "linear" for head in heads):
        return Regime("1/L", 1.0, 0.0, 1.0, 1.0)
    # that of several heads is that of the last of them to reach it; where heads nearly cancel it may be later
    each = [(math.nan, math.nan)]
    for head, form in zip(heads, square.each, strict=True):
        if kind_of(head) == "softmax":
            own = constant if len(heads) == 1 else _own_constant(queries, head, form)
            each.append(_scales(problem.mu, queries, head, form, own))
    dominated, onset = (float(np.fmax.reduce(lengths)) for lengths in zip(*each, strict=True))
    if math.isnan(spread):
        return Regime("unknown", 1.0, spread, onset, dominated)
    return Regime("1/L", 1.0, spread, onset, dominated).at(max(problem.lengths))


def _own_constant(queries: Nodes | GaussianQueries, head: AbstractAttention, form: QuadraticForm) -> Average:
    """That of a form of one of several heads."""
    return queries.constant((head,), HeadsSquare((form,), None))


def _scales(
    mu: AbstractMeasure,
    queries: Nodes | GaussianQueries,
    head: AbstractAttention,
    form: QuadraticForm,
    constant: Average,
) -> tuple[float, float]:
    r"""Lengths up to which single tokens dominate, and from which c/L is good to a tenth, for a softmax head.

    The first is that at which the tilted prompt is worth one token, $e^{\Lambda(2\theta)-2\Lambda(\theta)}$, at the
    queries that make the constant. The second is exact for the output on Gaussian tokens, and else guessed from the
    size of the next order, which for heavy tails is too soon.
    """
    dominated, second = queries.scales(head, constant)
    guess = _SECOND / _CLOSE * second
    if not isinstance(mu, Gaussian):
        return dominated, max(1.0, guess)
    # that of a slope is no sooner than that of the output behind it
    behind = QuadraticForm(form.slopes[0].A, ()) if form.slopes else form
    level = _own_constant(queries, head, behind).value if form.slopes else constant.value
    if not level > 0:
        return dominated, 1.0

    def ratio(log_L: float) -> float:
        L = round(math.exp(log_L))
        return queries.exact_mean_square(head, behind, L).value * L / level

    onset = _onset(ratio, math.log(max(guess, 1.0)))
    return dominated, max(onset, guess) if form.slopes else onset


def _onset(ratio: Callable[[float], float], guess: float) -> float:
    """Where a ratio that tends to 1 comes near it, in ln L: bracketed from the guess on, then by bisection."""
    longest = math.log(LONGEST)
    low, high = 0.0, min(guess, longest)
    while abs(ratio(high) - 1) > _CLOSE:
        if high == longest:
            return math.inf
        low, high = high, min(high + 4, longest)
    while high - low > 0.1:
        middle = max((low + high) / 2, high - 4)
        low, high = (low, middle) if abs(ratio(middle) - 1) <= _CLOSE else (middle, high)
    return math.exp(high)
