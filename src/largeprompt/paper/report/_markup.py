"""HTML that escapes by itself: text put into an element is text, whatever it holds."""

import html
import re
from collections.abc import Sequence
from typing import Any


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | None | Sequence[Any]  # of contents
_VOID = ("meta", "br")
# x_k, λ_max, E_{μ_z}, 10^9, L^{−1/2}, 0.5^|i−j|. A word of small letters, as in short_to_long, has no subscript; in
# x_kx_k the letter before the second underscore belongs to it.
_BASE = r"(?<=[^\W\d_]|[\])}‖|∇⁰-⁹²³\u0300-\u036f])(?:(?<![a-z]{2})|(?<=(?<![a-z])[a-z]_[a-z]{2}))"
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_LOWERED = rf"{_BASE}_({_BRACES}|[A-Za-z0-9]+(?=[A-Za-z]_)|[A-Za-z0-9]+|[α-ωΑ-Ω∞⋆])"
_RAISED = rf"(?<=\S)\^({_BRACES}|\|[^|]*\||[−-]?[A-Za-z0-9]+|[α-ωΑ-Ω∞⋆])"
_SCRIPT = re.compile(f"{_LOWERED}|{_RAISED}")


def element(name: str, /, *content: Content, **attributes: str | int | bool | None) -> Html:
    """An element. Of attributes, True is bare, None and False are left out; `class_`, `aria_label` name as in HTML."""
    told = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{told}>" + ("" if name in _VOID else f"{join(*content)}</{name}>"))


def join(*content: Content) -> Html:
    """Pieces one after the other, text among them escaped."""
    return Html("".join(_escaped(part) for part in content))


def _escaped(part: Content) -> str:
    if part is None:
        return ""
    if not isinstance(part, str):
        return join(*part)
    return part if isinstance(part, Html) else html.escape(part, quote=False)


def code(text: str) -> Html:
    """A line of code with a button that copies it."""
    return element(
        "div",
        element("code", text),
        element("button", "Copy", type="button", class_="copy", aria_label=f"Copy: {text}"),
        class_="line",
    )


def prose(text: str) -> Html:
    """Text in which plain mathematics has its sub- and superscripts."""
    parts: list[Content] = []
    end = 0
    for match in _SCRIPT.finditer(text):
        lowered, raised = match.groups()
        inner = (lowered or raised).removeprefix("{").removesuffix("}")
        parts += [text[end : match.start()], element("sub" if lowered else "sup", prose(inner))]
        end = match.end()
    return join(*parts, text[end:])
