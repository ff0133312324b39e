"""What a compression costs and saves on a text: the loss of what follows, the memory, the errors predicted."""

import inspect
import math
import time
from typing import TYPE_CHECKING, Any

import equinox as eqx
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._progress import Progress
from largeprompt.paper.chart import BLUE, VERMILION

from ._cache import CompressedCache

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

_TASK = "measuring"
_FEW = 8  # tokens on which a model is seen to be causal


class Effect(AbstractTable):
    """A prompt compressed: the mean loss in nats of the tokens after it, on the full cache and on the compressed one.

    `loss_change_stderr` is the standard error of their difference, over tokens taken as independent.
    `memory_before` and `memory_after` are numbers stored, in the layers that have a window too. `atoms` are the tokens
    that stand for the prompt in each layer that is compressed, for each of its heads of keys; `errors` the predicted
    relative errors of the outputs of its heads.
    """

    model: str = eqx.field(static=True)
    goal: str = eqx.field(static=True)
    length: int = eqx.field(static=True)
    continuation: int = eqx.field(static=True)
    loss_before: float
    loss_after: float
    loss_change_stderr: float
    memory_before: int
    memory_after: int
    seconds_to_read: float
    seconds_to_compress: float
    layer: Int[np.ndarray, " l"]
    atoms: Float[np.ndarray, "l g"]
    errors: Float[np.ndarray, "l h"]

    @property
    def loss_change(self) -> float:
        """By how much the loss rises."""
        return self.loss_after - self.loss_before

    @property
    def memory_share(self) -> float:
        """The memory after the compression over that before."""
        return self.memory_after / self.memory_before

    @property
    def median_error(self) -> float:
        """The predicted relative error of the median head."""
        return float(np.nanmedian(self.errors))

    @property
    def largest_error(self) -> float:
        """The largest predicted relative error of a head."""
        return float(np.nanmax(self.errors))

    @property
    def summary(self) -> list[str]:
        """What a person should know, in a few sentences."""
        return [
            f"The loss of what follows ({self.continuation - 1:,} tokens) goes from {self.loss_before:.4f} to "
            f"{self.loss_after:.4f} nats a token: {self.loss_change:+.4f} ± "
            f"{self.loss_change_stderr:.4f} (standard error).",
            f"The cache of {self.length:,} tokens takes {100 * self.memory_share:.1f} % of its memory: "
            f"{self.memory_after:,} numbers in place of {self.memory_before:,}.",
            f"Predicted relative error of a head's output: {self.median_error:.2g} in the median, "
            f"{self.largest_error:.2g} at most.",
            f"Reading took {self.seconds_to_read:.2g} s, compressing {self.seconds_to_compress:.2g} s.",
        ]

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        _, names, rows = super()._rows()
        return "\n".join([f"Effect ({self.model}, {self.goal})", *self.summary]), names, rows

    def to_dataset(self) -> "Dataset":
        """Atoms and predicted errors by layer; all other numbers are attributes."""
        facts = (
            *("model", "goal", "length", "continuation", "loss_before", "loss_after", "loss_change"),
            "loss_change_stderr",
            *("memory_before", "memory_after", "memory_share", "seconds_to_read", "seconds_to_compress"),
            *("median_error", "largest_error"),
        )
        by_layer = {
            "atoms": np.nanmean(self.atoms, axis=1),
            "median_error": np.nanmedian(self.errors, axis=1),
            "largest_error": np.nanmax(self.errors, axis=1),
            "errors": ("head", self.errors),
            "atoms_of_head": ("key_head", self.atoms),
        }
        return dataset("layer", self.layer, by_layer, {name: getattr(self, name) for name in facts})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw by layer the share of tokens kept and the predicted error, from the median head to the largest."""
        ax, data = axes(ax), self.to_dataset()
        least = np.finfo(float).tiny  # a logarithmic axis has no zero
        middle, most = (np.maximum(data[name].values, least) for name in ("median_error", "largest_error"))
        share = self.atoms / self.length
        ax.plot(self.layer, np.nanmean(share, axis=1), "o-", color=BLUE, label="tokens kept, share: mean and all heads")
        ax.fill_between(
            self.layer, np.nanmin(share, axis=1), np.nanmax(share, axis=1), color=BLUE, alpha=0.2, linewidth=0
        )
        ax.plot(self.layer, middle, "s-", color=VERMILION, label="predicted relative error, median and largest head")
        ax.fill_between(self.layer, middle, most, color=VERMILION, alpha=0.2, linewidth=0)
        ax.set(yscale="log", xlabel="layer", title=f"{self.length} tokens, {self.goal}")
        ax.locator_params(axis="x", integer=True)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
        return ax


def compression_effect(
    model: PreTrainedModel,
    ids: Any,
    length: int,
    *,
    keep: float | None = None,
    tokens: int | None = None,
    tolerance: float | None = None,
    queries: int = 8192,
    fit: bool = True,
    progress: Progress | None = None,
) -> Effect:
    """What it costs to compress the first `length` of a text's token ids: the model reads them, then those that follow.

    One of `keep`, `tokens` and `tolerance` says how much stays; `queries` and `fit` are those of `CompressedCache`. The
    first token that follows is predicted from the full prompt in any case, so losses are those of the tokens after it.
    The model is left as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is of type {type(model).__name__}; it must be a transformers model")
    ids, length = _text(ids), checks.count("length", length)
    if ids.shape[1] < length + 2:
        raise ValueError(f"there are {ids.shape[1]} tokens; length {length} needs at least {length + 2}")
    progress, ids = progress or Progress(), ids.to(model.device)
    goal = {"keep": keep, "tokens": tokens, "tolerance": tolerance}
    training, implementation = model.training, model.config._attn_implementation
    model.eval()
    try:
        with torch.no_grad(), progress.task(_TASK, 4) as advance:
            cache = CompressedCache(model, **goal, queries=queries, fit=fit)
            _check_causal(model, ids)
            full_losses = _losses(_logits(model, ids[:, :-1], ids.shape[1] - length - 1), ids)
            advance(1, "reading the prompt")
            read, _ = _timed(lambda: _logits(model, ids[:, :length], 1, cache), model)
            if not all(layer.is_initialized for layer in cache.stored.values()):
                raise ValueError(f"{type(model).__name__} keeps no keys and values in its cache; give one that does")
            memory = _memory(cache)
            advance(1, "compressing")
            compressed, _ = _timed(cache.compress, model)
            smaller = _memory(cache)
            advance(1, "reading what follows")
            compressed_losses = _losses(_logits(model, ids[:, length:-1], ids.shape[1] - length - 1, cache), ids)
    finally:
        model.train(training)
        if implementation is not None:
            model.set_attn_implementation(implementation)
    return Effect(
        model=type(model).__name__,
        goal=", ".join(f"{name} {value:g}" for name, value in goal.items() if value is not None),
        length=length,
        continuation=ids.shape[1] - length,
        loss_before=float(full_losses.mean()),
        loss_after=float(compressed_losses.mean()),
        loss_change_stderr=float((compressed_losses - full_losses).std(correction=0)) / math.sqrt(len(full_losses)),
        memory_before=memory,
        memory_after=smaller,
        seconds_to_read=read,
        seconds_to_compress=compressed,
        layer=np.array(list(cache.stored)),
        atoms=_by_layer([np.array(layer.atoms, float) for layer in cache.stored.values()]),
        errors=_by_layer([cache.errors[i][0].double().cpu().numpy() for i in cache.stored]),
    )


def _text(ids: Any) -> Tensor:
    """Token ids as a batch of one."""
    found = torch.as_tensor(ids)
    found = found[None] if found.ndim == 1 else found
    if found.ndim != 2 or found.shape[0] != 1 or found.is_floating_point():
        raise ValueError(
            f"ids have shape {tuple(np.shape(ids))} and type {found.dtype}; they must be whole numbers, of one text"
        )
    return found.long()


def _check_causal(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse a model that predicts no next tokens, or whose outputs depend on later tokens: no cache serves it."""
    name, few = type(model).__name__, ids[:, :_FEW]
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head; give a model that predicts the next token")
    other = few.clone()
    other[:, -1] = torch.where(few[:, -1] == 0, 1, 0)
    first, second = (_logits(model, each, few.shape[1])[:, :-1] for each in (few, other))
    if not torch.allclose(first, second, rtol=0.0, atol=1e-4 * float(first.abs().max())):
        raise ValueError(f"{name} reads later tokens too, as an encoder does; give a causal language model")


def _logits(model: PreTrainedModel, ids: Tensor, last: int, cache: CompressedCache | None = None) -> Tensor:
    """The logits at the last places; only there, where the model can do so."""
    options = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(ids, past_key_values=cache, use_cache=cache is not None, **options).logits[:, -last:]


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """The losses of the last tokens, each predicted from those before it."""
    found = cross_entropy(logits[0].float(), ids[0, -logits.shape[1] :], reduction="none").double()
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"the loss is {float(found.mean())}; the model must give finite logits on this text")
    return found


def _timed(action: Any, model: PreTrainedModel) -> tuple[float, Any]:
    """Seconds that an action takes, on whatever device the model is; and its result."""
    began = time.perf_counter()
    found = action()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began, found


def _memory(cache: CompressedCache) -> int:
    """Numbers stored in all layers."""
    others = [layer for i, layer in enumerate(cache.layers) if i not in cache.stored]
    parts = [getattr(layer, name, None) for layer in others for name in ("keys", "values")]
    return cache.memory + sum(part.numel() for part in parts if part is not None)


def _by_layer(rows: list[np.ndarray]) -> np.ndarray:
    """One row for each layer; NaN where a layer has fewer heads."""
    most = max(map(len, rows))
    return np.stack([np.pad(row, (0, most - len(row)), constant_values=np.nan) for row in rows])
