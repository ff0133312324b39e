"""A long prompt as a short measure: keys and values of a network compressed."""

from ._cache import CompressedCache as CompressedCache
from ._compress import CompressedHead as CompressedHead
from ._compress import compress as compress
from ._effect import Effect as Effect
from ._effect import compression_effect as compression_effect
from ._share import Goal as Goal


def __getattr__(name: str) -> type:
    if name == "MeasurePress":  # on first use: it needs kvpress
        from ._press import MeasurePress

        return MeasurePress
    raise AttributeError(f"module {__name__} has no attribute {name}")
