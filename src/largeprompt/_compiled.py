"""How programs are compiled: by JAX quickly, and kept on disk, where a user or the command line asks for it."""

import contextlib
import functools
import gc
import hashlib
import importlib.util
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

VARIABLE = "LARGEPROMPT_CACHE"
LIMIT = 2**30  # bytes; the programs that were used longest ago go first
_EVERY = 86_400.0  # seconds between two looks at the size


# XLA's options for few optimisations, and for what runs long. With higher levels, expensive passes and code in many
# parts, deviations, flows and searches took up to four times as long to compile, and ran at most a sixth faster.
_QUICK = {
    "xla_backend_optimization_level": (0, 1),
    "xla_llvm_disable_expensive_passes": (True, True),
    "xla_cpu_parallel_codegen_split_count": (1, 1),
    "xla_cpu_use_fusion_emitters": (False, True),
}
_FUSING = "xla_cpu_use_fusion_emitters"
_ONLY_BEFORE = {"xla_cpu_use_fusion_emitters": (0, 11)}  # of jaxlib: later versions die of it


def compile_quickly() -> None:
    """Compile with few optimisations from here on; to be called before JAX has computed anything.

    The README's example takes half of its CPU; with JAX 0.11 and later less is gained. What is known to run for long is
    optimised more; a program of your own may run up to four times as long. The loops of the engine, by Numba,
    have LLVM's first level (`NUMBA_OPT`), with which they are as fast and the same bits. The command line calls this.
    Nothing changes where `XLA_FLAGS` has one of these options, or beside JAX's build for GPUs, which would heed them.
    """
    given, on_gpu = os.environ.get("XLA_FLAGS", ""), [f"jax_cuda{version}_plugin" for version in (12, 13)]
    if any(name in given for name in _QUICK) or any(map(importlib.util.find_spec, on_gpu)):
        return
    os.environ["XLA_FLAGS"] = f"{given} {_quick_flags()}".strip()
    os.environ.setdefault("NUMBA_OPT", "1")


@functools.cache
def _known_options() -> dict[str, tuple[Any, Any]]:
    from jaxlib.version import __version_info__ as compiler

    return {name: both for name, both in _QUICK.items() if compiler[:2] < _ONLY_BEFORE.get(name, (1_000, 0))}


@functools.cache
def _quick_flags() -> str:
    return " ".join(f"--{name}={str(quick).lower()}" for name, (quick, _) in _known_options().items())


def optimised_jit(
    function: Callable[_P, _R], *, fusing: bool = True, unless: Callable[..., bool] = lambda *_, **__: False
) -> Callable[_P, _R]:
    """`equinox.filter_jit` for what may run for long: compiled with more optimisations where others have few.

    `fusing=False` is for what draws random numbers: XLA's newer way to fuse loops takes twice as long over these, and
    they run no faster. `unless` says of which arguments the function takes less time than its program to be optimised.
    """
    import equinox as eqx

    from ._checks import is_traced

    jit: Any = eqx.filter_jit  # whose types know of no options
    as_others = jit(function)

    @functools.cache
    def optimised() -> Callable[_P, _R]:
        options = {name: longer for name, (_, longer) in _known_options().items() if fusing or name != _FUSING}
        return jit(function, compiler_options=options)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import jax

        others_have_few = _quick_flags() in os.environ.get("XLA_FLAGS", "")  # also of a process that started this one
        wanted = others_have_few and not unless(*args, **kwargs)
        # JAX takes options of a whole program only, not of a part that is traced into another
        whole = wanted and not any(map(is_traced, jax.tree.leaves((args, kwargs))))
        return (optimised() if whole else as_others)(*args, **kwargs)

    return call


def cache_folder() -> Path | None:
    """The folder that `LARGEPROMPT_CACHE` names, else one in the user's cache folder; None for `off` or no home."""
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() == "off":
        return None
    with contextlib.suppress(RuntimeError):  # of a user without a home, or one that is not there
        if named:
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "largeprompt"
    return None


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep the programs that JAX compiles from here on in a folder, and load those that are there; return the folder.

    By default it is `largeprompt` in the user's cache folder, or what the environment variable `LARGEPROMPT_CACHE`
    says: a folder, or `off`. It holds up to 1 GiB. Where JAX has a cache of its own already, that one stays. The
    command line calls this; importing the package never does.
    """
    # XLA reports each program that it will not load from disk, as on some processors it always does; it compiles then
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    if own := jax.config.jax_compilation_cache_dir:  # pyrefly: ignore[missing-attribute]
        return Path(own)
    base = cache_folder() if folder is None else Path(folder).expanduser()
    if base is None:
        return None
    place = base / f"xla-{_fingerprint()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        drop_oldest(base, LIMIT)
    except OSError as error:
        if folder is not None:
            raise
        warnings.warn(f"compiled programs are not kept: {error}; {VARIABLE}=FOLDER or off", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # hundreds of small ones make up the time
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # one that another process is writing, or left half written, is read as none
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    return place


def drop_oldest(base: Path, limit: int) -> None:
    """Once a day, delete the programs that were used longest ago until those left take at most `limit` bytes.

    JAX has a limit too; to keep it, every program that is added waits for a lock and looks at all the others.
    """
    looked = base / "xla-looked-at"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - looked.stat().st_mtime < _EVERY:
            return
    looked.touch()
    taken = 0
    for _, size, file in sorted(programs(base), reverse=True):
        taken += size
        if taken > limit:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Compiling a loop of the engine makes millions of objects: looking through them took a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def kept(name: str) -> bytes | None:
    """A program for a GPU that some process has kept under this name; None where there is none."""
    base = cache_folder()
    if base is None:
        return None
    with contextlib.suppress(OSError):
        file = _of_gpu(base, name)
        found = file.read_bytes()
        file.touch()  # so that it does not count as unused
        return found
    return None


def keep(name: str, program: bytes) -> None:
    """Keep a program for a GPU under this name; where nothing can be written, or nothing is to be kept, nothing is."""
    base = cache_folder()
    if base is None:
        return
    file = _of_gpu(base, name)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        drop_oldest(base, LIMIT)
        # under another name first: a process that reads meanwhile finds all of it or none
        part = file.with_name(f"{file.name}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            part.write_bytes(program)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


def _of_gpu(base: Path, name: str) -> Path:
    return base / "gpu" / f"{name}-cache"


def programs(base: Path) -> list[tuple[float, int, Path]]:
    """The compiled programs in a folder: when each was used last, its bytes, its file."""
    found = []
    for file in [*base.glob("xla-*/*-cache"), *base.glob("gpu/*-cache"), *base.glob("engine/*/*.nbc")]:
        with contextlib.suppress(FileNotFoundError):  # another process deletes too
            known = file.stat()
            found.append((max(known.st_atime, known.st_mtime), known.st_size, file))
    return found


def _fingerprint() -> str:
    """Of the processor and of the compiler: code for another one may crash, and home folders are shared."""
    from jaxlib.version import __version__ as compiler

    words = [platform.machine(), platform.processor(), compiler]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        words += [next((line for line in lines if line.startswith(("flags", "Features"))), "")]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
