"""A network inspected: in Python with any PyTorch model, without PyTorch from arrays in files."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from largeprompt._progress import Progress

from ._call import AttentionCall
from ._inspection import Inspection, Inspector

if TYPE_CHECKING:
    from torch import Tensor, nn


def inspect(
    model: "nn.Module",
    tokens: "Tensor | Any",
    *,
    unseen: "Tensor | Any | None" = None,
    queries: int = 64,
    words: list[str] | None = None,
    progress: Progress | None = None,
    **inputs: Any,
) -> Inspection:
    """What every head of a PyTorch model does with a prompt.

    `tokens` is what the model takes first, such as token ids of shape (1, L); `inputs` are its other arguments. With
    tokens of `unseen` text, of the same shape, the errors predicted are measured there too. Heads are looked at through
    `queries` of their queries. The model computes what it computes without this.
    """
    import torch

    from ._tap import tap

    progress, began = progress or Progress(), time.perf_counter()
    training = model.training
    model.eval()
    pool: list[AttentionCall] | None = None
    try:
        with torch.no_grad():
            if unseen is not None:
                pool = []
                with tap(model, pool.append, queries=1):
                    model(_batch(unseen), **inputs)
            inspector = Inspector(pool, progress, total=len(pool or ()))
            with progress.task("inspecting", max(len(pool or ()), 1)), tap(model, inspector, queries=queries):
                model(_batch(tokens), **inputs)
    finally:
        model.train(training)
    facts = {"model": type(model).__name__, "queries": queries, "seconds": round(time.perf_counter() - began, 2)}
    return inspector.finished(words, **facts)


def _batch(tokens: Any) -> Any:
    """A prompt as a batch of one."""
    import torch

    if not isinstance(tokens, torch.Tensor | np.ndarray | list):
        return tokens
    tensor = torch.as_tensor(tokens)
    return tensor[None] if tensor.ndim == 1 else tensor


def inspect_calls(
    calls: list[AttentionCall],
    *,
    unseen: list[AttentionCall] | None = None,
    progress: Progress | None = None,
    **facts: Any,
) -> Inspection:
    """What the heads of given attention calls do: no model is needed. With calls on `unseen` text, errors measured."""
    for call, other in zip(calls, calls if unseen is None else unseen, strict=False):
        for part in ("keys", "values"):
            own, theirs = getattr(call, part).shape, getattr(other, part).shape
            if own != theirs:
                raise ValueError(
                    f"{part} of {call.name} have shape {own}, on unseen text {theirs}; both must be the same"
                )
    if unseen is not None and len(unseen) != len(calls):
        raise ValueError(f"there are {len(calls)} calls, on unseen text {len(unseen)}; both must be the same")
    progress = progress or Progress()
    inspector = Inspector(unseen, progress, total=len(calls))
    with progress.task("inspecting", len(calls)):
        for call in calls:
            inspector(call)
    return inspector.finished(**facts)
