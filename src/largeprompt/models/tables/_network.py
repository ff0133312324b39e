"""The network of TabPFN v1 (Hollmann et al., 2023): rows of a table as tokens without positions."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._checkpoint import checkpoint

# names in the published file: names here
_NAMES = {"self_attn.in_proj_": "in_proj.", "self_attn.out_proj.": "out_proj."}
_PREFIXES = ("module.", "transformer_encoder.")
FEATURES, CLASSES = 100, 10  # that the published network reads at most


class Layer(nn.Module):
    """One layer: every row reads the rows whose labels are known, by softmax attention; norms come after the sums."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, rows: Tensor, known: int) -> Tensor:
        weight, bias = self.in_proj.weight, self.in_proj.bias
        width = rows.shape[-1]
        query = functional.linear(rows, weight[:width], bias[:width])
        key, value = functional.linear(rows[:, :known], weight[width:], bias[width:]).chunk(2, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        # by its full name, so that `weighted` sees the call
        parts = query[:, :, :known], query[:, :, known:]
        read = torch.cat([functional.scaled_dot_product_attention(part, key, value) for part in parts], dim=2)
        rows = self.norm1(rows + self.out_proj(read.transpose(1, 2).flatten(2)))
        return self.norm2(rows + self.linear2(functional.gelu(self.linear1(rows))))


class TabPFN(nn.Module):
    """TabPFN v1: rows with labels, then rows without, in; logits of the classes of the rows without labels, out.

    Nothing but attention joins rows, so that the outputs are a function of the measure that the labelled rows are.
    """

    def __init__(
        self,
        features: int = FEATURES,
        classes: int = CLASSES,
        *,
        width: int = 512,
        heads: int = 4,
        hidden: int = 1024,
        layers: int = 12,
    ):
        super().__init__()
        self.features, self.classes = features, classes
        self.encoder, self.y_encoder = nn.Linear(features, width), nn.Linear(1, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.decoder = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, classes))

    @staticmethod
    def load(path: str | Path | None = None, *, fetch: bool = False) -> "TabPFN":
        """The published network from a checkpoint file, by default the one of the installed package pfns.

        With `fetch=True` the package that holds it is downloaded once, and not installed.
        """
        place = checkpoint(path, fetch=fetch)
        try:
            state, _, settings = torch.load(place, map_location="cpu", weights_only=True)
            state = {_name(name): value for name, value in state.items() if not name.endswith("criterion.weight")}
            width, features = state["encoder.weight"].shape
            hidden, classes = len(state["decoder.0.weight"]), len(state["decoder.2.weight"])
            depth = len({name.split(".")[1] for name in state if name.startswith("layers.")})
            sizes = {"width": width, "heads": settings["nhead"], "hidden": hidden, "layers": depth}
            network = TabPFN(features, classes, **sizes)
            network.load_state_dict(state)
        except Exception as error:  # of any kind: damaged files raise whatever the reader met
            said = " ".join(str(error).split())[:120]
            raise ValueError(f"{place} is no checkpoint of TabPFN v1 ({type(error).__name__}: {said})") from None
        return network.eval().requires_grad_(False)

    def forward(self, table: Tensor, labels: Tensor) -> Tensor:
        """Logits (b, t, classes) for tables (b, n + t, features) whose first rows have the labels (b, n)."""
        known = labels.shape[1]
        rows = self.encoder(table)
        rows = torch.cat([rows[:, :known] + self.y_encoder(labels[..., None].to(rows)), rows[:, known:]], dim=1)
        layers: Any = self.layers
        for layer in layers:
            rows = layer(rows, known)
        return self.decoder(rows[:, known:])


def _name(name: str) -> str:
    """A parameter's name here, from that in the published file."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
