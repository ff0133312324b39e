import math
import warnings
from typing import TYPE_CHECKING, overload

import equinox as eqx
import numpy as np
from jaxtyping import Float, PRNGKeyArray, Shaped

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, dataset, length_axes
from largeprompt.attention import AbstractLayer, kind_of
from largeprompt.measures import Gaussian
from largeprompt.measures._from_sampler import resampled, sampled_parts
from largeprompt.measures._worth import FewTokensWarning

from ._memory import refuse_what_does_not_fit
from ._problem import Problem, Queries, RiskProblem, Several, Tokens, problem_of
from ._query_averages import Average, GaussianQueries, Nodes, queries_of
from ._rates import Heads, summed_heads
from ._regime import Law, Regime, regime_of, spread
from ._reliability import reliability
from ._risk_prediction import risk_law
from ._squares import HeadsSquare
from ._stand_in import changes, chosen_queries, doubt_at

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset


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
