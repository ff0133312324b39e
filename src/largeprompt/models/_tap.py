"""What a PyTorch network's attention calls read, seen while the network runs; nothing of it changes."""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ._call import AttentionCall, chosen_queries
from ._projection import output_projections


@contextlib.contextmanager
def tap(model: nn.Module, each: Callable[[AttentionCall], None], queries: int = 32) -> Iterator[None]:
    """Give `each` every attention call of the forward passes in the block, with `queries` of its queries.

    Calls of transformers models are seen where the model looks up its attention function, those of other models where
    they call `scaled_dot_product_attention` or `multi_head_attention_forward`. A batch must be of one prompt.
    """
    recorder = _Recorder(model, each, queries)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one kernel for a whole layer, which shows no attention
    try:
        with recorder.following(), _transformers(recorder), _functional(recorder), _Direct(recorder):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Recorder:
    """Passes calls on; knows which module is running, and which call is part of one that it has passed on."""

    def __init__(self, model: nn.Module, each: Callable[[AttentionCall], None], queries: int):
        self.model, self.names = model, {module: name for name, module in model.named_modules()}
        self._each, self._queries, self._seen = each, queries, 0
        self._running: list[nn.Module] = []
        self.inside = False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow which module runs."""
        before = [m.register_forward_pre_hook(lambda m, _: self._running.append(m)) for m in self.names]
        after = [m.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True) for m in self.names]
        try:
            yield
        finally:
            for hook in (*before, *after):
                hook.remove()

    @property
    def running(self) -> nn.Module | None:
        """The innermost module that runs."""
        return self._running[-1] if self._running else None

    def seen(self, call: Callable[[], Any], module: nn.Module | None, heads: Callable[[Any], Any], **parts: Any) -> Any:
        """The result of a call, passed on with its parts; `heads` makes (1, heads, queries, v) of the result."""
        if self.inside:
            return call()
        self.inside = True
        try:
            result = call()
        finally:
            self.inside = False
        with torch.no_grad():
            self._pass_on(module, heads(result), **parts)
        return result

    def _pass_on(self, module, outputs, query, key, value, mask, bias, causal, scale) -> None:
        known = self.names.get(module) if module is not None else None
        name, self._seen = known or f"attention {self._seen}", self._seen + 1
        if query.shape[0] != 1:
            raise ValueError(f"the batch has {query.shape[0]} prompts; run the model on one at a time")
        n, L = query.shape[2], key.shape[2]
        at = chosen_queries(_visible(mask, causal, n, L), self._queries)
        added = _added(mask, bias, causal, torch.as_tensor(at), n, L)
        matrices = output_projections(self.model, known, query.shape[1], value.shape[3])
        self._each(
            AttentionCall(
                name,
                _numpy(query[0][:, at]),
                _numpy(key[0]),
                _numpy(value[0]),
                float(scale),
                added,
                at if n == L else None,
                _numpy(outputs[0][:, at]),
                None if matrices is None else _numpy(matrices),
            )
        )


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _visible(mask: torch.Tensor | None, causal: bool, n: int, L: int) -> np.ndarray:
    """How many tokens each query sees."""
    if causal:
        return np.minimum(np.arange(1, n + 1), L)
    if mask is None:
        return np.full(n, L)
    seen = mask if mask.dtype == torch.bool else mask > _lowest(mask)
    return np.broadcast_to(seen[0].sum(dim=-1)[0].cpu().numpy(), (n,))


def _lowest(mask: torch.Tensor) -> float:
    """What is added to a hidden token's score, or more."""
    return torch.finfo(mask.dtype).min / 2


def _added(mask, bias, causal: bool, at: torch.Tensor, n: int, L: int) -> np.ndarray | None:
    """What is added to the scores of these queries, −∞ for hidden tokens; None where that is nothing."""

    def rows(tensor):
        tensor = tensor[0] if tensor.ndim == 4 else tensor.reshape(1, *tensor.shape[-2:])
        return tensor[:, at] if tensor.shape[1] > 1 else tensor.expand(-1, len(at), -1)

    parts = []
    if causal:
        parts.append(torch.where(torch.arange(L) <= at[:, None], 0.0, -math.inf)[None])
    for tensor in (mask, bias):
        if tensor is None:
            continue
        chosen = rows(tensor)[..., :L].cpu()
        hidden = ~chosen if chosen.dtype == torch.bool else chosen <= _lowest(tensor)
        finite = torch.zeros((), dtype=torch.float32) if chosen.dtype == torch.bool else chosen.float()
        parts.append(torch.where(hidden, -math.inf, finite))
    if not parts:
        return None
    added = functools.reduce(torch.add, parts)
    return None if bool((added == 0).all()) else added.numpy()


# Where calls are seen: the table of transformers, the functions of torch.nn.functional, and direct calls of those.


@contextlib.contextmanager
def _transformers(recorder: _Recorder) -> Iterator[None]:
    """Stand between the model and its attention function, under the same name: so its masks stay the same too."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

    configs = [getattr(module, "config", None) for module in recorder.names]
    names = {found for config in configs if (found := getattr(config, "_attn_implementation", None))}
    own = {name: table[name] for name in names if name in table}
    for name in names:
        table[name] = functools.partial(_by_transformers, recorder, own.get(name))
    try:
        yield
    finally:
        for name in names:
            if name in own:
                table[name] = own[name]
            else:
                del table[name]


def _by_transformers(recorder, function, module, query, key, value, attention_mask, *rest: Any, **options: Any):
    if module not in recorder.names:
        function = function or _eager(module)
        return function(module, query, key, value, attention_mask, *rest, **options)
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"{recorder.names[module]} has {name}; its weights are no softmax of scores of its tokens")
    chosen = function or _eager(module)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(function is not None and attention_mask is None and query.shape[2] > 1 and causal)
    L = query.shape[2] if causal else key.shape[2]
    scaling = options.get("scaling")
    return recorder.seen(
        lambda: chosen(module, query, key, value, attention_mask, *rest, **options),
        module,
        lambda result: result[0].transpose(1, 2),
        query=query,
        key=key[:, :, :L],
        value=value[:, :, :L],
        mask=attention_mask,
        bias=options.get("position_bias"),
        causal=causal,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
    )


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The plain attention function of a model's own file."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no attention function that can be followed")


_dot_product = functional.scaled_dot_product_attention
_multi_head = functional.multi_head_attention_forward
_linear = functional.linear


@contextlib.contextmanager
def _functional(recorder: _Recorder) -> Iterator[None]:
    """Stand in for the two functions of torch.nn.functional, which its own modules call by name."""

    def multi_head(*arguments, need_weights=True, **options):
        if not need_weights or recorder.inside:
            return _multi_head(*arguments, need_weights=need_weights, **options)
        read: list[torch.Tensor] = []  # by linear maps, and what they gave
        gave: list[torch.Tensor] = []

        def linear(x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            read.append(x)
            gave.append(_linear(x, *more, **named))
            return gave[-1]

        # The weights come from a path of its own. The usual path then shows queries, keys, values and masks; what its
        # linear maps give is known, and so is what the last one reads: the outputs of the heads.
        recorder.inside, functional.linear = True, linear
        try:
            result = _multi_head(*arguments, need_weights=True, **options)
            recorder.inside, functional.linear = False, lambda *_, **__: gave.pop(0)
            functional.scaled_dot_product_attention = functools.partial(_by_dot_product, recorder, outputs=read[-1])
            with torch.no_grad():
                _multi_head(*arguments, need_weights=False, **options)
        finally:
            recorder.inside, functional.linear = False, _linear
            functional.scaled_dot_product_attention = by_dot_product
        return result

    by_dot_product = functools.partial(_by_dot_product, recorder)
    functional.scaled_dot_product_attention = by_dot_product
    functional.multi_head_attention_forward = multi_head
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = _dot_product
        functional.multi_head_attention_forward = _multi_head


class _Direct(TorchFunctionMode):
    """Sees the calls of code that has imported the function itself."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is _dot_product and not self._recorder.inside:
            return _by_dot_product(self._recorder, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_dot_product(
    recorder,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    outputs=None,
):
    """A call seen; where its outputs are known, of shape (queries, heads · v), it is not made."""
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if enable_gqa:
        options["enable_gqa"] = True

    def result():
        if outputs is None:
            return _dot_product(query, key, value, **options)
        return outputs.reshape(query.shape[2], *query.shape[:2], -1).permute(1, 2, 0, 3)

    def as_heads(tensor):
        return tensor if tensor.ndim == 4 else tensor.reshape(1, -1, *tensor.shape[-2:])

    return recorder.seen(
        result,
        recorder.running,
        as_heads,
        query=as_heads(query),
        key=as_heads(key),
        value=as_heads(value),
        mask=attn_mask,
        bias=None,
        causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )
