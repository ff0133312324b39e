"""The same compression for users of kvpress: a press, whose atoms have no weights beside their keys and values."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from .._projection import output_projections
from ._atoms import RECENT, SINKS, Layer, choose, fitted, importance, read, revalued, roots_of
from ._folding import folded
from ._future import replayed, segment_of
from ._rotation import rotation_of

try:
    from kvpress import BasePress
    from kvpress.utils import (
        compute_n_kept,
        get_prerope_query_states,
    )
except ImportError as error:
    raise ImportError(f"MeasurePress needs kvpress, which is not installed ({error}): pip install kvpress") from error


@dataclasses.dataclass
class MeasurePress(BasePress):
    """A press of kvpress that keeps atoms fitted to the queries to come, equally many for every head.

    Weights of atoms are folded into their keys where that is accurate, and values are fitted to the keys that result.
    """

    compression_ratio: float = 0.0
    queries: int = 8192

    def __post_init__(self):
        if not 0 <= self.compression_ratio < 1:
            raise ValueError(f"compression_ratio is {self.compression_ratio}; it must be at least 0 and below 1")

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that are left of a layer's."""
        tokens = keys.shape[2]
        count = compute_n_kept(tokens, self.compression_ratio)
        if count == tokens:
            return keys, values
        layer = self._problem(module, hidden_states, keys.float(), values.float(), kwargs)
        reading = read(layer)
        atoms = fitted(layer, reading, choose(importance(layer, reading), count, min(SINKS, count), RECENT))
        moved, folds = folded(atoms.keys, atoms.log_weights, layer.future.queries, layer.scale)
        plain = torch.take_along_dim(layer.values, atoms.kept[..., None], dim=2).float()
        begin = torch.where(folds[..., None, None], atoms.values, plain)
        return moved.to(keys.dtype), revalued(layer, reading, moved, begin).to(values.dtype)

    def _problem(self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, kwargs: dict) -> Layer:
        cos, sin = (part[:, None] for part in kwargs["position_embeddings"])
        queries = get_prerope_query_states(module, hidden_states)
        queries = queries * cos + rotate_half(queries) * sin
        future = replayed([segment_of(queries, self.queries)], keys, values, None, module.scaling, rotation_of(module))
        way = output_projections(module, "", queries.shape[1], values.shape[-1])
        roots = roots_of(way, (*future.queries.shape[1:3], values.shape[-1]), keys.device)
        return Layer(keys, values, torch.zeros_like(keys[..., 0]), module.scaling, future, roots)
