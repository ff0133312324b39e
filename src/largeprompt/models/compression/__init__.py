"""A long prompt as a short measure: keys and values of a network compressed."""

from ._cache import CompressedCache as CompressedCache
from ._compress import CompressedHead as CompressedHead
from ._compress import compress as compress


def __getattr__(name: str) -> type:
    if name == "MeasurePress":  # on first use: it needs kvpress
        from ._press import MeasurePress

        return MeasurePress
    raise AttributeError(f"module {__name__} has no attribute {name}")
