import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._device import Device, DeviceName, resolve_device
from largeprompt._display import AbstractTable, dataset, length_axes
from largeprompt._progress import Progress
from largeprompt.attention import AbstractLayer
from largeprompt.measures import Empirical
from largeprompt.measures._from_sampler import sampled_parts
from largeprompt.measures._worth import DoubtWarning, FewTokensWarning

from ._fit import RateFit, fit_power_law
from ._gaussian_prompts import GaussianPrompts
from ._problem import Problem, Queries, RiskProblem, Several, Tokens, problem_of
from ._query_draws import query_draws
from ._risk_samples import RiskPairs
from ._samples import LEVELS, QUERIES, ReducedPrompts, TokenPrompts

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset

_HELD = 2**27  # squares, at most
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


class _Given(TypedDict, total=False):
    replicates: int
    queries: int | None
    query_in_prompt: bool
    sampler: str
    widen: bool
    device: Device
    progress: Progress | None


@overload
def deviation(  # pyrefly: ignore[inconsistent-overload]
    layer: AbstractLayer, mu: Tokens, nu: Queries, Ls: object, quantity: str, key: PRNGKeyArray, **_: Unpack[_Given]
) -> Deviation: ...
@overload
def deviation(  # pyrefly: ignore[inconsistent-overload]
    layer: AbstractLayer, mu: Tokens, nu: Queries, Ls: object, quantity: Several, key: PRNGKeyArray, **_: Unpack[_Given]
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
    progress: Progress | None = None,
) -> Deviation | dict[str, Deviation]:
    r"""$E\|X_L - X\|^2$ over fresh prompts of L tokens of `mu` and queries of `nu`, measured, for each L.

    `quantity` is "output", a Jacobian ("V", "U", "K", "Q", "O", or "gradient" for all of the layer's own parameters at
    once), or several of them on the same prompts; for a task in place of `mu`, "risk" or "risk-gradient". Any layer
    will do: of several heads a Jacobian is that in the matrices of all, and heads that are neither softmax nor linear
    attention read prompts that are held whole. `nu` is a law (by default that of the tokens) or an array of queries.
    Each of `replicates` prompts is seen by `queries` fresh queries, or by all of a few given ones. Gaussian prompts of
    one softmax or linear head are drawn through their sufficient statistics, one query each, unless `sampler` is
    "tokens". With `widen`, Gaussian queries come from a wider law and are importance-weighted, which tames the tails.
    Prompts are drawn on a GPU where JAX has one, unless `device` is "cpu". Warns where heavy tails leave an estimate
    that cannot be trusted. Paper: the left-hand sides of Propositions 3.1 and 3.4; with `query_in_prompt`, Remark 3.2.
    """
    problem = problem_of(layer, mu, nu, Ls, quantity, query_in_prompt)
    longest = max(problem.lengths)
    if longest > LONGEST:
        raise ValueError(f"Ls has {longest}; prompts of up to {LONGEST} tokens are drawn, longer ones only predicted")
    replicates = checks.count("replicates", replicates, at_least=2)
    queries = None if queries is None else checks.count("queries", queries)
    if replicates * (each := queries or QUERIES) > _HELD:
        raise ValueError(f"replicates is {replicates} with {each} queries each; at most {_HELD} in all are held")
    if sampler not in ("auto", "tokens"):
        raise ValueError(f"sampler is {sampler!r}; it must be 'auto' or 'tokens'")
    key, progress = checks.key(key), progress or Progress()
    work = [_work(problem, L) for L in problem.lengths]
    with on_device(device) as found, progress.task("measuring", sum(work)) as advance:
        ways = _ways(problem, key, replicates, queries, sampler, widen, found)
        samples = []
        for L, amount in zip(problem.lengths, work, strict=True):
            way = next((way for way in ways[:-1] if way.serves(L)), ways[-1])
            samples.append(way.sample(L, jax.random.fold_in(key, L), replicates))
            advance(amount, f"measured L = {L}")
    return problem.answer(_curves(problem, samples, replicates))


@contextmanager
def on_device(device: Device) -> Iterator[DeviceName]:
    """What JAX computes inside is computed on the device that is yielded; a GPU that is not there is refused.

    The numbers are the same to rounding, since so are the random ones behind them.
    """
    found = resolve_device(device)
    there = jax.devices(found)[0]
    if jnp.zeros(()).device == there:  # a context of its own would have all compiled again
        yield found
        return
    with jax.default_device(there):
        yield found


def _work(problem: Problem | RiskProblem, L: int) -> float:
    """How long a length takes, in units of a token of each prompt; compiling takes about as long as a thousand.

    The limit at each query reads all tokens of a law that is given by its tokens.
    """
    atoms = problem.mu.size if isinstance(problem, Problem) and isinstance(problem.mu, Empirical) else 0
    return 1000.0 + L + atoms


def _ways(
    problem, key, replicates: int, queries: int | None, sampler: str, widen: bool, device: DeviceName
) -> list[Any]:
    """The ways to draw prompts for a problem, the best first; the last serves every length."""
    if isinstance(problem, RiskProblem):
        return [RiskPairs(problem, key, device)]
    size = min((part.stand_in.size for part in sampled_parts(problem.mu)), default=math.inf)
    if max(problem.lengths) > size / 10:
        warnings.warn(
            f"mu is known by a sampler, and {size} tokens stand in for it: below about c/{size} a deviation is that of "
            "the stand-in; give FromSampler a larger size",
            DoubtWarning,
            stacklevel=3,
        )
    heads = problem.heads or ()
    draws = query_draws(heads, problem.mu, problem.nu, widen)
    tokens = TokenPrompts(problem, draws, queries, replicates, device)
    reduced = GaussianPrompts.of(heads[0], problem.mu) if len(heads) == 1 else None
    if sampler == "tokens" or queries is not None or reduced is None:
        return [tokens]
    return [ReducedPrompts(problem, reduced, draws, device), tokens]


def _curves(problem: Problem | RiskProblem, samples: list[Any], replicates: int) -> dict[str, Deviation]:
    """The curve of each quantity from the samples at each length; warns of what cannot be trusted."""
    method = "; ".join(sorted({sample.method for sample in samples}))
    doubts = [sample.doubt for sample in samples]
    if (doubt := next(filter(None, doubts), None)) is not None:
        words = f"{', '.join(problem.quantities)} cannot be trusted: {doubt.sentence}"
        warnings.warn(words, FewTokensWarning, stacklevel=3)
    found = {}
    for name in problem.quantities:
        points = [sample.point(name, L) for sample, L in zip(samples, problem.lengths, strict=True)]
        columns: dict[str, Any] = {part: np.array([point[part] for point in points]) for part in points[0]}
        L = np.array(problem.lengths)
        found[name] = Deviation(quantity=name, L=L, replicates=replicates, method=method, **columns)
        _warn(found[name], ~found[name].trusted & np.array([doubt is None for doubt in doubts]))
    return found


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
        DoubtWarning,
        stacklevel=4,
    )
