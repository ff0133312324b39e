r"""Error bars of outputs over redraws of the prompt: groups drawn independently from a population.

To first order the variance is $\frac{n}{n-1}\sum_i(g_i-\bar g)^2$, $g_i$ the derivatives of the output in log-weights.
Networks that learn in context are far from linear in the weights; for them the variance is measured on disjoint parts
of the prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._progress import Progress
from largeprompt.paper.chart import BLUE, VERMILION

from ._outputs import check_level, gradients_at, groups_of, outputs_at, task
from ._resamples import VarianceLaw, agrees, counts, partitions, variance_law
from ._trust import doubts, tail_of
from ._weighted import WeightedPrompt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

Method = Literal["auto", "partitions", "bootstrap", "influence"]
_FEWEST = 8  # groups, so that quarters have two
_USUAL_FREEDOM = 20  # of variances over groups, where nothing says how evenly these carry them


class ErrorBars(AbstractTable):
    """Outputs with standard errors and intervals over redraws of the prompt, one row for each output.

    The intervals are for the mean of the output over prompts of this length. `bias` is the mean output on prompts with
    half of the groups (with replacement for the bootstrap) minus the estimate; 0 where none were run. `reason` says for
    each output why it is not `trusted`, or is empty. The variance falls like the number of groups to the power of minus
    `exponent`, 1 where it was not measured; `freedom` are its degrees of freedom. `draws` are outputs that spread as
    the standard errors say, for functions of several outputs at once.
    """

    estimate: Float[np.ndarray, " p"]
    stderr: Float[np.ndarray, " p"]
    low: Float[np.ndarray, " p"]
    high: Float[np.ndarray, " p"]
    bias: Float[np.ndarray, " p"]
    trusted: Bool[np.ndarray, " p"]
    freedom: Float[np.ndarray, " p"]
    draws: Float[np.ndarray, "r p"]
    exponent: float
    exponent_stderr: float
    level: float = eqx.field(static=True)
    method: str = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    reason: tuple[str, ...] = eqx.field(static=True)
    stderr_by: dict[str, Float[np.ndarray, " p"]]

    def transformed(self, f: Callable[[np.ndarray], np.ndarray]) -> "ErrorBars":
        """Error bars of a monotone function of each output, such as a sigmoid: its values at both ends."""
        every = (self.estimate, self.low, self.high, self.draws)
        estimate, one, other, draws = (np.asarray(f(x), dtype=float) for x in every)
        if (estimate.shape, draws.shape) != (self.estimate.shape, self.draws.shape):
            raise ValueError(
                f"f gives shape {estimate.shape} for outputs ({len(self.estimate)},); give one number for each"
            )
        if not np.allclose(f(self.estimate[:1]), estimate[:1], equal_nan=True):
            raise ValueError("f gives another number for an output among others than alone; `mapped` takes such an f")
        ends = np.minimum(one, other), np.maximum(one, other)
        return self._changed(estimate, ends, draws, trusted=self.trusted, freedom=self.freedom, reason=self.reason)

    def mapped(self, f: Callable[[np.ndarray], np.ndarray]) -> "ErrorBars":
        """Error bars of functions of all outputs, such as a softmax: quantiles of f over draws, one draw at a time.

        Draws are stretched as Student's quantiles are over normal ones. What is made of an output that is not trusted
        is not trusted.
        """
        upper = (1 + self.level) / 2
        stretch = stats.t.ppf(upper, self.freedom) / stats.norm.ppf(upper)
        estimate = np.asarray(f(self.estimate), dtype=float)
        draws = np.stack([np.asarray(f(each), dtype=float) for each in self.draws])
        if estimate.ndim != 1 or draws.shape[1:] != estimate.shape:
            raise ValueError(f"f gives shape {estimate.shape} for one draw ({len(self.estimate)},); give a vector")
        stretched = np.stack([f(self.estimate + stretch * (each - self.estimate)) for each in self.draws])
        low, high = np.quantile(stretched, [1 - upper, upper], axis=0)
        ends, worst = (np.minimum(low, estimate), np.maximum(high, estimate)), max(self.reason, key=len)
        return self._changed(
            estimate,
            ends,
            draws,
            trusted=np.full(len(estimate), not worst),
            freedom=np.full(len(estimate), self.freedom.min()),
            reason=(worst,) * len(estimate),
        )

    def _changed(
        self, estimate: np.ndarray, ends: tuple[np.ndarray, np.ndarray], draws: np.ndarray, **others: Any
    ) -> "ErrorBars":
        """The same error bars for other outputs; a bias of these is not known."""
        return dataclasses.replace(
            self,
            estimate=estimate,
            stderr=draws.std(axis=0, ddof=1),
            low=ends[0],
            high=ends[1],
            bias=np.zeros(len(estimate)),
            draws=draws,
            stderr_by={},
            **others,
        )

    def to_dataset(self) -> "Dataset":
        """All numbers by output."""
        columns = {name: getattr(self, name) for name in ("estimate", "stderr", "low", "high", "bias", "trusted")}
        columns |= {f"stderr_by_{name}": value for name, value in self.stderr_by.items()}
        facts = {name: getattr(self, name) for name in ("method", "level", "groups", "exponent")}
        reason = np.array(self.reason) if any(self.reason) else None
        return dataset("output", np.arange(len(self.estimate)), columns | {"reason": reason}, facts)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the outputs with their intervals, those that are not trusted in another colour."""
        ax, at = axes(ax), np.arange(len(self.estimate))
        for chosen, colour, label in ((self.trusted, BLUE, "trusted"), (~self.trusted, VERMILION, "not trusted")):
            if chosen.any():
                ax.plot(at[chosen], self.estimate[chosen], "o", color=colour, label=label)
                ax.vlines(at[chosen], self.low[chosen], self.high[chosen], color=colour)
        ax.set(xlabel="output", ylabel=f"estimate, {100 * self.level:g} % interval over redraws of the prompt")
        ax.legend(frameon=False)
        return ax


def error_bars(
    prompt: WeightedPrompt,
    *,
    level: float = 0.9,
    method: Method = "auto",
    draws: int = 100,
    seed: int = 0,
    batch: int = 16,
    progress: Progress | None = None,
) -> ErrorBars:
    """Error bars of each output over redraws of the prompt, from this one prompt.

    `partitions` runs it on about `draws` halves and quarters of its groups, `bootstrap` on counts of draws with
    replacement, `influence` takes one backward pass for each output. `auto` takes partitions, and the influence beside
    them where that costs no more; where both agree within the errors of the partitions, the influence is the more
    precise of the two and gives the error bars.
    """
    check_options(level, method, draws)
    n, batch, draws = groups_of(prompt, at_least=_FEWEST), checks.count("batch", batch), int(draws)
    rng = np.random.default_rng(checks.count("seed", seed, at_least=0))
    estimate = outputs_at(prompt, np.ones((1, n)), batch)[0]
    with_slopes = method == "influence" or (method == "auto" and 2 * len(estimate) <= draws)
    laws: dict[str, VarianceLaw] = {}
    centred, found = None, []
    with task(progress, "error bars", draws * (method != "influence") + len(estimate) * with_slopes) as advance:
        if method in ("auto", "partitions"):
            found = [
                outputs_at(prompt, weights.reshape(-1, n), batch, advance).reshape(*weights.shape[:2], -1)
                for weights in partitions(rng, draws, n)
            ]
            laws["partitions"] = variance_law(rng, found, estimate, n)
        if method == "bootstrap":
            laws[method] = _bootstrap_law(outputs_at(prompt, counts(rng, draws, n), batch, advance), estimate, n)
        if with_slopes:
            slopes = gradients_at(prompt, np.ones((1, n)), 1)[1][0]
            advance(len(estimate))
            centred = np.sqrt(n / (n - 1)) * (slopes - slopes.mean(axis=1, keepdims=True))
            laws["influence"] = _influence_law(rng, centred, draws)
    if method == "auto" and with_slopes and agrees(rng, found, laws["influence"].variance, n):
        law = laws["influence"]._replace(bias=laws["partitions"].bias)
        laws = {"influence": law, "partitions": laws["partitions"]}
    return _bars(estimate, laws, centred, float(level), n)


def check_options(level: float, method: str, draws: int) -> None:
    """Refuse what `error_bars` would refuse, before anything is run."""
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(get_args(Method))}")
    check_level(level)
    checks.count("draws", draws, at_least=2)


def _bars(
    estimate: np.ndarray, laws: dict[str, VarianceLaw], centred: np.ndarray | None, level: float, n: int
) -> ErrorBars:
    """Error bars by the first of the laws; what else is known says how sure they are."""
    method, law = next(iter(laws.items()))
    stderr_by = {name: np.sqrt(each.variance) for name, each in laws.items()}
    stderr = stderr_by[method]
    freedom = _freedom(centred, n, law.freedom, len(estimate))
    reach = stats.t.ppf((1 + level) / 2, freedom) * stderr
    reason = doubts(method, stderr_by, None if centred is None else tail_of(centred))
    return ErrorBars(
        estimate=estimate,
        stderr=stderr,
        low=estimate - reach,
        high=estimate + reach,
        bias=law.bias,
        trusted=np.array([not each for each in reason]),
        freedom=freedom,
        draws=estimate + law.like,
        exponent=law.exponent,
        exponent_stderr=law.exponent_stderr,
        level=level,
        method=method,
        groups=n,
        reason=reason,
        stderr_by=stderr_by,
    )


def _bootstrap_law(found: np.ndarray, estimate: np.ndarray, n: int) -> VarianceLaw:
    """The variance over counts is (n-1)/n of that over redraws, for outputs that are linear in the weights."""
    like = np.sqrt(n / (n - 1)) * (found - found.mean(axis=0))
    return VarianceLaw(like.var(axis=0, ddof=1), 1.0, 0.0, len(found) - 1, like, found.mean(axis=0) - estimate)


def _influence_law(rng: np.random.Generator, centred: np.ndarray, draws: int) -> VarianceLaw:
    """The sum of squares, and normal deviations with these covariances."""
    like = rng.normal(size=(draws, centred.shape[1])) @ centred.T
    return VarianceLaw(np.sum(centred**2, axis=1), 1.0, 0.0, np.inf, like, np.zeros(len(centred)))


def _freedom(centred: np.ndarray | None, n: int, of_draws: float, outputs: int) -> np.ndarray:
    """Degrees of freedom of the variance: twice the inverse of its relative variance, over draws and over groups."""
    if centred is None:
        of_groups = np.full(outputs, 1 / min(n - 1, _USUAL_FREEDOM))
    else:
        of_groups = np.full(outputs, 1 / (n - 1))
        squares = np.sum(centred**2, axis=1)
        spread = np.sum(centred**4, axis=1) / np.where(squares > 0, squares, 1.0) ** 2 - 1 / n
        of_groups = np.maximum(of_groups, spread / 2)
    return 1 / (of_groups + 1 / of_draws)
