import math
import warnings
from typing import TYPE_CHECKING, Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, Shaped

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, dataset, length_axes
from largeprompt.attention import AbstractAttention, AbstractLayer, kind_of, merged_form
from largeprompt.attention._forms import described
from largeprompt.icl import LinearRegression, blocks, norm, risk, risk_gradient, risk_rate
from largeprompt.measures import Gaussian
from largeprompt.measures._from_sampler import resampled, sampled_parts
from largeprompt.measures._worth import DoubtWarning, FewTokensWarning

from ._memory import refuse_what_does_not_fit
from ._problem import NotPredictedError, Problem, Queries, RiskProblem, Several, Tokens, problem_of
from ._query_averages import Average, GaussianQueries, Nodes, queries_of
from ._rates import Heads, summed_heads
from ._regime import Law, Regime, breakdown_exponent, regime_of, spread
from ._reliability import reliability
from ._spectrum import spectrum
from ._squares import HeadsSquare
from ._stand_in import changes, chosen_queries, doubt_at

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset

_DRAWS = 2**16  # nodes for the gradient of a risk, at most
_LATE = 1e13  # of lengths


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
    exact at every L. All else, and several heads, of every kind of attention: $c/L$, where $c$ is exact at every query
    for softmax and linear attention and every law with a known $\Lambda$, and else as exact as the kind knows it. The
    mean over queries is closed or one-dimensional for centred Gaussians, a sum over given queries, and otherwise an
    average over queries drawn from `key`. The query in the prompt changes $c/L$ to second order only, but may change
    the regime. Layers that are no sum of heads are refused.
    """
    problem = problem_of(layer, mu, nu, Ls, quantity, query_in_prompt)
    generator = checks.key_or_default(key)
    return problem.answer({name: _prediction(problem, name, generator) for name in problem.quantities})


def _prediction(problem: Problem | RiskProblem, name: str, key: PRNGKeyArray) -> Prediction:
    law = law_of(problem, name, key)
    values, errors, _ = (np.array(part) for part in zip(*map(law.at, problem.lengths), strict=True))
    of_risk = isinstance(problem, RiskProblem)
    return Prediction(
        quantity=name,
        L=np.array(problem.lengths),
        mean_square=values**2 if of_risk else values,
        stderr=2 * np.abs(values) * errors if of_risk else errors,
        constant=law.constant,
        constant_stderr=law.constant_stderr,
        regime=law.regime,
        method=law.method,
        exact=not np.any(errors) if law.exact is None else law.exact,
        gap=values if of_risk else None,
    )


def law_of(problem: Problem | RiskProblem, name: str, key: PRNGKeyArray) -> Law:
    """The law of one quantity: exact at every L where it can be, and else as c/L."""
    if isinstance(problem, RiskProblem):
        return risk_law(problem, name, key)
    heads, mu, square = summed_heads(problem.layer), problem.mu, problem.squares[name]
    refuse_what_does_not_fit(f"the constant of {name}", mu)
    queries, theta2 = queries_of(problem, heads, key), spread(problem.layer, mu, problem.nu)
    alone, linear = len(heads) == 1 and kind_of(heads[0]), all(kind_of(head) == "linear" for head in heads)
    closed = alone == "softmax" and isinstance(mu, Gaussian) and not square.slopes and not problem.query_in_prompt
    constant, doubtful = _constant(heads, square, queries, theta2, name, closed), False
    if isinstance(queries, Nodes) and constant.values is not None and sampled_parts(mu):
        constant, doubtful = _with_stand_in(heads, square, queries, constant, name, key)
    if doubtful:
        regime = Regime("too few tokens", 1.0, theta2, math.nan, math.nan)
    else:
        regime = regime_of(problem, heads, square, queries, constant, theta2)

    def as_constant(L: int) -> Average:
        value = constant.value if math.isfinite(constant.value) else math.nan  # no law of finite lengths is known then
        return Average(value / L, constant.stderr / L)

    def exactly(L: int) -> Average:
        return queries.exact_mean_square(heads[0], square.each[0], L)._replace(values=None)

    exact = closed or (linear and not problem.query_in_prompt)
    if closed:
        method = f"exact over prompts at every L, {queries.exact_words}"
    else:
        method = f"c/L, {'exact for linear attention, ' if exact else ''}{queries.words}"
    limit = constant.value if regime.exponent == 1.0 and regime.name != "slower than 1/L" else math.inf
    return Law(exactly if closed else as_constant, limit, constant.stderr, regime, method, exact)


def _constant(
    heads: Heads, square: HeadsSquare, queries: Nodes | GaussianQueries, theta2: float, name: str, exact: bool
) -> Average:
    if theta2 >= 0.5:
        return Average(math.inf, 0.0)
    constant = queries.constant(heads, square)
    if constant.values is None:
        return constant
    if not np.isfinite(constant.values).all():
        if exact:  # beyond what numbers hold, but not needed
            return Average(math.inf, 0.0)
        raise ValueError(f"the constant of {name} overflows at a query; use smaller weights or a wider type")
    drawn = isinstance(queries, Nodes) and queries.drawn
    if drawn and not (trust := reliability(constant.values)).trusted:
        warnings.warn(
            f"the constant of {name} is an average over {len(constant.values)} queries that are worth "
            f"{trust.effective:.3g} (tail index {trust.tail:.2f}): it may be far too small, and infinite",
            DoubtWarning,
            stacklevel=4,
        )
    return constant


def _with_stand_in(
    heads: Heads, square: HeadsSquare, nodes: Nodes, constant: Average, name: str, key: PRNGKeyArray
) -> tuple[Average, bool]:
    """The constant with the error of the tokens that stand in for the law, infinite where too few carry the tilts."""
    assert constant.values is not None
    mu, which = nodes.mu, chosen_queries(nodes.weights * constant.values)
    z, values = nodes.z[which], constant.values[which]
    # e^{Λ(2θ)} and moments under twice the tilt
    doubt, caution = doubt_at(mu, heads, z, square.slopes, 2)
    if doubt is not None:
        message = f"the constant of {name} cannot be trusted and may be infinite: {doubt.sentence}"
        warnings.warn(message, FewTokensWarning, stacklevel=4)
        return constant._replace(stderr=math.inf), True

    def ratio(key: PRNGKeyArray | None) -> list[float]:
        law = mu if key is None else resampled(mu, key)
        return [float(np.mean(nodes.constants(heads, square, law, z)[0] / np.maximum(values, 1e-300)))]

    share = caution * float(changes(ratio, key)[0])
    return constant._replace(stderr=math.hypot(constant.stderr, share * constant.value)), False


def risk_law(problem: RiskProblem, name: str, key: PRNGKeyArray) -> Law:
    """The gap of the risks, or of their gradients, exactly or exactly over prompts."""
    layer, task = problem.layer, problem.task
    if kind_of(layer) is None:
        raise NotPredictedError(
            f"the layer is {described(layer)}; a risk is predicted for one head of softmax or linear attention, else "
            "only measured"
        )
    if type(task) is not LinearRegression:
        raise NotPredictedError(
            f"mu is of type {type(task).__name__}; a risk is predicted for LinearRegression, else only measured"
        )
    merged = merged_form(layer)
    linear = kind_of(merged) == "linear"
    if problem.query_in_prompt and not linear:
        raise NotPredictedError("query_in_prompt is True; with softmax attention a risk is then only measured")
    rate = math.nan
    if name == "risk":
        rate = float(risk_rate(layer, task).value)

    def at(L: int) -> Average:
        gap = _gap(layer, task, L, name, key, problem.query_in_prompt)
        # so late the difference of the risks is lost to rounding, and all but its first order in 1/L is gone
        return gap._replace(value=rate / L) if L > _LATE and math.isfinite(rate) else gap

    method = "exact" if linear else "exact over prompts"
    return Law(at, rate**2, 0.0, _risk_regime(merged, task, linear), method, None)


def _gap(layer, task, L: int, name: str, key, query_in_prompt: bool) -> Average:
    options: Any = {"query_in_prompt": query_in_prompt}
    if name == "risk":
        finite, infinite = risk(layer, task, L, key, **options), risk(layer, task, math.inf, key)
        return Average(float(finite.value - infinite.value), float(finite.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # near an optimum a gradient is small beside its error: the error is returned
        finite = risk_gradient(layer, task, L, key, max_draws=_DRAWS, **options)
    infinite = risk_gradient(layer, task, math.inf, key)
    finite_part, infinite_part = (eqx.filter(g.layer, eqx.is_inexact_array) for g in (finite, infinite))
    return Average(float(norm(jax.tree.map(jnp.subtract, finite_part, infinite_part))), float(norm(finite.stderr)))


def _risk_regime(merged: AbstractAttention, task: LinearRegression, linear: bool) -> Regime:
    if linear:
        return Regime("1/L", 2.0, 0.0, 1.0, 1.0, 2.0)
    parts = blocks(merged, task)
    if bool(jnp.any(parts.C != 0)):
        return Regime("slower than any power", 0.0, math.nan, math.nan, math.nan, 2.0)
    A = np.asarray(parts.A, float)
    spread = float(spectrum(A.T @ np.asarray(task.Sigma, float) @ A, task.query_Sigma)[0][-1])
    power = breakdown_exponent(spread)
    name = "1/L" if spread < 0.5 else "slower than 1/L"
    return Regime(name, 2 * power, spread, math.nan, math.nan, 2.0)
