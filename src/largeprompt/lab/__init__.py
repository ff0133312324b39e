"""Runs as data: their settings, the store of results, checkpoints, sweeps, and what became of them."""

from ._checkpoint import Damaged as Damaged
from ._execution import Interrupted as Interrupted
from ._execution import Watcher as Watcher
from ._execution import train as train
from ._files import replacing as replacing
from ._forecast import Forecast as Forecast
from ._forecast import forecast as forecast
from ._record import Record as Record
from ._result import layer_at as layer_at
from ._run import Run as Run
from ._settings import as_toml as as_toml
from ._settings import read_toml as read_toml
from ._settings import runs_from as runs_from
from ._settings import with_files as with_files
from ._store import Entry as Entry
from ._store import Store as Store
from ._store import run_of as run_of
from ._summary import setting as setting
from ._summary import summary as summary
from ._summary import varying as varying
from ._sweep import sweep as sweep
from ._sweep import usable_cores as usable_cores
from ._verdict import VERDICTS as VERDICTS
from ._verdict import Yardstick as Yardstick
from ._verdict import verdict as verdict
from ._verdict import wilson as wilson
