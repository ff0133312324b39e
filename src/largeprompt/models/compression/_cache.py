"""A cache for transformers that holds a short measure in place of a long prompt; `model.generate` runs on it."""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from largeprompt import _checks as checks

from .._projection import output_projections
from ._atoms import (
    RECENT,
    SINKS,
    Atoms,
    Reading,
    choose,
    fitted,
    importance,
    read,
    relative_error,
    roots_of,
    smallest,
    squares,
    taken,
)
from ._rotation import is_rotated, rotation_of
from ._share import Goal, counts_of
from ._stack import Stack, alike
from ._stored import Check, StoredLayer

NAME = "largeprompt"
# Errors on text to come, over those on queries that lie between the ones of a fit: 1.2 on plays, 2 on code.
GROWTH = 2.0
_FEWEST = 16  # tokens from which on what was compressed is compressed again


class CompressedCache(Cache):
    """A cache of keys and values that is made shorter as it grows: give it to `model.generate` as `past_key_values`.

    How much stays is one of: `keep`, a share of the tokens read so far; `tokens`, for each head of keys, on average
    over layers; `tolerance`, the relative error of each head's output. A prompt is compressed once it has been read,
    and then again whenever `every` more tokens have come. `queries` bounds how many of its queries the law of those to
    come rests on. Without `fit` the tokens kept stay as they are, and a few hundred queries do: a small part of the
    time, and larger errors. With `check`, all that was stored stays until so many more tokens have come, and
    `differences` says how far their outputs are from those on it.
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
        queries: int = 8192,
        fit: bool = True,
        check: int = 0,
    ):
        self.goal, self._make = Goal(keep, tokens, tolerance), fitted if fit else taken
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
        self._first = whole.index(True)
        super().__init__(layers=stored)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedCache":
        """All that is stored once more, to go on from it in another way; for the same model, which is not copied."""
        memo |= {id(module): module for module in self._names}
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    @property
    def stored(self) -> dict[int, StoredLayer]:
        """The layers that are compressed, by number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, StoredLayer)}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Take the keys and values of new tokens of a layer; before those of its first, compress what has grown."""
        layer: Any = self.layers[layer_idx]
        if layer_idx == self._first and layer.fresh >= self.every:
            self.compress()
        return layer.update(key_states, value_states, *args, **kwargs)

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
        with _fast_products():
            self._compress(ready)

    def _compress(self, ready: dict[int, StoredLayer]) -> None:
        stacks = [self._stack(part) for part in alike(ready, self.goal.tolerance is not None, self._make is fitted)]
        worth, sizes, readings = [], [], []
        for stack in stacks:
            problem = stack.problem()
            readings.append(read(problem))
            worth.append(stack.worth(importance(problem, readings[-1])))
            sizes.append(squares(problem, readings[-1]).reshape(len(stack.layers), -1).mean(dim=1).sqrt())
        count = self.goal.count(next(iter(ready.values())).seen)
        shared = None if self.goal.tolerance is not None else counts_of(worth, sizes, count)
        for i, (stack, reading, tokens) in enumerate(zip(stacks, readings, worth, strict=True)):
            self._shorten(stack, reading, tokens, None if shared is None else shared[i])

    def _stack(self, layers: dict[int, StoredLayer]) -> Stack:
        first = next(iter(layers.values()))
        G, v = first.values.shape[1], first.values.shape[-1]
        heads = first.segments()[0].queries.shape[1]
        rotate = self._rotate if first.module is not None and is_rotated(first.module) else None
        ways = [output_projections(self._model, self._names.get(layer.module), heads, v) for layer in layers.values()]
        known = [way for way in ways if way is not None]
        roots = roots_of(torch.stack(known) if len(known) == len(ways) else None, (G, heads // G, v), first.keys.device)
        length = max(layer.width for layer in layers.values())
        return Stack(layers, roots.expand(len(layers), -1, -1, -1, -1), rotate, length)

    def _shorten(self, stack: Stack, reading: Reading, worth: Tensor, counts: Tensor | None) -> None:
        """Put atoms in place of the tokens of some layers: so many (layers, G), or what the tolerance allows."""
        problem, b = stack.problem(), stack.batch
        flat = worth.flatten(0, 1)
        if counts is None:  # of one layer. What stands for earlier text stays: its queries are not known any more
            (layer,), tolerance = stack.layers, (self.goal.tolerance or 0.0) / GROWTH
            earlier = torch.tensor(layer.atoms or [0] * flat.shape[1])
            before = torch.arange(flat.shape[-1], device=flat.device) < layer.width - layer.fresh
            flat = flat.masked_fill(before & (flat >= 0), math.inf)
            sinks = min(SINKS, flat.shape[-1])
            counts = smallest(problem, reading, self._make, flat, tolerance, sinks, earlier)[None]
        atoms = self._make(problem, reading, choose(flat, counts.repeat_interleave(b, dim=0), SINKS, RECENT))
        errors = GROWTH * relative_error(problem, reading, atoms).flatten(1)
        for row, (number, layer) in enumerate(zip(stack.numbers, stack.layers, strict=True)):
            rows = slice(b * row, b * (row + 1))
            known = self.errors.get(number) if layer.atoms else None
            self.errors[number] = errors[rows] if known is None else torch.hypot(errors[rows], known)
            layer.checked = Check(stack.alone(problem, row), self._check) if self._check else None
            own = Atoms(*(x[rows] for x in atoms))
            places = own.kept.clamp_max(worth.shape[-1] - 1)
            layer.replace(own, counts[row].tolist(), torch.take_along_dim(worth[row], places, dim=2))

    @property
    def memory(self) -> int:
        """Numbers that are stored: keys, values and weights, of every layer and prompt."""
        return sum(layer.memory for layer in self.stored.values())

    @property
    def differences(self) -> dict[int, Tensor]:
        """The measured relative errors of outputs in the residual stream, (b, H) of each layer; with `check` alone."""
        return {i: layer.checked.relative for i, layer in self.stored.items() if layer.checked is not None}


@contextlib.contextmanager
def _fast_products() -> Iterator[None]:
    """Products of float32 matrices from 11 bits of each, where a GPU has them: all that half precision has."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
            return layer.attend(query, attention_mask), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
