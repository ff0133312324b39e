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
    from .contexts import Attribution as Attribution
    from .contexts import ContextPrompt as ContextPrompt
    from .contexts import attribute as attribute
    from .sensitivity import ErrorBars as ErrorBars
    from .sensitivity import Influence as Influence
    from .sensitivity import LearningCurve as LearningCurve
    from .sensitivity import RowsFor as RowsFor
    from .sensitivity import WeightedPrompt as WeightedPrompt
    from .sensitivity import error_bars as error_bars
    from .sensitivity import influence as influence
    from .sensitivity import learning_curve as learning_curve
    from .sensitivity import left_out as left_out
    from .sensitivity import rows_for as rows_for
    from .sensitivity import weighted as weighted
    from .tables import InfluentialRows as InfluentialRows
    from .tables import Intervals as Intervals
    from .tables import RowsStudy as RowsStudy
    from .tables import Table as Table
    from .tables import TablePrompt as TablePrompt
    from .tables import TabPFN as TabPFN
    from .tables import TabPFNClassifier as TabPFNClassifier
    from .tables import read_table as read_table
    from .tables import study_rows as study_rows

_FIRST_USE = {
    ".compression": (
        *("CompressedCache", "CompressedHead", "Effect", "MeasurePress", "compress", "compression_effect"),
    ),
    ".contexts": ("Attribution", "ContextPrompt", "attribute"),
    ".sensitivity": (
        *("ErrorBars", "Influence", "LearningCurve", "RowsFor", "WeightedPrompt"),
        *("error_bars", "influence", "learning_curve", "left_out", "rows_for", "weighted"),
    ),
    ".tables": (
        *("InfluentialRows", "Intervals", "RowsStudy", "Table", "TablePrompt", "TabPFN", "TabPFNClassifier"),
        *("read_table", "study_rows"),
    ),
}
_HOMES = {name: home for home, names in _FIRST_USE.items() for name in names}


if not TYPE_CHECKING:  # else every misspelt name would pass for one of these

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = import_module(_HOMES[name], __name__)
        except ImportError as error:
            raise ImportError(f"{name}: {INSTALL} ({error})") from None
        globals()[name] = found = getattr(home, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
