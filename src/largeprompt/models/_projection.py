"""The way from a head's output to the residual stream."""

import contextlib

import torch
from torch import nn

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "o", "proj", "output.dense")  # names of a head's way out


def output_projections(model: nn.Module, name: str | None, heads: int, v: int) -> torch.Tensor | None:
    """The matrices (heads, v, residual) by which a named module or its parent sends outputs on; None if not known."""
    if name is None:
        return None
    for home in (name, name.rpartition(".")[0]):
        for output in _OUTPUTS:
            with contextlib.suppress(AttributeError):
                found = model.get_submodule(f"{home}.{output}".lstrip("."))
                weight = getattr(found, "weight", None)
                if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
                    continue
                matrix = weight if type(found).__name__ == "Conv1D" else weight.T  # (heads · v, residual)
                if matrix.shape[0] == heads * v:
                    return matrix.detach().reshape(heads, v, -1)
    return None
