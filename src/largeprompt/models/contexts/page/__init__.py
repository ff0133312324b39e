"""The page on a context: the text with what each of its parts does to the answer, in one file that needs no network."""

from operator import methodcaller
from typing import TYPE_CHECKING, Any

from largeprompt.paper.page import embedded, environment
from largeprompt.paper.report.words import number

if TYPE_CHECKING:
    from largeprompt.models.contexts._attribution import Attribution


def page(attribution: "Attribution", title: str, facts: dict[str, str]) -> str:
    """The whole page as HTML."""
    filled = environment(__name__, html=True)
    filled.filters |= {"one": methodcaller("removesuffix", "s")}
    largest = float(abs(attribution.scores).max())
    return filled.get_template("context.html.jinja").render(
        title=title,
        facts=facts,
        question=attribution.question or "",
        answer=attribution.answer,
        summary=attribution.summary,
        unit=attribution.unit,
        largest=number(largest, 2),
        rows=_rows(attribution, largest),
        **embedded(__name__, "context.css"),
    )


def _rows(attribution: "Attribution", largest: float) -> list[dict[str, Any]]:
    """One row for each part, in the order of the text."""
    ranks = {int(i): k for k, i in enumerate(attribution.top(len(attribution.parts)), start=1)}
    found = []
    for i, (text, score) in enumerate(zip(attribution.parts, attribution.scores, strict=True)):
        nats, error = _signed(float(score)), number(float(attribution.stderr[i]), 2)
        found.append(
            {
                "number": i + 1,
                "text": text,
                "score": float(score),
                "nats": nats,
                "error": error,
                "tokens": int(attribution.tokens[i]),
                "side": "for" if score >= 0 else "against",
                "share": f"{abs(score) / largest if largest else 0:.3f}",
                "hover": f"{i + 1}: {nats} ± {error} nats, {ranks[i]} of {len(ranks)}",
            }
        )
    return found


def _signed(value: float) -> str:
    """With its sign, in three digits."""
    return ("+" if value > 0 else "") + number(value, 3)
