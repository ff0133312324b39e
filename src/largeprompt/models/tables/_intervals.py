"""Results for rows of a table: class probabilities with intervals, and the labelled rows that carry them."""

from typing import TYPE_CHECKING

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import expit

from largeprompt._display import AbstractTable, axes
from largeprompt.models.sensitivity import ErrorBars
from largeprompt.paper.chart import BLUE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset


class Intervals(AbstractTable):
    r"""Class probabilities of rows with intervals over redraws of the labelled rows.

    Intervals are made on the log-odds $\log p/(1-p)$ of each class, `log_odds`, and transformed: they stay within 0 and
    1. They are for the mean of the log-odds over tables of this size.
    """

    log_odds: ErrorBars
    classes: tuple[str, ...] = eqx.field(static=True)

    @property
    def probabilities(self) -> Float[np.ndarray, "t c"]:
        """The class probabilities."""
        return self._by_class(expit(self.log_odds.estimate))

    @property
    def low(self) -> Float[np.ndarray, "t c"]:
        """The lower ends of the intervals."""
        return self._by_class(expit(self.log_odds.low))

    @property
    def high(self) -> Float[np.ndarray, "t c"]:
        """The upper ends of the intervals."""
        return self._by_class(expit(self.log_odds.high))

    @property
    def trusted(self) -> Bool[np.ndarray, "t c"]:
        """Whether each interval is to be trusted; `log_odds.reason` says why not."""
        return self._by_class(self.log_odds.trusted)

    def _by_class(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, len(self.classes))

    def to_dataset(self) -> "Dataset":
        """All numbers by row and class."""
        import xarray as xr

        bars = self.log_odds
        values = {name: getattr(self, name) for name in ("probabilities", "low", "high", "trusted")}
        values |= {f"log_odds_{name}": self._by_class(getattr(bars, name)) for name in ("estimate", "stderr")}
        values["reason"] = self._by_class(np.array(bars.reason))
        return xr.Dataset(
            {name: (("row", "class"), value) for name, value in values.items()},
            coords={"row": np.arange(len(self.low)), "class": list(self.classes)},
            attrs={"level": bars.level, "method": bars.method, "rows of the prompt": bars.groups},
        )

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        bars, likely = self.log_odds, self.probabilities.argmax(axis=1)
        rows = []
        for i, c in enumerate(likely[:12]):
            low, high = self.low[i, c], self.high[i, c]
            sure = "yes" if self.trusted[i, c] else "no"
            rows.append([str(i), self.classes[c], f"{self.probabilities[i, c]:.3f}", f"{low:.3f} to {high:.3f}", sure])
        shown = f"the first {len(rows)} of {len(likely)} rows" if len(rows) < len(likely) else f"{len(rows)} rows"
        title = f"Intervals of {100 * bars.level:g} % over redraws of {bars.groups} rows, by {bars.method} ({shown})"
        return title, ["row", "class", "probability", "interval", "trusted"], rows

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the probability of each row's likeliest class with its interval."""
        ax, at = axes(ax), np.arange(len(self.low))
        likely = self.probabilities.argmax(axis=1)
        middle, low, high, trusted = (
            values[at, likely] for values in (self.probabilities, self.low, self.high, self.trusted)
        )
        for chosen, colour, label in ((trusted, BLUE, "trusted"), (~trusted, VERMILION, "not trusted")):
            if chosen.any():
                ax.plot(at[chosen], middle[chosen], "o", color=colour, label=label)
                ax.vlines(at[chosen], low[chosen], high[chosen], color=colour)
        ax.set(xlabel="row", ylabel="probability of its likeliest class", ylim=(0, 1))
        ax.legend(frameon=False)
        return ax


class InfluentialRows(AbstractTable):
    """The labelled rows that carry the prediction of each row, the strongest first.

    `change` is the predicted change, to first order, of the log-odds of the row's likeliest class when the labelled row
    is left out: negative where the labelled row speaks for that class.
    """

    rows: Int[np.ndarray, "t k"]
    change: Float[np.ndarray, "t k"]
    classes: tuple[str, ...] = eqx.field(static=True)

    def to_dataset(self) -> "Dataset":
        """Rows and changes by row and rank."""
        import xarray as xr

        return xr.Dataset(
            {"labelled_row": (("row", "rank"), self.rows), "change": (("row", "rank"), self.change)},
            coords={"row": np.arange(len(self.rows)), "class": ("row", list(self.classes))},
        )

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        few = min(5, self.rows.shape[1])
        rows = [
            [str(i), name, *(f"{r} ({c:+.2g})" for r, c in zip(self.rows[i, :few], self.change[i, :few], strict=True))]
            for i, name in enumerate(self.classes[:12])
        ]
        title = "Labelled rows that carry each prediction (change of its log-odds when the labelled row is left out)"
        return title, ["row", "class", *(f"rank {k + 1}" for k in range(few))], rows

    def plot(self, ax: "Axes | None" = None, row: int = 0) -> "Axes":
        """Draw the changes of one row."""
        ax, change = axes(ax), self.change[row][::-1]
        ax.barh(np.arange(len(change)), change, color=np.where(change > 0, BLUE, VERMILION))
        ax.set_yticks(np.arange(len(change)), [str(each) for each in self.rows[row][::-1]])
        ax.set(xlabel=f"change of the log-odds of {self.classes[row]} when left out", ylabel="labelled row")
        return ax
