"""Every test runs in float64 with the shapes of all public signatures checked at run time."""

import gc
import os
import shutil
import signal
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

# The background jobs of a shell ignore Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Matrices and networks are small here: threads of NumPy and of PyTorch would only wait for each other, and for those of
# the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# JAX makes objects by the million, nearly all of them to keep: looking for the others takes a tenth of the time.
gc.set_threshold(50_000, 20, 10)

# Nearly all of the time goes into compiling what is then run once or twice: without XLA's optimiser and its newer code
# generator, on one thread, that is three times faster.
COMPILE_FAST = ["--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # which has the newer one only, and dies of the flag
    COMPILE_FAST += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *COMPILE_FAST]).strip()

os.environ.setdefault("NUMBA_OPT", "1")  # as for commands

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

COMPILES_THE_ENGINE = "tests/engine/test_trajectories.py"  # which takes a minute; other processes then load it
SECONDS_OF_A_TEST = 0.3  # in a file that has not been timed


def pytest_configure(config):
    """Import the package with its shapes checked; what one worker compiles, now or in an earlier run, others load."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only hands out work to others
    with install_import_hook("largeprompt", "typechecker.checked"):
        import largeprompt
        from largeprompt import attention, concentration, dynamics, icl, measures  # noqa: F401  # else on first use
    largeprompt.use_float64()
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
    os.environ["LARGEPROMPT_CACHE"] = str(config.cache.mkdir("compiled"))  # of commands that tests start
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)  # less takes as long to keep
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Work is handed out a file at a time, so that what a file compiles and prepares is made once. The longest files, timed
# in an earlier run, come first: at the end they would keep one worker waiting for the other.
_seconds: Counter[str] = Counter()


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def pytest_collection_modifyitems(config, items):
    timed, tests = config.cache.get("largeprompt/seconds", {}), Counter(_file(item.nodeid) for item in items)

    def place(item):
        file = _file(item.nodeid)
        return file != COMPILES_THE_ENGINE, -timed.get(file, SECONDS_OF_A_TEST * tests[file]), file

    items.sort(key=place)


def pytest_runtest_logreport(report):
    _seconds[_file(report.nodeid)] += report.duration


def pytest_sessionfinish(session):
    """Keep how long each file took, once all of the tests have run."""
    config = session.config
    whole = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
    if whole and not hasattr(config, "workerinput"):
        config.cache.set("largeprompt/seconds", dict(_seconds))


MOST_MAPS = 56_000  # pieces of memory of a process, which Linux lets have 65,530; each compiled program takes some
# JAX keeps what it has compiled programs from, in two thirds of their memory; without it they run as before.
LOWERED: list[Any] = [
    getattr(import_module(f"jax._src.{module}"), name, None)
    for module, name in (("pjit", "_pjit_lower"), ("interpreters.pxla", "_cached_lowering_to_hlo"))
]


@pytest.fixture(scope="module", autouse=True)
def tidy():
    """What a file leaves behind is gone when the next begins; what is left then, Python looks through no more."""
    yield
    for cache in filter(None, LOWERED):
        cache.cache_clear()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture
def optimised():
    """For tests whose time goes into running: what they compile goes through XLA's optimiser."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def quick(monkeypatch):
    """Runs are done by a trainer that compiles nothing; runs of the paper, which keep their engine, are made again."""
    import stand_in
    from largeprompt import engine
    from largeprompt.paper import choice

    choice._run.cache_clear()
    monkeypatch.setattr(engine, "trainer_for", stand_in.trainer_for)
    yield
    choice._run.cache_clear()


@pytest.fixture(scope="session")
def environment(pytestconfig):
    """Of processes that tests start: they share what is compiled, and as here a half-written entry is read as none."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(pytestconfig.cache.mkdir("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONWARNINGS": ",".join(
            f"ignore:Error {doing} persistent compilation cache entry" for doing in ("reading", "writing")
        ),
    }


@pytest.fixture
def as_a_stranger():
    """Turn the run-time shape checks off, to see the errors that a user without them sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def browser():
    """One browser for all tests of a file."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on this machine: the page is not looked at")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
