r"""Weights on the tokens of a prompt, through a whole network.

A token of weight $a$ counts as $a$ tokens: $\log a$ is added to every attention score on it, in every layer. A network
of attention, maps of single tokens and norms of single tokens is then exactly a function of the weighted measure, and
an integer weight is the same as so many copies of the token.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NOTHING = -3e4  # a score that leaves nothing of a token; float16 holds it, and −∞ would give NaN times 0

_dot_product = functional.scaled_dot_product_attention


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
    no such call is an error. Other averages over tokens (a standardisation of columns) are the caller's to weigh. In a
    block inside another both apply.
    """
    _check(log_weights)
    before = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
    calls = _Calls(log_weights, *before)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one kernel for a whole layer, which shows no attention
    functional.scaled_dot_product_attention = calls.dot_product  # pyrefly: ignore[bad-assignment]
    functional.multi_head_attention_forward = calls.multi_head
    try:
        with calls:
            yield
    finally:
        functional.scaled_dot_product_attention, functional.multi_head_attention_forward = before
        torch.backends.mha.set_fastpath_enabled(fast)
    if not calls.seen:
        raise ValueError(
            f"no attention call has read {log_weights.shape[-1]} keys by `scaled_dot_product_attention`; give as many "
            'weights as the prompt has tokens, and a model that runs with attn_implementation="sdpa"'
        )


def _check(log_weights: Tensor) -> None:
    if not isinstance(log_weights, Tensor):
        raise ValueError(f"log-weights are of type {type(log_weights).__name__}; give a tensor of PyTorch")
    if log_weights.ndim not in (1, 2) or not log_weights.is_floating_point():
        raise ValueError(
            f"log-weights have shape {tuple(log_weights.shape)} and type {log_weights.dtype}; they must be "
            "floating-point numbers (tokens,) or (prompts, tokens)"
        )
    wrong = torch.isnan(log_weights) | (log_weights == torch.inf)
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"log-weight {at} is {float(log_weights[at])}; it must be a number, or −∞ for a token left out"
        )
    if bool((log_weights == -torch.inf).all(dim=-1).any()):
        raise ValueError("every token of a prompt has log-weight −∞; at least one must stay")


class _Calls(TorchFunctionMode):
    """Stands in for the two functions of torch.nn.functional, and sees code that has imported the first itself."""

    def __init__(self, log_weights: Tensor, dot_product: Callable[..., Tensor], multi_head: Callable[..., Any]):
        super().__init__()
        self._log_weights, self._dot_product, self._multi_head = log_weights, dot_product, multi_head
        self.seen, self._inside = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _dot_product and not self._inside:
            return self.dot_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def multi_head(
        self, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *others: Any, **options: Any
    ) -> Any:
        """PyTorch's function, which calls `scaled_dot_product_attention`; where weights are asked for it does not.

        Then the log-weights go into the mask, which it adds to the scores of all pairs.
        """
        asked = options.get("need_weights", True) and key.shape[0] == self._log_weights.shape[-1]
        if options.get("is_causal") and options.get("attn_mask") is None:
            asked = False  # PyTorch says what is wrong
        if asked and not self._inside:
            self.seen += 1
            prompts = query.shape[1] if query.ndim == 3 else 1
            added = self._for_prompts(prompts).clamp_min(_NOTHING)[:, None, None].to(query)
            added = added.expand(prompts, heads, query.shape[0], key.shape[0]).flatten(0, 1)
            mask, padding = options.get("attn_mask"), options.get("key_padding_mask")
            if mask is not None:
                added = added.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else added + mask
            if padding is not None and padding.dtype == torch.bool:  # two masks of different types are not taken
                padding = query.new_zeros(padding.shape).masked_fill(padding, -torch.inf)
            options |= {"attn_mask": added, "key_padding_mask": padding, "is_causal": False}
        if not asked:
            return self._multi_head(query, key, value, width, heads, *others, **options)
        return self._unseen(self._multi_head, query, key, value, width, heads, *others, **options)

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
            return self._unseen(self._dot_product, query, key, value, scale=scale, **options)
        self.seen += 1
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        added = self._for_prompts(key.shape[0] if key.ndim > 2 else 1) / scale
        added = added.clamp_min(_NOTHING).to(key)
        added = added.reshape(len(added), *[1] * (key.ndim - 3), key.shape[-2]) if key.ndim > 2 else added[0]
        width = -(-max(key.shape[-1] + 1, value.shape[-1]) // 8) * 8  # one for all three: kernels take it for granted
        longer, keys, values = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        last = torch.zeros(width, dtype=key.dtype, device=key.device)
        last[-1] = 1
        keys = keys + added.expand(key.shape[:-1])[..., None] * last
        found = self._unseen(self._dot_product, longer + last, keys, values, scale=scale, **options)
        return found[..., : value.shape[-1]]

    def _for_prompts(self, prompts: int) -> Tensor:
        """Log-weights as (1, L) or (prompts, L)."""
        found = self._log_weights.reshape(-1, self._log_weights.shape[-1])
        if len(found) not in (1, prompts):
            raise ValueError(f"there are weights for {len(found)} prompts and {prompts} prompts in the batch")
        return found

    def _unseen(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function gives that was there before the block; PyTorch calls it through this object once more."""
        before, self._inside = self._inside, True
        try:
            return function(*arguments, **options)
        finally:
            self._inside = before
