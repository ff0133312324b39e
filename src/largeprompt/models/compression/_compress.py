r"""One call's keys and values as shorter measures: atoms, and beside them a Gaussian for the rest where it helps.

Tokens among which none stands out act through their Gaussian law, of $n_r$ tokens, as linear attention with a gate:
$n_re^{sq\cdot m_k+\frac12s^2q^\top C_{kk}q}$ is its weight and $m_v+sC_{vk}q$ its value. That holds below the
threshold $s^2q^\top C_{kk}q<2\ln n_r$ and where the weights have light tails; elsewhere the Gaussian is refused. It is
stored with all its moments, which costs as much as some tens of atoms, so the better of both is kept: the one with the
smaller error on queries that no fit has used.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from largeprompt import _checks as checks
from largeprompt.measures import Empirical, Gaussian, Mixture
from largeprompt.measures._worth import tail_index

from .._statistics import HEAVIEST
from ._atoms import (
    SINKS,
    Atoms,
    Layer,
    Reading,
    average_weights,
    choose,
    fitted,
    importance,
    read,
    relative_error,
    roots_of,
    taken,
)
from ._future import Future, given
from ._share import Goal, fewest

_BELOW = 0.95  # share of queries that must be below the threshold


@dataclasses.dataclass(frozen=True)
class CompressedHead:
    """What stands for the prompt of one head of keys: atoms with weights in tokens, and perhaps a Gaussian."""

    keys: np.ndarray  # (m, k)
    values: np.ndarray  # (m, v)
    weights: np.ndarray  # (m,), in tokens
    kept: np.ndarray  # (m,): places in the prompt
    errors: np.ndarray  # (r,): predicted relative errors of the outputs of its heads of queries
    tokens: int  # of the prompt
    gaussian: Gaussian | None = None
    gaussian_weight: float = 0.0  # in tokens

    @property
    def measure(self) -> Empirical | Mixture:
        """The law of tokens (k, v) that attention reads in place of the prompt; with a Gaussian, a mixture."""
        atoms = Empirical(np.concatenate([self.keys, self.values], axis=1), self.weights / self.weights.sum())
        if self.gaussian is None:
            return atoms
        share = self.gaussian_weight / self.mass
        return Mixture([1 - share, share], [atoms, self.gaussian])

    @property
    def mass(self) -> float:
        """How many tokens it stands for, by its weights: what it weighs beside other tokens."""
        return float(self.weights.sum()) + self.gaussian_weight

    @property
    def memory(self) -> int:
        """Numbers that are stored: keys, values, weights, and the Gaussian's moments."""
        k, v = self.keys.shape[1], self.values.shape[1]
        return len(self.keys) * (k + v + 1) + (0 if self.gaussian is None else gaussian_numbers(k, v))

    def __repr__(self) -> str:
        beside = "" if self.gaussian is None else f" and a Gaussian of {self.gaussian_weight:.0f} tokens"
        share = 100 * self.memory / (self.tokens * (self.keys.shape[1] + self.values.shape[1]))
        return (
            f"{self.tokens} tokens as {len(self.keys)} atoms{beside}: {share:.3g} % of the memory, "
            f"predicted error {float(self.errors.max()):.2g}"
        )


def compress(
    keys: Any,
    values: Any,
    queries: Any,
    *,
    budget: float | None = None,
    tolerance: float | None = None,
    scale: float | None = None,
    projections: Any = None,
    gaussian: bool = True,
) -> list[CompressedHead]:
    """Shorter measures in place of the tokens (G, L, k) and (G, L, v) of heads, for the law of queries (H, n, k).

    `budget` is how many tokens' memory each head of keys may take, or, below 1, which share of it; `tolerance` the
    relative error of outputs for which the least memory is sought. Outputs count by their norm, or where `projections`
    (H, v, residual) are given, by that in the residual stream. Without `gaussian`, there are atoms alone.
    """
    problem = _layer(keys, values, queries, scale, projections)
    G, L = problem.keys.shape[1:3]
    if (budget is None) == (tolerance is None):
        raise ValueError(f"budget is {budget} and tolerance {tolerance}; exactly one must be given")
    whole = isinstance(budget, int | float) and budget >= 1
    try:
        goal = Goal(tokens=budget) if whole else Goal(keep=budget, tolerance=tolerance)  # pyrefly: ignore[bad-argument-type]
    except ValueError as error:
        raise ValueError(re.sub("^(tokens|keep) is", "budget is", str(error))) from None
    found = []
    for g in range(G):
        layer = _one(problem, g)
        reading = read(layer)
        worth = importance(layer, reading)
        if tolerance is None:
            found.append(_within(layer, reading, worth, goal.count(L), gaussian))
            continue

        def enough(tokens: Tensor, layer: Layer = layer, reading: Reading = reading, worth: Tensor = worth) -> Tensor:
            head = _within(layer, reading, worth, int(tokens), gaussian)
            return torch.tensor([float(head.errors.max()) <= tolerance])

        tokens = int(fewest(torch.tensor([min(SINKS, L)]), torch.tensor([L]), enough))
        all_tokens = torch.arange(L, device=worth.device)[None, None]
        whole = _head(layer, reading, taken(layer, reading, all_tokens), None)
        found.append(_within(layer, reading, worth, tokens, gaussian) if tokens < L else whole)
    return found


def _within(layer: Layer, reading: Reading, worth: Tensor, tokens: int, gaussian: bool) -> CompressedHead:
    """The better of atoms alone and of fewer beside a Gaussian, in the memory of so many tokens."""
    (L, k), v, sinks = layer.keys.shape[2:], layer.values.shape[-1], min(SINKS, layer.keys.shape[2])
    room = tokens * (k + v)  # numbers
    kept = choose(worth, min(L, max(room // (k + v + 1), sinks)), sinks)
    best = _head(layer, reading, fitted(layer, reading, kept), None)
    fewer = (room - gaussian_numbers(k, v)) // (k + v + 1)
    if not gaussian or not sinks <= fewer < L - 1:
        return best
    kept = choose(worth, fewer, sinks)
    law = _rest(layer, kept)
    if not _may_stand(layer, reading, kept, law):
        return best
    beside = layer._replace(future=_with(layer, law))
    since = torch.exp(beside.future.log_mass - reading.log_total)[..., None]
    rest = torch.cat([beside.future.output, torch.ones_like(since)], dim=-1)
    left = reading._replace(prompt=reading.prompt - since * rest)
    other = _head(beside, reading, fitted(beside, left, kept), law)
    return min(best, other, key=lambda head: float(head.errors.max()))


def gaussian_numbers(k: int, v: int) -> int:
    """What a Gaussian takes to store: two means, a symmetric C_kk, C_vk and its weight."""
    return k + v + k * (k + 1) // 2 + k * v + 1


def _layer(keys: Any, values: Any, queries: Any, scale: float | None, projections: Any) -> Layer:
    arrays = []
    for name, array in (("keys", keys), ("values", values), ("queries", queries)):
        tensor = torch.as_tensor(np.asarray(array) if not isinstance(array, Tensor) else array).detach().float()
        if tensor.ndim == 2:
            tensor = tensor[None]
        if tensor.ndim != 3 or 0 in tensor.shape:
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}; they must be (heads, tokens, dimension)")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} are not all finite; take them from a model that runs in float32 or bfloat16")
        arrays.append(tensor[None])
    k, v, q = arrays
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"keys have shape {tuple(k.shape[1:])}, values {tuple(v.shape[1:])} and queries {tuple(q.shape[1:])}; keys "
            "must have the heads and tokens of values, the dimension of queries, and divide their heads"
        )
    future = given(q, v)
    matrices = None if projections is None else torch.as_tensor(projections).float()
    if matrices is not None and matrices.shape[:2] != (q.shape[1], v.shape[3]):
        raise ValueError(
            f"projections have shape {tuple(matrices.shape)}; they must be ({q.shape[1]}, {v.shape[3]}, residual)"
        )
    scale = k.shape[3] ** -0.5 if scale is None else float(checks.number("scale", scale, at_least=1e-30))
    roots = roots_of(matrices, (*future.queries.shape[1:3], v.shape[3]), k.device)
    return Layer(k, v, k.new_zeros(k.shape[:3]), scale, future, roots)


def _one(layer: Layer, g: int) -> Layer:
    """One head of keys of a layer."""
    at = slice(g, g + 1)
    future = Future(*(part[:, at] for part in layer.future))
    roots = layer.roots[:, at]
    return Layer(layer.keys[:, at], layer.values[:, at], layer.log_weights[:, at], layer.scale, future, roots)


def _rest(layer: Layer, kept: Tensor) -> tuple[float, Tensor, Tensor]:
    """Weight, mean and covariance of the tokens that are not kept, in float64."""
    left = torch.ones(layer.keys.shape[2], dtype=torch.bool, device=layer.keys.device)
    left[kept[0, 0]] = False
    tokens = torch.cat([layer.keys, layer.values], dim=-1)[0, 0, left].double()
    centred = tokens - tokens.mean(dim=0)
    return float(left.sum()), tokens.mean(dim=0), centred.T @ centred / len(tokens)


def _variance(layer: Layer, covariance: Tensor) -> Tensor:
    """The variance of scores under the Gaussian, for each query."""
    k = layer.keys.shape[-1]
    q = layer.future.queries.double() * layer.scale
    return ((q @ covariance[:k, :k]) * q).sum(dim=-1)


def _with(layer: Layer, law: tuple[float, Tensor, Tensor]) -> Future:
    """The law of queries with a Gaussian among what each has read beside the atoms."""
    (count, mean, covariance), k = law, layer.keys.shape[-1]
    q = layer.future.queries.double() * layer.scale
    gate = math.log(count) + q @ mean[:k] + _variance(layer, covariance) / 2
    value = mean[k:] + q @ covariance[:k, k:]
    total = torch.logaddexp(gate, layer.future.log_mass.double())
    output = torch.exp(gate - total)[..., None] * value
    output = output + torch.exp(layer.future.log_mass.double() - total)[..., None] * layer.future.output
    return Future(layer.future.queries, total.float(), output.float())


def _may_stand(layer: Layer, reading: Reading, kept: Tensor, law: tuple[float, Tensor, Tensor]) -> bool:
    """Whether the rest is in the large-prompt regime: below the threshold, with light tails, for most queries."""
    count, _, covariance = law
    if count < 25:
        return False
    below = (_variance(layer, covariance) < 2 * math.log(count)).double().mean()
    left = torch.ones(layer.keys.shape[2], dtype=torch.bool, device=layer.keys.device)
    left[kept[0, 0]] = False
    tails = [
        tail_index(weights[left].double().cpu().numpy()) for weights in average_weights(layer, reading, power=1)[0, 0]
    ]
    return float(below) >= _BELOW and float(np.median(tails)) <= HEAVIEST


def _head(layer: Layer, reading: Reading, atoms: Atoms, law: tuple[float, Tensor, Tensor] | None) -> CompressedHead:
    keys, values, weights, kept = (part[0, 0].cpu().numpy() for part in atoms)
    errors = relative_error(layer, reading, atoms)[0, 0].cpu().numpy()
    made = CompressedHead(keys, values, np.exp(weights), kept, errors, layer.keys.shape[2])
    if law is None:
        return made
    gaussian = Gaussian(law[1].cpu().numpy(), law[2].cpu().numpy())
    return dataclasses.replace(made, gaussian=gaussian, gaussian_weight=law[0])
