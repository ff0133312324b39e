"""Networks that people use: their heads as attention on measures."""

from ._arrays import calls_from as calls_from
from ._call import AttentionCall as AttentionCall
from ._call import HeadCall as HeadCall
from ._inspect import calls_of as calls_of
from ._inspect import inspect as inspect
from ._inspect import inspect_calls as inspect_calls
from ._inspection import Inspection as Inspection
from ._load import load as load
from .report import write_report as write_report
