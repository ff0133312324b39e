"""Outputs of a weighted prompt and their gradients, in batches, as numbers that are known to be finite."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from largeprompt import _checks as checks
from largeprompt._progress import Progress

from ._weighted import WeightedPrompt


def groups_of(prompt: WeightedPrompt, *, at_least: int = 2) -> int:
    """How many groups a prompt has, once they are enough."""
    return checks.count("prompt.groups", getattr(prompt, "groups", None), at_least=at_least)


def check_level(level: float) -> None:
    """Refuse what is no level of an interval."""
    if not isinstance(level, int | float | np.floating) or not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, such as 0.9")


def whole(name: str, numbers: Any) -> Int[np.ndarray, "..."]:
    """Whole numbers as an array; what is cut to be one is refused."""
    found = np.asarray(numbers)
    if found.dtype.kind not in "iu":
        if found.dtype.kind != "f" or not np.all(found == np.round(found)):
            raise ValueError(f"{name} are {numbers}; they must be whole numbers")
        found = found.astype(int)
    return found


def nobody(amount: float = 1.0, note: str = "") -> None:
    """Nothing reads this progress."""


def outputs_at(
    prompt: WeightedPrompt,
    weights: Float[np.ndarray, "r n"],
    batch: int,
    advance: Callable[..., None] = nobody,
) -> Float[np.ndarray, "r p"]:
    """Outputs at each row of weights, `batch` rows at a time; 0 leaves a group out."""
    found = []
    with torch.no_grad():
        for rows in np.split(weights, range(batch, len(weights), batch)):
            found.append(_finite(prompt(log_weights(rows)), len(rows)).double().cpu().numpy())
            advance(len(rows))
    return np.concatenate(found)


def gradients_at(
    prompt: WeightedPrompt,
    weights: Float[np.ndarray, "r n"],
    batch: int,
    advance: Callable[..., None] = nobody,
) -> tuple[Float[np.ndarray, "r p"], Float[np.ndarray, "r p n"]]:
    """Outputs at each row of weights, and their derivatives in the log-weights: one backward pass for each output."""
    values, slopes = [], []
    for rows in np.split(weights, range(batch, len(weights), batch)):
        at = log_weights(rows).requires_grad_()
        with torch.enable_grad():
            outputs = _finite(prompt(at), len(rows))
            if not outputs.requires_grad:
                raise ValueError("outputs of the prompt do not depend on its log-weights by differentiable operations")
            # rows of a batch are independent, so the gradient of a column's sum has that of each row
            columns = outputs.sum(dim=0)
            each = [torch.autograd.grad(column, at, retain_graph=True)[0] for column in columns]
        values.append(outputs.detach().double().cpu().numpy())
        slopes.append(torch.stack(each, dim=1).double().cpu().numpy())
        if not np.isfinite(slopes[-1]).all():
            raise ValueError("a derivative in a log-weight is not finite; the network must be smooth in its scores")
        advance(len(rows))
    return np.concatenate(values), np.concatenate(slopes)


def log_weights(weights: Float[np.ndarray, "r n"]) -> Tensor:
    """Logarithms of weights, as a network reads them."""
    with np.errstate(divide="ignore"):
        return torch.as_tensor(np.log(weights), dtype=torch.get_default_dtype())


def task(progress: Progress | None, name: str, total: float):
    """A piece of work that reports to `progress`, or to nobody."""
    return (progress or Progress()).task(name, total)


def _finite(outputs: Tensor, rows: int) -> Tensor:
    """The outputs themselves, once they are finite numbers of the right shape."""
    if not isinstance(outputs, Tensor):
        raise ValueError(f"outputs are of type {type(outputs).__name__}; give a tensor of PyTorch, ({rows}, p)")
    if outputs.ndim != 2 or outputs.shape[0] != rows or not outputs.shape[1]:
        raise ValueError(f"outputs have shape {tuple(outputs.shape)} for {rows} rows of log-weights; give ({rows}, p)")
    if not bool(torch.isfinite(outputs).all()):
        at = tuple(int(i) for i in (~torch.isfinite(outputs)).nonzero()[0])
        raise ValueError(f"output {at[1]} is {outputs[at].item()}; every output must be finite")
    return outputs
