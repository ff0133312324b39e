r"""A prompt as a shorter one with the same outputs for the queries to come: atoms chosen, then weighed and moved.

For a query $j$ of the law let $x_{ij}$ be the weight of token $i$ in the softmax over the prompt and all that the query
will have read since, and $o_j$ the output. Taking token $i$ out moves the output by $-x_{ij}(v_i-o_j)$ to first order,
so a token is worth $(\overline{x_i^2})^{1/2}\|W_O(v_i-\bar o)\|$, in the unit of the residual stream. Of the tokens
kept, weight $a_i$ and value $u_i/a_i$ are fitted: the error of the output,

$$\sum_{\rm kept}x_{ij}(u_i-a_io_j)-\sum_{\rm all}x_{ij}(v_i-o_j),$$

is linear in both, and small where $\sum_{\rm kept}x_{ij}(u_i, a_i)\approx\sum_{\rm all}x_{ij}(v_i, 1)$: one
least-squares problem for values and weights, held near the tokens themselves ($u_i=v_i$, $a_i=1$) by a ridge.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._fused import attended
from ._future import Future
from ._share import fewest

SINKS = 4  # first tokens that are always kept
RECENT = 32  # last tokens that are kept, at most an eighth of all that are
RIDGE = 0.03  # in mean squared norms of a query's weights
LEAST = 0.05  # weight of an atom, over that of its token
FITTED = 1024  # queries of a head of keys that a fit uses, about; of a longer prompt, as many as it has tokens
ROUNDS = 6  # of conjugate gradients


class Layer(NamedTuple):
    """Prompts of one layer, or of several layers stacked, and the law of their queries; in the model's own type."""

    keys: Tensor  # (b, G, L, k)
    values: Tensor  # (b, G, L, v)
    log_weights: Tensor  # (b, G, L), −∞ for tokens that are hidden
    scale: float
    future: Future
    roots: Tensor  # (b or 1, G, r, v, v'): ‖o root‖ is the norm of a head's output in the residual stream


class Reading(NamedTuple):
    """What the queries of the law make of a prompt."""

    log_total: Tensor  # (b, G, r, n): log of all that a query weighs
    outputs: Tensor  # (b, G, r, n, v)
    prompt: Tensor  # (b, G, r, n, v + 1): the part of an output that the prompt gives, and its share of the weight


class Atoms(NamedTuple):
    """Weighted tokens in place of a prompt: what is stored."""

    keys: Tensor  # (b, G, m, k)
    values: Tensor  # (b, G, m, v)
    log_weights: Tensor  # (b, G, m)
    kept: Tensor  # (b, G, m): their places in the prompt


Make = Callable[[Layer, Reading, Tensor], Atoms]  # from the places of the tokens that are kept


def read(layer: Layer) -> Reading:
    """Read the prompt with every query of the law."""
    future, shape = layer.future, layer.future.queries.shape[:4]
    queries = future.queries.flatten(2, 3)
    found, mass = attended(queries, layer.keys, layer.values, layer.log_weights, layer.scale)
    found, mass = found.reshape(*shape, -1), mass.reshape(shape)
    total = torch.logaddexp(mass, future.log_mass)
    share, since = torch.exp(mass - total)[..., None], torch.exp(future.log_mass - total)[..., None]
    return Reading(total, share * found + since * future.output, torch.cat([share * found, share], dim=-1))


def average_weights(layer: Layer, reading: Reading, power: int) -> Tensor:
    """The mean of this power of each token's weights over the law of queries, (b, G, r, L), and its root.

    Keys read queries here, with as many times their scores: what a key weighs is the sum over queries.
    """
    queries = layer.future.queries.to(layer.keys.dtype)
    b, G, r, n, k = queries.shape
    keys = layer.keys[:, :, None].expand(b, G, r, -1, k).flatten(1, 2)
    flat, total = queries.flatten(1, 2), reading.log_total.flatten(1, 2)
    _, mass = attended(keys, flat, flat, -power * total, power * layer.scale)
    return torch.exp((mass.reshape(b, G, r, -1) - math.log(n)) / power + layer.log_weights[:, :, None].float())


def _weights(layer: Layer, queries: Tensor, total: Tensor, keys: Tensor, log_weights: Tensor) -> Tensor:
    """Weights (b, G, r, n, L) of keys where `total` is the log of all that a query weighs."""
    scores = (layer.scale * queries.float()) @ keys[:, :, None].float().transpose(-1, -2)
    return scores.add_(log_weights[:, :, None, None]).sub_(total[..., None]).exp_()


def importance(layer: Layer, reading: Reading) -> Tensor:
    """What each token is worth, (b, G, L): how far the output moves without it in the residual stream; −1 if hidden."""
    real = (reading.outputs != 0).any(dim=-1, keepdim=True)  # not the query of a hidden token
    centre = reading.outputs.sum(dim=3, keepdim=True) / real.sum(dim=3, keepdim=True).clamp_min(1)
    moved = torch.linalg.vector_norm((layer.values[:, :, None].float() - centre) @ layer.roots, dim=-1)
    worth = (average_weights(layer, reading, power=2) * moved).square().sum(dim=2).sqrt()
    return worth.masked_fill(layer.log_weights == -math.inf, -1.0)


def squares(layer: Layer, reading: Reading) -> Tensor:
    """The mean squares (b,) of a layer's outputs in the residual stream, its heads taken as independent."""
    return (reading.outputs @ layer.roots).square().sum(dim=-1).mean(dim=3).sum(dim=(1, 2))


def roots_of(projections: Tensor | None, shape: Sequence[int], device: torch.device) -> Tensor:
    """Roots (layers, G, r, v, v) from the matrices (layers, heads, v, residual) of ways out; else unit matrices."""
    if projections is None:
        return torch.eye(shape[-1], device=device).expand(1, *shape, -1)
    flat = projections.flatten(0, 1)
    if flat.is_cuda and flat.dtype in (torch.float16, torch.bfloat16):  # products of such numbers are exact in float32
        gram = torch.bmm(flat, flat.mT, out_dtype=torch.float32)
    else:
        gram = flat.double() @ flat.double().mT
    diagonal, least = gram.diagonal(dim1=-2, dim2=-1), torch.finfo(gram.dtype)
    diagonal.add_(16 * least.eps * diagonal.mean() + least.tiny)
    return torch.linalg.cholesky(gram).float().reshape(-1, *shape, shape[-1])


def choose(importance: Tensor, counts: int | Tensor, sinks: int, recent: int = 0) -> Tensor:
    """The places (b, G, most) of the tokens worth most; the first ones and some recent ones are always among them.

    Where heads keep different numbers of tokens, (b or 1, G), a shorter list ends with the number of tokens, which is
    no place.
    """
    tokens = torch.arange(importance.shape[-1], device=importance.device)
    each = torch.as_tensor(counts)
    most, each = int(each.max()), each.to(importance.device)[..., None]
    seen = importance >= 0  # at the left of a padded prompt are tokens that are hidden
    ranked = importance.masked_fill(seen & (seen.cumsum(dim=-1) <= sinks), math.inf)
    ranked = ranked.masked_fill(tokens >= len(tokens) - (each // 8).clamp_max(recent), math.inf)
    places = ranked.topk(most, dim=-1).indices
    return places.masked_fill(tokens[:most] >= each, len(tokens)).sort(dim=-1).values


def fitted(layer: Layer, reading: Reading, kept: Tensor) -> Atoms:
    """The tokens kept, with weights and values that stand for all: fitted on a part of the law's queries."""
    keys, values, log_weights = _taken(layer, kept)
    b, G, m, _ = keys.shape
    at = _places(layer, 0)
    part, total = Future(*(x[:, :, :, at] for x in layer.future)), reading.log_total[:, :, :, at]
    X = _weights(layer, part.queries, total, keys, log_weights).reshape(b, G, -1, m)
    wanted, share = reading.prompt[:, :, :, at].split([values.shape[-1], 1], dim=-1)  # Σ over all tokens of x v and x
    seen = layer.log_weights[..., None] > -math.inf
    centre = (layer.values.float() * seen).sum(dim=2, keepdim=True) / seen.sum(dim=2, keepdim=True).clamp_min(1)
    target = torch.cat([wanted - share * centre[:, :, None], share], dim=-1).reshape(b, G, X.shape[2], -1)
    plain = torch.cat([values - centre, torch.ones_like(values[..., :1])], dim=-1)
    moved = plain + _ridge(X, target - X @ plain)
    weight = moved[..., -1:].clamp_min(LEAST)
    stands = moved[..., :-1] / weight + centre
    return Atoms(keys, stands, log_weights + weight[..., 0].log(), kept)


def revalued(layer: Layer, reading: Reading, keys: Tensor, values: Tensor) -> Tensor:
    """Values near these that give keys (b, G, m, k) of weight 1 the outputs of the whole prompt."""
    at = _places(layer, 0)
    part = Future(*(x[:, :, :, at] for x in layer.future))
    equal = torch.zeros_like(keys[..., 0], dtype=torch.float32)
    found = read(layer._replace(future=part, keys=keys, values=values, log_weights=equal))
    weights = _weights(layer, part.queries, found.log_total, keys, equal)
    missing = reading.outputs[:, :, :, at] - found.outputs
    return values + _ridge(weights.flatten(2, 3), missing.flatten(2, 3))


def taken(layer: Layer, reading: Reading, kept: Tensor) -> Atoms:
    """The tokens kept, as they are: what `fitted` begins with."""
    return Atoms(*_taken(layer, kept), kept)


def _taken(layer: Layer, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    L = layer.keys.shape[2]
    at = kept.clamp_max(L - 1)
    keys, values = (torch.take_along_dim(x, at[..., None], dim=2) for x in (layer.keys, layer.values))
    log_weights = torch.take_along_dim(layer.log_weights.float(), at, dim=2)
    return keys, values.float(), log_weights.masked_fill(kept == L, -math.inf)


def _places(layer: Layer, offset: int) -> Tensor:
    """Every so many-th query: those with offset 0 are for fits, those with offset 1 for what is predicted of them."""
    (r, n), L = layer.future.queries.shape[2:4], layer.keys.shape[2]
    stride = max(2, -(-n * r // max(FITTED, L))) if n > 1 else 1  # with fewer queries than atoms, a fit goes astray
    return torch.arange(min(offset, n - 1), n, stride, device=layer.keys.device)


def _ridge(X: Tensor, target: Tensor) -> Tensor:
    """The least-squares change of atoms: (b, G, m, ·) from weights (b, G, j, m) and what is missing (b, G, j, ·).

    By conjugate gradients, stopped early: errors on queries that the fit has not seen are then smaller than at its end.
    """
    (j, m), turned = X.shape[-2:], X.transpose(-1, -2)
    squares = X.square()
    ridge = (RIDGE * squares.sum(dim=(-1, -2)) / j + torch.finfo(X.dtype).tiny)[..., None, None]
    if j <= m:
        return turned @ _solved(X, turned, squares.sum(dim=-1)[..., None], ridge, target)
    return _solved(turned, X, squares.sum(dim=-2)[..., None], ridge, turned @ target)


def _solved(A: Tensor, B: Tensor, diagonal: Tensor, ridge: Tensor, target: Tensor) -> Tensor:
    """(AB + ridge)⁻¹ target, nearly: each column by conjugate gradients, scaled by the diagonal of AB."""
    inverse = 1 / (diagonal + ridge)
    found, left, direction = torch.zeros_like(target), target, inverse * target
    size, least = (left * direction).sum(dim=-2, keepdim=True), torch.finfo(A.dtype).tiny
    for _ in range(ROUNDS):
        moved = A @ (B @ direction) + ridge * direction
        step = size / (direction * moved).sum(dim=-2, keepdim=True).clamp_min(least)
        found, left = found + step * direction, left - step * moved
        scaled = inverse * left
        before, size = size, (left * scaled).sum(dim=-2, keepdim=True)
        direction = scaled + (size / before.clamp_min(least)) * direction
    return found


def relative_error(layer: Layer, reading: Reading, atoms: Atoms) -> Tensor:
    """The predicted error of outputs in the residual stream over their size, (b, G, r): on queries no fit has used."""
    at = _places(layer, 1)
    part = Future(*(x[:, :, :, at] for x in layer.future))
    found = read(
        layer._replace(future=part, keys=atoms.keys, values=atoms.values, log_weights=atoms.log_weights)
    ).outputs
    wanted = reading.outputs[:, :, :, at]
    wrong, whole = (torch.linalg.vector_norm(x @ layer.roots, dim=(-1, -2)) for x in (found - wanted, wanted))
    return wrong / whole.clamp_min(torch.finfo(whole.dtype).tiny)


def smallest(
    layer: Layer, reading: Reading, make: Make, worth: Tensor, tolerance: float, sinks: int, least: Tensor
) -> Tensor:
    """The fewest atoms of each head of keys (G,), at least so many, whose predicted errors are within the tolerance."""

    def enough(counts: Tensor) -> Tensor:
        atoms = make(layer, reading, choose(worth, counts[None], sinks, RECENT))
        return (relative_error(layer, reading, atoms) <= tolerance).all(dim=-1).all(dim=0).cpu()

    return fewest(least.clamp_min(sinks), torch.full_like(least, layer.keys.shape[2]), enough)
