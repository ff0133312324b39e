"""Every test runs in float64 with the shapes of all public signatures checked at run time."""

import jaxtyping
import pytest
from jaxtyping import install_import_hook

with install_import_hook("largeprompt", "typechecker.checked"):
    import largeprompt

largeprompt.use_float64()


@pytest.fixture
def as_a_stranger():
    """Turn the run-time shape checks off, to see the errors that a user without them sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
