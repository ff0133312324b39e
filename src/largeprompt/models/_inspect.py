"""A network inspected: in Python with any PyTorch model, without PyTorch from arrays in files."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from largeprompt import _checks as checks
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
    queries: int = 32,
    words: list[str] | None = None,
    progress: Progress | None = None,
    **inputs: Any,
) -> Inspection:
    """What every head of a PyTorch model does with a prompt.

    `tokens` is what the model takes first, such as token ids of shape (1, L); `inputs` are its other arguments. With
    tokens of `unseen` text, of the same shape, the errors predicted are measured there too. Heads are looked at through
    `queries` of their queries. The model computes what it computes without this.
    """
    progress, began, queries = progress or Progress(), time.perf_counter(), checks.count("queries", queries)
    if unseen is not None and np.shape(unseen)[-1:] != np.shape(tokens)[-1:]:
        raise ValueError(
            f"unseen has shape {tuple(np.shape(unseen))} and tokens {tuple(np.shape(tokens))}; both must be as long"
        )
    pool = None if unseen is None else calls_of(model, unseen, queries=1, **inputs)
    inspector = Inspector(pool, progress, total=_layers(model))
    with progress.task("inspecting", max(_layers(model), 1)):
        _run(model, tokens, inspector, queries, inputs)
    facts = {"model": type(model).__name__, "queries": queries, "seconds": round(time.perf_counter() - began, 2)}
    return inspector.finished(words, **facts)


def calls_of(model: "nn.Module", tokens: "Tensor | Any", *, queries: int = 32, **inputs: Any) -> list[AttentionCall]:
    """The attention calls of a PyTorch model on a prompt, in the order in which they are made."""
    calls: list[AttentionCall] = []
    _run(model, tokens, calls.append, queries, inputs)
    return calls


def _run(model: "nn.Module", tokens: Any, each: Callable[[AttentionCall], None], queries: int, inputs: Any) -> None:
    """Run a model on a prompt as it is used, not as it is trained, and give `each` every attention call."""
    import torch

    from ._tap import tap

    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; it must be a PyTorch module")
    batch = _batch(tokens)
    if 0 in np.shape(batch):
        raise ValueError(f"tokens have shape {tuple(np.shape(batch))}; there must be at least one")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), tap(model, each, queries):
            model(batch, **inputs)
    finally:
        model.train(training)


def _layers(model: "nn.Module") -> int:
    """How many attention calls a forward pass will make, where the model's settings say so; else 0."""
    return int(getattr(getattr(model, "config", None), "num_hidden_layers", 0) or 0)


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
