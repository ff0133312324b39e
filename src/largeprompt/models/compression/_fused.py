"""Softmax attention without its matrix of scores: outputs, and the log of all that each query weighs."""

import math

import torch
from torch import Tensor

_FAR = 3e4  # the largest bias: within what every type of number holds


def attended(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs (b, h, n, v) and log Σ exp(score) (b, h, n), in float32, of queries (b, h, n, k) on keys (b, h, L, k).

    `bias` (b, h, L) is added to the scores on each key. It goes in as three more coordinates of queries and keys, since
    no fused function takes a bias and says what queries weigh; each holds 8 bits of it, so that half precision is
    enough. Work is done in the type of the keys.
    """
    v, dtype = values.shape[-1], keys.dtype
    width = -(-max(keys.shape[-1] + 3, v) // 8) * 8
    factor = 2.0 ** -round(math.log2(scale))
    longer, biased = _padded(queries.to(dtype), width), _padded(keys, width)
    longer[..., keys.shape[-1] : keys.shape[-1] + 3] = factor
    rest = bias.float().clamp(-_FAR, _FAR) / (factor * scale)
    for place in range(keys.shape[-1], keys.shape[-1] + 3):
        piece = rest.bfloat16()
        biased[..., place] = piece.to(dtype)
        rest = rest - piece.float()
    found, mass = _fused(longer, biased, _padded(values.to(dtype), width), scale)
    return found[..., :v].float(), mass[..., : queries.shape[2]].float()


def _padded(x: Tensor, width: int) -> Tensor:
    wider = x.new_zeros(*x.shape[:-1], width)
    wider[..., : x.shape[-1]] = x
    return wider


def _fused(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What PyTorch's fused functions return first; written out where a device or type has none."""
    functions = torch.ops.aten
    if keys.device.type == "cpu":
        return functions._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, scale=scale)
    if keys.device.type == "cuda" and keys.dtype in (torch.float16, torch.bfloat16) and keys.shape[-1] <= 256:
        return functions._scaled_dot_product_flash_attention(queries, keys, values, scale=scale)[:2]
    if keys.device.type == "cuda":
        return functions._scaled_dot_product_efficient_attention(queries, keys, values, None, True, scale=scale)[:2]
    scores = scale * (queries @ keys.transpose(-1, -2)).float()
    return scores.softmax(dim=-1).to(values.dtype) @ values, scores.logsumexp(dim=-1)
