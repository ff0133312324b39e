"""Tables of `contexts.py` from what it has recorded: every estimator at every budget, from the raw numbers."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

KINDS = ("masked", "taken out")
BUDGETS = (3, 6, 12, 24, 32, 48, 64, 96, 128, 192, 256, 300)
DEVELOPED = ("hamlet", "macbeth", "lear", "tempest")
HALVES = 128  # subsets of the score; those after them are drawn by coins
OURS = "ours"


def library(name: str) -> Any:
    """A module on contexts."""
    return importlib.import_module("contexts").module(f"largeprompt.models.contexts.{name}")


class Record:
    """What was recorded of one pair, for one kind of ablation."""

    def __init__(self, row: dict[str, Any], pair: dict[str, Any], kind: str):
        self.row, self.kind, self.groups = row, kind, row["groups"]
        self.train, self.test = pair["train"], pair["test"][:HALVES]
        numbers = row[kind]
        self.values, self.actual = np.array(numbers["train"]), np.array(numbers["test"])[:HALVES]
        self.single = np.array(numbers["single"])
        self.at_subsets = np.array(numbers["gradients"]["subsets"]["gradients"])
        self.few, self.designed = (np.array(numbers.get(name, ())) for name in ("few", "designed"))
        self.mirrored = 2 * len(self.train) // 3  # the complement of subset k is there at `mirrored + k`

    def gradients(self, law: str) -> np.ndarray:
        """Derivatives in log-weights at weights of a law; weights above 0 mean the same for both kinds."""
        return np.array(self.row["masked"]["gradients"][law]["gradients"])

    def pairs(self, count: int) -> np.ndarray:
        """Numbers of subsets, each followed by its complement; where these end, of subsets alone."""
        half = len(self.train) - self.mirrored
        both = np.stack([np.arange(half), self.mirrored + np.arange(half)], 1).ravel()
        return np.concatenate([both, np.arange(half, self.mirrored)])[:count]

    def own(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Subsets of `attribute`'s own design and their values; random pairs where these were not recorded."""
        if not len(self.designed):
            chosen = self.pairs(count) if count >= self.groups else np.arange(count)
            return self.train[chosen], self.values[chosen]
        subsets = library("_estimators").designed(np.random.default_rng(2), count, self.groups)
        return subsets, (self.few if count < self.groups else self.designed)[:count]

    def score(self, coefficients: np.ndarray) -> float:
        """The rank correlation of predicted with actual values over halves."""
        return library("_evidence").rank_correlation(self.test @ coefficients, self.actual)


def estimators() -> dict[str, Callable[[Record, int], np.ndarray | None]]:
    """By name, coefficients from a record within a budget, or None where the budget is too small."""
    evidence, sparse, shared = (library(name) for name in ("_evidence", "_lasso", "_estimators"))

    def ours(record: Record, budget: int) -> np.ndarray:
        points, others = shared.shares(budget)
        at = np.round(-shared.nodes(points)).astype(int) - 1
        expected = shared.expected_parts(record.gradients("low path")[at])
        return evidence.combined(*record.own(others), expected).coefficients

    def regression(record: Record, budget: int) -> np.ndarray | None:
        return evidence.combined(*record.own(min(budget, 297))).coefficients if budget > 5 else None

    def lasso(record: Record, budget: int, penalty: float | None = None) -> np.ndarray | None:
        n = min(budget, record.mirrored)
        own = None if penalty is None else penalty * record.row["answer"]
        return sparse.lasso(record.train[:n], record.values[:n], own) if budget > 5 else None

    def path(record: Record, budget: int) -> np.ndarray | None:
        points = max(m for m in (1, 2, 4, 8) if 3 * m <= budget)
        at = (np.arange(points) + 0.5)[:, None] / points
        return (record.gradients("path")[np.round(16 * at[:, 0]).astype(int) - 1] / at).mean(0)

    def drawn(law: str) -> Callable[[Record, int], np.ndarray | None]:
        def mean(record: Record, budget: int) -> np.ndarray | None:
            found = record.gradients(law) if law != "subsets" else record.at_subsets
            half = min(budget // 6, len(found) // 2)
            return found[[*range(half), *(len(found) // 2 + np.arange(half))]].mean(0) if half else None

        return mean

    return {
        OURS: ours,
        "ours without gradients": regression,
        "lasso": lasso,
        "lasso, penalty 0.01": lambda record, budget: lasso(record, budget, 0.01),
        "leave-one-out": lambda record, budget: (
            record.single[0] - record.single[1:] if budget > record.groups else None
        ),
        "gradient at weight 1": lambda record, _: record.gradients("path")[-1],
        "gradients along the path": path,
        **{f"gradients, {law}": drawn(law) for law in ("uniform", "log-uniform", "soft", "softer", "subsets")},
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
            for name, estimator in estimators().items():
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
