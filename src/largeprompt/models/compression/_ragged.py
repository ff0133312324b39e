"""Atoms of heads that keep different numbers of them, without gaps: the rows of one head after those of another."""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_ROOM = 256  # tokens by which a buffer grows
_AT_ONCE = 512  # queries that are read together, so that no matrix of all pairs is held
_STEP = 16  # rows: kernels want masks of so many, or a multiple
_SERIAL = 2**11  # rows that a GPU reads one after another for one query


class Ragged:
    """Places of rows: `counts` of them for each head, and after them one row for every head of each token that comes.

    The same for all prompts of a batch. `owner` says of each row whose it is.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        self.counts, self.rows, self.most = list(counts), sum(counts), max(counts)
        # found on the processor: a mask of a GPU would have to be waited for
        number, place = torch.tensor(self.counts)[:, None], torch.arange(self.most)
        filled = place >= self.most - number  # (G, most): aligned right
        found = torch.stack([*(place < number).nonzero().T, filled.flatten().nonzero()[:, 0]]).to(device)
        self.owner, self._left, self._right = found[0], self.most * found[0] + found[1], found[2]
        self.filled = filled.to(device)

    def padded(self, flat: Tensor, missing: float = 0.0) -> Tensor:
        """Rows (b, rows, …) as (b, G, most, …), those of each head at the right."""
        made = flat.new_full((flat.shape[0], self.filled.numel(), *flat.shape[2:]), missing)
        return made.index_copy_(1, self._right, flat[:, : self.rows]).unflatten(1, self.filled.shape)

    def flat(self, padded: Tensor) -> Tensor:
        """The rows (b, rows, …) of (b, G, most or more, …), those of each head at the left."""
        return padded[:, :, : self.most].flatten(1, 2).index_select(1, self._left)


class RaggedTokens:
    """Atoms with weights, and after them tokens as they came, of one layer: what attention reads."""

    def __init__(self, keys: Tensor, values: Tensor, log_weights: Tensor, places: Ragged):
        self.places, self.heads, self.fresh, self.used = places, len(places.counts), 0, places.rows
        self._size = keys.shape[-1]
        self.rows = torch.cat([keys, values], dim=-1)  # (b, room, k + v)
        numbers = torch.arange(self.heads, device=keys.device)
        other = places.owner != numbers[:, None]
        self.bias = log_weights[:, None].masked_fill(other, -math.inf)  # (b, G, room): −∞ for rows of other heads
        self._own = (
            self.bias.new_zeros(()).expand(self.heads, self.heads).masked_fill(numbers != numbers[:, None], -math.inf)
        )
        self._grow()

    @property
    def memory(self) -> int:
        """Numbers that are stored, the room to grow apart: keys, values, and for each head what is added to scores."""
        return len(self.rows) * self.used * (self.rows.shape[-1] + self.heads)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store new tokens (b, G, n, ·); in as few calls as possible, for tokens that come one by one."""
        n = keys.shape[2]
        begin, size = self.used, n * self.heads
        self.used, self.fresh = begin + size, self.fresh + n
        if self.used > self.rows.shape[1]:
            self._grow()
        if n == 1:
            keys, values, own = keys.squeeze(2), values.squeeze(2), self._own
        else:
            keys, values = (x.transpose(1, 2).flatten(1, 2) for x in (keys, values))
            own = self._own.repeat(1, n)
        torch.cat((keys, values), dim=-1, out=self.rows.narrow(1, begin, size))
        self.bias.narrow(2, begin, size).copy_(own)

    def _grow(self) -> None:
        more = -(-(self.used + _ROOM * self.heads) // _STEP) * _STEP - self.rows.shape[1]
        self.rows, self.bias = pad(self.rows, (0, 0, 0, more)), pad(self.bias, (0, more), value=-math.inf)
        self._views: tuple[Tensor, Tensor, Tensor] | None = None  # as a query reads them: made once, not at each token

    def _parts(self, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows."""
        stored = self.rows.narrow(1, 0, rows)
        return stored[..., : self._size], stored[..., self._size :]

    def new(self) -> tuple[Tensor, Tensor]:
        """Keys and values (b, G, fresh, ·) of the tokens that have come since."""
        new = self.rows[:, self.places.rows : self.used].unflatten(1, (self.fresh, self.heads)).transpose(1, 2)
        return new[..., : self._size], new[..., self._size :]

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and log-weights (b, G, most + fresh, ·), −∞ where a head has no row; new tokens are last."""
        old = self._parts(self.places.rows)
        keys, values = (torch.cat([self.places.padded(x), new], dim=2) for x, new in zip(old, self.new(), strict=True))
        own = self.bias[..., : self.places.rows].amax(dim=1).float()
        return keys, values, pad(self.places.padded(own, -math.inf), (0, self.fresh))

    def attend(self, queries: Tensor, scale: float, visible: Tensor | None) -> Tensor:
        """Outputs (b, n, H, v) of queries (b, H, n, k); `visible` (b or 1, n, fresh): which new tokens each sees."""
        if queries.shape[2] == 1:
            return self._one(queries, scale, visible)
        (b, H, n, _), r = queries.shape, queries.shape[1] // self.heads
        (old_keys, old_values), (new_keys, new_values) = self._parts(self.places.rows), self.new()
        found, begin = queries.new_empty(b, n, H, old_values.shape[-1]), 0
        for g, count in enumerate(self.places.counts):
            rows, own = slice(begin, begin + count), slice(g * r, (g + 1) * r)
            begin += count
            keys, values = (
                torch.cat([old[:, rows], new[:, g]], dim=1)[:, None].expand(-1, r, -1, -1)
                for old, new in ((old_keys, new_keys), (old_values, new_values))
            )
            weights = pad(self.bias[:, g, None, None, rows], (0, self.fresh))
            for first in range(0, n, _AT_ONCE):
                some = slice(first, min(first + _AT_ONCE, n))
                bias = weights
                if visible is not None:
                    seen = pad(visible[:, None, some], (count, 0), value=True)
                    bias = weights.masked_fill(~seen, -math.inf).expand(b, r, -1, -1)
                found[:, some, own] = scaled_dot_product_attention(
                    queries[:, own, some], keys, values, attn_mask=bias, scale=scale
                ).transpose(1, 2)
        return found

    def _one(self, queries: Tensor, scale: float, visible: Tensor | None) -> Tensor:
        """One query for each head: all heads read all rows at once, and rows of other heads have no weight.

        Queries that share rows take the place of heads, so that what is added to scores is the same for these.
        """
        rows, (b, H, _, k), G = self.used, queries.shape, self.heads
        if queries.is_cuda:
            rows = -(-rows // _STEP) * _STEP
        if self._views is None:
            wide = self.rows[:, None].expand(b, H // G, -1, -1)
            self._views = wide[..., :k], wide[..., k:], self.bias[:, None].expand(b, H // G, -1, -1)
        all_keys, all_values, all_bias = self._views
        keys, values, bias = all_keys.narrow(2, 0, rows), all_values.narrow(2, 0, rows), all_bias.narrow(3, 0, rows)
        if visible is not None:
            hidden = ~visible[:, 0].repeat_interleave(G, dim=1)
            bias = bias.masked_fill(pad(hidden, (self.places.rows, rows - self.used))[:, None, None], -math.inf)
        grouped = queries.view(b, G, -1, k).transpose(1, 2)
        attention = _in_parallel if queries.is_cuda and rows > _SERIAL else scaled_dot_product_attention
        found = attention(grouped, keys, values, attn_mask=bias, scale=scale)
        return found.transpose(1, 2).reshape(b, 1, H, -1)

    def copied(self) -> "RaggedTokens":
        """The same tokens, to go on from in another way."""
        other = copy.copy(self)
        other.change(torch.clone)
        return other

    def change(self, change) -> None:
        """Change the prompts of a batch: `change` is applied to all tensors that have one row for each."""
        self.rows, self.bias, self._views = change(self.rows), change(self.bias), None


def _in_parallel(queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor, scale: float) -> Tensor:
    """Outputs (b, r, G, v) of queries (b, r, G, k), by products that a GPU splits among all its parts.

    Scores are in float32: half precision would round them to three digits.
    """
    (b, r, G, _), flat, keys, values = queries.shape, queries.flatten(1, 2), keys[:, 0], values[:, 0]
    if queries.dtype == torch.float32:
        scores = torch.bmm(flat, keys.mT)
    else:
        scores = torch.bmm(flat, keys.mT, out_dtype=torch.float32)
    scores = torch.add(attn_mask, scores.view(b, r, G, -1), alpha=scale)
    weights = scores.softmax(-1).to(values.dtype)
    return torch.bmm(weights.flatten(1, 2), values).view(b, r, G, -1)
