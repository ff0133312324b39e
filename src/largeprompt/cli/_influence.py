"""Which sentences of a context carry a model's answer: the text in colours, numbers, and a few sentences."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, Out, app
from ._inspect import name_of, running
from ._interrupts import interrupts
from ._output import print_result

if TYPE_CHECKING:
    from largeprompt.models import Attribution

FILES = ("influence.html", "influence.json")


@app.command()
def influence(
    model: Annotated[str, typer.Argument(help="A folder with a transformers model, FILE.gguf, or a hub name.")],
    context: Annotated[
        list[Path], typer.Option(help="Text file with the context; give several for several documents.")
    ],
    question: Annotated[str, typer.Option(help="What is asked about the context.")],
    answer: Annotated[str | None, typer.Option(help="The answer; without it, the model's own.")] = None,
    unit: Annotated[str, typer.Option(help="Parts of the context: sentences, lines, paragraphs, documents.")] = (
        "sentences"
    ),
    budget: Annotated[int, typer.Option(help="Forward passes; a backward pass counts as two.")] = 64,
    taken_out: Annotated[
        bool, typer.Option("--taken-out", help="Shorten the text, instead of hiding parts of it from attention.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Do without the chat template of the model.")] = False,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Find the sentences of a context that carry a model's answer, and how much its probability rests on each."""
    from largeprompt.lab import writable_folder
    from largeprompt.models import _load

    texts = [_load.read_text(path) for path in context]
    for path, text in zip(context, texts, strict=True):
        if not text.strip():
            raise ValueError(f"{path} is empty; a context is a text of at least two parts")
    if not question.strip():
        raise ValueError("--question is empty; give one, such as --question “Who is it about?”")
    if answer is not None and not answer.strip():
        raise ValueError("--answer is empty; give one, or leave it out for the model's own")
    options = _checked(model, texts, unit, budget)
    writable_folder(out, "--out", files=FILES)
    found = _attribution(model, texts, question, answer, {**options, "plain": plain, "taken_out": taken_out})
    with interrupts.raised():
        files = _write(out, found, name_of(model), ", ".join(path.name for path in context))
    print_result(as_json, found.to_json(), _lines(found), files, width=100)


def _checked(model: str, texts: list[str], unit: str, budget: int) -> dict[str, Any]:
    """Options checked before a model is read."""
    try:
        from largeprompt.models.contexts._estimators import LEAST
        from largeprompt.models.contexts._units import UNITS, parts_of
    except ImportError as error:
        from largeprompt.models._load import INSTALL

        raise ValueError(f"{model}: {INSTALL} ({error})") from None
    if unit not in UNITS:
        raise ValueError(f"--unit is {unit}; it must be one of {', '.join(UNITS)}")
    if budget < LEAST:
        raise ValueError(f"--budget is {budget}; it must be at least {LEAST}, the cost of one gradient")
    parts_of(texts, unit)
    return {"unit": unit, "budget": budget}


def _attribution(
    model: str, texts: list[str], question: str, answer: str | None, options: dict[str, Any]
) -> "Attribution":
    from largeprompt import models
    from largeprompt.models import _load

    network, tokenizer = _load.load(model, causal=True)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer that transformers knows; a context is read as text")
    network.requires_grad_(False)  # of parameters: half of the memory of a backward pass
    kind = "taken out" if options.pop("taken_out") else "masked"
    with running(model) as view:
        return models.attribute(
            network,
            tokenizer,
            texts if len(texts) > 1 else texts[0],
            question,
            answer,
            kind=kind,
            **options,
            progress=view,
        )


def _write(out: Path, found: "Attribution", model: str, context: str) -> list[Path]:
    """The page and all numbers, each file written at once."""
    from largeprompt.lab import replacing
    from largeprompt.paper.files import write_json

    page, numbers = (out / name for name in FILES)
    text = found.to_html("What carries the answer", {"Model": model, "Context": context})
    with replacing(page) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
    return [page, write_json(numbers, found.to_json())]


def _lines(found: "Attribution") -> Iterator[Any]:
    """The answer, the summary, and a table of the parts that carry most."""
    from ._tables import attribution_table

    yield f"Answer: {' '.join(found.answer.split())}"
    yield from found.summary
    yield attribution_table(found.unit, found.table)
