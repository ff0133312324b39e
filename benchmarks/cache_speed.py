"""Claims: compressing a cache takes a small part of reading the prompt, and a token generated after it no longer.

Measured on models of the shapes of SmolLM2-135M and Llama-3-8B with random weights, since time depends on shapes alone:
seconds to read a prompt, to compress it (atoms fitted to its queries, and tokens kept as they are, chosen by few of
these), and seconds a token on the compressed cache, on a plain one of as many tokens and on the full one. Best of
several, each kind in turn.

    python benchmarks/cache_speed.py [--shapes smollm2 llama3] [--length 8192] [--keep 0.5 0.25] [--profile]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from largeprompt.models import CompressedCache

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 99},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3, "vocab_size": 49152},
    "llama3": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
GENERATED = 32  # tokens
WAYS: dict[str, dict[str, Any]] = {
    "fitted": {},
    "fitted to 1,024 queries": {"queries": 1024},
    "not fitted, 256 queries": {"queries": 256, "fit": False},
}


def made(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A model of this shape with random weights, made where it runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=65536)).eval()
    finally:
        torch.set_default_dtype(before)


def seconds(action: Callable[[], Any], device: str) -> float:
    """Wall-clock seconds of an action, to its end on the device."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - began


def compressed(model: Any, prompt: torch.Tensor, keep: float, way: str, spent: list[float], device: str) -> Any:
    """A prompt read and compressed; what the second took is added to a list."""
    cache = CompressedCache(model, keep=keep, **WAYS[way])
    model(prompt, past_key_values=cache, logits_to_keep=1)
    spent.append(seconds(cache.compress, device))
    return cache


def generated(model: Any, cache: Any, seen: int, device: str) -> float:
    """Seconds a token: the best of several in a row, since other programs disturb a host."""
    token = torch.ones(1, 1, dtype=torch.long, device=device)

    def steps() -> None:
        for _ in range(GENERATED // 4):
            model(token, past_key_values=cache, position_ids=torch.tensor([[seen]], device=device))

    steps()
    return min(seconds(steps, device) for _ in range(4)) / (GENERATED // 4)


def rows(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    device, model = options.device, made(shape, options.device, getattr(torch, options.dtype))
    prompt = torch.randint(99, (1, options.length), device=device)

    def read(tokens: int) -> Any:
        cache = DynamicCache()
        model(prompt[:, :tokens], past_key_values=cache, logits_to_keep=1)
        return cache

    CompressedCache(model, keep=0.5)  # both kinds run with the attention function that it gives
    found = []
    for keep in options.keep:
        row: dict[str, Any] = {"shape": shape, "L": options.length, "keep": keep}
        spent: dict[str, list[float]] = {way: [] for way in options.ways}
        steps: dict[str, list[float]] = {"compressed": [], "plain": [], "full": []}
        reading = []
        for _ in range(options.rounds):
            reading.append(seconds(lambda: read(options.length), device))
            caches = [compressed(model, prompt, keep, way, spent[way], device) for way in options.ways]
            steps["compressed"].append(generated(model, caches.pop(0), options.length, device))
            caches.clear()
            steps["plain"].append(generated(model, read(round(keep * options.length)), options.length, device))
            steps["full"].append(generated(model, read(options.length), options.length, device))
        row["reading"] = min(reading)
        row |= {f"compressing, {way}, over reading": min(times) / min(reading) for way, times in spent.items()}
        row |= {f"a token, {name}": min(times) for name, times in steps.items()}
        found.append(row)
        print(json.dumps(row), flush=True)
    if options.profile:
        profile(model, prompt, options, shape)
    return found


def profile(model: Any, prompt: torch.Tensor, options: argparse.Namespace, shape: str) -> None:
    """Where a compression spends its time, on the error stream."""
    from torch.profiler import ProfilerActivity, profile

    for way in options.ways:
        cache = CompressedCache(model, keep=options.keep[0], **WAYS[way])
        model(prompt, past_key_values=cache, logits_to_keep=1)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            cache.compress()
        table = found.key_averages().table(sort_by="self_device_time_total", row_limit=22, max_name_column_width=60)
        print(shape, way, table, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["smollm2", "llama3"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with torch.no_grad():
        for shape in options.shapes:
            rows(shape, options)


if __name__ == "__main__":
    main()
