import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._device import Device
from largeprompt.attention import AbstractLayer
from largeprompt.measures import Empirical

from ._fit import RateFit, fit_power_law
from ._gaussian_prompts import GaussianPrompts
from ._place import carried_out_on
from ._prompts import batch_for, chunk_for, squares
from ._quantities import OF_RISK, Form, Queries, Several, Tokens, chosen, forms, laws, lengths, stand_in_size
from ._query_draws import query_draws
from ._reliability import interval, reliability

LEVELS = (0.05, 0.5, 0.95)
_QUERIES = 8  # a prompt, where drawing the prompt is the larger cost
_ALL = 64  # atoms of a law of queries up to which each prompt sees them all
_HELD = 2**27  # squares, at most
LONGEST = 2**31 - 1  # tokens of a prompt that is drawn: their count is a whole number of 32 bits


class Deviation(eqx.Module):
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
    once), or several of them on the same prompts; for a task in place of `mu`, "risk" or "risk-gradient". `nu` is a law
    (by default that of the tokens) or an array of queries. Each of `replicates` prompts is seen by `queries` fresh
    queries, or by all of a few given ones. Gaussian prompts are drawn through what attention sees of them, one query
    each, unless `sampler` is "tokens". With `widen`, Gaussian queries come from a wider law and are weighed back, which
    tames the tails. Prompts are drawn on a GPU where JAX has one, unless `device` is "cpu". Warns where heavy tails
    leave an estimate that cannot be trusted. Paper: the left-hand sides of Propositions 3.1 and 3.4; with
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
        else:
            options = (replicates, queries, query_in_prompt, sampler, widen, place, done)
            found = _of_layer(layer, mu, nu, Ls, names, key, *options)
    for result in found.values():
        _warn(result)
    return found[names[0]] if isinstance(quantity, str) else found


def _of_layer(layer, mu, nu, Ls, names, key, replicates, queries, query_in_prompt, sampler, widen, place, done):
    attention, mu, nu = laws(layer, mu, nu)
    known = list(forms(layer, names).values())
    size = stand_in_size(mu)
    if size is not None and max(Ls) > size / 10:
        warnings.warn(
            f"mu is known by a sampler, and {size} tokens stand in for it: below about c/{size} a deviation is that of "
            "the stand-in; give FromSampler a larger size",
            stacklevel=3,
        )
    reduced = GaussianPrompts.of(attention, mu) if sampler == "auto" and queries is None else None
    slopes = any(form.slopes for form in known)
    draws = query_draws(attention, mu, nu, widen)
    curves, methods = [], set()
    for L in Ls:
        at_length = jax.random.fold_in(key, L)
        if reduced is not None and reduced.serves(L, slopes):
            values, weights = _reduced(reduced, known, draws, L, at_length, replicates, query_in_prompt, place)
            methods.add("Gaussian prompts through what attention sees of them, one query each")
        else:
            options = (replicates, queries, query_in_prompt, place)
            values, weights = _streamed(attention, mu, nu, draws, known, L, at_length, *options)
            methods.add(f"whole prompts, {values[0].shape[1]} queries each")
        curves.append((values, weights))
        if done is not None:
            done(L)
    method = "; ".join(sorted(methods))
    return {
        name: summary(name, Ls, [(values[i], weights) for values, weights in curves], method)
        for i, name in enumerate(names)
    }


def _seed(key: PRNGKeyArray) -> int:
    words = np.asarray(jax.random.bits(key, (2,), jnp.uint32)).astype(np.uint64)
    return int(words[0]) + (int(words[1] >> np.uint64(1)) << 32)


def _reduced(reduced: GaussianPrompts, known: list[Form], draws, L, key, replicates, query_in_prompt, place):
    of_queries, of_prompts = jax.random.split(key)
    z, weights = (np.asarray(part, float) for part in draws.draw(of_queries, replicates))
    values = reduced.squares(known, z, L, _seed(of_prompts), 0, query_in_prompt, place)
    return [value[:, None] for value in values], weights[:, None]


def _streamed(attention, mu, nu, draws, known, L, key, replicates, queries, query_in_prompt, place):
    few = isinstance(nu, Empirical) and nu.log_weights is None and nu.size <= _ALL and not np.any(nu.theta)
    fixed = nu.points if queries is None and few else None
    count = len(fixed) if fixed is not None else _QUERIES if queries is None else int(queries)
    slopes = any(form.slopes for form in known)
    chunk = chunk_for(L, count, mu.dim, slopes)
    batch = min(batch_for(chunk, count, mu.dim, slopes, place), 2 ** math.ceil(math.log2(replicates)))
    keys = jax.random.split(key, -(-replicates // batch) * batch)
    parts = []
    for i in range(0, replicates, batch):  # whole batches, the last one cut: one shape is compiled
        options = (jnp.asarray(L), chunk, count, query_in_prompt)
        values, weights = squares(attention, mu, draws, fixed, known, keys[i : i + batch], *options)
        parts.append([np.asarray(part, float) for part in (*values, weights)])
    *values, weights = (np.concatenate(part)[:replicates] for part in zip(*parts, strict=True))
    return values, weights


def summary(name: str, Ls: Sequence[int], curves: Sequence[tuple[np.ndarray, np.ndarray]], method: str) -> Deviation:
    """The curve of one quantity from its squares and their weights, prompts in rows."""
    points = []
    for L, (values, weights) in zip(Ls, curves, strict=True):
        refuse_overflow(name, L, values)
        of_prompts = (weights * values).mean(axis=1)
        low, high = interval(of_prompts, L)
        points.append(
            reliability(of_prompts)._asdict()
            | {
                "mean_square": of_prompts.mean(),
                "stderr": of_prompts.std(ddof=1) / math.sqrt(len(of_prompts)),
                "low": low,
                "high": high,
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


def _warn(result: Deviation) -> None:
    if result.trusted.all():
        return
    worst = int(np.argmax(np.where(result.trusted, 0, result.needed)))
    L, effective, needed = int(result.L[worst]), result.effective[worst], result.needed[worst]
    remedy = f"about {needed:.2g} prompts would do" if needed < 1e9 else "no number that is practical would do"
    warnings.warn(
        f"{result.quantity} at L = {L}: {result.replicates} prompts are worth {effective:.3g} (tail index "
        f"{result.tail[worst]:.2f}), so the mean cannot be trusted; {remedy}",
        stacklevel=3,
    )
