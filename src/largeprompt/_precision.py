"""The one place where the floating-point width of the mathematics is chosen."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def use_float64() -> None:
    """Make JAX compute in float64 from here on; importing the package never does.

    Arrays made before, and tasks, layers and measures of them, stay in float32: call it before making any.
    """
    jax.config.update("jax_enable_x64", True)


def is_float64() -> bool:
    """Whether JAX computes in float64."""
    return bool(jax.config.jax_enable_x64)  # pyrefly: ignore[missing-attribute]


def cached(maxsize: int) -> Callable[[Function], Function]:
    """`functools.lru_cache` for functions that use JAX: what was computed in float32 is not the answer in float64."""

    def decorator(function: Function) -> Function:
        @functools.lru_cache(maxsize)
        def at(_precision: bool, *arguments: Any) -> Any:
            return function(*arguments)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return at(is_float64(), *arguments)

        return call  # pyrefly: ignore[bad-return]

    return decorator
