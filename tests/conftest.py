"""Every test runs in float64 with the shapes of all public signatures checked at run time."""

import gc
import os
import signal
from pathlib import Path

# The background jobs of a shell ignore Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX makes objects by the million, nearly all of them to keep: looking for the others takes a tenth of the time.
gc.set_threshold(50_000, 20, 10)

# Nearly all of the time goes into compiling what is then run once or twice: without XLA's optimiser and its newer code
# generator, on one thread, that is three times faster.
COMPILE_FAST = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}".strip()

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

with install_import_hook("largeprompt", "typechecker.checked"):
    import largeprompt
    from largeprompt import attention, concentration, dynamics, icl, measures  # noqa: F401  # else on first use

largeprompt.use_float64()
jax.config.update("jax_disable_most_optimizations", True)


def pytest_configure(config):
    """What one worker has compiled, now or in an earlier run, the other need not."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Work is handed out a file at a time. The first of these compiles all of the engine, which takes 80 s; the next
# are as long and do without, so that no two workers compile it at once. Then come the longest: at the end they would
# keep one worker waiting for the other. All others follow in the order of the tree.
# fmt: off
FIRST = (
    "engine/test_pair_law",
    "dynamics/test_flow", "measures/test_laws", "measures/test_streaming", "icl/test_stationary",
    "concentration/test_prediction", "concentration/test_rates", "test_documentation", "lab/test_killed_runs",
    "lab/test_cluster", "cli/test_cli_paper", "engine/test_gpu_simulated", "concentration/test_deviation",
    "concentration/test_bounds_layers", "measures/test_closed_forms", "cli/test_cli_concentration",
    "concentration/test_bounds_risks", "icl/test_bayes", "icl/test_risk", "concentration/test_prompt_length",
    "dynamics/test_limits", "icl/test_optima", "paper/test_errata", "icl/test_tasks", "test_examples",
)
# fmt: on


def pytest_collection_modifyitems(items):
    places = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))


@pytest.fixture(scope="module", autouse=True)
def tidy():
    """What a file leaves behind is gone when the next begins; what is left then, Python looks through no more."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def optimised():
    """For tests whose time goes into running: what they compile goes through XLA's optimiser."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


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
