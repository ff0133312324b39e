"""A text cut into the parts that are weighed: sentences, lines, paragraphs, or whole documents. No letter is lost."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

Unit = Literal["sentences", "lines", "paragraphs", "documents"]
UNITS: tuple[Unit, ...] = get_args(Unit)

_END_OF_PARAGRAPH = r"\n[ \t\r]*\n\s*"
# a sentence ends at . ? ! or …, with the quotes and brackets that close after it, before a space and no small letter;
# at 。 ？ or ！ with or without a space
_END_OF_SENTENCE = r"[.?!…]+[\"'”’)\]]*\s+(?![a-z])|[。？！]+[”’」』）]*\s*"
_ENDS = {
    "sentences": re.compile(f"{_END_OF_SENTENCE}|{_END_OF_PARAGRAPH}"),
    "lines": re.compile(r"\n\s*"),
    "paragraphs": re.compile(_END_OF_PARAGRAPH),
}
# after these a full stop ends no sentence; initials such as J. are seen by their length
_ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "e.g", "i.e", "cf", "fig", "eq", "no", "vol")
)


def parts(text: str, unit: Unit) -> list[str]:
    """The parts of a text in their order; joined they are the text, and each has a letter that is no space.

    Spaces belong to the part before them, at the beginning of the text to the first one.
    """
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    if not text.strip():
        return []
    if unit == "documents":
        return [text]
    found, began = [], 0
    for end in _ENDS[unit].finditer(text):
        if text[began : end.end()].strip() and not (unit == "sentences" and _goes_on(text[began : end.end()])):
            found.append(text[began : end.end()])
            began = end.end()
    rest = text[began:]
    if rest.strip() or not found:
        found.append(rest)
    else:
        found[-1] += rest
    return found


def parts_of(context: str | Sequence[str], unit: Unit) -> list[str]:
    """The parts of a context, of which there must be two; several texts are cut one by one."""
    texts = [context] if isinstance(context, str) else [f"{text.rstrip()}\n\n" for text in context]
    found = [part for text in texts for part in parts(text, unit)]
    if not found:
        raise ValueError("the context is empty; give a text with at least two parts")
    if len(found) == 1:
        raise ValueError(f"the context is one part ({unit}); give a longer text, or a smaller unit")
    return found


def _goes_on(sentence: str) -> bool:
    """Whether the full stop at the end belongs to an abbreviation or an initial."""
    if not re.search(r"\w\.[ \t]+$", sentence):
        return False
    last = sentence.split()[-1].strip("\"'“‘([").rstrip(".")
    return last.lower() in _ABBREVIATIONS or (len(last) == 1 and last.isupper() and last != "I")
