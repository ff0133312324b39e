"""Functions that are compiled as parts of the loop that calls them, and not on their own.

Numba optimises each function that a compiled one calls and makes machine code of it, with all that it calls in turn,
and then does so again for its callers. Here a function is left as it was translated until the outermost one, which
Python calls, is optimised with everything below it. There is nothing to unpack Python's arguments either: to call such
a function from Python ends the process.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from largeprompt._compiled import without_garbage_collection

from ._cpu_program import keep


class _Translated(JITCodeLibrary):
    """Code that is optimised and made machine code of where it is linked to, without a place in memory of its own."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:  # of which Numba asks `set_env` alone
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Nothing: what is not in memory has no constants there."""


class _Translator(Compiler):
    def define_pipelines(self):
        state: Any = self.state
        state.library = _Translated(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()


class _Uncollected(Compiler):
    def compile_extra(self, func: Any) -> Any:
        with without_garbage_collection():
            return super().compile_extra(func)


def outermost(**options: Any) -> Any:
    """`numba.njit` with these options, for the function that Python calls, which holds all memory meanwhile.

    No references are counted: each count is an atomic operation, and together they took two fifths of a step beside its
    tokens. Nothing may be allocated inside.
    """
    fixed: Any = {"pipeline_class": _Uncollected, "_nrt": False}

    def compiled(function: Callable[..., Any]) -> Any:
        loop = numba.njit(nogil=True, error_model="numpy", **fixed, **options)(function)
        if loop is not function:  # as it is with NUMBA_DISABLE_JIT
            keep(loop)
        return loop

    return compiled


def within(**options: Any) -> Any:
    """`numba.njit` with these options, for functions that only compiled ones call."""
    fixed: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _Translator, "_nrt": False}
    return numba.njit(error_model="numpy", **fixed, **options)
