import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt.attention import AbstractLayer

from ._risk._estimates import risk
from ._task import AbstractTask

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset


class PrefixRisks(AbstractTable):
    """The risks of one layer on prompts of several lengths: what it makes of the first tokens of a prompt."""

    lengths: tuple[int | float, ...] = eqx.field(static=True)
    risk: Float[Array, " n"]
    risk_stderr: Float[Array, " n"]
    method: str = eqx.field(static=True)

    def to_dataset(self) -> "Dataset":
        return dataset(
            "L", self.lengths, {n: getattr(self, n) for n in ("risk", "risk_stderr")}, {"method": self.method}
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The risk by the number of tokens; that of the infinite prompt is a line across."""
        ax = axes(ax)
        ax.set(xscale="log", yscale="log", xlabel="tokens before the query", ylabel="risk")
        finite = [i for i, L in enumerate(self.lengths) if math.inf > L]
        ax.plot([self.lengths[i] for i in finite], [float(self.risk[i]) for i in finite], marker=".")
        if len(finite) < len(self.lengths):
            ax.axhline(float(self.risk[self.lengths.index(math.inf)]), linestyle=":", color="black")
        return ax


def prefix_risks(
    layer: AbstractLayer,
    task: AbstractTask,
    lengths: Sequence[int | float],
    key: PRNGKeyArray | None = None,
    **options,
) -> PrefixRisks:
    r"""$R_\ell$ of a layer at each of the `lengths`; `options` go to `risk`.

    Under a causal mask position $\ell+1$ of a prompt is answered from the $\ell$ tokens before it. All positions share
    the tokens and the coefficients of one prompt, but a risk is a mean, which sees the law of one prefix at a time.
    """
    if not isinstance(lengths, Sequence) or not lengths:
        raise ValueError(f"lengths is {lengths!r}; it must be a list of prompt lengths")
    each = tuple(checks.prompt_length(L) for L in lengths)
    found = [risk(layer, task, L, key, **options) for L in each]
    method = found[min(range(len(each)), key=lambda i: each[i])].method
    return PrefixRisks(each, jnp.stack([f.value for f in found]), jnp.stack([f.stderr for f in found]), method)
