"""Queries moved to other positions, with the model's own rotary embedding."""

import sys

import torch
from torch import Tensor, nn

from ._future import Rotation

_WITHOUT = ("cohere2", "exaone4")  # models whose layers of full attention have no rotary embedding


def is_rotated(module: nn.Module) -> bool:
    """Whether an attention module of full attention, of a model with rotary embedding, uses it."""
    kind = getattr(getattr(module, "config", None), "model_type", "")
    return bool(getattr(module, "use_rope", True)) and kind not in _WITHOUT


def rotation_of(model: nn.Module) -> Rotation | None:
    """A function that moves queries by positions; None for a model without rotary embedding, where they stay."""
    named = {name: module for name, module in model.named_modules() if name.split(".")[-1] in ("rotary_emb", "rotary")}
    if not named:
        return None
    name, rotary = next(iter(named.items()))
    files = {type(module).__module__ for module in model.modules()}
    functions = [getattr(sys.modules[file], "apply_rotary_pos_emb", None) for file in sorted(files)]
    apply = next((function for function in functions if function is not None), None)
    if apply is None or not hasattr(rotary, "inv_freq"):
        raise ValueError(
            f"queries of {type(model).__name__} cannot be moved: its {name} is of a kind that is not known"
        )
    if getattr(rotary, "rope_type", "default") in ("longrope", "dynamic"):
        raise ValueError(
            f"queries of {type(model).__name__} cannot be moved: its rotary embedding ({rotary.rope_type}) depends on "
            "the length of the text; give a model with one that does not"
        )
    size = float(getattr(rotary, "attention_scaling", 1.0))

    def rotate(queries: Tensor, by: Tensor) -> Tensor:
        b, H, pieces, n, k = queries.shape
        flat = queries.reshape(b, H, pieces * n, k)
        cos, sin = (part.float() / size for part in rotary(flat, by.repeat_interleave(n)[None]))
        width = cos.shape[-1]
        turned = apply(flat[..., :width], flat[..., :width], cos, sin)[0]
        return torch.cat([turned, flat[..., width:]], dim=-1).reshape(queries.shape)

    return rotate
