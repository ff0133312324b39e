r"""The influence of each group of a prompt on each output: derivatives in log-weights, and groups left out.

With weights $a$ on the groups, $g_i=\partial F/\partial\log a_i$ at $a=1$ is the first-order effect of group $i$
through all layers: leaving it out changes $F$ by $-g_i$, giving it twice by $+g_i$, up to curvature.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._progress import Progress
from largeprompt.paper.chart import BLUE, VERMILION

from ._outputs import gradients_at, groups_of, outputs_at, task, whole
from ._weighted import WeightedPrompt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

_SHOWN = 10  # groups that are printed and drawn
_ROUNDING = 1e-4  # of sums of derivatives that are 0


class Influence(AbstractTable):
    """What each group of a prompt does to each output: `values` are derivatives in log-weights, or averages of them.

    `left_out` is the predicted change of each output when a group is left out. It prints the groups that matter most:
    those with the largest `size`, the root of the sum of squares over outputs.
    """

    estimate: Float[np.ndarray, " p"]
    values: Float[np.ndarray, "p n"]
    along: int = eqx.field(static=True)
    groups: tuple[str, ...] | None = eqx.field(static=True, default=None)
    outputs: tuple[str, ...] | None = eqx.field(static=True, default=None)

    @property
    def left_out(self) -> Float[np.ndarray, "p n"]:
        """The predicted change of each output when a group is left out: minus its value."""
        return -self.values

    @property
    def size(self) -> Float[np.ndarray, " n"]:
        """How much a group does to all outputs together."""
        return np.sqrt(np.sum(self.values**2, axis=0))

    def named(self, groups: Sequence[str] | None = None, outputs: Sequence[str] | None = None) -> "Influence":
        """The same with names of groups and of outputs."""
        names = [
            _names(what, given, count)
            for what, given, count in zip(
                ("groups", "outputs"), (groups, outputs), self.values.shape[::-1], strict=True
            )
        ]
        return Influence(self.estimate, self.values, self.along, names[0] or self.groups, names[1] or self.outputs)

    def top(self, k: int = _SHOWN, output: int | None = None) -> Int[np.ndarray, " k"]:
        """The groups with the largest values, for one output or for all together; the largest first."""
        size = self.size if output is None else np.abs(self.values[self._output(output)])
        return np.argsort(-size, kind="stable")[: checks.count("k", k)]

    def _output(self, output: int) -> int:
        """The number of an output, once there is such a one."""
        if not 0 <= output < len(self.values):
            raise ValueError(f"output is {output}; it must be from 0 to {len(self.values) - 1}")
        return output

    def to_dataset(self) -> "Dataset":
        """Values by group and output."""
        names = np.arange(self.values.shape[1]) if self.groups is None else np.array(self.groups)
        found = dataset(
            "group",
            names,
            {"size": self.size, "influence": ("output", self.values.T), "left_out": ("output", self.left_out.T)},
            {"outputs": len(self.values), "along": self.along},
        )
        return found if self.outputs is None else found.assign_coords(output=list(self.outputs))

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        chosen, count = self.top(), self.values.shape[1]
        names = self.outputs or tuple(f"output {i}" for i in range(len(self.values)))
        few = range(min(len(names), 4))
        rows = [
            [self.groups[i] if self.groups else str(i), *(f"{self.values[j, i]:+.4g}" for j in few)] for i in chosen
        ]
        what = "derivative in the log-weight" if self.along == 0 else f"mean of {self.along} derivatives along the path"
        title = f"Influence ({what}; the {len(chosen)} largest of {count} groups on {len(names)} outputs)"
        return title, ["group", *(names[j] for j in few)], rows

    def plot(self, ax: "Axes | None" = None, output: int = 0) -> "Axes":
        """Draw the values of the groups that matter most for one output."""
        ax, chosen = axes(ax), self.top(2 * _SHOWN, output)[::-1]
        values = self.values[output, chosen]
        ax.barh(np.arange(len(chosen)), values, color=np.where(values > 0, BLUE, VERMILION))
        ax.set_yticks(np.arange(len(chosen)), [self.groups[i] if self.groups else str(i) for i in chosen])
        name = self.outputs[output] if self.outputs else f"output {output}"
        ax.set(xlabel=f"influence on {name}", ylabel="group")
        return ax


def _names(what: str, given: Sequence[str] | None, count: int) -> tuple[str, ...] | None:
    if given is not None and len(given) != count:
        raise ValueError(f"there are {len(given)} names of {what} for {count} {what}; give one for each")
    return None if given is None else tuple(map(str, given))


def influence(
    prompt: WeightedPrompt, *, along: int = 0, batch: int = 16, progress: Progress | None = None
) -> Influence:
    r"""The derivative of every output in the log-weight of each group, at weight 1: one backward pass for each output.

    With `along=m` it is the average of $\partial F/\partial a_i$ over the path $a=t(1,\dots,1)$, $0<t<1$, by the
    midpoints of m pieces. Its sum over groups is the change of the output from a prompt without any group; so there
    must be tokens that belong to none. Where groups stand in for each other, the path sees what each would do without
    the rest.
    """
    n, along = groups_of(prompt, at_least=1), checks.count("along", along, at_least=0)
    batch = checks.count("batch", batch)
    times = (np.arange(along) + 0.5) / along if along else np.ones(1)
    with task(progress, "influence", len(times)) as advance:
        outputs, slopes = gradients_at(prompt, times[:, None] * np.ones(n), batch, advance)
        estimate = outputs_at(prompt, np.ones((1, n)), batch)[0] if along else outputs[0]
    if along and np.all(np.abs(slopes.sum(axis=2)) <= _ROUNDING * np.abs(slopes).sum(axis=2)):
        raise ValueError(f"along is {along}, but only ratios of weights matter to this prompt; it must be 0")
    return Influence(estimate, np.mean(slopes / times[:, None, None], axis=0), along)


def left_out(
    prompt: WeightedPrompt,
    groups: Sequence[int] | None = None,
    *,
    batch: int = 16,
    progress: Progress | None = None,
) -> Float[np.ndarray, "p k"]:
    """The change of each output when a group is left out, exactly: one forward pass for each group (all by default)."""
    n = groups_of(prompt)
    chosen = np.arange(n) if groups is None else whole("groups", groups)
    if chosen.ndim != 1 or not len(chosen) or chosen.min() < 0 or chosen.max() >= n:
        raise ValueError(f"groups are {groups}; they must be whole numbers from 0 to {n - 1}")
    weights = np.ones((len(chosen) + 1, n))
    weights[np.arange(1, len(weights)), chosen] = 0.0
    with task(progress, "leaving out", len(weights)) as advance:
        outputs = outputs_at(prompt, weights, checks.count("batch", batch), advance)
    return (outputs[1:] - outputs[0]).T
