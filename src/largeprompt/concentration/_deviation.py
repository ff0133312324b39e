import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._device import Device
from largeprompt._display import AbstractTable, dataset, length_axes
from largeprompt.attention import AbstractLayer, known_heads
from largeprompt.measures import AbstractMeasure, Empirical

from ._fit import RateFit, fit_power_law
from ._gaussian_prompts import GaussianPrompts
from ._memory import refuse_what_does_not_fit
from ._place import carried_out_on
from ._prompts import squares
from ._quantities import OF_RISK, Form, Queries, Several, Tokens, chosen, laws, lengths
from ._query_draws import query_draws
from ._readers import SummedHeads, WholePrompts, reader_of
from ._reliability import interval, reliability
from ._stand_in import FewTokensWarning, Worth, changes, chosen_queries, doubt_at, sampled_parts

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset

LEVELS = (0.05, 0.5, 0.95)
_QUERIES = 8  # a prompt, where drawing the prompt is the larger cost
_ALL = 64  # atoms of a law of queries up to which each prompt sees them all
_HELD = 2**27  # squares, at most
_FOR_FIXED, _FOR_DRAWN = 64, 16  # prompts on which the error of a sampled law is found
LONGEST = 2**31 - 1  # tokens of a prompt that is drawn: their count is a whole number of 32 bits


class Deviation(AbstractTable):
    r"""How far a quantity of a layer on L tokens is from its limit: the mean of $\|X_L - X\|^2$, for each length.

    `stderr` and the 95 % interval from `low` to `high` are over independent prompts; `quantiles` are those of the
    squares at `levels`, over prompts and queries. `effective` is the number of equally large squares that would carry
    the same error, `tail` the index of their tail, `needed` how many prompts a standard error of a tenth takes
    (infinite where the mean itself seems to be), and `trusted` whether the mean is no worse than it seems. For risks
    `mean_square` is the square of the difference of the means, and `gap` that difference or its norm.
    """

    quantity: str = eqx.field(static=True)
    L: Int[np.ndarray, " k"]
    mean_square: Float[np.ndarray, " k"]
    stderr: Float[np.ndarray, " k"]
    low: Float[np.ndarray, " k"]
    high: Float[np.ndarray, " k"]
    quantiles: Float[np.ndarray, "k 3"]
    effective: Float[np.ndarray, " k"]
    tail: Float[np.ndarray, " k"]
    needed: Float[np.ndarray, " k"]
    trusted: Bool[np.ndarray, " k"]
    replicates: int = eqx.field(static=True)
    method: str = eqx.field(static=True)
    gap: Float[np.ndarray, " k"] | None = None
    gap_stderr: Float[np.ndarray, " k"] | None = None
    levels: tuple[float, ...] = eqx.field(static=True, default=LEVELS)

    def fit(self, at_least: float = 0) -> RateFit:
        """The power law through the trusted points from the length `at_least` on."""
        keep = (at_least <= self.L) & self.trusted
        return fit_power_law(self.L[keep], self.mean_square[keep], self.stderr[keep])

    def to_dataset(self) -> "Dataset":
        names = ("mean_square", "stderr", "low", "high", "gap", "gap_stderr", "effective", "tail", "needed", "trusted")
        return dataset(
            "L",
            self.L,
            {name: getattr(self, name) for name in names} | {"quantiles": ("level", self.quantiles)},
            {"quantity": self.quantity, "replicates": self.replicates, "method": self.method},
        ).assign_coords(level=list(self.levels))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The measured mean squares by length with their 95 % intervals; hollow where they are not to be trusted."""
        ax = length_axes(ax, self.quantity)
        for kept, face, label in ((self.trusted, None, "measured"), (~self.trusted, "none", "measured, not trusted")):
            if np.any(kept):
                square = self.mean_square[kept]
                bars = np.maximum([square - self.low[kept], self.high[kept] - square], 0)
                ax.errorbar(self.L[kept], square, bars, fmt="o", capsize=2, color="C0", mfc=face, label=label)
        ax.legend()
        return ax


Done = Callable[[int], None]


@overload
def deviation(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    Ls: object,
    quantity: str,
    key: PRNGKeyArray,
    *,
    replicates: int = 1000,
    queries: int | None = None,
    query_in_prompt: bool = False,
    sampler: str = "auto",
    widen: bool = True,
    device: Device = "auto",
    done: Done | None = None,
) -> Deviation: ...
@overload
def deviation(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    Ls: object,
    quantity: Several,
    key: PRNGKeyArray,
    *,
    replicates: int = 1000,
    queries: int | None = None,
    query_in_prompt: bool = False,
    sampler: str = "auto",
    widen: bool = True,
    device: Device = "auto",
    done: Done | None = None,
) -> dict[str, Deviation]: ...
def deviation(
    layer: AbstractLayer,
    mu: Tokens,
    nu: Queries,
    Ls: object,
    quantity: str | Several,
    key: PRNGKeyArray,
    *,
    replicates: int = 1000,
    queries: int | None = None,
    query_in_prompt: bool = False,
    sampler: str = "auto",
    widen: bool = True,
    device: Device = "auto",
    done: Done | None = None,
) -> Deviation | dict[str, Deviation]:
    r"""$E\|X_L - X\|^2$ over fresh prompts of L tokens of `mu` and queries of `nu`, measured, for each L.

    `quantity` is "output", a Jacobian ("V", "U", "K", "Q", "O", or "gradient" for all of the layer's own parameters at
    once), or several of them on the same prompts; for a task in place of `mu`, "risk" or "risk-gradient". Any layer
    will do: of several heads a Jacobian is that in the matrices of all, and a layer that is not softmax or linear
    attention or a sum of such heads is asked for its outputs and Jacobians on prompts that are held whole. `nu` is a
    law (by default that of the tokens) or an array of queries. Each of `replicates` prompts is seen by `queries` fresh
    queries, or by all of a few given ones. Gaussian prompts of one head are drawn through what attention sees of them,
    one query each, unless `sampler` is "tokens". With `widen`, Gaussian queries come from a wider law and are weighed
    back, which tames the tails. Prompts are drawn on a GPU where JAX has one, unless `device` is "cpu". Warns where
    heavy tails leave an estimate that cannot be trusted. Paper: the left-hand sides of Propositions 3.1 and 3.4; with
    `query_in_prompt`, Remark 3.2.
    """
    names, Ls = chosen(quantity), lengths(Ls)
    if max(Ls) > LONGEST:
        raise ValueError(f"Ls has {max(Ls)}; prompts of up to {LONGEST} tokens are drawn, longer ones only predicted")
    replicates = checks.count("replicates", replicates, at_least=2)
    each = _QUERIES if queries is None else checks.count("queries", queries)
    if replicates * each > _HELD:
        raise ValueError(f"replicates is {replicates} with {each} queries each; at most {_HELD} in all are held")
    key = checks.key(key)
    if sampler not in ("auto", "tokens"):
        raise ValueError(f"sampler is {sampler!r}; it must be 'auto' or 'tokens'")
    with carried_out_on(device) as place:
        if names[0] in OF_RISK:
            from ._risks import risk_deviation

            found = risk_deviation(layer, mu, nu, Ls, names, key, replicates, query_in_prompt, place, done)
            for result in found.values():
                _warn(result, ~result.trusted)
        else:
            options = (replicates, queries, query_in_prompt, sampler, widen, place, done)
            found = _of_layer(layer, mu, nu, Ls, names, key, *options)
    return found[names[0]] if isinstance(quantity, str) else found


def _of_layer(layer, mu, nu, Ls, names, key, replicates, queries, query_in_prompt, sampler, widen, place, done):
    layer, mu, nu = laws(layer, mu, nu)
    heads = known_heads(layer) or ()
    reader, found = reader_of(layer, mu, names)
    known = list(found.values())
    size = min((part.stand_in.size for part in sampled_parts(mu)), default=math.inf)
    if max(Ls) > size / 10:
        warnings.warn(
            f"mu is known by a sampler, and {size} tokens stand in for it: below about c/{size} a deviation is that of "
            "the stand-in; give FromSampler a larger size",
            stacklevel=3,
        )
    each = _QUERIES if queries is None else int(queries)
    squares_held = 2 * (len(known) + 1) * replicates * each
    reader.sizes(max(Ls), each, mu.dim, place)  # refuses prompts that are too long to hold
    numbers = reader.numbers_held(max(Ls), each, mu.dim) + squares_held
    refuse_what_does_not_fit(f"the deviation of {', '.join(names)}", mu, numbers)
    reduced = GaussianPrompts.of(heads[0], mu) if sampler == "auto" and queries is None and len(heads) == 1 else None
    draws = query_draws(heads, mu, nu, widen)
    curves, methods = [], set()
    errors = np.zeros((len(known), len(Ls)))
    doubts: list[Worth | None] = [None] * len(Ls)
    for i, L in enumerate(Ls):
        at_length = jax.random.fold_in(key, L)
        if reduced is not None and reduced.serves(L, reader.slopes):
            own = [form.each[0] for form in known]
            values, weights = _reduced(reduced, own, draws, L, at_length, replicates, query_in_prompt, place)
            methods.add("Gaussian prompts through what attention sees of them, one query each")
        else:
            prompts = _Prompts.planned(reader, mu, nu, draws, known, L, at_length, replicates, queries, place)
            values, weights = prompts.squares(mu, query_in_prompt, replicates)
            if size < math.inf:
                errors[:, i], doubts[i] = prompts.stand_in(values, weights, query_in_prompt)
            methods.add(f"whole prompts, {values[0].shape[1]} queries each")
        curves.append((values, weights))
        if done is not None:
            done(L)
    method = "; ".join(sorted(methods))
    if (doubt := next(filter(None, doubts), None)) is not None:
        warnings.warn(f"{', '.join(names)} cannot be trusted: {doubt.sentence}", FewTokensWarning, stacklevel=3)
    found = {
        name: summary(name, Ls, [(values[i], weights) for values, weights in curves], method, errors[i], doubts)
        for i, name in enumerate(names)
    }
    for result in found.values():
        _warn(result, ~result.trusted & np.array([doubt is None for doubt in doubts]))
    return found


def _seed(key: PRNGKeyArray) -> int:
    words = np.asarray(jax.random.bits(key, (2,), jnp.uint32)).astype(np.uint64)
    return int(words[0]) + (int(words[1] >> np.uint64(1)) << 32)


def _reduced(reduced: GaussianPrompts, known: list[Form], draws, L, key, replicates, query_in_prompt, place):
    of_queries, of_prompts = jax.random.split(key)
    z, weights = (np.asarray(part, float) for part in draws.draw(of_queries, replicates))
    values = reduced.squares(known, z, L, _seed(of_prompts), 0, query_in_prompt, place)
    return [value[:, None] for value in values], weights[:, None]


class _Prompts(NamedTuple):
    """Prompts of one length that are drawn whole: the keys of each, and how many are drawn at once."""

    reader: SummedHeads | WholePrompts
    mu: AbstractMeasure
    draws: Any
    fixed: Any
    known: list[Any]
    keys: Any
    L: int
    chunk: int
    queries: int
    batch: int

    @classmethod
    def planned(cls, reader, mu, nu, draws, known, L, key, replicates, queries, place) -> "_Prompts":
        few = isinstance(nu, Empirical) and nu.log_weights is None and nu.size <= _ALL and not np.any(nu.theta)
        fixed = nu.points if queries is None and few else None
        count = len(fixed) if fixed is not None else _QUERIES if queries is None else int(queries)
        chunk, batch = reader.sizes(L, count, mu.dim, place)
        batch = min(batch, 2 ** math.ceil(math.log2(replicates)))
        keys = jax.random.split(key, -(-replicates // batch) * batch)
        return cls(reader, mu, draws, fixed, known, keys, L, chunk, count, batch)

    def squares(self, mu: AbstractMeasure, query_in_prompt: bool, replicates: int):
        """The squares of each form, prompts in rows, and the queries' weights; `mu` may be another law."""
        parts = []
        for i in range(0, replicates, self.batch):  # whole batches, the last one cut: one shape is compiled
            options = (jnp.asarray(self.L), self.chunk, self.queries, query_in_prompt)
            keys = self.keys[i : i + self.batch]
            values, weights = squares(self.reader, mu, self.draws, self.fixed, self.known, keys, *options)
            parts.append([np.asarray(part, float) for part in (*values, weights)])
        *values, weights = (np.concatenate(part)[:replicates] for part in zip(*parts, strict=True))
        return values, weights

    def stand_in(self, values, weights, query_in_prompt: bool) -> tuple[np.ndarray, Worth | None]:
        """What the tokens that stand in for the law add to the error of each form, and their worth where it is poor."""
        some = min(len(weights), _FOR_FIXED if self.fixed is not None else _FOR_DRAWN)
        part = self._replace(batch=min(self.batch, 2 ** int(math.log2(some))))
        part = part._replace(keys=self.keys[: -(-some // part.batch) * part.batch])

        def means(mu):
            values, weights = part.squares(mu, query_in_prompt, some)
            return np.array([(weights * value).mean() for value in values])

        errors = changes(self.mu, jax.random.fold_in(self.keys[0], 1), means)
        shares = (weights * sum(value / max(float(value.mean()), 1e-300) for value in values)).ravel()
        which = chosen_queries(shares)
        z = np.stack([self._query(i // weights.shape[1], i % weights.shape[1]) for i in which])
        heads = self.reader.heads if isinstance(self.reader, SummedHeads) else ()
        doubt, caution = doubt_at(self.mu, heads, z, self.reader.slopes, 1)
        return caution * errors, doubt

    def _query(self, prompt: int, i: int) -> np.ndarray:
        if self.fixed is not None:
            return np.asarray(self.fixed[i], float)
        return np.asarray(self.draws.draw(jax.random.split(self.keys[prompt])[0], self.queries)[0][i], float)


def summary(
    name: str,
    Ls: Sequence[int],
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    method: str,
    of_limits: Float[np.ndarray, " k"],
    doubts: Sequence[Worth | None],
) -> Deviation:
    """The curve of one quantity from its squares and their weights, prompts in rows; `of_limits` is the limits' error.

    Where there is a doubt, the limit is that of too few tokens.
    """
    points = []
    for L, (values, weights), error, doubt in zip(Ls, curves, of_limits, doubts, strict=True):
        refuse_overflow(name, L, values)
        of_prompts = (weights * values).mean(axis=1)
        mean, (low, high) = float(of_prompts.mean()), interval(of_prompts, L)
        stderr = math.hypot(of_prompts.std(ddof=1) / math.sqrt(len(of_prompts)), error)
        found = reliability(of_prompts, stderr / mean if error > 0 < mean else None)
        if doubt is not None or error > mean / 3:  # more prompts would not help
            found = found._replace(trusted=found.trusted and doubt is None, needed=math.inf)
        points.append(
            found._asdict()
            | {
                "mean_square": mean,
                "stderr": stderr,
                "low": mean - math.hypot(mean - low, 1.96 * error),
                "high": mean + math.hypot(high - mean, 1.96 * error),
                "quantiles": _quantiles(values, weights),
            }
        )
    return curve(name, Ls, points, len(curves[0][0]), method)


def refuse_overflow(name: str, L: int, values: np.ndarray) -> None:
    """Refuse squares or differences that are not all finite."""
    if not np.isfinite(values).all():
        raise ValueError(f"the deviation of {name} at L = {L} overflows; use smaller weights or a wider type")


def curve(name: str, Ls: Sequence[int], points: Sequence[dict], replicates: int, method: str) -> Deviation:
    """The numbers at each length as one curve."""
    columns: dict[str, Any] = {part: np.array([point[part] for point in points]) for part in points[0]}
    return Deviation(quantity=name, L=np.array(Ls), replicates=replicates, method=method, **columns)


def _quantiles(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of weighted values: where the weights from below reach each level."""
    order = np.argsort(values, axis=None)
    below = np.cumsum(weights.ravel()[order])
    return values.ravel()[order][np.searchsorted(below, np.array(LEVELS) * below[-1])]


def _warn(result: Deviation, doubtful: Bool[np.ndarray, " k"]) -> None:
    """Warn where the prompts themselves are too few."""
    if not doubtful.any():
        return
    worst = int(np.argmax(np.where(doubtful, result.needed, 0)))
    L, effective, needed = int(result.L[worst]), result.effective[worst], result.needed[worst]
    remedy = f"about {needed:.2g} prompts would do" if needed < 1e9 else "no number that is practical would do"
    warnings.warn(
        f"{result.quantity} at L = {L}: {result.replicates} prompts are worth {effective:.3g} (tail index "
        f"{result.tail[worst]:.2f}), so the mean cannot be trusted; {remedy}",
        stacklevel=4,
    )
