"""Numba's CUDA, an extra, also beside a NumPy that is newer than it."""

from typing import Any

import numpy as np
from numba.core import config

from largeprompt._device import numba_cuda

cuda: Any = numba_cuda()


def _import_arrays() -> None:
    """Its arrays take `row_stack` from NumPy, which has dropped it; nothing here calls it."""
    from importlib import import_module

    module: Any = np
    module.row_stack = lambda arrays: np.vstack(arrays)  # a function of its own, not another name of vstack
    try:
        import_module("numba.cuda.np.arrayobj")
    finally:
        del module.row_stack


if not (hasattr(np, "row_stack") or config.ENABLE_CUDASIM):  # pyrefly: ignore[missing-attribute]
    _import_arrays()
