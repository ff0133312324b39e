"""Input that must be refused."""

from collections.abc import Callable

import pytest


def assert_refused(call: Callable[[], object], message: str) -> None:
    """A ValueError of one line with the message in it."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        call()
    assert message in str(error.value)


def refusal(function: Callable[..., object], *arguments: object) -> str:
    """The one line with which a call is refused, because of a value or of a file."""
    with pytest.raises((ValueError, OSError)) as error:
        function(*arguments)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)
