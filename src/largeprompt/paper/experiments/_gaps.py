"""The gap between softmax and linear attention with the same weights, before training: exact, measured and bounded."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt import _checks as checks
from largeprompt.attention import Head
from largeprompt.concentration import bounds
from largeprompt.icl import LinearRegression, initial_gaps, norm, risk, risk_gradient, root, squared_mean, widened
from largeprompt.lab import Progress, Run
from largeprompt.paper.choice import Conventions
from largeprompt.paper.experiment import Computation

QUANTITIES = ("output", "risk-gradient")
BATCHES = 200  # of prompts, whose means give the errors
_MOST, _LONG = 16, 1000  # short prompts are cheap: up to 16 times as many, as many as tokens of prompts of 1000


@dataclasses.dataclass(frozen=True)
class Gaps(Computation):
    r"""By draw of the weights and by length: $E(T-T')^2$ of predictions, and $\|\nabla R-\nabla R'\|^2$ of risks.

    `exact` over prompts, with `draws` nodes for queries and coefficients; `measured` on `prompts` sampled prompts or
    more, each read by the first `measured_heads` heads. The gradients are those in K, Q, V and O. `bound_log10` is what
    the paper bounds, softmax attention against its limit, and by the triangle inequality the exact distance of linear
    attention from the same limit. `size` is the squared norm of linear attention's own gradient.
    """

    words: ClassVar[str] = "gaps before training, {covariance}"

    covariance: str
    lengths: tuple[int, ...]
    heads: int
    prompts: int
    conventions: Conventions = dataclasses.field(default_factory=Conventions)
    measured_heads: int = 8
    draws: int = 2**15
    seed: int = 0

    def __post_init__(self):
        for name, least in (("heads", 1), ("prompts", 2), ("measured_heads", 1), ("draws", 2)):
            checks.count(name, getattr(self, name), at_least=least)
        if self.measured_heads > self.heads:
            object.__setattr__(self, "measured_heads", self.heads)

    @property
    def seconds(self) -> float:
        tokens = sum(L * self.sampled(L) for L in self.lengths)
        exact = self.heads * len(self.lengths) * (0.04 + 1.5e-6 * self.draws)
        return 10 + exact + tokens * (1e-7 + 1e-8 * self.measured_heads)

    def sampled(self, L: int) -> int:
        """How many prompts of a length are sampled: whole batches."""
        batch = -(-self.prompts * min(_MOST, max(1, _LONG // L)) // BATCHES)
        return BATCHES * batch

    def pairs(self) -> list[tuple[Head, Head]]:
        """Softmax and linear attention of each draw of the weights, as a training would start from them."""
        return [self._run(seed).layers() for seed in range(self.heads)]

    def _run(self, seed: int) -> Run:
        convention: Any = dataclasses.asdict(self.conventions)
        return Run(sigma=self.covariance, d=5, weight_seed=seed, **convention)

    def _compute(self, progress: Progress) -> xr.Dataset:
        task, pairs = self._run(0).task(), self.pairs()
        columns, refusals = [], {}
        with progress.task(self.title, len(self.lengths)) as advance:
            for L in self.lengths:
                columns.append(xr.Dataset(self._exact(pairs, task, L, refusals) | self._measured(pairs, task, L)))
                advance(1, f"L = {L}")
        found = xr.concat(columns, "L").transpose("quantity", "head", "L")
        found["prompts"] = "L", np.array([self.sampled(L) for L in self.lengths], np.int32)
        heads, lengths = np.arange(self.heads, dtype=np.int32), np.asarray(self.lengths, np.int32)
        return found.assign_coords(quantity=list(QUANTITIES), head=heads, L=lengths).assign_attrs(
            covariance=self.covariance,
            measured_heads=self.measured_heads,
            sampler="whole prompts; queries and coefficients from a wider law, importance-weighted",
            bound_refusal="; ".join(dict.fromkeys(refusals.values())),
        )

    def _exact(
        self, pairs: list[tuple[Head, Head]], task: LinearRegression, L: int, refusals: dict[str, str]
    ) -> dict[str, Any]:
        key, squared = jax.random.key(self.seed), self.conventions.loss_factor**2
        rows = []
        for softmax, linear in pairs:
            output, gradient = initial_gaps(softmax, linear, task, L, key, self.draws)
            found = np.array([[output.value, output.stderr], [gradient.value * squared, gradient.stderr * squared]])
            finite, infinite = (risk_gradient(linear, task, length).layer for length in (L, math.inf))
            # the mean of linear attention over prompts is its limit, so that risks differ by half its mean square
            apart = 2 * float(risk(linear, task, L).value - risk(linear, task, math.inf).value)
            distances = math.sqrt(apart), float(norm(jax.tree.map(jnp.subtract, finite, infinite)))
            bound = [_bound_log10(softmax, task, L, q, d, refusals) for q, d in zip(QUANTITIES, distances, strict=True)]
            bound[1] += math.log10(squared)
            rows.append((found, np.array(bound), squared * float(norm(finite)) ** 2))
        values, limits, sizes = (np.stack(part) for part in zip(*rows, strict=True))
        both = {"exact": values[:, :, 0].T, "exact_stderr": values[:, :, 1].T, "bound_log10": limits.T}
        return {name: (("quantity", "head"), part) for name, part in both.items()} | {"size": ("head", sizes)}

    def _measured(self, pairs: list[tuple[Head, Head]], task: LinearRegression, L: int) -> dict[str, Any]:
        h = self.measured_heads
        squares, rows = differences([softmax for softmax, _ in pairs[:h]], task, L, self.sampled(L), self.seed)
        rows *= self.conventions.loss_factor
        value, error = np.full((2, self.heads), math.nan), np.full((2, self.heads), math.nan)
        value[0, :h], error[0, :h] = squares.mean(axis=0), standard_error(squares)
        for i in range(h):
            value[1, i], error[1, i] = squared_mean(rows[:, i])
        # heads read the same prompts: the error of their mean is not that of independent ones
        together, of_all = squared_mean(rows.reshape(len(rows), -1))
        mean, mean_error = [squares.mean(), together / h], [standard_error(squares.mean(axis=1)), of_all / h]
        return {
            "measured": (("quantity", "head"), value),
            "measured_stderr": (("quantity", "head"), error),
            "measured_mean": ("quantity", np.asarray(mean, float)),
            "measured_mean_stderr": ("quantity", np.asarray(mean_error, float)),
        }


def standard_error(rows: np.ndarray) -> Any:
    """Of the mean over the first axis; not a number where that has one row."""

    n = len(rows)
    return rows.std(axis=0, ddof=1) / math.sqrt(n) if n > 1 else np.full(rows.shape[1:], math.nan)


def _bound_log10(
    softmax: Head, task: LinearRegression, L: int, quantity: str, distance: float, refusals: dict[str, str]
) -> float:
    """Twice log₁₀ of the bound on softmax attention's distance from the limit plus linear attention's."""
    try:
        if quantity == "output":
            # Δ² ≥ E‖T_L − T_∞‖² over tasks, as the bound on the risk has it
            log = (bounds.bound(softmax, task, None, L, "risk").terms["½Δ²"] + math.log(2)) / 2
        else:
            log = bounds.bound(softmax, task, None, L, quantity).log
    except ValueError as error:
        refusals[quantity] = f"{quantity}: {error}"
        return math.nan
    return 2 * float(np.logaddexp(log, math.log(max(distance, 1e-300)))) / math.log(10)


class _Prompts(NamedTuple):
    """Sampled instances with their weights; `z` are queries, `y` targets, `Gamma` the covariances of tokens."""

    tokens: Float[np.ndarray, "b D L"]
    Gamma: Float[np.ndarray, "b D D"]
    z: Float[np.ndarray, "b D"]
    y: Float[np.ndarray, " b"]
    weights: Float[np.ndarray, " b"]


class _Reading(NamedTuple):
    """What a head reads off each prompt, m, and its slope along v, Hv."""

    m: Float[np.ndarray, "b h D"]
    Hv: Float[np.ndarray, "b h D"]


def differences(
    heads: list[Head], task: LinearRegression, L: int, prompts: int, seed: int
) -> tuple[Float[np.ndarray, "b h"], Float[np.ndarray, "b h p"]]:
    r"""Softmax minus linear attention, means over batches of prompts: squared predictions, and gradients of losses.

    Their means are the mean square, and the difference of the gradients of the risks in K, Q, V and O, in coordinates
    that keep its norm. To first order in $1/\sqrt L$ a difference of gradients is linear in token averages
    whose means are exactly 0, because the law is known: that part is taken out, unless its own tails make matters
    worse.
    """
    merged = [head.merged() for head in heads]
    U = np.stack([np.asarray(attention.U, float) for attention in merged])
    v = np.stack([np.asarray(attention.V, float)[-1] for attention in merged])
    chains = np.stack([_chain(head) for head in heads])
    squares, rows, controls = [], [], []
    for batch in _sampled(task, L, prompts, seed):
        limit, softmax, linear, first_order = _readings(batch, U, v)
        T, T_linear, T_limit = (np.einsum("hi,bhi->bh", v, reading.m) for reading in (softmax, linear, limit))
        squares.append(np.mean(batch.weights[:, None] * (T - T_linear) ** 2, axis=0))
        loss_slope, loss_slope_linear, loss_slope_limit = (
            (output - batch.y[:, None])[..., None] for output in (T, T_linear, T_limit)
        )
        of_difference = [loss_slope * a - loss_slope_linear * b for a, b in zip(softmax, linear, strict=True)]
        moved = [a - (b - c) for a, b, c in zip(first_order, linear, limit, strict=True)]
        by = np.einsum("hi,bhi->bh", v, moved[0])[..., None]
        of_control = [by * a + loss_slope_limit * b for a, b in zip(limit, moved, strict=True)]
        for kept, (of_v, of_u) in ((rows, of_difference), (controls, of_control)):
            of_U = np.einsum("bhi,bj->bhij", of_u, batch.z).reshape(*T.shape, -1)
            mean = np.tensordot(batch.weights, np.concatenate([of_U, of_v], axis=2), axes=1) / len(batch.weights)
            kept.append(np.einsum("hn,hnp->hp", mean, chains))
    plain, control = np.stack(rows), np.stack(controls)
    left = plain - control
    better = left.var(axis=0).sum(axis=1) < plain.var(axis=0).sum(axis=1)
    return np.stack(squares), np.where(better[:, None], left, plain)


def _chain(head: Head) -> Float[np.ndarray, "n n"]:
    """From derivatives in U and the last row of V, of the merged form, to those in K, Q, V and O, up to a rotation."""
    leaves = jax.tree.leaves(_derivatives(*eqx.partition(head, eqx.is_inexact_array)))
    whole = np.concatenate([np.asarray(leaf, float).reshape(len(leaf), -1) for leaf in leaves], axis=1)
    return np.asarray(np.linalg.qr(whole.T, mode="r")).T


@eqx.filter_jit  # heads of one shape share it
def _derivatives(parameters: Any, static: Any) -> Any:
    """Of U and the last row of V in the parameters."""

    def products(parameters):
        merged = eqx.combine(parameters, static).merged()
        return jnp.concatenate([merged.U.ravel(), merged.V[-1]])

    return jax.jacrev(products)(parameters)


def _sampled(task: LinearRegression, L: int, prompts: int, seed: int) -> Iterator[_Prompts]:
    """Prompts in equal batches; tokens in single precision, whose rounding is far below what prompts differ by."""
    rng, d, D = np.random.default_rng([seed, L]), task.d, task.dim
    half, of_query, of_task = (np.asarray(root(M), float) for M in (task.Sigma, task.query_Sigma, task.Omega))
    s = math.sqrt(float(task.noise))
    b = prompts // BATCHES
    for _ in range(BATCHES):
        normal, weights = widened(rng.standard_normal((b, 2 * d)))
        x, w = normal[:, :d] @ of_query, normal[:, d:] @ of_task
        C = np.zeros((b, D, D))
        C[:, :d, :d], C[:, d, :d], C[:, d, d] = half, w @ half, s
        tokens = C.astype(np.float32) @ rng.standard_normal((b, D, L), dtype=np.float32)
        y = np.sum(w * x, axis=1) + s * rng.standard_normal(b)
        yield _Prompts(tokens, C @ C.transpose(0, 2, 1), np.pad(x, ((0, 0), (0, 1))), y, weights)


def _readings(batch: _Prompts, U: Float[np.ndarray, "h D D"], v: Float[np.ndarray, "h D"]) -> tuple[_Reading, ...]:
    """What the law, softmax and linear attention give; and how far softmax is from the law, to first order."""
    tokens, transposed, L = batch.tokens, batch.tokens.transpose(0, 2, 1), batch.tokens.shape[2]
    u = np.einsum("hij,bj->bhi", U, batch.z)

    def along(m):
        return np.einsum("hi,bhi->bh", v, m)[..., None]

    def of_second_moments(second):
        return _Reading(np.einsum("bij,bhj->bhi", second, u), np.einsum("bij,hj->bhi", second, v))

    scores = u.astype(np.float32) @ tokens
    top = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2, dtype=float)[..., None]
    first = (weights @ transposed).astype(float)
    second = ((weights * (v.astype(np.float32) @ tokens)) @ transposed).astype(float)
    m = first / total
    limit, softmax = of_second_moments(batch.Gamma), _Reading(m, second / total - along(m) * m)
    linear = of_second_moments((tokens @ transposed).astype(float) / L)
    # weights with the mean 1 under the law, in place of those with the largest 1
    nu = np.sum(u * limit.m, axis=2, keepdims=True)
    scale = np.exp(top - nu / 2) / L
    # fades where these weights have tails too heavy to be met, by a factor of the query alone: the mean stays 0
    scale /= 1 + np.exp(2 * nu) / L
    spread = second - along(first) * limit.m - along(limit.m) * first
    spread += total * (along(limit.m) * limit.m - limit.Hv)
    return limit, softmax, linear, _Reading(scale * (first - total * limit.m), scale * spread)
