r"""Weights on the tokens of a prompt, through a whole network.

A token of weight $a$ counts as $a$ tokens: $\log a$ is added to every attention score on it, in every layer. A network
of attention, maps of single tokens and norms of single tokens is then exactly a function of the weighted measure, and
an integer weight is the same as so many copies of the token.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NOTHING = -1e4  # a log-weight that leaves nothing of a token, in every type of number

_dot_product = functional.scaled_dot_product_attention
_multi_head = functional.multi_head_attention_forward


class WeightedPrompt(Protocol):
    """A network's outputs as a function of the log-weights of the groups (rows, sentences, documents) of its prompt.

    Rows of a batch are independent, and gradients go through.
    """

    @property
    def groups(self) -> int:
        """How many groups there are."""
        ...

    def __call__(self, log_weights: Tensor) -> Tensor:
        """Outputs (b, p) for log-weights (b, groups)."""
        ...


@contextlib.contextmanager
def weighted(log_weights: Tensor) -> Iterator[None]:
    """Give the tokens of a prompt log-weights, (L,) or (b, L), in all attention calls of the block that read L keys.

    They are seen where a network calls `scaled_dot_product_attention` or `multi_head_attention_forward`; a block with
    no such call is an error. Other averages over tokens (a standardisation of columns) are the caller's to weigh.
    """
    if log_weights.ndim not in (1, 2) or bool(torch.isnan(log_weights).any()) or bool((log_weights == torch.inf).any()):
        raise ValueError(
            f"log-weights have shape {tuple(log_weights.shape)}; they must be numbers (tokens,) or (prompts, tokens), "
            "with −∞ for a token that is left out"
        )
    calls = _Calls(log_weights.clamp_min(_NOTHING))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one kernel for a whole layer, which shows no attention
    functional.scaled_dot_product_attention = calls.dot_product
    functional.multi_head_attention_forward = calls.multi_head
    try:
        with calls:
            yield
    finally:
        functional.scaled_dot_product_attention = _dot_product
        functional.multi_head_attention_forward = _multi_head
        torch.backends.mha.set_fastpath_enabled(fast)
    if not calls.seen:
        raise ValueError(
            f"no attention call has read {log_weights.shape[-1]} keys by `scaled_dot_product_attention`; give as many "
            'weights as the prompt has tokens, and a model that runs with attn_implementation="sdpa"'
        )


class _Calls(TorchFunctionMode):
    """Stands in for the two functions of torch.nn.functional, and sees code that has imported the first itself."""

    def __init__(self, log_weights: Tensor):
        super().__init__()
        self._log_weights, self.seen, self._inside = log_weights, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _dot_product and not self._inside:
            return self.dot_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def multi_head(self, *arguments: Any, need_weights: bool = True, **options: Any) -> Any:
        """The usual path, which calls `scaled_dot_product_attention`; the weights themselves are not returned."""
        return _multi_head(*arguments, need_weights=False, **options)

    def dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        **rest,
    ) -> Tensor:
        """The call with log-weights added to scores: one more coordinate of keys, 1 in queries.

        So a fused kernel stays fused, and gradients reach the weights without a matrix of all pairs.
        """
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **rest}
        if key.shape[-2] != self._log_weights.shape[-1]:
            return self._own(query, key, value, scale=scale, **options)
        self.seen += 1
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        added = self._log_weights.to(key.dtype) / scale
        if added.ndim == 2:
            if added.shape[0] not in (1, key.shape[0]):
                raise ValueError(
                    f"there are weights for {added.shape[0]} prompts and {key.shape[0]} prompts in the batch"
                )
            added = added.reshape(added.shape[0], *[1] * (key.ndim - 3), added.shape[1])
        width = -(-max(key.shape[-1] + 1, value.shape[-1]) // 8) * 8  # one for all three: kernels take it for granted
        longer, keys, values = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        last = torch.zeros(width, dtype=key.dtype, device=key.device)
        last[-1] = 1
        keys = keys + added.expand(key.shape[:-1])[..., None] * last
        return self._own(longer + last, keys, values, scale=scale, **options)[..., : value.shape[-1]]

    def _own(self, *arguments: Any, **options: Any) -> Tensor:
        """PyTorch's function, not seen a second time."""
        self._inside = True
        try:
            return _dot_product(*arguments, **options)
        finally:
            self._inside = False
