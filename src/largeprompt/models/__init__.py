"""Networks that people use: their heads as attention on measures."""

from ._call import AttentionCall as AttentionCall
from ._call import HeadCall as HeadCall
from ._inspect import calls_of as calls_of
from ._inspect import inspect as inspect
from ._inspect import inspect_calls as inspect_calls
from ._inspection import Inspection as Inspection
