"""Tables of `contexts.py` from what it has recorded: every estimator at every budget, from the raw numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from largeprompt.models.contexts._estimators import designed, expected_parts, shares
from largeprompt.models.contexts._evidence import combined, rank_correlation
from largeprompt.models.contexts._lasso import lasso
from largeprompt.models.contexts._prompt import KINDS

BUDGETS = (3, 6, 12, 24, 32, 48, 64, 96, 128, 192, 300)
DEVELOPED = ("hamlet", "macbeth", "lear", "tempest")
HALVES = 128  # subsets of the score; those after them are drawn by coins
NODES = {1: [1], 2: [0, 1], 3: [0, 1, 2]}  # which of the recorded gradients are taken where so many are
OURS = "ours"


def own_subsets(count: int, groups: int) -> np.ndarray:
    """Subsets of `attribute`'s own design."""
    return designed(np.random.default_rng(2), count, groups)


class Record:
    """What was recorded of one pair, for one kind of ablation."""

    def __init__(self, row: dict[str, Any], pair: dict[str, Any], kind: str):
        self.row, self.groups = row, row["groups"]
        self.train, self.test = pair["train"], pair["test"][:HALVES]
        self.values, self.actual, self.single, self.designed = (
            np.array(row[kind][name]) for name in ("train", "test", "single", "designed")
        )
        self.gradients = {name: np.array(each) for name, each in row["gradients"].items()}

    def own(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Subsets of `attribute`'s own design, and their values."""
        # fewer than there are sentences come without their complements, which are every second one
        values = self.designed[::2] if count < self.groups else self.designed
        return own_subsets(count, self.groups), values[:count]

    def score(self, coefficients: np.ndarray) -> float:
        """The rank correlation of predicted with actual values over halves."""
        return rank_correlation(self.test @ coefficients, self.actual)


def ours(record: Record, budget: int) -> np.ndarray:
    points, others = shares(budget)
    chosen = record.gradients["nodes"][NODES[points]]
    return combined(*record.own(others), expected_parts(chosen)).coefficients


def sparse(record: Record, budget: int, penalty: float | None = None) -> np.ndarray | None:
    """Regression on random subsets, as ContextCite does: with a penalty per token of the answer, or the best one."""
    own = None if penalty is None else penalty * record.row["answer"]
    return lasso(record.train[:budget], record.values[:budget], own) if budget > 5 else None


def along_path(record: Record, budget: int) -> np.ndarray:
    points = max(m for m in (1, 2, 4, 8) if 3 * m <= budget)
    at = (np.arange(points) + 0.5)[:, None] / points
    return (record.gradients["path"][np.round(16 * at[:, 0]).astype(int) - 1] / at).mean(0)


def at_random(record: Record, budget: int) -> np.ndarray | None:
    """The mean over weights and their mirror images."""
    found = record.gradients["random"]
    half = min(budget // 6, len(found) // 2)
    return found[[*range(half), *(len(found) // 2 + np.arange(half))]].mean(0) if half else None


# coefficients from a record within a budget, or None where the budget is too small
ESTIMATORS: dict[str, Callable[[Record, int], np.ndarray | None]] = {
    OURS: ours,
    "ours without gradients": lambda record, budget: combined(*record.own(budget)).coefficients if budget > 5 else None,
    "lasso": sparse,
    "lasso, penalty 0.01": lambda record, budget: sparse(record, budget, 0.01),
    "leave-one-out": lambda record, budget: record.single[0] - record.single[1:] if budget > record.groups else None,
    "gradient at weight 1": lambda record, _: record.gradients["path"][-1],
    "gradients along the path": along_path,
    "gradients at random weights": at_random,
    "attention weights": lambda record, _: np.array(record.row["attention"]),
    "gradient times input": lambda record, _: np.array(record.row["gradient times input"]),
}


def scores(rows: list[dict[str, Any]], pairs: dict[str, dict[str, Any]]) -> dict[tuple[str, str, int], list[float]]:
    """Scores over pairs, by kind, estimator and budget; NaN where there is none."""
    found: dict[tuple[str, str, int], list[float]] = {}
    rng = np.random.default_rng(0)
    for row in rows:
        for kind in KINDS:
            record = Record(row, pairs[row["name"]], kind)
            for name, estimator in ESTIMATORS.items():
                for budget in BUDGETS:
                    coefficients = estimator(record, budget)
                    score = np.nan if coefficients is None else record.score(coefficients)
                    found.setdefault((kind, name, budget), []).append(score)
                    if name == OURS and coefficients is not None:
                        permuted = record.score(rng.permutation(coefficients))
                        found.setdefault((kind, "ours, permuted", budget), []).append(permuted)
    return found


def show(rows: list[dict[str, Any]], pairs: dict[str, dict[str, Any]]) -> None:
    """Print the score of every estimator by budget, for plays of the development and for the others."""
    for title, chosen in (
        ("plays not used in the development", [row for row in rows if not developed(row)]),
        ("plays of the development", [row for row in rows if developed(row)]),
    ):
        if chosen:
            _show(f"{len(chosen)} pairs, {title}", scores(chosen, pairs))


def developed(row: dict[str, Any]) -> bool:
    """Whether a pair, or what was recorded of it, is of a play that the method was developed on."""
    return any(f" {play} " in row["name"] for play in DEVELOPED)


def _show(title: str, found: dict[tuple[str, str, int], list[float]]) -> None:
    names = list(dict.fromkeys(name for _, name, _ in found))
    for kind in KINDS:
        print(f"\n{title}; sentences {kind}: rank correlation, mean over pairs, by forward passes")
        print("".ljust(28), *(f"{budget:>6}" for budget in BUDGETS))
        for name in names:
            cells = [np.array(found[kind, name, budget]) for budget in BUDGETS]
            print(name.ljust(28), *(f"{cell.mean():6.3f}" if not np.isnan(cell).any() else "     –" for cell in cells))
        print("the best other, and by how much ours is better ± standard error over pairs")
        for budget in BUDGETS:
            others = {
                name: np.array(found[kind, name, budget])
                for name in names
                if not name.startswith(OURS) and not np.isnan(found[kind, name, budget]).any()
            }
            best = max(others, key=lambda name: others[name].mean())
            gap = np.array(found[kind, OURS, budget]) - others[best]
            error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else np.nan
            print(f"{budget:>4} {best.ljust(28)} {gap.mean():+.3f} ± {error:.3f}")
