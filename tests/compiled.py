"""Functions inside the compiled engine, for tests to call."""

import numba


def from_python(function):
    """The function as one that Python can call: without a caller it has no machine code."""

    @numba.njit
    def call(*arguments):
        return function(*arguments)

    return call
