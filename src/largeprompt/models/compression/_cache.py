"""A cache for transformers that holds a short measure in place of a long prompt; `model.generate` runs on it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from largeprompt import _checks as checks

from .._projection import output_projections
from ._atoms import (
    RECENT,
    SINKS,
    Layer,
    choose,
    fitted,
    importance,
    read,
    relative_error,
    roots_of,
    size,
    smallest,
)
from ._future import Future, replayed
from ._rotation import is_rotated, rotation_of
from ._share import Goal, counts_of
from ._stored import Check, StoredLayer, shown

NAME = "largeprompt"
_FEWEST = 16  # tokens from which on what was compressed is compressed again


class CompressedCache(Cache):
    """A cache of keys and values that is made shorter as it grows: give it to `model.generate` as `past_key_values`.

    How much stays is one of: `keep`, a share of the tokens read so far; `tokens`, for each head of keys, on average
    over layers; `tolerance`, the relative error of each head's output. A prompt is compressed once it has been read,
    and then again whenever `every` more tokens have come. `queries` bounds how many of its queries the law of those to
    come rests on. With `check`, all that was stored stays until so many more tokens have come, and `differences` says
    how far their outputs are from those on it.
    The model's attention function is replaced by one that does what `sdpa` does with every other cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        keep: float | None = None,
        tokens: int | None = None,
        tolerance: float | None = None,
        every: int = 256,
        queries: int = 2048,
        check: int = 0,
    ):
        self.goal = Goal(keep, tokens, tolerance)
        self.every = checks.count("every", every)
        queries, self._check = checks.count("queries", queries, at_least=2), checks.count("check", check, at_least=0)
        layers = DynamicCache(config=model.config).layers  # transformers knows which of them have a window
        whole = [type(layer) is DynamicLayer for layer in layers]
        if not any(whole):
            raise ValueError(
                f"no layer of {type(model).__name__} reads its whole prompt, so there is nothing to compress; "
                "give a model with layers of full attention"
            )
        use_compressed_attention(model)
        self._model, self._rotate = model, rotation_of(model)
        self._names: dict[nn.Module | None, str] = {module: name for name, module in model.named_modules()}
        self.errors: dict[int, Tensor] = {}
        stored: list[Any] = [StoredLayer(queries) if each else layer for each, layer in zip(whole, layers, strict=True)]
        super().__init__(layers=stored)

    @property
    def stored(self) -> "dict[int, StoredLayer]":
        """The layers that are compressed, by number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, StoredLayer)}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Take the keys and values of new tokens of a layer; before those of its first, compress what has grown."""
        stored = self.stored
        if layer_idx == next(iter(stored)) and stored[layer_idx].fresh >= self.every:
            self.compress()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.no_grad()
    def compress(self) -> None:
        """Put a shorter measure in place of all that is stored; after the first time, once 16 tokens have come."""
        ready = {i: layer for i, layer in self.stored.items() if layer.fresh >= (_FEWEST if layer.atoms else 1)}
        for i, layer in ready.items():
            if not layer.recorded:
                raise ValueError(
                    f"the queries of layer {i} of {type(self._model).__name__} were not seen, so it stays whole; "
                    "its attention does not read the keys of its cache as they are"
                )
        if not ready:
            return
        worth, sizes, readings, futures = [], [], [], []
        for layer in ready.values():
            problem = self._problem(layer)
            futures.append(problem.future)
            readings.append(read(problem))
            worth.append(layer.worth_with(importance(problem, readings[-1])))
            sizes.append(size(problem, readings[-1]))
        count = self.goal.count(next(iter(ready.values())).seen)
        counts = counts_of(worth, sizes, count) if self.goal.tolerance is None else []
        for at, (i, layer) in enumerate(ready.items()):
            problem, reading = self._problem(layer, futures[at]), readings[at]
            sinks = min(SINKS, worth[at].shape[-1])
            if self.goal.tolerance is None:
                atoms = fitted(problem, reading, choose(worth[at], counts[at], sinks, RECENT))
            else:  # what stands for earlier text stays: its queries are not known any more
                fixed = worth[at].clone()
                fixed[..., : layer.atoms] = math.inf
                atoms = smallest(problem, reading, fixed, self.goal.tolerance, sinks, RECENT, layer.atoms)
            error = relative_error(problem, reading, atoms).flatten(1)
            self.errors[i] = torch.hypot(error, self.errors[i]) if layer.atoms and i in self.errors else error
            layer.checked = Check(problem, self._check) if self._check else None
            layer.replace(atoms, torch.take_along_dim(worth[at], atoms.kept, dim=2))

    def _problem(self, layer: "StoredLayer", future: Future | None = None) -> Layer:
        keys, values, log_weights = layer.whole()
        if future is None:
            rotate = self._rotate if layer.module is not None and is_rotated(layer.module) else None
            future = replayed(layer.segments(), keys, values, layer.hidden, layer.scale, rotate)
        if layer.roots is None:
            heads, name = future.queries.shape[1] * future.queries.shape[2], self._names.get(layer.module)
            layer.roots = roots_of(output_projections(self._model, name, heads, values.shape[-1]), future)
        return Layer(keys, values, log_weights, layer.scale, future, layer.roots)

    @property
    def memory(self) -> int:
        """Numbers that are stored: keys, values and weights, of every layer and prompt."""
        return sum(layer.memory for layer in self.stored.values())

    @property
    def differences(self) -> dict[int, Tensor]:
        """The measured relative errors of outputs in the residual stream, (b, H) of each layer; with `check` alone."""
        return {i: layer.checked.relative for i, layer in self.stored.items() if layer.checked is not None}


def use_compressed_attention(model: PreTrainedModel) -> None:
    """Give a model the attention function that reads compressed caches; with others it does what `sdpa` does."""
    if model.config._attn_implementation == NAME:
        return
    if model.config._attn_implementation not in ("sdpa", "eager") or not getattr(model, "_supports_sdpa", False):
        raise ValueError(
            f"the attention of {type(model).__name__} ({model.config._attn_implementation}) cannot be replaced; "
            'load a model that transformers runs with attn_implementation="sdpa"'
        )
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    layer = getattr(key, "stored_layer", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is not None:
        layer.record(module, query, attention_mask, scale)
        if layer.atoms:
            return _weighted(query, key, value, layer, scale, attention_mask), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def _weighted(query: Tensor, key: Tensor, value: Tensor, layer: StoredLayer, scale: float, mask: Any) -> Tensor:
    """Attention on atoms with weights and the tokens after them; queries that share keys go together."""
    (b, H, n, k), (G, used) = query.shape, key.shape[1:3]
    bias = layer.bias[..., :used]
    if mask is not None:
        visible = torch.nn.functional.pad(shown(mask)[:, :1, :, -layer.fresh :], (layer.atoms, 0), value=True)
        bias = bias.masked_fill(~visible, -math.inf).repeat(1, 1, H // G, 1)
    elif n > 1:
        later = torch.ones(n, used, dtype=torch.bool, device=query.device).triu(used - n + 1)
        bias = bias.masked_fill(later, -math.inf).repeat(1, 1, H // G, 1)
    grouped = query.reshape(b, G, -1, k)
    found = scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scale)
    if layer.checked is not None and layer.checked.left > 0:
        new = slice(layer.atoms, None)
        layer.checked.compare(found, grouped, key[:, :, new], value[:, :, new], bias[..., new], n)
    return found.reshape(b, H, n, -1).transpose(1, 2).contiguous()
