r"""How many rows a prompt needs for an output with a given standard error.

Over redraws of a prompt the variance of an output falls like $n^{-\gamma}$: from a standard error $s$ at $n$ rows, an
error $\varepsilon$ needs $n\,(s/\varepsilon)^{2/\gamma}$. The errors of $\log s^2$ and of $\gamma$ give that of its
logarithm. Where $\gamma$ was measured, beyond the rows at hand it may be another.
"""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from largeprompt._display import AbstractTable, axes, dataset
from largeprompt.paper.chart import BLUE

from ._error_bars import ErrorBars, error_bars
from ._weighted import WeightedPrompt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

_DRIFT = 0.2  # by which the exponent beyond the rows differs from that before: root mean square over six tables
_SLOWEST = 0.3  # exponent: below, a tenth of it changes the rows by more than their own number


class RowsFor(AbstractTable):
    """The rows for which each output has the standard error `error`, with an interval; NaN where it is not `trusted`.

    `now` is how many there are, with which the standard error is `stderr`; its
    square falls like their power of minus `exponent`.
    """

    rows: Float[np.ndarray, " p"]
    low: Float[np.ndarray, " p"]
    high: Float[np.ndarray, " p"]
    stderr: Float[np.ndarray, " p"]
    trusted: Bool[np.ndarray, " p"]
    exponent: float
    error: float = eqx.field(static=True)
    level: float = eqx.field(static=True)
    now: int = eqx.field(static=True)
    reason: tuple[str, ...] = eqx.field(static=True)

    def to_dataset(self) -> "Dataset":
        """All numbers by output."""
        columns = {name: getattr(self, name) for name in ("rows", "low", "high", "stderr", "trusted")}
        facts = {"error": self.error, "level": self.level, "rows now": self.now, "exponent": self.exponent}
        reason = np.array(self.reason) if any(self.reason) else None
        return dataset("output", np.arange(len(self.rows)), columns | {"reason": reason}, facts)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the rows with their intervals, and a line at those at hand."""
        ax, at = axes(ax), np.arange(len(self.rows))
        ax.plot(at, self.rows, "o", color=BLUE)
        ax.vlines(at[self.trusted], self.low[self.trusted], self.high[self.trusted], color=BLUE)
        ax.axhline(self.now, color="0.5", linestyle="--", label=f"{self.now} rows now")
        ax.set(yscale="log", xlabel="output", ylabel=f"rows for a standard error of {self.error:g}")
        ax.legend(frameon=False)
        return ax


def rows_for(prompt: WeightedPrompt | ErrorBars, error: float, **options: Any) -> RowsFor:
    """How many rows (groups drawn independently) each output needs for the standard error `error`.

    It takes a prompt, with the options of `error_bars`, or error bars that are known already.
    """
    if not 0 < error < np.inf:
        raise ValueError(f"error is {error:g}; it must be a positive number, in the unit of the outputs")
    if isinstance(prompt, ErrorBars) and options:
        raise ValueError(f"{', '.join(options)}: error bars that are known take no options; give the prompt itself")
    bars = prompt if isinstance(prompt, ErrorBars) else error_bars(prompt, **options)
    slow = bars.exponent < _SLOWEST
    falls = f"falls too slowly, like their power {-bars.exponent:.2f}" if bars.exponent > 0 else "does not fall at all"
    why = f"with more rows the variance {falls}; how many are needed is not known"
    reason = tuple(each or (why if slow else "") for each in bars.reason)
    trusted = np.array([not each for each in reason])
    ratio = np.log(np.where(trusted, bars.stderr, 1.0) / error)
    power = max(bars.exponent, _SLOWEST)
    of_power = np.hypot(bars.exponent_stderr, _DRIFT) if bars.exponent_stderr else 0.0
    spread = np.hypot(np.sqrt(2 / bars.freedom) / power, 2 * ratio * of_power / power**2)
    reach = stats.norm.ppf((1 + bars.level) / 2) * spread
    rows = np.where(trusted, bars.groups * np.exp(2 * ratio / power), np.nan)
    low, high = rows * np.exp(-reach), rows * np.exp(reach)
    return RowsFor(
        rows=rows,
        low=low,
        high=high,
        stderr=bars.stderr,
        trusted=trusted,
        exponent=bars.exponent,
        error=float(error),
        level=bars.level,
        now=bars.groups,
        reason=reason,
    )
