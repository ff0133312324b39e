"""A cache for transformers that holds a short measure in place of a long prompt; `model.generate` runs on it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from largeprompt import _checks as checks

from .._projection import output_projections
from ._atoms import (
    RECENT,
    SINKS,
    Atoms,
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
from ._future import Future, Segment, every, replayed
from ._rotation import is_rotated, rotation_of
from ._share import Goal, counts_of

NAME = "largeprompt"
_FEWEST = 16  # tokens from which on what was compressed is compressed again
_ROOM = 256  # tokens by which a buffer grows


class CompressedCache(Cache):
    """A cache of keys and values that is made shorter as it grows: give it to `model.generate` as `past_key_values`.

    How much stays is one of: `keep`, a share of the tokens read so far; `tokens`, for each head of keys, on average
    over layers; `tolerance`, the relative error of each head's output. A prompt is compressed once it has been read,
    and then again whenever `every` more tokens have come. `queries` bounds how many of its queries the law of those to
    come rests on. With `check`, all that was stored stays until so many more tokens have come, and `differences` says
    how far their outputs are from those on it.
    The model's attention function is replaced by one that does the same as before with every other cache.
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


class StoredLayer(CacheLayerMixin):
    """Atoms with weights, and after them tokens as they came; with some of the queries of these."""

    is_sliding = False
    is_compileable = False

    keys: Any  # (b, G, room, k)
    values: Any  # (b, G, room, v)
    bias: Tensor  # (b, G, 1, room): log-weights, 0 for tokens

    def __init__(self, queries: int):
        super().__init__()
        self._most = queries
        self._clear()

    def _clear(self) -> None:
        self.checked: Check | None = None
        self.seen = self.used = self.atoms = 0
        self.hidden: Tensor | None = None
        self.module: nn.Module | None = None
        self.roots: Tensor | None = None
        self.worth: Tensor | None = None
        self.scale = 1.0
        self._segments: list[Segment] = []
        self._single: list[Tensor] = []

    @property
    def fresh(self) -> int:
        """Tokens that have come since the last compression."""
        return self.used - self.atoms

    @property
    def recorded(self) -> bool:
        """Whether the queries of all fresh tokens are known."""
        return sum(segment.length for segment in self.segments()) == self.fresh

    @property
    def memory(self) -> int:
        """Numbers that are stored, the room to grow apart."""
        if not self.is_initialized:
            return 0
        b, G, _, k = self.keys.shape
        return b * G * (self.used * (k + self.values.shape[-1]) + 2 * self.atoms)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and shape from the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        b, G = key_states.shape[:2]
        self.keys = key_states.new_empty(b, G, 0, key_states.shape[-1])
        self.values = value_states.new_empty(b, G, 0, value_states.shape[-1])
        self.bias = key_states.new_zeros(b, G, 1, 0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens; what is returned knows the layer that it comes from."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = key_states.shape[2]
        if self.used + n > self.keys.shape[2]:
            self._grow(self.used + n + (_ROOM if self.used else 0))
        self.keys[:, :, self.used : self.used + n] = key_states.detach()
        self.values[:, :, self.used : self.used + n] = value_states.detach()
        self.used, self.seen = self.used + n, self.seen + n
        keys, values = self.keys[:, :, : self.used], self.values[:, :, : self.used]
        keys.stored_layer = self  # pyright: ignore[reportAttributeAccessIssue]
        return keys, values

    def _grow(self, size: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], size, old.shape[3])
            new[:, :, : self.used] = old[:, :, : self.used]
            setattr(self, name, new)
        bias = self.bias.new_zeros(*self.bias.shape[:3], size)
        bias[..., : self.used] = self.bias[..., : self.used]
        self.bias = bias

    def record(self, module: nn.Module, queries: Tensor, mask: Tensor | None, scale: float) -> None:
        """Keep some of the queries of tokens that have just come, and which tokens are hidden."""
        self.module, self.scale, queries = module, scale, queries.detach()
        if queries.shape[2] == 1:
            self._single.append(queries)
        else:
            step = every(queries.shape[2], self._most)
            self._segments = [
                *self.segments(),
                Segment(queries[:, :, step - 1 + queries.shape[2] % step :: step], queries.shape[2], step),
            ]
        if mask is not None:
            self.hidden = torch.nn.functional.pad(~_shown(mask)[:, 0, -1, -self.fresh :], (self.atoms, 0))

    def segments(self) -> list[Segment]:
        """The queries known, tokens that came one by one joined."""
        if self._single:
            joined = torch.cat(self._single, dim=2)
            self._segments, self._single = [*self._segments, Segment(joined, joined.shape[2], 1)], []
        return self._segments

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is stored, in float32."""
        keys, values = self.keys[:, :, : self.used].float(), self.values[:, :, : self.used].float()
        log_weights = self.bias[:, :, 0, : self.used].float()
        if self.hidden is not None:
            hidden = torch.nn.functional.pad(self.hidden, (0, self.used - self.hidden.shape[1]))
            log_weights = log_weights.masked_fill(hidden[:, None], -math.inf)
        return keys, values, log_weights

    def worth_with(self, fresh: Tensor) -> Tensor:
        """What tokens are worth, (b, G, used): for atoms, the mean over all queries so far, not the last alone."""
        if self.worth is None:
            return fresh
        old = self.seen - self.fresh
        atoms = (old * self.worth + self.fresh * fresh[..., : self.atoms]) / self.seen
        return torch.cat([atoms, fresh[..., self.atoms :]], dim=-1)

    def replace(self, atoms: Atoms, worth: Tensor) -> None:
        """Store atoms, which are worth so much, in place of all tokens."""
        self.worth, self.roots = worth, None
        self.atoms = self.used = atoms.keys.shape[2]
        self.keys = atoms.keys.to(self.dtype)
        self.values = atoms.values.to(self.dtype)
        self.bias = atoms.log_weights[:, :, None].to(self.dtype)
        self.hidden, self._segments, self._single = None, [], []

    def get_seq_length(self) -> int:
        """How many tokens have been read, also those that are no longer stored."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """The size of the mask that a model makes; it is not used once there are atoms."""
        if isinstance(query_length, Tensor):  # up to transformers 5.2: the positions of the queries
            query_length = len(query_length)
        return self.seen + query_length, 0

    def get_max_cache_shape(self) -> int:
        """No bound."""
        return -1

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what has been compressed cannot be taken back."""
        raise ValueError("tokens cannot be taken back from a compressed cache; generate without assisted decoding")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other prompts of the batch, as a beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these prompts of the batch alone."""
        self._each(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each prompt of the batch."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def _each(self, change: Any) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values", "bias", "worth", "hidden"):
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))
        self._segments = [segment._replace(queries=change(segment.queries)) for segment in self.segments()]


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


def _shown(mask: Tensor) -> Tensor:
    """Which tokens a mask of the model shows."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _weighted(query: Tensor, key: Tensor, value: Tensor, layer: StoredLayer, scale: float, mask: Any) -> Tensor:
    """Attention on atoms with weights and the tokens after them; queries that share keys go together."""
    (b, H, n, k), (G, used) = query.shape, key.shape[1:3]
    bias = layer.bias[..., :used]
    if mask is not None:
        shown = torch.nn.functional.pad(_shown(mask)[:, :1, :, -layer.fresh :], (layer.atoms, 0), value=True)
        bias = bias.masked_fill(~shown, -math.inf).repeat(1, 1, H // G, 1)
    elif n > 1:
        later = torch.ones(n, used, dtype=torch.bool, device=query.device).triu(used - n + 1)
        bias = bias.masked_fill(later, -math.inf).repeat(1, 1, H // G, 1)
    grouped = query.reshape(b, G, -1, k)
    found = scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scale)
    if layer.checked is not None and layer.checked.left > 0:
        new = slice(layer.atoms, None)
        layer.checked.compare(found, grouped, key[:, :, new], value[:, :, new], bias[..., new], n)
    return found.reshape(b, H, n, -1).transpose(1, 2).contiguous()


class Check:
    """All that a layer stored before it was compressed, kept to compare outputs with those on it."""

    def __init__(self, layer: Layer, tokens: int):
        self._layer: Layer | None = layer
        self.left = tokens
        self._wrong = self._whole = torch.zeros((), device=layer.keys.device)

    def compare(self, found: Tensor, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, n: int) -> None:
        """Compare outputs (b, G, r · n, v) of new queries with those on all that was stored and the tokens since."""
        layer = self._layer
        if layer is None:
            return
        (b, G, _, v), r = found.shape, layer.roots.shape[1]
        whole, read = (
            torch.cat([old, new.float()], dim=2) for old, new in ((layer.keys, keys), (layer.values, values))
        )
        old = layer.log_weights[:, :, None]
        bias = bias.float().expand(b, G, bias.shape[2], -1)
        bias = torch.cat([old.expand(b, G, bias.shape[2], -1), bias], dim=-1)
        wanted = scaled_dot_product_attention(queries.float(), whole, read, attn_mask=bias, scale=layer.scale)
        wrong, size = (x.reshape(b, G, r, n, v) @ layer.roots for x in (found.float() - wanted, wanted))
        self._wrong, self._whole = (
            total + x.square().sum(dim=(-1, -2)) for total, x in ((self._wrong, wrong), (self._whole, size))
        )
        self.left -= n
        if self.left <= 0:
            self._layer = None

    @property
    def relative(self) -> Tensor:
        """The root mean square error over that of outputs, (b, H); of no shape before a token has come."""
        ratio = (self._wrong / self._whole.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
        return ratio.flatten(1) if ratio.ndim else ratio
