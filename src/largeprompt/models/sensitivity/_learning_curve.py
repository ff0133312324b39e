r"""How a score of the outputs grows with the rows of a prompt: measured on subsets of the rows at hand, extrapolated.

The mean score on $m$ rows is fitted by $a+b\,m^{-c}$. Its error has two parts: there are few subsets of each size, and
all are from the same $n$ rows. To first order the variance over subsets of size $m$ is $(n-m)/m$ times the variance $V$
over redraws of all $n$ rows, and $V$ is also that of the whole curve, which moves up and down as one.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._progress import Progress
from largeprompt.paper.chart import BLUE, VERMILION

from ._outputs import check_level, groups_of, outputs_at, task, whole
from ._resamples import subsets
from ._weighted import WeightedPrompt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

_POWERS = np.linspace(0.1, 2.0, 39)  # of the rows, in the fit
_REFITS = 200


class Band(NamedTuple):
    """Scores on so many rows: the fitted one, and the ends of an interval."""

    rows: Float[np.ndarray, " k"]
    score: Float[np.ndarray, " k"]
    low: Float[np.ndarray, " k"]
    high: Float[np.ndarray, " k"]


class LearningCurve(AbstractTable):
    r"""The mean score on subsets of each size, and the curve $a+b\,m^{-c}$ through it.

    `spread` is the standard deviation over subsets, `stderr` the standard error of the whole curve, over redraws of
    all rows. `fits` has $(a,b,c)$, first of the scores, then of scores drawn again.
    """

    rows: Int[np.ndarray, " k"]
    score: Float[np.ndarray, " k"]
    spread: Float[np.ndarray, " k"]
    fits: Float[np.ndarray, "r 3"]
    stderr: float
    level: float = eqx.field(static=True)
    repeats: int = eqx.field(static=True)
    bounds: tuple[float, float] = eqx.field(static=True)

    def at(self, rows: Sequence[float] | float) -> Band:
        """The fitted score on so many rows, with an interval; beyond those at hand it is extrapolated."""
        m = np.atleast_1d(np.asarray(rows, dtype=float))
        if not (np.isfinite(m).all() and (m >= 1).all()):
            raise ValueError(f"rows are {rows}; they must be numbers of at least 1")
        curves = self.fits[:, :1] + self.fits[:, 1:2] * m ** -self.fits[:, 2:]
        shift = self.stderr * np.random.default_rng(0).normal(size=(len(curves), 1))
        low, high = np.quantile(curves + shift, [(1 - self.level) / 2, (1 + self.level) / 2], axis=0)
        score, low, high = (np.clip(x, *self.bounds) for x in (curves[0], low, high))
        return Band(m, score, np.minimum(low, score), np.maximum(high, score))

    def to_dataset(self) -> "Dataset":
        """Scores by number of rows; the fit is in the attributes."""
        band = self.at(self.rows.tolist())
        columns = {"score": self.score, "spread": self.spread, "fitted": band.score, "low": band.low, "high": band.high}
        a, b, c = (float(x) for x in self.fits[0])
        facts = {"a": a, "b": b, "c": c, "stderr": self.stderr, "level": self.level, "repeats": self.repeats}
        return dataset("rows", self.rows, columns, facts)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the scores and the curve, up to eight times the rows at hand."""
        ax = axes(ax)
        band = self.at(np.geomspace(self.rows[0], 8 * self.rows[-1], 60).tolist())
        ax.errorbar(self.rows, self.score, self.spread, fmt="o", color=BLUE, label="subsets, ± spread")
        ax.plot(band.rows, band.score, color=VERMILION, label="$a+b\\,m^{-c}$")
        ax.fill_between(band.rows, band.low, band.high, color=VERMILION, alpha=0.2, linewidth=0)
        ax.axvline(self.rows[-1], color="0.5", linestyle="--")
        ax.set(xscale="log", xlabel="rows of the prompt", ylabel="score")
        ax.legend(frameon=False)
        return ax


def learning_curve(
    prompt: WeightedPrompt,
    score: Callable[[np.ndarray], float],
    *,
    rows: Sequence[int] | None = None,
    repeats: int = 8,
    bounds: tuple[float, float] = (-np.inf, np.inf),
    level: float = 0.9,
    seed: int = 0,
    batch: int = 16,
    progress: Progress | None = None,
) -> LearningCurve:
    """The mean `score` of outputs on random subsets of the prompt's groups, by their number, and a fit to extrapolate.

    Sizes are six from an eighth of the groups to all of them, unless `rows` gives others. `bounds` are numbers that no
    score can pass: (0, 1) for an accuracy.
    """
    n, repeats = groups_of(prompt, at_least=16), checks.count("repeats", repeats, at_least=2)
    check_level(level)
    if not bounds[0] < bounds[1]:
        raise ValueError(f"bounds are {bounds}; the first must be below the second")
    sizes = np.unique(whole("rows", rows if rows is not None else np.geomspace(n / 8, n, 6).round()))
    if len(sizes) < 4 or sizes[0] < 1 or sizes[-1] > n:
        raise ValueError(f"rows are {sizes.tolist()}; give at least four different numbers from 1 to {n}")
    rng = np.random.default_rng(checks.count("seed", seed, at_least=0))
    found: list[np.ndarray] = []
    with task(progress, "learning curve", repeats * len(sizes)) as advance:
        for m in sizes:
            outputs = outputs_at(prompt, subsets(rng, repeats if m < n else 1, n, int(m)), batch, advance)
            scores = [score(each) for each in outputs]
            if not all(np.ndim(each) == 0 and np.isfinite(each) for each in scores):
                raise ValueError(f"the score on {m} rows is {scores[0]}; it must be a finite number")
            found.append(np.array(scores, dtype=float))
    means, spreads = (np.array([f(x) for x in found]) for f in (np.mean, _spread))
    every = sizes == n
    share = sizes[~every] / n
    # large subsets are most like all rows
    variance = float(np.average(spreads[~every] ** 2 * share / (1 - share), weights=share**2))
    errors = np.where(every, 0.0, spreads**2 / repeats)
    # a curve has no reason to pass exactly through any one point, all rows included
    precision = 1 / np.maximum(errors + np.mean(errors) / 4, np.finfo(float).tiny)
    again = np.stack([rng.choice(x, (_REFITS, len(x))).mean(axis=1) for x in found], axis=1)
    return LearningCurve(
        rows=sizes,
        score=means,
        spread=spreads,
        fits=_fits(sizes.astype(float), np.array([means, *again]), precision),
        stderr=np.sqrt(variance),
        level=float(level),
        repeats=repeats,
        bounds=bounds,
    )


def _spread(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0


def _fits(m: np.ndarray, scores: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """For each row of scores the best a and b for every power c, and of these the best."""
    root, found = np.sqrt(precision), []
    for c in _POWERS:
        design = np.stack([np.ones_like(m), m**-c], axis=1)
        a, b = np.linalg.pinv(design * root[:, None]) @ (scores * root).T
        left = np.sum(precision * (scores - a[:, None] - b[:, None] * m**-c) ** 2, axis=1)
        found.append(np.stack([left, a, b, np.full(len(a), c)], axis=1))
    best = np.argmin([each[:, 0] for each in found], axis=0)
    return np.stack(found)[best, np.arange(len(scores)), 1:]
