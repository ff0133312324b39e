"""The presses of kvpress that need no training and no files of their own, and how a model runs with them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

OURS = "MeasurePress"  # ours too: never the best press of a comparison


def presses() -> dict[str, Callable[[float], Any]]:
    """By name, a function of the share of tokens to remove."""
    import kvpress as kv

    def expected(ratio: float, **options: Any) -> Any:
        return kv.ExpectedAttentionPress(ratio, **options)

    def plain(ratio: float) -> Any:  # the wrappers below weigh by values themselves
        return kv.ExpectedAttentionPress(ratio, use_vnorm=False)

    def kept(press: type) -> Callable[[float], Any]:
        return lambda ratio: press(compression_ratio=ratio)

    def ours(ratio: float) -> Any:
        from largeprompt.models.compression import MeasurePress

        return MeasurePress(ratio)

    names = "SnapKV TOVA Knorm KeyDiff LagKV StreamingLLM Compactor LeverageScore NonCausalAttn CUR PyramidKV Cap"
    return {
        "ExpectedAttention": expected,
        "AdaKV, ExpectedAttention": lambda ratio: kv.AdaKVPress(expected(ratio, epsilon=1e-2)),
        "CriticalKV, ExpectedAttention": lambda ratio: kv.CriticalKVPress(plain(ratio)),
        "CriticalAdaKV, ExpectedAttention": lambda ratio: kv.CriticalAdaKVPress(plain(ratio)),
        "Merging, ExpectedAttention": lambda ratio: kv.MergingPress(expected(ratio)),
        "AdaKV, SnapKV": lambda ratio: kv.AdaKVPress(kv.SnapKVPress(ratio)),
        "CriticalKV, SnapKV": lambda ratio: kv.CriticalKVPress(kv.SnapKVPress(ratio)),
        "CriticalAdaKV, SnapKV": lambda ratio: kv.CriticalAdaKVPress(kv.SnapKVPress(ratio)),
        "Merging, SnapKV": lambda ratio: kv.MergingPress(kv.SnapKVPress(ratio)),
        "ChunkKV, SnapKV": lambda ratio: kv.ChunkKVPress(kv.SnapKVPress(ratio)),
        "EntropyGatedChunkKV, SnapKV": lambda ratio: kv.EntropyGatedChunkKVPress(kv.SnapKVPress(ratio)),
        **{name: kept(getattr(kv, name + "Press")) for name in names.split() if hasattr(kv, name + "Press")},
        "ObservedAttention": kept(kv.ObservedAttentionPress),
        "KVzip": kept(kv.KVzipPress),
        "KVzip, normalized": lambda ratio: kv.KVzipPress(ratio, kvzip_plus_normalization=True),
        "Random": lambda ratio: kv.RandomPress(ratio, seed=0),
        OURS: ours,
    }


class Kept(NamedTuple):
    """What a press has left of a prompt."""

    cache: Any  # a DynamicCache
    hidden: list[Tensor | None]  # (b, G, tokens) of each layer: stored still, but removed as far as attention goes

    @property
    def memory(self) -> int:
        """Numbers that are stored, without those that are hidden."""
        total = 0
        for layer, hidden in zip(self.cache.layers, self.hidden, strict=True):
            total += layer.keys.numel() + layer.values.numel()
            total -= 0 if hidden is None else int(hidden.sum()) * (layer.keys.shape[-1] + layer.values.shape[-1])
        return total


def read(model: Any, tokens: Tensor, press: Any = None) -> Kept:
    """Read a prompt with a press; without one, in full."""
    cache: Any = DynamicCache()
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    model.set_attn_implementation("eager" if type(press).__name__ == "ObservedAttentionPress" else "sdpa")
    with press(model) if press is not None else contextlib.nullcontext():
        model(tokens, past_key_values=cache, position_ids=positions[None], cache_position=positions, logits_to_keep=1)
    model.set_attn_implementation("sdpa")
    return Kept(cache, [_hidden(layer.self_attn, cache.layers[i].keys) for i, layer in enumerate(model.model.layers)])


def _hidden(module: Any, keys: Tensor) -> Tensor | None:
    """What a press has marked in a module; the mark is taken off, or the next prompt would be read with it."""
    marked, module.masked_key_indices = getattr(module, "masked_key_indices", None), None
    if marked is None:
        return None
    hidden = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    hidden[tuple(torch.as_tensor(part, device=keys.device) for part in marked)] = True
    return hidden


def go_on(model: Any, kept: Kept, tokens: Tensor, seen: int) -> Tensor:
    """The logits of tokens read after a prompt of `seen` tokens.

    The mask is made here: it hides what presses have marked exactly, where kvpress looks for a key that all queries
    avoid, and it lets layers have different numbers of tokens.
    """
    positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None]
    with _masked(model, kept, tokens.shape[1]):
        longest = max(layer.keys.shape[2] for layer in kept.cache.layers)
        mask = _visible(tokens.shape[1], longest, tokens.device)
        return model(tokens, past_key_values=kept.cache, position_ids=positions, attention_mask=mask).logits


def _visible(tokens: int, before: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, before + tokens, dtype=torch.bool, device=device).tril(before)[None, None]


@contextlib.contextmanager
def _masked(model: Any, kept: Kept, tokens: int) -> Iterator[None]:
    hooks = []
    for i, layer in enumerate(model.model.layers):
        keys, hidden = kept.cache.layers[i].keys, kept.hidden[i]
        mask = _visible(tokens, keys.shape[2], keys.device)
        if hidden is not None:
            seen = torch.nn.functional.pad(~hidden, (0, tokens + keys.shape[2] - hidden.shape[2]), value=True)
            groups = model.config.num_attention_heads // keys.shape[1]
            mask = mask & seen.repeat_interleave(groups, dim=1)[:, :, None]

        def use(module: Any, args: Any, options: dict, mask: Tensor = mask) -> tuple:
            return args, {**options, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(use, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
