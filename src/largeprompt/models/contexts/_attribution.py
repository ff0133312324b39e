"""What the parts of a context add to an answer, as a result that prints, plots and becomes a page."""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt.paper.chart import BLUE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

_SHOWN = 10  # parts that are printed and drawn
_LETTERS = 60  # of a part that are printed


class Attribution(AbstractTable):
    r"""What each part of a context adds to the log-probability of an answer.

    `scores` are in nats: by so much $\log p$ is predicted to fall when the part is left out, and the score of several
    parts is the sum of theirs. `stderr` are standard errors over the ablations that could have been drawn, NaN where a
    method has none. `fit` is the rank correlation of predicted with actual values on ablations that the fit has not
    seen, NaN where there were too few. `log_probability` is that of the answer with the whole context; `passes` the
    forward passes that all took, a backward pass counted as two.
    """

    parts: tuple[str, ...] = eqx.field(static=True)
    scores: Float[np.ndarray, " g"]
    stderr: Float[np.ndarray, " g"]
    tokens: Int[np.ndarray, " g"]
    log_probability: float
    fit: float
    question: str | None = eqx.field(static=True)
    answer: str = eqx.field(static=True)
    unit: str = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    method: str = eqx.field(static=True)
    passes: int = eqx.field(static=True)

    @property
    def left_out(self) -> Float[np.ndarray, " g"]:
        """The predicted change of the log-probability when a part is left out: minus its score."""
        return -self.scores

    def top(self, k: int = _SHOWN) -> Int[np.ndarray, " k"]:
        """The parts with the largest scores, the largest first."""
        return np.argsort(-self.scores, kind="stable")[: checks.count("k", k)]

    def predict(self, subsets: Bool[np.ndarray, "n g"]) -> Float[np.ndarray, " n"]:
        """The predicted log-probability with only some parts there."""
        return self.log_probability - (1.0 - np.asarray(subsets)) @ self.scores

    @property
    def summary(self) -> list[str]:
        """What a person should know, in a few sentences."""
        first, count = int(self.top(1)[0]), len(self.parts)
        carried = np.maximum(self.scores, 0)
        found = [f"The answer has the log-probability {self.log_probability:.4g} nats."]
        if carried.any():
            half = int(np.searchsorted(np.cumsum(np.sort(carried)[::-1]), carried.sum() / 2)) + 1
            found += [
                f"{self.unit.removesuffix('s').capitalize()} {first + 1} of {count} carries most: "
                f"without it {self.left_out[first]:+.3g} nats.",
                f"{half} of {count} {self.unit} {'carries' if half == 1 else 'carry'} half of all that speaks for it.",
            ]
        else:
            found.append(f"None of {count} {self.unit} speaks for it: it is no less likely without any of them.")
        if not np.isnan(self.fit):
            found.append(f"Scores rank ablations that the fit has not seen with a correlation of {self.fit:.2f}.")
        return [*found, f"This took {self.passes} forward passes ({self.method}, {self.unit} {self.kind})."]

    def to_dataset(self) -> "Dataset":
        """Scores by part, numbered from 1 in the order of the text; all other numbers are attributes."""
        facts = ("question", "answer", "unit", "kind", "method", "passes", "log_probability", "fit")
        return dataset(
            "part",
            np.arange(1, len(self.parts) + 1),
            {
                "score": self.scores,
                "stderr": self.stderr,
                "tokens": self.tokens,
                "text": np.array(self.parts, dtype=object),
            },
            {name: "" if getattr(self, name) is None else getattr(self, name) for name in facts},
        )

    def to_html(self, title: str = "What carries the answer", facts: dict[str, str] | None = None) -> str:
        """The text with its scores as colours, as one page that needs no network."""
        from .page import page

        return page(self, title, facts or {})

    def to_json(self) -> dict[str, Any]:
        """Summary, settings and one row for each part, as plain data."""
        data = self.to_dataset()
        rows = data.to_dataframe().reset_index().to_dict(orient="records")
        return {"summary": self.summary, "settings": dict(data.attrs), "rows": rows}

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        rows = self.table
        title = "\n".join([f"Attribution ({self.unit}, the {len(rows)} that carry most)", *self.summary])
        wide = [[*cells, text.ljust(_LETTERS)] for *cells, text in rows]
        return title, ["part", "nats", "± error", "text".ljust(_LETTERS)], wide

    @property
    def table(self) -> list[list[str]]:
        """The parts that carry most: number, score, error and the beginning of the text."""
        found = []
        for i in self.top():
            text = " ".join(self.parts[i].split())
            short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
            error = "–" if np.isnan(self.stderr[i]) else f"{self.stderr[i]:.2g}"
            found.append([str(i + 1), f"{self.scores[i]:+.3g}", error, short])
        return found

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the scores in the order of the text, with their standard errors."""
        ax, at = axes(ax), np.arange(1, len(self.parts) + 1)
        ax.bar(at, self.scores, color=np.where(self.scores > 0, BLUE, VERMILION))
        ax.errorbar(at, self.scores, self.stderr, fmt="none", ecolor="0.3", elinewidth=0.8)
        ax.set(xlabel=self.unit.removesuffix("s"), ylabel="nats that it adds", title=self.answer[:_LETTERS])
        return ax
