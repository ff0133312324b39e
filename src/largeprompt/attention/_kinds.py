"""Kinds of attention by name."""

from collections.abc import Callable
from typing import Literal, TypeVar, overload

from ._attention import AbstractAttention, known_kinds
from ._linear import LinearAttention
from ._softmax import SoftmaxAttention

Kind = Literal["softmax", "linear"]
Merged = TypeVar("Merged", bound=SoftmaxAttention | LinearAttention)


@overload
def attention_of(kind: Kind) -> type[SoftmaxAttention] | type[LinearAttention]: ...
@overload
def attention_of(kind: str) -> Callable[..., AbstractAttention]: ...
def attention_of(kind: str) -> Callable[..., AbstractAttention]:
    """What makes the (U, V) form of a kind: its class, or for "normalised-…" the class with that option."""
    known = known_kinds()
    if kind not in known:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(map(repr, known))}")
    return known[kind]
