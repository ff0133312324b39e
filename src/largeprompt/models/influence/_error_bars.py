r"""Error bars of outputs over redraws of the prompt: groups drawn independently from a population.

To first order the variance is $\frac{n}{n-1}\sum_i(g_i-\bar g)^2$, $g_i$ the derivatives of the output in log-weights.
Where a network is far from linear in the weights that is not enough, and subsets of the groups are drawn.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._progress import Progress
from largeprompt.paper.chart import BLUE, VERMILION

from ._outputs import gradients_at, groups_of, outputs_at, task
from ._resamples import counts, subset_size, subsets
from ._trust import doubts, tail_of
from ._weighted import WeightedPrompt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

Method = Literal["auto", "subsets", "bootstrap", "influence"]
_METHODS = ("auto", "subsets", "bootstrap", "influence")


class ErrorBars(AbstractTable):
    """Outputs with standard errors and intervals over redraws of the prompt, one row for each output.

    The intervals are for the mean of the output over prompts of this length. `bias` is the mean of the outputs on
    prompts drawn again minus the estimate, 0 where none were drawn. `reason` says for each output why it is not
    `trusted`, or is empty. `freedom` are the degrees of freedom of the variance, `draws` outputs whose spread is the
    standard error, for maps of several outputs at once.
    """

    estimate: Float[np.ndarray, " p"]
    stderr: Float[np.ndarray, " p"]
    low: Float[np.ndarray, " p"]
    high: Float[np.ndarray, " p"]
    bias: Float[np.ndarray, " p"]
    trusted: Bool[np.ndarray, " p"]
    freedom: Float[np.ndarray, " p"]
    draws: Float[np.ndarray, "r p"]
    level: float = eqx.field(static=True)
    method: str = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    reason: tuple[str, ...] = eqx.field(static=True)
    stderr_by: dict[str, Float[np.ndarray, " p"]]

    def transformed(self, f: Callable[[np.ndarray], np.ndarray]) -> "ErrorBars":
        """Error bars of a monotone function of each output, such as a sigmoid: its values at both ends."""
        estimate, one, other, draws = (np.asarray(f(x), dtype=float) for x in self._ends)
        if not all(x.shape == y.shape for x, y in zip((estimate, draws), (self.estimate, self.draws), strict=True)):
            raise ValueError(
                f"f gives shape {estimate.shape} for outputs ({len(self.estimate)},); give one number for each"
            )
        return self._with(estimate, np.minimum(one, other), np.maximum(one, other), draws)

    def mapped(self, f: Callable[[np.ndarray], np.ndarray]) -> "ErrorBars":
        """Error bars of functions of all outputs, such as a softmax: quantiles of f over draws, one draw at a time."""
        estimate = np.asarray(f(self.estimate), dtype=float)
        draws = np.stack([np.asarray(f(each), dtype=float) for each in self.draws])
        if estimate.ndim != 1 or draws.shape[1:] != estimate.shape:
            raise ValueError(f"f gives shape {estimate.shape} for one draw ({len(self.estimate)},); give a vector")
        low, high = np.quantile(draws, [(1 - self.level) / 2, (1 + self.level) / 2], axis=0)
        return self._with(estimate, np.minimum(low, estimate), np.maximum(high, estimate), draws)

    @property
    def _ends(self) -> tuple[np.ndarray, ...]:
        return self.estimate, self.low, self.high, self.draws

    def _with(self, estimate: np.ndarray, low: np.ndarray, high: np.ndarray, draws: np.ndarray) -> "ErrorBars":
        same = len(estimate) == len(self.trusted)
        trusted = self.trusted if same else np.full(len(estimate), bool(self.trusted.all()))
        worst = next((reason for reason in self.reason if reason), "")
        reason = self.reason if same else (worst,) * len(estimate)
        stderr, bias = draws.std(axis=0, ddof=1), np.zeros(len(estimate))
        facts = (self.level, self.method, self.groups, reason, {})
        freedom = self.freedom if same else np.full(len(estimate), self.freedom.min())
        return ErrorBars(estimate, stderr, low, high, bias, trusted, freedom, draws, *facts)

    def to_dataset(self) -> "Dataset":
        """All numbers by output."""
        columns = {name: getattr(self, name) for name in ("estimate", "stderr", "low", "high", "bias", "trusted")}
        columns |= {f"stderr_by_{name}": value for name, value in self.stderr_by.items()}
        facts = {name: getattr(self, name) for name in ("method", "level", "groups")}
        return dataset("output", np.arange(len(self.estimate)), columns | {"reason": np.array(self.reason)}, facts)

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

    `subsets` runs the prompt on `draws` subsets of four fifths of its groups, `bootstrap` on counts of draws with
    replacement, `influence` takes one backward pass for each output. `auto` takes subsets, and the influence beside it
    where that costs no more.
    """
    if method not in _METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(_METHODS)}")
    if not 0 < level < 1:
        raise ValueError(f"level is {level:g}; it must lie between 0 and 1, such as 0.9")
    n, batch, draws = groups_of(prompt), checks.count("batch", batch), checks.count("draws", draws, at_least=8)
    rng = np.random.default_rng(checks.count("seed", seed, at_least=0))
    estimate = outputs_at(prompt, np.ones((1, n)), batch)[0]
    again = method != "influence"
    slopes = method == "influence" or (method == "auto" and 2 * len(estimate) <= draws)
    stderr_by: dict[str, np.ndarray] = {}
    centred = found = None
    with task(progress, "error bars", draws * again + len(estimate) * slopes) as advance:
        if again:
            name, weights, factor = _drawn(method, rng, draws, n)
            found = outputs_at(prompt, weights, batch, advance)
            stderr_by[name] = np.sqrt(factor) * found.std(axis=0, ddof=1)
        if slopes:
            values = gradients_at(prompt, np.ones((1, n)), 1)[1][0]
            advance(len(estimate))
            centred = values - values.mean(axis=1, keepdims=True)
            stderr_by["influence"] = np.sqrt(n / (n - 1) * np.sum(centred**2, axis=1))
    used = next(iter(stderr_by))
    stderr = stderr_by[used]
    freedom = np.broadcast_to(_freedom(centred, n, draws if again else None), estimate.shape)
    reach = stats.t.ppf((1 + level) / 2, freedom) * stderr
    bias = np.zeros_like(estimate) if found is None else found.mean(axis=0) - estimate
    if found is not None:
        spread = found.std(axis=0, ddof=1)
        like = estimate + (found - found.mean(axis=0)) * (stderr / np.where(spread > 0, spread, 1.0))
    else:
        assert centred is not None
        like = estimate + np.sqrt(n / (n - 1)) * rng.normal(size=(draws, n)) @ centred.T
    reason = doubts(stderr_by, bias, None if centred is None else tail_of(centred))
    return ErrorBars(
        estimate=estimate,
        stderr=stderr,
        low=estimate - reach,
        high=estimate + reach,
        bias=bias,
        trusted=np.array([not each for each in reason]),
        freedom=freedom,
        draws=like,
        level=float(level),
        method=used,
        groups=n,
        reason=reason,
        stderr_by=stderr_by,
    )


def _drawn(method: str, rng: np.random.Generator, draws: int, n: int) -> tuple[str, np.ndarray, float]:
    """The method's name, weights, and the factor from the variance over them to that over redraws."""
    if method == "bootstrap":
        return method, counts(rng, draws, n), n / (n - 1)
    m = subset_size(n)
    return "subsets", subsets(rng, draws, n, m), m / (n - m)


def _freedom(centred: np.ndarray | None, n: int, draws: int | None) -> np.ndarray | float:
    """Degrees of freedom of the variance: twice the inverse of its relative variance, over groups and over draws."""
    of_draws = 0.0 if draws is None else 2 / (draws - 1)
    if centred is None:
        return 2 / (2 / (n - 1) + of_draws)
    squares = np.sum(centred**2, axis=1)
    of_groups = np.sum(centred**4, axis=1) / np.where(squares > 0, squares, 1.0) ** 2 - 1 / n
    return 2 / (np.maximum(of_groups, 2 / (n - 1)) + of_draws)
