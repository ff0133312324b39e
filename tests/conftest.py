"""Every test runs in float64 with the shapes of all public signatures checked at run time."""

import os

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

largeprompt.use_float64()
jax.config.update("jax_disable_most_optimizations", True)


def pytest_configure(config):
    """What one worker has compiled, now or in an earlier run, the other need not."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def as_a_stranger():
    """Turn the run-time shape checks off, to see the errors that a user without them sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
