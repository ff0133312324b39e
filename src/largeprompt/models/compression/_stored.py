"""What a compressed cache holds of one layer: atoms, tokens since, some of their queries; and a check of outputs."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import CacheLayerMixin

from ._atoms import Atoms, Layer
from ._future import Segment, segment_of

_ROOM = 256  # tokens by which a buffer grows


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
        self.worth: Tensor | None = None
        self.scale = 1.0
        self._segments: list[Segment] = []
        self._single: list[Tensor] = []
        self._unseen = 0  # tokens whose queries have not been seen

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
        if self._unseen and self.atoms:
            raise ValueError(
                "a model has read a compressed cache with another attention function, which leaves out its weights; "
                "make a cache again after changing the model's attention"
            )
        n = self._unseen = key_states.shape[2]
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
        self.module, self.scale, queries, self._unseen = module, scale, queries.detach(), 0
        if queries.shape[2] == 1:
            self._single.append(queries)
        else:
            self._segments = [*self.segments(), segment_of(queries, self._most)]
        if mask is not None:
            self.hidden = torch.nn.functional.pad(~shown(mask)[:, 0, -1, -self.fresh :], (self.atoms, 0))

    def segments(self) -> list[Segment]:
        """The queries known, tokens that came one by one joined."""
        if self._single:
            joined = torch.cat(self._single, dim=2)
            self._segments, self._single = [*self._segments, Segment(joined, joined.shape[2], 1)], []
        return self._segments

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is stored: keys and values in float32, or in the half precision that they have."""
        keys, values = self.keys[:, :, : self.used], self.values[:, :, : self.used]
        if self.dtype not in (torch.float16, torch.bfloat16):
            keys, values = keys.float(), values.float()
        log_weights = self.bias[:, :, 0, : self.used].float()
        if self.hidden is not None:
            hidden = torch.nn.functional.pad(self.hidden, (0, self.used - self.hidden.shape[1]))
            log_weights = log_weights.masked_fill(hidden[:, None], -math.inf)
        return keys, values, log_weights

    def worth_with(self, fresh: Tensor) -> Tensor:
        """What tokens are worth, (b, G, used): for atoms, with all queries so far, not the last alone."""
        if self.worth is None:
            return fresh
        old = self.seen - self.fresh
        now = fresh[..., : self.atoms]
        atoms = ((old * self.worth.square() + self.fresh * now.square()) / self.seen).sqrt()
        atoms = torch.where(now < 0, now, atoms)  # a hidden token
        return torch.cat([atoms, fresh[..., self.atoms :]], dim=-1)

    def replace(self, atoms: Atoms, worth: Tensor) -> None:
        """Store atoms, which are worth so much, in place of all tokens."""
        self.worth = worth
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


def shown(mask: Tensor) -> Tensor:
    """Which tokens a mask of the model shows."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


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
        (b, G, _, v), r = found.shape, layer.roots.shape[2]
        whole, read = (
            torch.cat([old.float(), new.float()], dim=2) for old, new in ((layer.keys, keys), (layer.values, values))
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
