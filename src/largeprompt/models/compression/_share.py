"""How much is kept: what is asked for, and a budget shared among layers."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEAST = 0.2  # of an even share: what every head keeps at least
_FEWEST = 8  # tokens


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a compression is to reach; one of the three is given."""

    keep: float | None = None  # share of the tokens
    tokens: int | None = None  # tokens of a head of keys, on average
    tolerance: float | None = None  # relative error of outputs

    def __post_init__(self):
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"{said} of keep, tokens and tolerance is given; exactly one must be")
        name, value = given.popitem()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}; it must be a number")
        if name == "tokens" and (value != int(value) or value < _FEWEST):
            raise ValueError(f"tokens is {value}; it must be a whole number of at least {_FEWEST}")
        if name != "tokens" and not 0 < value <= 1:
            raise ValueError(f"{name} is {value}; it must be above 0 and at most 1")

    def count(self, tokens: int) -> int:
        """How many atoms stand for so many tokens."""
        wanted = self.tokens if self.tokens is not None else round((self.keep or 0) * tokens)
        return min(max(int(wanted), _FEWEST), tokens)


def counts_of(worth: Sequence[Tensor], sizes: Sequence[Tensor], count: int) -> list[Tensor]:
    """How many tokens each head of keys keeps, `count` on average: (layers, G) for each stack of layers.

    `worth` has what each token of some layers is worth (layers, b, G, L), in the unit of the residual stream, −∞ where
    there is none; `sizes` (layers,) those of their outputs there. Once every head has its least, the tokens are kept
    that are worth most beside the output of their layer, over all heads. Prompts of a batch keep equally many.
    """
    least = min(max(_FEWEST, int(LEAST * count)), count)
    ranked = []
    for tokens, size in zip(worth, sizes, strict=True):
        relative = tokens / size.clamp_min(1e-30)[:, None, None, None]
        first = relative.topk(min(least, relative.shape[-1]), dim=-1).indices
        first = relative.scatter(-1, first, math.inf)
        ranked.append(torch.where(tokens == -math.inf, tokens, first).to(worth[0].device))
    whole = torch.cat([x.flatten() for x in ranked])
    kept = torch.zeros_like(whole, dtype=torch.bool)
    kept[whole.topk(min(count * sum(x[..., 0].numel() for x in ranked), len(whole))).indices] = True
    kept &= whole > -math.inf
    parts = zip(kept.split([x.numel() for x in ranked]), ranked, strict=True)
    return [(part.reshape(x.shape).sum(dim=-1).sum(dim=1) // x.shape[1]).cpu() for part, x in parts]


def fewest(low: Tensor, high: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The fewest tokens that are enough, to a part in 32, for each of several heads; so many as `high` are."""
    while bool((wide := high - low > (high // 32).clamp_min(1)).any()):
        middle = torch.where(wide, (low + high) // 2, high)
        good = enough(middle)
        low, high = torch.where(wide & ~good, middle, low), torch.where(wide & good, middle, high)
    return high
