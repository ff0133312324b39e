import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray, Shaped

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, dataset, length_axes
from largeprompt.attention import AbstractLayer, kind_of, known_heads, summed_heads
from largeprompt.measures import AbstractMeasure, Gaussian

from ._crossed import Heads, crossed_constants_at, gaussian_crossed_constant
from ._memory import queries_to_draw, refuse_what_does_not_fit
from ._quantities import OF_RISK, Form, NotPredictedError, Queries, Several, Tokens, chosen, laws, lengths
from ._query_averages import DRAWS, Average, closed, constants_at, exact_mean_square, gaussian_constant, query_nodes
from ._readers import HeadsForm, heads_forms
from ._regime import Regime, exponent, own_weight, spread
from ._reliability import reliability
from ._spectrum import spectrum
from ._stand_in import FewTokensWarning, changes, chosen_queries, doubt_at, sampled_parts

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset

_CLOSE = 0.1  # of c/L, where it begins to serve
_SECOND = 2.0  # the second order in 1/L is about this times e^{Λ(3θ)-Λ(2θ)-Λ(θ)}/L of the first, as for Gaussians
LONGEST = 1e60  # the exact moments are known up to here


class Prediction(AbstractTable):
    r"""The mean of $\|X_L - X\|^2$ that theory predicts, for each length, and the law it follows.

    `constant` is that of $c\,L^{-e}$ with $e$ the regime's exponent, infinite where the mean over queries of the
    constants at each query is; then `mean_square` is nan unless it is exact. `stderr` and `constant_stderr` are of the
    average over queries, 0 where that is exact, and of the tokens that stand in for a law known by its sampler:
    infinite where too few of them carry the tilts. For risks `gap` is $R_L-R_\infty$ with its sign, or the norm of the
    difference of the gradients.
    """

    quantity: str = eqx.field(static=True)
    L: Shaped[np.ndarray, " k"]  # of Python's whole numbers, where they go past 2^63
    mean_square: Float[np.ndarray, " k"]
    stderr: Float[np.ndarray, " k"]
    constant: float
    constant_stderr: float
    regime: Regime
    method: str = eqx.field(static=True)
    exact: bool = eqx.field(static=True)
    gap: Float[np.ndarray, " k"] | None = None

    def to_dataset(self) -> "Dataset":
        return dataset(
            "L",
            self.L,
            {"mean_square": self.mean_square, "stderr": self.stderr, "gap": self.gap},
            {
                "quantity": self.quantity,
                "regime": self.regime.sentence,
                "constant": self.constant,
                "constant_stderr": self.constant_stderr,
                "method": self.method,
            },
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The predicted mean squares by length."""
        ax = length_axes(ax, self.quantity)
        ax.plot(self.L.astype(float), self.mean_square, marker=".", color="C1", label="predicted")
        ax.legend()
        return ax


@overload
def predict(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    Ls: object,
    quantity: str,
    key: PRNGKeyArray | None = None,
    *,
    query_in_prompt: bool = False,
) -> Prediction: ...
@overload
def predict(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    Ls: object,
    quantity: Several,
    key: PRNGKeyArray | None = None,
    *,
    query_in_prompt: bool = False,
) -> dict[str, Prediction]: ...
def predict(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    Ls: object,
    quantity: str | Several,
    key: PRNGKeyArray | None = None,
    *,
    query_in_prompt: bool = False,
) -> Prediction | dict[str, Prediction]:
    r"""What `deviation` would measure, without drawing a prompt.

    Linear attention, and the output of one softmax head on Gaussian tokens (with V and O, which read the same mean):
    exact at every L. All else, and several heads: $c/L$, where $c$ is exact at every query and for every law with a
    known $\Lambda$. The mean over queries is closed or one-dimensional for centred Gaussians, a sum over given queries,
    and otherwise an average over queries drawn from `key`. The query in the prompt changes $c/L$ to second order only,
    but may change the regime. Layers that are not softmax or linear attention or sums of such heads are refused.
    """
    names, Ls = chosen(quantity), lengths(Ls)
    generator = checks.key_or_default(key)
    if names[0] in OF_RISK:
        from ._risks import risk_prediction

        found = {name: risk_prediction(layer, mu, nu, Ls, name, generator, query_in_prompt) for name in names}
    else:
        layer, tokens, queries = laws(layer, mu, nu)
        if (heads := known_heads(layer)) is None:
            raise NotPredictedError(
                f"the layer is of type {type(layer).__name__}; deviations are predicted for softmax and linear "
                "attention and sums of such heads, else only measured"
            )
        known = heads_forms(layer, heads, names)
        found = {
            name: _predicted(name, layer, tokens, queries, known[name], Ls, generator, query_in_prompt)
            for name in names
        }
    return found[names[0]] if isinstance(quantity, str) else found


def _predicted(
    name: str,
    layer: AbstractLayer,
    mu: AbstractMeasure,
    nu: AbstractMeasure,
    form: HeadsForm,
    Ls: Sequence[int],
    key: PRNGKeyArray,
    query_in_prompt: bool,
) -> Prediction:
    refuse_what_does_not_fit(f"the constant of {name}", mu)
    heads = summed_heads(layer)
    nodes = None if closed(heads, mu, nu) else query_nodes(nu, key, queries_to_draw(mu, DRAWS))
    rho = own_weight(layer, mu, nu) if query_in_prompt else 0.0
    theta2, linear = spread(layer, mu, nu), all(kind_of(head) == "linear" for head in heads)
    exact = isinstance(mu, Gaussian) and len(heads) == 1 and not linear and not form.slopes and not query_in_prompt
    constant, doubtful = _constant(heads, mu, nu, form, nodes, theta2, name, exact), False
    if nodes is not None and constant.values is not None and sampled_parts(mu):
        constant, doubtful = _with_stand_in(heads, mu, form, nodes, constant, name, key)
    if exact:
        assert isinstance(mu, Gaussian)
        averages = [exact_mean_square(heads[0], mu, nu, form.each[0], L, nodes) for L in Ls]
    else:
        value = constant.value if math.isfinite(constant.value) else math.nan  # no law of finite lengths is known then
        averages = [Average(value / L, constant.stderr / L, None) for L in Ls]
    over = "in closed form" if nodes is None else f"over {len(nodes.z)} queries" + (" drawn" if nodes.drawn else "")
    if exact:
        method = f"exact over prompts at every L, {over if nodes else 'one-dimensional quadrature over queries'}"
    elif linear:
        exact = not query_in_prompt
        method = f"c/L, exact for linear attention, {over}" if exact else f"c/L, {over}"
    else:
        method = f"c/L, {over}"
    if doubtful:
        regime = Regime("too few tokens", 1.0, theta2, math.nan, math.nan)
    else:
        regime = _regime(heads, mu, nu, form, nodes, theta2, rho, constant, Ls)
    return Prediction(
        quantity=name,
        L=np.array(Ls),
        mean_square=np.array([a.value for a in averages]),
        stderr=np.array([a.stderr for a in averages]),
        constant=constant.value if regime.exponent == 1.0 and regime.name != "slower than 1/L" else math.inf,
        constant_stderr=constant.stderr,
        regime=regime,
        method=method,
        exact=exact,
    )


def _constant(heads: Heads, mu, nu, form: HeadsForm, nodes, theta2: float, name: str, exact: bool) -> Average:
    if theta2 >= 0.5:
        return Average(math.inf, 0.0, None)
    if nodes is None:
        own = sum(gaussian_constant(head, mu, nu, part) for head, part in zip(heads, form.each, strict=True))
        return Average(own + (gaussian_crossed_constant(heads, mu, nu) if form.is_crossed else 0.0), 0.0, None)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _constants_at(heads, mu, form, nodes.z)
    if not np.isfinite(values).all():
        if exact:  # beyond what numbers hold, but not needed
            return Average(math.inf, 0.0, None)
        raise ValueError(f"the constant of {name} overflows at a query; use smaller weights or a wider type")
    average = nodes.average(values)
    if nodes.drawn and not (trust := reliability(values)).trusted:
        warnings.warn(
            f"the constant of {name} is an average over {len(values)} queries that are worth {trust.effective:.3g} "
            f"(tail index {trust.tail:.2f}): it may be far too small, and infinite",
            stacklevel=4,
        )
    return average


def _constants_at(heads: Heads, mu, form: HeadsForm, z: Float[np.ndarray, "n D"]) -> Float[np.ndarray, " n"]:
    """The constant of a sum of heads at each query: their own, and for the output what each pair adds."""
    own = [constants_at(head, mu, part, z) for head, part in zip(heads, form.each, strict=True)]
    return np.sum(own, axis=0) + (crossed_constants_at(heads, mu, z) if form.is_crossed else 0.0)


def _with_stand_in(heads: Heads, mu, form: HeadsForm, nodes, constant: Average, name: str, key) -> tuple[Average, bool]:
    """The constant with the error of the tokens that stand in for the law, infinite where too few carry the tilts."""
    assert constant.values is not None
    which = chosen_queries(nodes.weights * constant.values)
    z, values = nodes.z[which], constant.values[which]
    # e^{Λ(2θ)} and moments under twice the tilt
    doubt, caution = doubt_at(mu, heads, z, form.slopes, 2)
    if doubt is not None:
        message = f"the constant of {name} cannot be trusted and may be infinite: {doubt.sentence}"
        warnings.warn(message, FewTokensWarning, stacklevel=5)
        return constant._replace(stderr=math.inf), True

    def ratio(mu):
        return np.array([np.mean(_constants_at(heads, mu, form, z) / np.maximum(values, 1e-300))])

    share = caution * float(changes(mu, key, ratio)[0])
    return constant._replace(stderr=math.hypot(constant.stderr, share * constant.value)), False


def _regime(heads: Heads, mu, nu, form: HeadsForm, nodes, theta2: float, rho: float, constant: Average, Ls) -> Regime:
    power = exponent(theta2, rho)
    if theta2 >= 0.5 or power < 1:
        return Regime("slower than 1/L", power, theta2, math.nan, math.nan)
    soft = [pair for pair in zip(heads, form.each, strict=True) if kind_of(pair[0]) == "softmax"]
    if not soft:
        return Regime("1/L", 1.0, 0.0, 1.0, 1.0)
    # that of several heads is that of the last of them to reach it; where heads nearly cancel it may be later
    each = [
        _scales(head, mu, nu, part, nodes, constant if len(heads) == 1 else _own_constant(head, mu, nu, part, nodes))
        for head, part in soft
    ]
    dominated, onset = (max(lengths) for lengths in zip(*each, strict=True))
    if math.isnan(theta2):
        return Regime("unknown", 1.0, theta2, onset, dominated)
    return Regime("1/L", 1.0, theta2, onset, dominated).at(max(Ls))


def _own_constant(head, mu, nu, form: Form, nodes) -> Average:
    """That of one of several heads."""
    if nodes is None:
        return Average(gaussian_constant(head, mu, nu, form), 0.0, None)
    return nodes.average(constants_at(head, mu, form, nodes.z))


def _scales(attention, mu, nu, form: Form, nodes, constant: Average) -> tuple[float, float]:
    """Lengths up to which single tokens dominate, and from which c/L is good to a tenth.

    The first is that at which the tilted prompt is worth one token, $e^{Λ(2θ)-2Λ(θ)}$, at the queries that make the
    constant (its weighted median). The second is exact for the output on Gaussian tokens, and else guessed from the
    size of the next order, which for heavy tails is too soon.
    """
    if nodes is None:  # under e^ν the queries are wider: ν there has the mean Σ λ/(1-2λ)
        U, Gamma, S = (np.asarray(a, float) for a in (attention.U, mu.Gamma, nu.Gamma))
        weights, _ = spectrum(U.T @ Gamma @ U, S)
        typical = float(np.sum(weights / (1 - 2 * weights)))
        dominated, guess = math.exp(min(typical, 690.0)), _SECOND / _CLOSE * math.exp(min(2 * typical, 690.0))
    else:
        scores = _scores(attention, mu, nodes.z)
        weights = nodes.weights * (np.ones(len(nodes.z)) if constant.values is None else constant.values)
        dominated, guess = (_weighted_median(np.exp(np.minimum(s, 690.0)), weights) for s in scores)
        guess *= _SECOND / _CLOSE
    if not isinstance(mu, Gaussian):
        return dominated, max(1.0, guess)
    # that of a slope is no sooner than that of the output behind it
    behind = Form(form.slopes[0].B, ()) if form.slopes else form
    level = _own_constant(attention, mu, nu, behind, nodes).value if form.slopes else constant.value
    if not level > 0:
        return dominated, 1.0

    def ratio(log_L: float) -> float:
        L = round(math.exp(log_L))
        return exact_mean_square(attention, mu, nu, behind, L, nodes).value * L / level

    onset = _onset(ratio, math.log(max(guess, 1.0)))
    return dominated, max(onset, guess) if form.slopes else onset


def _onset(ratio, guess: float) -> float:
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


def _scores(attention, mu, z) -> tuple[np.ndarray, np.ndarray]:
    """Λ(2θ) - 2Λ(θ) and Λ(3θ) - Λ(2θ) - Λ(θ) at each query."""

    @eqx.filter_jit
    def of(mu, thetas):
        def one(theta):
            single, double, triple = (mu._cgf(k * theta) for k in (1, 2, 3))
            return double - 2 * single, triple - double - single

        return jax.lax.map(one, thetas, batch_size=256)

    first, second = of(mu, z @ np.asarray(attention.U).T)
    return np.asarray(first, float), np.asarray(second, float)


def _weighted_median(values, weights) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)]) if cumulative[-1] > 0 else 1.0
