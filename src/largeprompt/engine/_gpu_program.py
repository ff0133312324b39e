"""Compiled loops of a GPU, kept on disk: to compile one takes half a minute, to load it milliseconds.

Numba's own cache knows a function by its source and by what it encloses; a loop here encloses a hundred functions made
for its shape. So the key is ours: all sources of this package's engine, the shape, the types of the arguments, the card
and the compilers.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import io
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.types import none

from largeprompt._compiled import keep, kept

from ._gpu_shapes import KernelShape

_COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings", "nvidia-nvjitlink", "nvidia-cuda-nvcc")


def prepare(loop: Any, shape: KernelShape, arguments: tuple[Any, ...]) -> None:
    """Give a loop its program for arguments of these types: the kept one, or one that is compiled here and kept."""
    types = tuple(loop.typeof_pyval(argument) for argument in arguments)
    if types in loop.overloads:
        return
    key = _key(shape, types)
    found = kept(key)
    if found is not None and _load(loop, types, found, shape.registers):
        return
    loop.compile(types)
    program = _as_bytes(loop.overloads[types])
    if program is not None:
        keep(key, program)


def _key(shape: KernelShape, types: tuple[Any, ...]) -> str:
    from ._cuda import cuda

    card = cuda.get_current_device().compute_capability
    words = [repr(shape), repr(types), repr(card), _sources(), *map(_version, _COMPILERS)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash of the modules that a loop may be made of."""
    together = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        together.update(file.read_bytes())
    return together.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _as_bytes(kernel: Any) -> bytes | None:
    """The name and the machine code of a compiled kernel; None where this Numba has them elsewhere."""
    try:
        code = bytes(kernel.library.get_cubin().code)
        file = io.BytesIO()
        np.savez(file, name=np.array(kernel.entry_name), code=np.frombuffer(code, np.uint8))
    except (AttributeError, TypeError):
        return None
    return file.getvalue()


def _load(loop: Any, types: tuple[Any, ...], program: bytes, registers: int) -> bool:
    """Give the loop a kernel made of kept machine code; whether that could be done."""
    try:
        core, codegen, dispatcher, typing = (
            importlib.import_module(name)
            for name in ("cuda.core", "numba.cuda.codegen", "numba.cuda.dispatcher", "numba.cuda.typing")
        )
        with np.load(io.BytesIO(program), allow_pickle=False) as parts:
            name, code = str(parts["name"]), parts["code"].tobytes()
        library = codegen.CUDACodeLibrary(None, name, entry_name=name, max_registers=registers)
        library._cubin_cache[library._ensure_cc(None)] = core.ObjectCode.from_cubin(code)
        library._finalized = True
        kernel = dispatcher._Kernel._rebuild(
            cooperative=False,
            name=name,
            signature=typing.signature(none, *types),
            codelibrary=library,
            debug=False,
            lineinfo=False,
            call_helper=None,
            extensions=[],
        )
        kernel.bind()
        loop.add_overload(kernel, types)
    except Exception:  # half written, or another Numba: the loop is compiled then, which says what is wrong
        return False
    return True
