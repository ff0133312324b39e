"""What predictions from a table rest on: intervals, the rows that carry them, the rows that an error needs."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import expit, log_softmax

from largeprompt import _checks as checks
from largeprompt._progress import Progress
from largeprompt.models.sensitivity import (
    ErrorBars,
    Influence,
    LearningCurve,
    RowsFor,
    error_bars,
    influence,
    learning_curve,
    rows_for,
)
from largeprompt.models.sensitivity._error_bars import check_options

from ._classifier import TabPFNClassifier
from ._csv import Table
from ._network import CLASSES, FEATURES

FEWEST = 16  # rows of a prompt


@dataclass(frozen=True)
class RowsStudy:
    """Predictions of held-out rows from labelled ones, both as places in the table, and what the predictions rest on.

    `bars` and `influence` are of the log-odds of each held-out row's likeliest class, `curve` of the mean loss
    -log p(true class) over held-out rows; `needed` are the rows for which the log-odds have a given standard error.
    """

    table: Table
    labelled: np.ndarray
    held_out: np.ndarray
    probabilities: np.ndarray
    bars: ErrorBars
    influence: Influence
    needed: RowsFor
    curve: LearningCurve
    settings: dict[str, Any]

    @cached_property
    def predicted(self) -> np.ndarray:
        """The likeliest class of each held-out row."""
        return self.probabilities.argmax(axis=1)

    @cached_property
    def right(self) -> np.ndarray:
        """Whether it is the true one."""
        return self.predicted == self.table.labels[self.held_out]

    def rows(self, k: int = 8) -> list[dict[str, Any]]:
        """All numbers of each held-out row, as plain data, with the k labelled rows that carry its prediction."""
        found = []
        for i, place in enumerate(self.held_out):
            change = self.influence.left_out[i]
            strongest = np.argsort(-np.abs(change), kind="stable")[:k]
            found.append(
                {
                    "line": int(self.table.lines[place]),
                    "true": self.table.classes[self.table.labels[place]],
                    "predicted": self.table.classes[self.predicted[i]],
                    "probability": float(expit(self.bars.estimate[i])),
                    "low": float(expit(self.bars.low[i])),
                    "high": float(expit(self.bars.high[i])),
                    "log_odds": float(self.bars.estimate[i]),
                    "stderr": float(self.bars.stderr[i]),
                    "trusted": bool(self.bars.trusted[i]),
                    "reason": self.bars.reason[i],
                    "rows_needed": float(self.needed.rows[i]),
                    "rows_low": float(self.needed.low[i]),
                    "rows_high": float(self.needed.high[i]),
                    "influential": [
                        {
                            "line": int(self.table.lines[self.labelled[j]]),
                            "class": self.table.classes[self.table.labels[self.labelled[j]]],
                            "change": float(change[j]),
                        }
                        for j in strongest
                    ],
                }
            )
        return found

    @cached_property
    def summary(self) -> list[str]:
        """What was found, in sentences."""
        n, t, level = len(self.labelled), len(self.held_out), 100 * self.bars.level
        low, high = expit(self.bars.low), expit(self.bars.high)
        undecided = int(np.sum((low < 0.5) & (high > 0.5)))
        later = self.curve.at([n, 2 * n])
        found = [
            f"From {n} labelled rows {int(self.right.sum())} of {t} held-out rows are predicted right "
            f"(mean loss {self.curve.score[-1]:.3g}).",
            f"If other rows had been drawn, the probability of a row's class would vary: the {level:g} % interval is "
            f"{np.median(high - low):.2g} wide for the median row (by {self.bars.method}); for {undecided} of {t} rows "
            "it contains ½.",
            f"Twice as many rows: along the learning curve the mean loss goes from {later.score[0]:.3g} to "
            f"{later.score[1]:.3g} ({later.low[1]:.3g} to {later.high[1]:.3g}).",
        ]
        known = self.needed.rows[np.isfinite(self.needed.rows)]
        if len(known):
            found.append(
                f"For a standard error of {self.needed.error:g} of the log-odds, the median row needs "
                f"{_rounded(float(np.median(known)))} labelled rows."
            )
        else:
            reason = max(self.needed.reason, key=self.needed.reason.count)
            found.append(f"{reason[0].upper()}{reason[1:]}.")
        doubted = int(np.sum(~self.bars.trusted))
        if doubted:
            found.append(f"{doubted} of {t} intervals are not to be trusted; each row says why.")
        carried = np.sort(self.influence.values**2, axis=1)[:, ::-1].cumsum(axis=1)
        half = round(float(np.median(np.argmax(carried >= carried[:, -1:] / 2, axis=1) + 1)))
        verb = "carries" if half == 1 else "carry"
        found.append(f"To first order, {half} of {n} labelled rows {verb} half of a prediction's variance.")
        return found


def study_rows(
    table: Table,
    classifier: TabPFNClassifier,
    *,
    rows: int | None = None,
    held_out: int = 16,
    error: float = 0.25,
    level: float = 0.9,
    method: str = "auto",
    draws: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> RowsStudy:
    """Predict rows of a table that are held out from `rows` others, all drawn at random, and see what that rests on."""
    labelled, out = checked(table, rows, held_out, error, level, method, draws, seed)
    classes = np.array(table.classes)
    classifier.fit(table.values[labelled], table.labels[labelled])
    values, truth = table.values[out], table.labels[out]
    known = classifier.classes_
    probabilities = np.zeros((len(out), len(classes)))
    probabilities[:, known] = classifier.predict_proba(values)
    likely = list(enumerate(np.searchsorted(known, probabilities.argmax(axis=1))))
    prompt = classifier.weighted_prompt(values, of="log-odds", chosen=likely)
    options: Any = {"seed": seed, "batch": classifier.batch(prompt), "progress": progress}
    bars = error_bars(prompt, level=level, method=method, draws=draws, **options)  # pyrefly: ignore[bad-argument-type]
    carried = influence(prompt, batch=options["batch"], progress=progress)

    def loss(outputs: np.ndarray) -> float:
        logs = np.full((len(out), len(classes)), math.log(1e-6))  # a class that no labelled row has
        logs[:, known] = log_softmax(outputs.reshape(len(out), -1), axis=1)
        return -float(np.mean(logs[np.arange(len(out)), truth]))

    curve = learning_curve(classifier.weighted_prompt(values), loss, bounds=(0, math.inf), level=level, **options)
    settings = {"rows": len(labelled), "held_out": len(out), "members": classifier.members, "error": error}
    settings |= {"level": level, "method": bars.method, "draws": draws, "seed": seed}
    needed = rows_for(bars, error)
    return RowsStudy(table, labelled, out, probabilities, bars, carried, needed, curve, settings)


def checked(
    table: Table, rows: int | None, held_out: int, error: float, level: float, method: str, draws: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places of the labelled rows and of those held out, once all that is asked for can be done."""
    check_options(level, method, draws)
    if not 0 < error < math.inf:
        raise ValueError(f"error is {error:g}; it must be a positive standard error of log-odds, such as 0.25")
    return split(table, rows, held_out, seed)


def split(table: Table, rows: int | None, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of the labelled rows and of those held out, drawn at random; each class is among the labelled ones."""
    held_out = checks.count("held_out", held_out)
    most = len(table) - held_out
    if most < FEWEST:
        raise ValueError(
            f"the table has {len(table)} rows; with {held_out} held out it must have {held_out + FEWEST} or more"
        )
    for count, limit, what in ((len(table.classes), CLASSES, "classes"), (len(table.columns), FEATURES, "columns")):
        if count > limit:
            of = f"the target {table.target}" if what == "classes" else "the table"
            raise ValueError(f"{of} has {count} {what}; TabPFN reads at most {limit}")
    rows = min(256, most) if rows is None else checks.count("rows", rows)
    if not FEWEST <= rows <= most:
        asked = f"there are {rows} labelled rows and {held_out} held out of {len(table)}"
        raise ValueError(f"{asked}; give {FEWEST} to {most} labelled rows")
    order = np.random.default_rng(checks.count("seed", seed, at_least=0)).permutation(len(table))
    out, labelled = order[:held_out], order[held_out : held_out + rows]
    if len(np.unique(table.labels[labelled])) < 2:
        only = table.classes[table.labels[labelled[0]]]
        raise ValueError(
            f"all {rows} labelled rows have the {table.target} {only!r}; there must be at least two classes"
        )
    return labelled, out


def _rounded(rows: float) -> str:
    """A number of rows in two digits."""
    return f"{float(f'{rows:.2g}'):,.0f}"
