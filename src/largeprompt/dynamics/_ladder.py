import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, dataset, time_axes
from largeprompt._progress import Progress
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractLayer
from largeprompt.icl import AbstractTask, norm

from ._flow import Trajectory, gradient_flow, increasing_times

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset


class Ladder(AbstractTable):
    """Finite-prompt flows beside the infinite one, from one start: row i is at length `Ls[i]`.

    `distance` is that of the parameters at equal times. Paper: Lemma E.1 for the distance, Theorem 4.3 for the risks.
    """

    Ls: tuple[int, ...] = eqx.field(static=True)
    times: Float[Array, " t"]
    distance: Float[Array, "n t"]
    risk: Float[Array, "n t"]
    risk_stderr: Float[Array, "n t"]
    infinite: Trajectory
    finite: tuple[Trajectory, ...]

    @property
    def excess(self) -> Float[Array, " n"]:
        """Final risk of each finite flow above that of the infinite one."""
        return self.risk[:, -1] - self.infinite.risk[-1]

    def to_dataset(self) -> "Dataset":
        names = ("distance", "risk", "risk_stderr")
        last = {f"last_{name}": getattr(self, name)[:, -1] for name in names}
        along = {name: ("time", getattr(self, name)) for name in names}
        found = dataset("L", self.Ls, last | {"excess": self.excess} | along, {"last_time": float(self.times[-1])})
        return found.assign_coords(time=self.times).assign(infinite_risk=("time", self.infinite.risk))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The risks along the flows of all lengths."""
        ax = time_axes(ax, self.times, "risk")
        for L, risk in zip(self.Ls, self.risk, strict=True):
            ax.plot(self.times, risk, label=f"L = {L}")
        ax.plot(self.times, self.infinite.risk, color="black", label="L = ∞")
        ax.legend()
        return ax


def flow_ladder(
    layer: AbstractLayer,
    task: AbstractTask,
    Ls: Sequence[int],
    times: Numbers,
    key: PRNGKeyArray | None = None,
    *,
    progress: Progress | None = None,
    name: str = "flows by prompt length",
    **options,
) -> Ladder:
    """The gradient flows from one layer at each length of a ladder and at infinite length, and how far apart they are.

    `progress` receives each flow once it is followed, under `name`; `options` go to `gradient_flow`.
    """
    record = increasing_times(times)
    if not isinstance(Ls, Sequence):
        raise ValueError(f"Ls is {Ls!r}; it must be a list of prompt lengths")
    lengths = tuple(checks.count("L", L) for L in Ls)
    if not lengths:
        raise ValueError("Ls is empty; it must hold at least one prompt length")
    flows = []
    with (progress or Progress()).task(name, len(lengths) + 1) as advance:
        for L in (math.inf, *lengths):
            flow = gradient_flow(layer, task, L, record, key, **options)
            if flow.ending != "completed":
                raise ValueError(
                    f"the flow at L = {L} ended at t = {flow.ended_at:g}: {flow.ending}; ask for earlier times"
                )
            advance(1, f"L = {L:g}: flow to t = {flow.ended_at:g}")
            flows.append(flow)
    infinite, *finite = flows
    distance = jnp.stack([_distances(flow.layers, infinite.layers) for flow in finite])
    risk, error = (jnp.stack([getattr(flow, name) for flow in finite]) for name in ("risk", "risk_stderr"))
    return Ladder(lengths, record, distance, risk, error, infinite, tuple(finite))


def _distances(layers: AbstractLayer, others: AbstractLayer) -> Float[Array, " t"]:
    first, second = (eqx.filter(tree, eqx.is_inexact_array) for tree in (layers, others))
    return jax.vmap(lambda a, b: norm(jax.tree.map(jnp.subtract, a, b)))(first, second)
