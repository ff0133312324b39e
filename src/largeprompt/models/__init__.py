"""Networks that people use: their heads as attention on measures."""

from importlib import import_module
from typing import TYPE_CHECKING

from ._arrays import calls_from as calls_from
from ._call import AttentionCall as AttentionCall
from ._call import HeadCall as HeadCall
from ._inspect import calls_of as calls_of
from ._inspect import inspect as inspect
from ._inspect import inspect_calls as inspect_calls
from ._inspection import Inspection as Inspection
from ._load import INSTALL
from ._load import load as load
from .report import write_report as write_report

# Imported on first use, by `__getattr__`: they need PyTorch and transformers, which the rest does not.
if TYPE_CHECKING:
    from .compression import CompressedCache as CompressedCache
    from .compression import CompressedHead as CompressedHead
    from .compression import Effect as Effect
    from .compression import compress as compress
    from .compression import compression_effect as compression_effect
    from .compression._press import MeasurePress as MeasurePress

_COMPRESSION = ("CompressedCache", "CompressedHead", "Effect", "MeasurePress", "compress", "compression_effect")


if not TYPE_CHECKING:  # else every misspelt name would pass for one of these

    def __getattr__(name: str) -> object:
        if name not in _COMPRESSION:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = import_module(".compression", __name__)
        except ImportError as error:
            raise ImportError(f"{name}: {INSTALL} ({error})") from None
        globals()[name] = found = getattr(home, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_COMPRESSION})
