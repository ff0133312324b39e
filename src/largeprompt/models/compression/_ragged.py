"""Atoms of heads that keep different numbers of them, without gaps: the rows of one head after those of another."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_ROOM = 256  # tokens by which a buffer grows
_AT_ONCE = 512  # queries that are read together, so that no matrix of all pairs is held


class Ragged:
    """Places of rows: `counts` of them for each head, and after them one row for every head of each token that comes.

    The same for all prompts of a batch. `owner` says of each row whose it is.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        self.counts, self.rows, self.most = list(counts), sum(counts), max(counts)
        number = torch.tensor(self.counts, device=device)
        self.owner = torch.arange(len(counts), device=device).repeat_interleave(number, output_size=self.rows)
        self.filled = torch.arange(self.most, device=device) >= self.most - number[:, None]  # (G, most): aligned right

    def padded(self, flat: Tensor, missing: float = 0.0) -> Tensor:
        """Rows (b, rows, …) as (b, G, most, …), those of each head at the right."""
        made = flat.new_full((flat.shape[0], *self.filled.shape, *flat.shape[2:]), missing)
        made[:, self.filled] = flat[:, : self.rows]
        return made

    def flat(self, padded: Tensor) -> Tensor:
        """The rows (b, rows, …) of (b, G, most or more, …), those of each head at the left."""
        return padded[:, :, : self.most][:, self.filled.flip(-1)]


class RaggedTokens:
    """Atoms with weights, and after them tokens as they came, of one layer: what attention reads."""

    def __init__(self, keys: Tensor, values: Tensor, log_weights: Tensor, places: Ragged):
        self.places, self.heads, self.fresh = places, len(places.counts), 0
        self.keys, self.values, self.log_weights = keys, values, log_weights  # (b, room, ·), (b, room)
        self.owner = places.owner.to(torch.uint8 if self.heads < 256 else torch.int16)
        self._numbers = torch.arange(self.heads, device=keys.device, dtype=self.owner.dtype)

    @property
    def used(self) -> int:
        """Rows that are in use."""
        return self.places.rows + self.heads * self.fresh

    @property
    def memory(self) -> int:
        """Numbers that are stored, the room to grow apart: rows, weights of atoms, whose each row is."""
        b, _, k = self.keys.shape
        owner = -(-self.used * self.owner.element_size() // self.keys.element_size())
        return b * (self.used * (k + self.values.shape[-1]) + self.places.rows) + owner

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store new tokens (b, G, n, ·)."""
        n, begin = keys.shape[2], self.used
        self.fresh += n
        if self.used > self.keys.shape[1]:
            self._grow(self.used + _ROOM * self.heads)
        self.keys[:, begin : self.used] = keys.transpose(1, 2).flatten(1, 2)
        self.values[:, begin : self.used] = values.transpose(1, 2).flatten(1, 2)

    def _grow(self, size: int) -> None:
        more = size - self.keys.shape[1]
        self.keys, self.values = (pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
        self.log_weights = pad(self.log_weights, (0, more))
        missing = -(-(size - len(self.owner)) // self.heads)
        self.owner = torch.cat([self.owner, self._numbers.repeat(missing)])[:size]

    def new(self) -> tuple[Tensor, Tensor]:
        """Keys and values (b, G, fresh, ·) of the tokens that have come since."""
        rows = slice(self.places.rows, self.used)
        keys, values = (x[:, rows].unflatten(1, (self.fresh, self.heads)) for x in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and log-weights (b, G, most + fresh, ·), −∞ where a head has no row; new tokens are last."""
        keys, values = (
            torch.cat([self.places.padded(old), new], dim=2)
            for old, new in zip((self.keys, self.values), self.new(), strict=True)
        )
        return keys, values, pad(self.places.padded(self.log_weights.float(), -math.inf), (0, self.fresh))

    def attend(self, queries: Tensor, scale: float, visible: Tensor | None) -> Tensor:
        """Outputs (b, H, n, v) of queries (b, H, n, k); `visible` (b or 1, n, fresh): which new tokens each sees."""
        if queries.shape[2] == 1:
            return self._one(queries, scale, visible)
        (b, H, n, _), r = queries.shape, queries.shape[1] // self.heads
        new_keys, new_values = self.new()
        found = queries.new_empty(b, H, n, self.values.shape[-1])
        begin = 0
        for g, count in enumerate(self.places.counts):
            rows, own = slice(begin, begin + count), slice(g * r, (g + 1) * r)
            begin += count
            keys, values = (
                torch.cat([old[:, rows], new[:, g]], dim=1)[:, None].expand(-1, r, -1, -1)
                for old, new in ((self.keys, new_keys), (self.values, new_values))
            )
            for first in range(0, n, _AT_ONCE):
                some = slice(first, min(first + _AT_ONCE, n))
                bias = pad(self.log_weights[:, rows], (0, self.fresh))[:, None]
                if visible is not None:
                    bias = bias.masked_fill(~pad(visible[:, some], (count, 0), value=True), -math.inf)
                bias = bias[:, None].expand(b, r, -1, -1) if visible is not None else bias[:, None]
                found[:, own, some] = scaled_dot_product_attention(
                    queries[:, own, some], keys, values, attn_mask=bias, scale=scale
                )
        return found

    def _one(self, queries: Tensor, scale: float, visible: Tensor | None) -> Tensor:
        """One query for each head: all heads read all rows at once, and what is not theirs has no weight."""
        rows = self.used
        scores = _product(queries[:, :, 0], self.keys[:, :rows].transpose(1, 2))
        scores = torch.add(self.log_weights[:, None, :rows], scores, alpha=scale)
        other = self.owner[:rows] != self._numbers[:, None]  # (G, rows)
        if visible is not None:
            hidden = ~visible[:, 0].repeat_interleave(self.heads, dim=1)
            other = other | pad(hidden, (self.places.rows, 0))[:, None]
        scores.unflatten(1, (self.heads, -1)).masked_fill_(other.unsqueeze(-2), -math.inf)
        weights = scores.softmax(dim=-1)
        return (weights.to(self.values.dtype) @ self.values[:, :rows])[:, :, None]

    def change(self, change) -> None:
        """Change the prompts of a batch: `change` is applied to all tensors that have one row for each."""
        self.keys, self.values, self.log_weights = (change(x) for x in (self.keys, self.values, self.log_weights))


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """Scores in float32: half precision would round them to three digits, and weights are their exponentials."""
    if queries.device.type == "cuda" and queries.dtype != torch.float32:
        return torch.bmm(queries, keys, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    return queries.float() @ keys.float()
