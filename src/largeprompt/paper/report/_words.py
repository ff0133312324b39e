"""Numbers, times and checks in words, as both forms of the report say them."""

import datetime
import math
from typing import Any

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4) -> str:
    """A number in a few digits, with a power of ten where that is shorter; a dash for one that is not there."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    mantissa, _, power = f"{value:.{digits}g}".partition("e")
    mantissa = mantissa.replace("-", "−")
    return f"{mantissa}×10{str(int(power)).translate(_RAISED)}" if power else mantissa


def check(entry: dict[str, Any]) -> str:
    """What was measured against what: `slope: 0.98 ± 0.01 > 0.5`."""
    return f"{entry['label']}: {reading(entry)} {demand(entry)}"


def reading(entry: dict[str, Any]) -> str:
    """The measured number with its standard error, where it has one."""
    error = entry.get("error") or 0.0
    return number(entry["measured"]) + (f" ± {number(error, 2)}" if error else "")


def demand(entry: dict[str, Any]) -> str:
    """What the number is held against."""
    tolerance = entry.get("tolerance") or 0.0
    return f"{entry['relation']} {number(entry['target'])}" + (f" within {number(tolerance)}" if tolerance else "")


def comparison(entry: dict[str, Any]) -> str:
    """A line of evidence of an erratum, numbers in brackets."""
    left, right = f"{entry['left']} ({number(entry['x'])})", f"{entry['right']} ({number(entry['y'])})"
    return f"{left} {entry['relation']} {right}"


def duration(seconds: float) -> str:
    """A time that one can imagine."""
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h" + (f" {minutes} min" if minutes and hours < 100 else "")


def moment(iso: str) -> str:
    """A time of day as one says it."""
    when = datetime.datetime.fromisoformat(iso)
    return f"{when.day} {when:%B %Y, %H:%M}" + (f" {when.tzname()}" if when.tzinfo else "")


def machine_of(told: dict[str, Any]) -> str:
    """The machine in a line."""
    return f"{told['processor']}, {plural(told['cores'], 'core')}, {told['system']}, Python {told['python']}"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested plain data as names with dots and their values in words."""
    told: dict[str, str] = {}
    for name, value in data.items():
        told |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": plain(value)}
    return told


def plain(value: Any) -> str:
    """A value of the settings in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list | tuple):
        paired = all(isinstance(part, list | tuple) and len(part) == 2 for part in value)
        return ", ".join(" × ".join(map(plain, part)) if paired else plain(part) for part in value) or "none"
    return str(value)
