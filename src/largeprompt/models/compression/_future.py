"""The law of the queries to come: pieces of the text so far, as if they were read once more at its end.

A query at position $p$ of a piece that begins at $s$ is moved to position $E + p - s$, where $E$ is the end of the
text. There it sees the whole prompt, and beside it what it will have read since: the piece's own tokens up to itself,
which keep their distances. So what a head takes from nearby tokens is not asked of the prompt.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 256  # tokens that are read again together
_NOTHING = 1e4  # a score so large that nothing is asked of the prompt

Rotation = Callable[[Tensor, Tensor], Tensor]  # queries (…, p, n, k), by how many positions each of p is moved


class Segment(NamedTuple):
    """Some of the queries of `length` tokens in a row: every `step`-th, the last one among them."""

    queries: Tensor  # (b, H, n, k)
    length: int
    step: int


class Future(NamedTuple):
    """Queries to come, grouped by the heads of keys that they read, and what else each will have read by then."""

    queries: Tensor  # (b, G, r, n, k)
    log_mass: Tensor  # (b, G, r, n): log Σ exp(score) of the tokens read since; −∞ where there is none
    output: Tensor  # (b, G, r, n, v): their own output; 0 for the query of a hidden token


def segment_of(queries: Tensor, most: int) -> Segment:
    """At most so many of the queries (b, H, n, k) of tokens in a row, evenly spaced."""
    n, step = queries.shape[2], 1
    while n > step * most:
        step *= 2
    return Segment(queries[:, :, step - 1 + n % step :: step], n, step)


def given(queries: Tensor, values: Tensor) -> Future:
    """The law of queries (b, H, n, k) that are taken as they are, on values (b, G, L, v): nothing is read since."""
    (b, H, n, k), G = queries.shape, values.shape[1]
    shape = (b, G, H // G, n)
    return Future(
        queries.reshape(*shape, k), queries.new_full(shape, -math.inf), queries.new_zeros(*shape, values.shape[-1])
    )


def replayed(
    segments: Sequence[Segment],
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    scale: float,
    rotate: Rotation | None,
) -> Future:
    """Queries of segments whose tokens are the last ones of keys (b, G, L, k), moved to the end of the text."""
    parts, stop = [], keys.shape[2]
    for segment in reversed(segments):
        parts.append(_replayed(segment, keys, values, hidden, scale, stop, rotate))
        stop -= segment.length
    return Future(*(torch.cat(part, dim=3) for part in zip(*reversed(parts), strict=True)))


def _replayed(segment, keys, values, hidden, scale, stop, rotate) -> Future:
    b, H, _, k = segment.queries.shape
    G, step = keys.shape[1], segment.step
    pieces = -(-segment.length // PIECE)
    n = max(segment.length // pieces // step, 1)
    length = min(n * step, segment.length)
    queries = segment.queries[:, :, -pieces * n :].float().reshape(b, H, pieces, n, k)
    begin = stop - pieces * length
    near, since = (x[:, :, begin:stop].float().reshape(b, G, 1, pieces, length, -1) for x in (keys, values))
    scores = scale * queries.reshape(b, G, H // G, pieces, n, k) @ near.transpose(-1, -2)
    at = length - step * torch.arange(n, 0, -1, device=keys.device)[:, None] + step - 1
    scores = scores.masked_fill(torch.arange(length, device=keys.device) > at, -math.inf)
    if hidden is not None:
        away = hidden[:, begin:stop].reshape(b, 1, 1, pieces, 1, length)
        scores = scores.masked_fill(away, -math.inf)
        nothing = torch.take_along_dim(away, at.reshape(1, 1, 1, 1, n, 1), dim=-1)  # the query is a hidden token's own
        scores = torch.where(nothing, _NOTHING, scores)
    log_mass, output = torch.logsumexp(scores, dim=-1), torch.softmax(scores, dim=-1) @ since
    output = output.masked_fill((log_mass > _NOTHING / 2)[..., None], 0.0)
    if rotate is not None:
        queries = rotate(queries, keys.shape[2] - begin - length * torch.arange(pieces, device=keys.device))
    shape = (b, G, H // G, pieces * n)
    return Future(queries.to(keys.dtype).reshape(*shape, k), log_mass.reshape(shape), output.reshape(*shape, -1))
