"""Input that must be refused."""

from collections.abc import Callable

import pytest


def assert_refused(call: Callable[[], object], message: str) -> None:
    """A ValueError of one line with the message in it."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        call()
    assert message in str(error.value)
