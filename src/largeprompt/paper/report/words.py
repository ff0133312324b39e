"""Numbers, times and checks in words, as both forms of the report say them; plain mathematics with its scripts."""

import dataclasses
import datetime
import html
import math
import re
from typing import Any

from markupsafe import Markup

from largeprompt.lab._forecast import duration, plural
from largeprompt.paper.choice import Conventions

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# x_k, λ_max, E_{μ_z}, 10^9, L^{−1/2}, 0.5^|i−j|. A word of small letters, as in short_to_long, has no subscript; in
# x_kx_k the letter before the second underscore belongs to it.
_BASE = r"(?<=[^\W\d_]|[\])}‖|∇⁰-⁹²³\u0300-\u036f])(?:(?<![a-z]{2})|(?<=(?<![a-z])[a-z]_[a-z]{2}))"
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_LOWERED = rf"{_BASE}_({_BRACES}|[A-Za-z0-9]+(?=[A-Za-z]_)|[A-Za-z0-9]+|[α-ωΑ-Ω∞⋆])"
_RAISED = rf"(?<=\S)\^({_BRACES}|\|[^|]*\||[−-]?(?:\d+\.\d+|[A-Za-z0-9]+)|[α-ωΑ-Ω∞⋆])"
_SCRIPT = re.compile(f"{_LOWERED}|{_RAISED}")
# The settings' names in words; a name that is not here stands for itself.
MEANING = {
    "lengths": "lengths trained (Figures 2 and 6)",
    "paths": "lengths whose weights are followed (Figures 3 and 7)",
    "courses": "lengths whose risk is followed (Figures 4 and 8)",
    "steps": "steps of SGD",
    "seeds": "seeds at each length",
    "starts": "covariance × length × seeds, to count starts that miss the optimum",
    "traps": "covariance × lengths whose spurious minima are computed",
    "short_to_long": "lengths at initialisation (Figures 1 and 5)",
    "heads": "draws of weights at initialisation",
    "prompts": "prompts sampled for each draw",
    "law_lengths": "lengths for laws of tokens",
    "law_prompts": "prompts for each law and length",
    "ladder": "lengths of gradient flows",
    "flow_time": "time of gradient flows",
    "flow_seeds": "starts of gradient flows",
    "head_lengths": "lengths of the least risks of one and two heads",
    "trained_heads": "heads × length × seeds trained",
    "head_steps": "steps of several heads",
    "limit_queries": "queries at which attention on measures is computed",
    "limit_prompts": "prompts for each length of linear attention",
    "conventions.score_scale": "factor of the scores",
    "conventions.loss_factor": "factor of the loss ½(ŷ−y)²",
    "conventions.query_sigma": "covariance of queries, where not the tokens'",
}


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
    return f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPTS)}" if power else mantissa


def check(entry: dict[str, Any]) -> str:
    """What was measured against what: `slope: 0.98 ± 0.01 > 0.5`."""
    return f"{entry['label']}: {reading(entry)} {demand(entry)}"


def reading(entry: dict[str, Any]) -> str:
    """The measured number with its standard error, where it has one."""
    error = entry.get("error", 0.0)
    said = " ± unknown" if error is None else f" ± {number(error, 2)}" if error else ""
    return number(entry["measured"]) + said


def demand(entry: dict[str, Any]) -> str:
    """What the number is held against."""
    tolerance = entry.get("tolerance") or 0.0
    return f"{entry['relation']} {number(entry['target'])}" + (f" within {number(tolerance)}" if tolerance else "")


def comparison(entry: dict[str, Any]) -> str:
    """A line of evidence of an erratum, numbers in brackets."""
    left, right = f"{entry['left']} ({number(entry['x'])})", f"{entry['right']} ({number(entry['y'])})"
    return f"{left} {entry['relation']} {right}"


def moment(iso: str, seconds: bool = False) -> str:
    """A time of day as one says it."""
    when = datetime.datetime.fromisoformat(iso)
    clock = f"{when:%H:%M:%S}" if seconds else f"{when:%H:%M}"
    return f"{when.day} {when:%B %Y}, {clock}" + (f" {when.tzname()}" if when.tzinfo else "")


def machine_of(said: dict[str, Any]) -> str:
    """The machine in a line."""
    gpu = f"{said['gpu']}, " if "gpu" in said else ""
    return f"{gpu}{said['processor']}, {plural(said['cores'], 'core')}, {said['system']}, Python {said['python']}"


def work_of(said: dict[str, Any], noun: str) -> str:
    """How many of something were computed, and the time of each by the clock, added up."""
    gpu = [f"{duration(said['gpu_seconds'])} of a GPU"] if said.get("gpu_seconds") else []
    beside = " on the processor" if gpu else ""
    cores = [f"{duration(said['core_seconds'])}{beside}"] if said["core_seconds"] or not gpu else []
    return f"{plural(said['count'], noun)} ({' and '.join([*gpu, *cores])})"


def conventions_of(settings: dict[str, Any]) -> str:
    """The conventions that are not the paper's, in a line; empty where all are."""
    usual, own = dataclasses.asdict(Conventions()), settings.get("conventions", {})
    differ = {name: value for name, value in own.items() if value != usual.get(name)}
    said = flat(differ, "conventions.").items()
    return "; ".join(f"{MEANING.get(name, name)}: {value}" for name, value in said)


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested plain data as names with dots and their values in words."""
    said: dict[str, str] = {}
    for name, value in data.items():
        said |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": plain(value)}
    return said


def plain(value: Any) -> str:
    """A value of the settings in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list | tuple):
        nested = all(isinstance(part, list | tuple) and len(part) > 1 for part in value)
        return ", ".join(" × ".join(map(plain, part)) if nested else plain(part) for part in value) or "none"
    return str(value)


def prose(text: str) -> Markup:
    """Text as HTML in which plain mathematics has its sub- and superscripts."""
    parts, end = [], 0
    for match in _SCRIPT.finditer(text):
        lowered, raised = match.groups()
        name, inner = ("sub" if lowered else "sup"), (lowered or raised).removeprefix("{").removesuffix("}")
        parts += [html.escape(text[end : match.start()], quote=False), f"<{name}>{prose(inner)}</{name}>"]
        end = match.end()
    return Markup("".join([*parts, html.escape(text[end:], quote=False)]))


def one_line(text: str) -> str:
    """Text for Markdown on one line in which nothing is markup: no HTML, no cells, no emphasis, no links."""
    flat_text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", flat_text)
