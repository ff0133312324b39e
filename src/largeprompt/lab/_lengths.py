"""Prompt lengths as a user writes them, in a command or in a file of settings."""

import decimal
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from largeprompt import _checks as checks

from ._settings import short

_LOGARITHMIC = 9  # lengths, unless their number is given
_MOST = 1000  # lengths of one study
_DIGITS = 400  # of one length
_FORMS = "10,100,1000, or 10:50:10 (start:stop:step), or 10:100000:log, or 10:100000:log:17"


def length_from(value: Any, name: str = "L") -> int | float:
    """One prompt length: a whole number, also as text such as 1000, 1_000 or 1e3; or inf."""
    number = _number(value)
    try:
        return checks.prompt_length(number)
    except ValueError:
        raise ValueError(f"{name} is {short(number)}; it must be a whole number of at least 1, or inf") from None


def listed_lengths(value: Any, name: str = "L") -> list[int | float]:
    """Prompt lengths in any order, inf among them: a list of them, or text such as `10,1e3,inf` or `10:100000:log`."""
    if isinstance(value, str) and ":" in value:
        return list(_range(name, value))
    parts = (
        value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple | range) else [value]
    )
    if not parts:
        raise ValueError(f"{name} is an empty list; it must have at least one entry")
    return [length_from(part, name) for part in parts]


def lengths_from(value: Any, name: str = "L") -> tuple[int, ...]:
    """Finite prompt lengths as a list or as text, such as `10,100`, `10:50:10` or `10:100000:log`; both ends are in.

    Of log-spaced lengths, those that round to the same whole number count once.
    """
    if isinstance(value, str) and ":" in value:
        lengths = _range(name, value)
    else:
        listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        lengths = [_length(name, part, value) for part in listed]
    if not 1 <= len(lengths) <= _MOST:
        raise ValueError(f"{name} is {short(value)}, {len(lengths)} lengths; there must be 1 to {_MOST} of them")
    for earlier, later in itertools.pairwise(lengths):
        if later <= earlier:
            raise ValueError(f"{name} has {earlier} before {later}; prompt lengths must increase")
    return tuple(lengths)


def _range(name: str, text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(":")]
    start, stop = (_length(name, part, text) for part in parts[:2])
    if len(parts) < 3 or stop < start:
        raise ValueError(f"{name} is {text!r}; it must be such as {_FORMS}, from the shorter to the longer")
    if parts[2] == "log" and len(parts) <= 4:
        count = _length(name, parts[3], text) if len(parts) == 4 else _LOGARITHMIC
        if not 2 <= count <= _MOST:
            raise ValueError(f"{name} is {text!r}; of log-spaced lengths there must be 2 to {_MOST}")
        return sorted({round(float(L)) for L in np.geomspace(start, stop, count)})
    if len(parts) == 3:
        return range(start, stop + 1, _length(name, parts[2], text))
    raise ValueError(f"{name} is {text!r}; it must be such as {_FORMS}")


def _length(name: str, part: Any, whole: Any) -> int:
    """One length, of at least 1 and below 2³¹, the most that the files hold."""
    try:
        L = checks.count(name, _number(part))
    except ValueError:
        L = 0
    if 1 <= L < 2**31:
        return L
    inside = "" if part == whole else f" in {short(whole)}"
    raise ValueError(f"{name} has {short(part)}{inside}; prompt lengths are whole numbers of at least 1, below 2**31")


def _number(value: Any) -> Any:
    """Text as the number that it writes, to the last digit; what is none stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        number = decimal.Decimal(value)
    except decimal.InvalidOperation:
        return value
    if not number.is_finite() or number != number.to_integral_value():
        return float(number) if not number.is_snan() else math.nan
    return int(number) if number.adjusted() < _DIGITS else value
