"""What a compressed cache holds of one layer: atoms, tokens since, some of their queries; and a check of outputs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import CacheLayerMixin

from ._atoms import Atoms, Layer
from ._future import Segment, segment_of
from ._ragged import Ragged, RaggedTokens

_ROOM = 256  # tokens by which a buffer grows


class StoredLayer(CacheLayerMixin):
    """Tokens as they came; once compressed, atoms with weights and the tokens since. With some of their queries."""

    is_sliding = False
    is_compileable = False

    keys: Any  # (b, G, room, k), until it is compressed
    values: Any  # (b, G, room, v)

    def __init__(self, queries: int):
        super().__init__()
        self._most = queries
        self._clear()

    def _clear(self) -> None:
        self.checked: Check | None = None
        self.short: RaggedTokens | None = None
        self.seen = self._read = 0
        self.hidden: Tensor | None = None  # (b, fresh)
        self.module: nn.Module | None = None
        self.worth: Tensor | None = None  # (b, G, most), of atoms
        self.scale = 1.0
        self._segments: list[Segment] = []
        self._single: list[Tensor] = []
        self._unseen = 0  # tokens whose queries have not been seen

    @property
    def atoms(self) -> list[int]:
        """How many atoms each head of keys has; none before the first compression."""
        return [] if self.short is None else self.short.places.counts

    @property
    def fresh(self) -> int:
        """Tokens that have come since the last compression."""
        return self._read if self.short is None else self.short.fresh

    @property
    def width(self) -> int:
        """The most tokens and atoms of a head."""
        return self.fresh + max(self.atoms, default=0)

    @property
    def recorded(self) -> bool:
        """Whether the queries of all fresh tokens are known."""
        return sum(segment.length for segment in self.segments()) == self.fresh

    @property
    def memory(self) -> int:
        """Numbers that are stored, the room to grow apart; of each atom also what it is worth."""
        if not self.is_initialized:
            return 0
        if self.short is not None:
            return self.short.memory + len(self.short.rows) * self.short.places.rows
        b, G, _, k = self.keys.shape
        return b * G * self._read * (k + self.values.shape[-1])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and shape from the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        b, G = key_states.shape[:2]
        self.keys = key_states.new_empty(b, G, 0, key_states.shape[-1])
        self.values = value_states.new_empty(b, G, 0, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens; what is returned knows the layer that it comes from, which alone has the atoms."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._unseen and self.short is not None:
            raise ValueError(
                "a model has read a compressed cache with another attention function, which leaves out its weights; "
                "make a cache again after changing the model's attention"
            )
        keys, values = (x.detach() if x.requires_grad else x for x in (key_states, value_states))
        n = self._unseen = keys.shape[2]
        self.seen += n
        if self.short is not None:
            self.short.append(keys, values)
        else:
            if self._read + n > self.keys.shape[2]:
                self._grow(self._read + n + (_ROOM if self._read else 0))
            self.keys[:, :, self._read : self._read + n] = keys
            self.values[:, :, self._read : self._read + n] = values
            self._read += n
            keys, values = self.keys[:, :, : self._read], self.values[:, :, : self._read]
        keys.stored_layer = self  # pyrefly: ignore[missing-attribute]
        return keys, values

    def _grow(self, size: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], size, old.shape[3])
            new[:, :, : self._read] = old[:, :, : self._read]
            setattr(self, name, new)

    def record(self, module: nn.Module, queries: Tensor, mask: Tensor | None, scale: float) -> None:
        """Keep some of the queries of tokens that have just come, and which tokens are hidden."""
        self.module, self.scale, self._unseen = module, scale, 0
        queries = queries.detach() if queries.requires_grad else queries
        if queries.shape[2] == 1:
            self._single.append(queries)
        else:
            self._segments = [*self.segments(), segment_of(queries, self._most)]
        if mask is not None:
            self.hidden = ~shown(mask)[:, 0, -1, -self.fresh :]

    def segments(self) -> list[Segment]:
        """The queries known, tokens that came one by one joined."""
        if self._single:
            joined = torch.cat(self._single, dim=2)
            self._segments, self._single = [*self._segments, Segment(joined, joined.shape[2], 1)], []
        return self._segments

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is stored, (b, G, width, ·): keys and values in float32, or in the half precision that they have."""
        if self.short is not None:
            keys, values, log_weights = self.short.whole()
        else:
            keys, values = self.keys[:, :, : self._read], self.values[:, :, : self._read]
            log_weights = torch.zeros(keys.shape[:3], device=keys.device)
        if self.dtype not in (torch.float16, torch.bfloat16):
            keys, values = keys.float(), values.float()
        if self.hidden is not None:
            hidden = pad(self.hidden, (self.width - self.fresh, self.fresh - self.hidden.shape[1]))
            log_weights = log_weights.masked_fill(hidden[:, None], -math.inf)
        return keys, values, log_weights

    def worth_with(self, fresh: Tensor) -> Tensor:
        """What tokens are worth, (b, G, width): for atoms, with all queries so far, not the last alone.

        −∞ where a head has no atom.
        """
        if self.short is None or self.worth is None:
            return fresh
        most, old = self.width - self.fresh, self.seen - self.fresh
        now = fresh[..., :most]
        atoms = ((old * self.worth.square() + self.fresh * now.square()) / self.seen).sqrt()
        atoms = torch.where(now < 0, now, atoms)  # a hidden token
        atoms = atoms.masked_fill(~self.short.places.filled, -math.inf)
        return torch.cat([atoms, fresh[..., most:]], dim=-1)

    def replace(self, atoms: Atoms, counts: Sequence[int], worth: Tensor) -> None:
        """Store so many of the atoms of each head, which are worth so much, in place of all tokens."""
        places = Ragged(counts, self.device)
        keys, values, log_weights, worth = (places.flat(x) for x in (*atoms[:3], worth))
        self.short = RaggedTokens(keys.to(self.dtype), values.to(self.dtype), log_weights.to(self.dtype), places)
        self.worth = places.padded(worth)
        self.keys, self.values = (x[:, :, :0].clone() for x in (self.keys, self.values))
        self.hidden, self._read, self._segments, self._single = None, 0, [], []

    def attend(self, queries: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs (b, n, H, v) of new tokens' queries on atoms and on the tokens since; as the model masks these."""
        assert self.short is not None
        n, fresh = queries.shape[2], self.fresh
        visible = None
        if mask is not None:
            visible = shown(mask)[:, 0, :, -fresh:]
        elif n > 1:
            visible = torch.ones(1, n, fresh, dtype=torch.bool, device=queries.device).tril(fresh - n)
        found = self.short.attend(queries, self.scale, visible)
        if self.checked is not None and self.checked.left > 0:
            self.checked.compare(found.transpose(1, 2), queries, *self.short.new(), visible)
        return found

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
        for name in ("keys", "values", "worth", "hidden"):
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))
        if self.short is not None:
            self.short.change(change)
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

    def compare(self, found: Tensor, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Compare outputs (b, H, n, v) of new queries with those on all that was stored and the tokens since."""
        layer = self._layer
        if layer is None:
            return
        (b, H, n, v), G = found.shape, keys.shape[1]
        whole, read = (
            torch.cat([old.float(), new.float()], dim=2) for old, new in ((layer.keys, keys), (layer.values, values))
        )
        bias = pad(layer.log_weights, (0, keys.shape[2]))[:, :, None]
        if visible is not None:
            seen = pad(visible, (layer.keys.shape[2], 0), value=True)
            bias = bias.masked_fill(~seen[:, None], -math.inf).repeat(1, 1, H // G, 1)
        grouped = queries.reshape(b, G, -1, queries.shape[-1]).float()
        wanted = scaled_dot_product_attention(grouped, whole, read, attn_mask=bias, scale=layer.scale)
        wanted = wanted.reshape(b, G, H // G, n, v)
        wrong, size = (x @ layer.roots for x in (found.float().reshape(wanted.shape) - wanted, wanted))
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
