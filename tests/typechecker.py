"""Beartype as the run-time checker of every signature, an int being welcome where a float is asked for (PEP 484)."""

from beartype import BeartypeConf, beartype

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function):
    """Check a function's signature, unless it is defined in another: each call of that one would prepare it again."""
    return function if "<locals>" in getattr(function, "__qualname__", "") else _checked(function)
