"""What a compressed cache costs and saves: the loss of what follows a prompt, memory, and errors by layer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, Out, app
from ._inspect import name_of, remark_unknown, running
from ._interrupts import interrupts
from ._output import print_result, records

if TYPE_CHECKING:
    from largeprompt.models import Effect

FILES = ("compression.png", "compression.json")
QUICK = 256  # queries that choose tokens which are not fitted


@app.command()
def compress(
    model: Annotated[str, typer.Argument(help="A folder with a transformers model, FILE.gguf, or a hub name.")],
    text: Annotated[Path, typer.Option(help="Text file that begins with the prompt, or token ids in FILE.npy.")],
    keep: Annotated[str | None, typer.Option(help="Share of the tokens that is kept: 25% or 0.25.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens that a head of keys keeps, on average.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Relative error that each head's output may have.")] = None,
    fit: Annotated[
        bool, typer.Option(help="Fit the tokens kept to what they stand for; without, quicker, with larger errors.")
    ] = True,
    length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    continuation: Annotated[int, typer.Option(help="Tokens after the prompt, on which the loss is measured.")] = 256,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Compress the keys and values of a prompt, and measure what that does to the loss of the text that follows."""
    from largeprompt.lab import writable_folder

    for name, given in (("--length", length), ("--continuation", continuation)):
        if given < 2:
            raise ValueError(f"{name} is {given}; it must be at least 2")
    goal = _goal(model, keep, tokens, tolerance)
    writable_folder(out, "--out", files=FILES)
    found = _effect(model, text, length, continuation, goal | {"fit": fit} | ({} if fit else {"queries": QUICK}))
    data = found.to_dataset().assign_attrs(model=f"{name_of(model)} ({found.model})", text=text.name)
    by_head = {"errors": found.errors, "atoms_of_head": found.atoms}
    numbers = records(data.drop_vars(list(by_head)))
    for i, row in enumerate(numbers["rows"]):
        row |= {name: values[i].tolist() for name, values in by_head.items()}
    with interrupts.raised():
        files = _write(out, found, numbers)
    print_result(as_json, numbers, _lines(found), files)


def _goal(model: str, keep: str | None, tokens: int | None, tolerance: float | None) -> dict[str, Any]:
    """How much is to be kept, checked before a model is read."""
    given = {"--keep": keep, "--tokens": tokens, "--tolerance": tolerance}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        said = f"{' and '.join(named)} are given" if named else "nothing says how much is kept"
        raise ValueError(f"{said}; give one of --keep 25%, --tokens N and --tolerance 0.01")
    share = None if keep is None else _share(keep)
    goal = {"keep": share, "tokens": tokens, "tolerance": tolerance}
    try:
        from largeprompt.models.compression import Goal
    except ImportError as error:
        from largeprompt.models._load import INSTALL

        raise ValueError(f"{model}: {INSTALL} ({error})") from None
    try:
        Goal(**goal)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    return goal


def _share(text: str) -> float:
    """25% or 0.25 as a number."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise ValueError(f"--keep is {text}; it must be a share above 0% and at most 100%, such as 25% or 0.25")
    return found


def _effect(model: str, text: Path, length: int, continuation: int, options: dict[str, Any]) -> "Effect":
    from largeprompt import models
    from largeprompt.models import _load

    source = _load.read_tokens(text) if text.suffix == ".npy" else _load.read_text(text)
    network, tokenizer = _load.load(model, causal=True)
    asked = f"--length {length} with --continuation {continuation}"
    ids, words = _load.prompt(model, tokenizer, source, length + continuation, asked=asked)
    _load.check_tokens(model, network, ids, asked)
    if words is not None:
        remark_unknown(tokenizer, ids)
    with running(model) as view:
        return models.compression_effect(network, ids, length, **options, progress=view)


def _write(out: Path, found: "Effect", numbers: dict[str, Any]) -> list[Path]:
    """A picture and all numbers, each file written at once."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from largeprompt.lab import replacing
    from largeprompt.paper.drawing import STYLE, save
    from largeprompt.paper.files import write_json

    picture, data = (out / name for name in FILES)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        found.plot(figure.subplots())
        with replacing(picture) as path:
            save(figure, path)
    return [picture, write_json(data, numbers)]


def _lines(found: "Effect") -> Iterator[Any]:
    """The summary, and a table of layers."""
    from ._tables import compression_table

    yield from found.summary
    yield compression_table(found.to_dataset())
