"""Here most of the time goes into compiling what is then run once or twice: a quarter less without the optimiser."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def without_the_optimiser():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
