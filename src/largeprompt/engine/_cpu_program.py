"""Compiled loops of a processor, kept on disk by Numba: to compile one takes ten seconds, to load it milliseconds."""

import contextlib
from typing import Any

import numba
from numba.core.caching import FunctionCache

from largeprompt._compiled import LIMIT, cache_folder, drop_oldest


class _Programs(FunctionCache):
    """Those of one loop. A damaged one is read as none, and what cannot be written is not kept."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling may raise
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


def keep(loop: Any) -> None:
    """Keep what is compiled of a loop, in the user's cache folder or where `NUMBA_CACHE_DIR` says.

    Where nothing can be written there, it is kept beside the package.
    """
    config: Any = numba.config
    own, base = config.CACHE_DIR, cache_folder()
    if not own:
        if base is None:
            return
        with contextlib.suppress(OSError):
            drop_oldest(base, LIMIT)
        config.CACHE_DIR = str(base.absolute() / "engine")
    with contextlib.suppress(RuntimeError):  # of no folder that can be written
        loop._cache = _Programs(loop.py_func)
    config.CACHE_DIR = own
