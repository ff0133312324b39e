"""What a layer adds up, and the doors to what holds for softmax or linear attention alone."""

from typing import cast

from ._attention import AbstractAttention
from ._heads import Head, MultiHead
from ._kinds import Kind
from ._layer import AbstractLayer
from ._linear import LinearAttention
from ._softmax import SoftmaxAttention


def heads_of(layer: AbstractLayer) -> tuple[AbstractAttention, ...] | None:
    """The (U, V) forms whose outputs a layer adds up, of whatever kinds; None for a layer that is no sum of such."""
    if type(layer) is Head:
        return (layer.merged(),)
    if type(layer) is MultiHead:
        parts = [heads_of(head) for head in layer.heads]
        return None if None in parts else tuple(head for part in parts for head in part or ())
    # a layer that changes its output is no longer V times its reading
    if isinstance(layer, AbstractAttention) and type(layer)._output is AbstractAttention._output:
        return (layer,)
    return None


def kind_of(layer: AbstractLayer) -> Kind | None:
    """The kind of a layer of one head, where it is exactly softmax or linear attention; None for all else.

    A subclass is a kind of its own, even one that changes nothing: what it reads is known only by asking it.
    """
    if type(layer) is Head:
        return cast(Kind, layer.kind) if layer.kind in ("softmax", "linear") else None
    return "softmax" if type(layer) is SoftmaxAttention else "linear" if type(layer) is LinearAttention else None


def merged_form(layer: AbstractLayer) -> SoftmaxAttention | LinearAttention:
    """A layer of one softmax or linear head in its (U, V) form; what holds for these only refuses the rest here."""
    if kind_of(layer) is None:
        raise ValueError(f"the layer is {described(layer)}; it must be one head of softmax or linear attention")
    merged = layer.merged() if isinstance(layer, Head) else layer
    return cast(SoftmaxAttention | LinearAttention, merged)


def softmax_form(layer: AbstractLayer) -> SoftmaxAttention:
    """A layer of one softmax head in its (U, V) form; every other layer is refused."""
    merged = merged_form(layer)
    if not isinstance(merged, SoftmaxAttention):
        raise ValueError("the layer is linear attention; this holds of softmax attention only")
    return merged


def linear_form(layer: AbstractLayer) -> LinearAttention:
    """A layer of one head of linear attention in its (U, V) form; every other layer is refused."""
    merged = merged_form(layer)
    if not isinstance(merged, LinearAttention):
        raise ValueError("the layer is softmax attention; this holds of linear attention only")
    return merged


def described(layer: AbstractLayer) -> str:
    """The type of a layer, and the kinds of its heads where that says why it is refused, for messages."""
    heads = layer.heads if isinstance(layer, MultiHead) else (layer,) if isinstance(layer, Head) else ()
    kinds = ", ".join(dict.fromkeys(head.kind for head in heads if head.kind not in ("softmax", "linear")))
    return f"of type {type(layer).__name__}" + (f" ({kinds})" if kinds else "")
