"""Squared differences on drawn prompts: two ways to draw them, and their mean, error and tail at one length."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt._device import DeviceName
from largeprompt.measures import AbstractMeasure, Empirical
from largeprompt.measures._from_sampler import resampled, sampled_parts
from largeprompt.measures._worth import Worth

from ._gaussian_prompts import GaussianPrompts
from ._memory import refuse_what_does_not_fit
from ._problem import Problem
from ._prompts import reader_of, sizes, squares
from ._query_draws import PlainQueries, WiderQueries
from ._reliability import interval, reliability
from ._stand_in import changes, chosen_queries, doubt_at

LEVELS = (0.05, 0.5, 0.95)
QUERIES = 8  # for each prompt, where drawing the prompt is the larger cost
_ALL = 64  # atoms of a law of queries up to which each prompt sees them all
_FOR_FIXED, _FOR_DRAWN = 64, 16  # prompts on which the error of a sampled law is found
Draws = PlainQueries | WiderQueries


class Sample(NamedTuple):
    """Squares at one length: an array for each quantity, prompts in rows, and the weights of their queries.

    `errors` are those of the limits, for each quantity. Where there is a `doubt`, the limit is that of too few tokens.
    """

    squares: dict[str, np.ndarray]
    weights: np.ndarray
    method: str
    errors: Sequence[float]
    doubt: Worth | None = None

    def point(self, name: str, L: int) -> dict[str, Any]:
        """The numbers of a `Deviation` for one quantity at this length."""
        values, error = self.squares[name], float(self.errors[list(self.squares).index(name)])
        refuse_overflow(name, L, values)
        of_prompts = (self.weights * values).mean(axis=1)
        mean, (low, high) = float(of_prompts.mean()), interval(of_prompts, L)
        stderr = math.hypot(of_prompts.std(ddof=1) / math.sqrt(len(of_prompts)), error)
        found = reliability(of_prompts, stderr / mean if error > 0 < mean else None)
        if self.doubt is not None or error > mean / 3:  # more prompts would not help
            found = found._replace(trusted=found.trusted and self.doubt is None, needed=math.inf)
        return found._asdict() | {
            "mean_square": mean,
            "stderr": stderr,
            "low": mean - math.hypot(mean - low, 1.96 * error),
            "high": mean + math.hypot(high - mean, 1.96 * error),
            "quantiles": np.quantile(values, LEVELS, weights=self.weights, method="inverted_cdf"),
        }


def refuse_overflow(name: str, L: int, values: np.ndarray) -> None:
    """Refuse squares or differences that are not all finite."""
    if not np.isfinite(values).all():
        raise ValueError(f"the deviation of {name} at L = {L} overflows; use smaller weights or a wider type")


def batched_keys(key: PRNGKeyArray, batch: int, count: int) -> tuple[Array, int]:
    """Keys of `count` prompts or a few more, whole batches of them, and the size of a batch."""
    batch = min(batch, 2 ** math.ceil(math.log2(count)))
    return jax.random.split(key, -(-count // batch) * batch), batch


def in_batches(found: Callable[[Array], Sequence[Any]], keys: Array, batch: int, count: int) -> list[np.ndarray]:
    """What is found for `count` keys, of whole batches, the last one cut: one shape is compiled."""
    parts = [[np.asarray(part, float) for part in found(keys[i : i + batch])] for i in range(0, count, batch)]
    return [np.concatenate(part)[:count] for part in zip(*parts, strict=True)]


class ReducedPrompts(NamedTuple):
    """Gaussian prompts of one softmax or linear head, drawn through their sufficient statistics, one query each."""

    problem: Problem
    prompts: GaussianPrompts
    draws: Draws
    device: DeviceName

    def serves(self, L: int) -> bool:
        """Whether prompts of this length can be drawn so."""
        return self.prompts.serves(L, self.problem.slopes)

    def sample(self, L: int, key: PRNGKeyArray, replicates: int) -> Sample:
        """The squares of so many prompts."""
        of_queries, of_prompts = jax.random.split(key)
        z, weights = (np.asarray(part, float) for part in self.draws.draw(of_queries, replicates))
        forms = [square.each[0] for square in self.problem.squares.values()]
        values = self.prompts.squares(forms, z, L, _seed(of_prompts), 0, self.problem.query_in_prompt, self.device)
        named = {name: value[:, None] for name, value in zip(self.problem.quantities, values, strict=True)}
        method = "Gaussian prompts through their sufficient statistics, one query each"
        return Sample(named, weights[:, None], method, [0.0] * len(named))


def _seed(key: PRNGKeyArray) -> int:
    words = np.asarray(jax.random.bits(key, (2,), jnp.uint32)).astype(np.uint64)
    return int(words[0]) + (int(words[1] >> np.uint64(1)) << 32)


class TokenPrompts:
    """Prompts of any law for any layer, token by token, each seen by several queries."""

    def __init__(self, problem: Problem, draws: Draws, queries: int | None, replicates: int, device: DeviceName):
        self.problem, self.draws = problem, draws
        self.device: DeviceName = device
        self.reader = reader_of(problem.layer, problem.heads, problem.slopes)
        nu = problem.nu
        self.fixed = None
        if queries is None and isinstance(nu, Empirical) and nu.size <= _ALL:
            self.fixed = nu.points if nu.log_weights is None and not np.any(nu.theta) else None
        each = QUERIES if queries is None else queries
        self.queries = len(self.fixed) if self.fixed is not None else each
        longest, dim = max(problem.lengths), problem.mu.dim
        held = 2 * (len(problem.quantities) + 1) * replicates * each + self.reader.numbers(longest, each, dim)[1]
        self.reader.chunk(longest, each, dim)  # refuses prompts that are too long to hold
        refuse_what_does_not_fit(f"the deviation of {', '.join(problem.quantities)}", problem.mu, held)

    def sample(self, L: int, key: PRNGKeyArray, replicates: int) -> Sample:
        """The squares of so many prompts."""
        chunk, batch = sizes(self.reader, L, self.queries, self.problem.mu.dim, self.device)
        keys, batch = batched_keys(key, batch, replicates)

        def squares_of(mu: AbstractMeasure, keys: Array, batch: int, count: int) -> list[np.ndarray]:
            known = list(self.problem.squares.values())
            options = (jnp.asarray(L), chunk, self.queries, self.problem.query_in_prompt)

            def found(keys):
                values, weights = squares(self.reader, mu, self.draws, self.fixed, known, keys, *options)
                return *values, weights

            return in_batches(found, keys, batch, count)

        *values, weights = squares_of(self.problem.mu, keys, batch, replicates)
        errors, doubt = np.zeros(len(values)), None
        if sampled_parts(self.problem.mu):
            errors, doubt = self._stand_in(squares_of, values, weights, keys, batch)
        named = dict(zip(self.problem.quantities, values, strict=True))
        return Sample(named, weights, f"whole prompts, {self.queries} queries each", errors.tolist(), doubt)

    def _stand_in(self, squares_of, values, weights, keys, batch: int) -> tuple[np.ndarray, Worth | None]:
        """What the tokens that stand in for the law add to the error of each square; their worth, where it is poor."""
        mu = self.problem.mu
        some = min(len(weights), _FOR_FIXED if self.fixed is not None else _FOR_DRAWN)
        batch = min(batch, 2 ** int(math.log2(some)))
        first = keys[: -(-some // batch) * batch]

        def means(key: PRNGKeyArray | None) -> list[Any]:
            *values, weights = squares_of(mu if key is None else resampled(mu, key), first, batch, some)
            return [np.mean(weights * value) for value in values]

        errors = changes(means, jax.random.fold_in(keys[0], 1))
        shares = (weights * sum(value / max(float(value.mean()), 1e-300) for value in values)).ravel()
        z = np.stack([self._query(keys, *divmod(i, weights.shape[1])) for i in chosen_queries(shares)])
        doubt, caution = doubt_at(mu, self.problem.heads or (), z, self.problem.slopes, 1)
        return caution * errors, doubt

    def _query(self, keys: Array, prompt: int, i: int) -> Float[np.ndarray, " D"]:
        if self.fixed is not None:
            return np.asarray(self.fixed[i], float)
        return np.asarray(self.draws.draw(jax.random.split(keys[prompt])[0], self.queries)[0][i], float)
