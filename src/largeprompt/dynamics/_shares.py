"""Where gradient flows from default starts end: the share of starts at each stationary point of the risk."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._intervals import wilson
from largeprompt._progress import Progress
from largeprompt.attention import Head, Kind, MultiHead
from largeprompt.icl import LinearRegression, StationaryPoint, as_regression, stationary_points

from ._flow import gradient_flow

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset

_NEAR = 0.1  # of the distance to the next risk: an end that is as near to a point is at it
_RTOL, _ATOL = 1e-4, 1e-6  # an end is known by its risk, to a tenth of what tells points apart


class StartShares(AbstractTable):
    """How many gradient flows from default starts are at which stationary point at the last time.

    Row i is the point `points[i]`, with the share of starts that are at it and Wilson's 95 % interval. `risks` are
    those of all ends; ends that are near no point, within a tenth of the distance to the next, are `elsewhere`.
    """

    points: tuple[StationaryPoint, ...]
    counts: tuple[int, ...] = eqx.field(static=True)
    elsewhere: int = eqx.field(static=True)
    risks: Float[Array, " s"]
    time: float = eqx.field(static=True)

    @property
    def starts(self) -> int:
        """How many flows there are."""
        return len(self.risks)

    @property
    def share(self) -> Float[np.ndarray, " n"]:
        """Of all starts, by point."""
        return np.asarray(self.counts) / self.starts

    @property
    def interval(self) -> Float[np.ndarray, "n 2"]:
        """Wilson's 95 % interval of each share."""
        return np.array([wilson(count, self.starts) for count in self.counts]).reshape(-1, 2)

    def to_dataset(self) -> "Dataset":
        low, high = self.interval.T
        columns = {
            "kind": [point.kind for point in self.points],
            "risk": [float(point.risk.value) for point in self.points],
            "excess": [float(point.excess) for point in self.points],
            "count": list(self.counts),
            "share": self.share,
            "low": low,
            "high": high,
        }
        facts = {"starts": self.starts, "elsewhere": self.elsewhere, "time": self.time}
        return dataset("point", np.arange(len(self.points)), columns, facts)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The shares with their intervals, over the risks of the points."""
        ax = axes(ax)
        low, high = self.interval.T
        risks = [float(point.risk.value) for point in self.points]
        ax.errorbar(risks, self.share, yerr=[self.share - low, high - self.share], fmt="o", capsize=3)
        ax.set(xlabel="risk", ylabel="share of starts", ylim=(-0.05, 1.05))
        return ax


def start_shares(
    task: LinearRegression,
    L: int | float,
    kind: Kind,
    key: PRNGKeyArray | None = None,
    *,
    heads: int = 1,
    starts: int = 64,
    time: float = 1000.0,
    points: Sequence[StationaryPoint] | None = None,
    draws: int = 2**10,
    progress: Progress | None = None,
) -> StartShares:
    """The share of PyTorch's default starts in (K, Q, V, O) whose gradient flow ends at which stationary point.

    Heads are as wide as a token. A flow is followed up to `time`, with the exact vector field for linear heads and over
    `draws` fixed nodes for softmax heads, and its risk then is compared with those of the `points`, by default those
    that `stationary_points` finds. A flow that rests at a saddle for longer than that counts there.
    """
    task, L, starts = as_regression(task), checks.prompt_length(L), checks.count("starts", starts)
    heads, time = checks.count("heads", heads), float(checks.number("time", time, at_least=1e-9))
    of_points, of_nodes, of_starts = jax.random.split(checks.key_or_default(key), 3)
    found = tuple(stationary_points(task, L, kind, of_points, heads=heads) if points is None else points)
    if not found:
        raise ValueError("points is empty; there must be at least one stationary point")
    ends = []
    with (progress or Progress()).task("flows from default starts", starts) as advance:
        for of_start in jax.random.split(of_starts, starts):
            layer = _default(of_start, task, kind, heads)
            flow = gradient_flow(layer, task, L, [time], of_nodes, draws=draws, rtol=_RTOL, atol=_ATOL)
            ends.append(float(flow.risk[-1]) if flow.ending == "completed" else np.inf)
            advance(1, f"risk {ends[-1]:.4g}")
    at = [_place(risk, [float(point.risk.value) for point in found], _nothing(task)) for risk in ends]
    counts = tuple(at.count(i) for i in range(len(found)))
    return StartShares(found, counts, at.count(None), jnp.asarray(ends), time)


def _default(key: PRNGKeyArray, task: LinearRegression, kind: Kind, heads: int) -> Head | MultiHead:
    if heads == 1:
        return Head.pytorch_default(key, task.dim, outputs=task.targets, kind=kind)
    return MultiHead.pytorch_default(key, task.dim, heads, head_dim=task.dim, outputs=task.targets, kind=kind)


def _nothing(task: LinearRegression) -> float:
    """The risk of predicting 0."""
    return task.targets * float((task.query_Sigma * task.Omega).sum() + task.noise) / 2


def _place(risk: float, levels: list[float], nothing: float) -> int | None:
    """Which of the levels a risk is at; that of predicting 0 is a level too, at which no flow stays."""
    nearest = int(np.argmin(np.abs(np.asarray(levels) - risk)))
    others = [level for i, level in enumerate(levels) if i != nearest] + [nothing]
    apart = min(abs(level - levels[nearest]) for level in others)
    return nearest if abs(risk - levels[nearest]) <= _NEAR * apart else None
