"""What the heads of a network do with a prompt: a page, numbers, and a few sentences."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, Out, app
from ._interrupts import interrupts
from ._output import print_result, remark
from ._view import View

if TYPE_CHECKING:
    from largeprompt.models import Inspection


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="A folder with a transformers model, FILE.gguf, a hub name; FILE.npz or other arrays."),
    ],
    text: Annotated[Path | None, typer.Option(help="Text file whose beginning is the prompt.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Token ids in FILE.npy, instead of a text.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    unseen: Annotated[
        Path | None, typer.Option(help="Other text, token ids or arrays, on which predicted errors are measured.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure predicted errors on what follows the prompt in the same text.")
    ] = False,
    queries: Annotated[int, typer.Option(help="Queries through which a head is looked at.")] = 32,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Inspect every head of a network: how many tokens it weighs, how its error falls with length, what carries it."""
    from largeprompt.lab import writable_folder
    from largeprompt.models._arrays import holds_arrays
    from largeprompt.models.report import FILES, write_report
    from largeprompt.models.report import as_json as numbers_of

    for name, given in (("--length", length), ("--queries", queries)):
        if given < 2:
            raise ValueError(f"{name} is {given}; it must be at least 2")
    if verify and unseen is not None:
        raise ValueError("--verify and --unseen are both given; errors are measured on one text")
    arrays = holds_arrays(model)
    if arrays and (text is not None or tokens is not None or verify):
        raise ValueError(f"{model} holds arrays; --text, --tokens and --verify are for models, --unseen takes arrays")
    if not arrays and (text is None) == (tokens is None):
        raise ValueError(f"{model} needs a prompt; give --text FILE or --tokens FILE.npy, and not both")
    writable_folder(out, "--out", files=FILES)
    found = (
        _of_arrays(model, unseen, queries)
        if arrays
        else _of_model(model, text, tokens, length, unseen, verify, queries)
    )
    with interrupts.raised():
        write_report(found, out, title=f"The heads of {_name(model)}")
    print_result(as_json, numbers_of(found), _lines(found), [out / name for name in FILES], width=120)


def _name(model: str) -> str:
    """A model's name for people: the file, the folder with the one around it, or the name on the hub."""
    path = Path(model).expanduser()
    return path.name if path.is_file() else "/".join((path.resolve() if path.exists() else path).parts[-2:])


def _of_arrays(model: str, unseen: Path | None, queries: int) -> "Inspection":
    from largeprompt.models import inspect_calls
    from largeprompt.models._arrays import calls_from

    calls = calls_from(model, queries)
    other = None if unseen is None else calls_from(unseen, 1)
    with View() as view:
        return inspect_calls(calls, unseen=other, progress=view, model=_name(model), queries=queries)


def _of_model(
    model: str, text: Path | None, tokens: Path | None, length: int, unseen: Path | None, verify: bool, queries: int
) -> "Inspection":
    from largeprompt import models
    from largeprompt.models import _load

    given = _load.read_text(text) if text is not None else None
    ids = _load.read_tokens(tokens) if tokens is not None else None
    other: Any = None
    if unseen is not None:
        other = _load.read_tokens(unseen) if unseen.suffix == ".npy" else _load.read_text(unseen)
    network, tokenizer = _load.load(model)

    def prompt(source: Any, part: int = 0) -> tuple[Any, list[str] | None]:
        """Ids and words of a text, or of ids themselves."""
        if isinstance(source, str):
            if tokenizer is None:
                raise ValueError(
                    f"{model} has no tokenizer that transformers knows; give token ids by --tokens FILE.npy"
                )
            return _load.encode(tokenizer, source, length, part)
        if len(source) < (part + 1) * length:
            raise ValueError(f"there are {len(source)} tokens; --length {length} needs {(part + 1) * length}")
        return source[part * length : (part + 1) * length], None

    first, words = prompt(given if ids is None else ids)
    pool = prompt(given if ids is None else ids, 1)[0] if verify else None if other is None else prompt(other)[0]
    for each in (first, pool):
        if each is not None:
            _load.check_tokens(model, network, each)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if words is not None and (first == unknown).mean() > 0.1:
        remark(
            f"{(first == unknown).sum()} of {len(first)} tokens are unknown to the tokenizer; is the text of its kind?"
        )
    try:
        with _load.quiet(), View() as view:
            found = models.inspect(network, first, unseen=pool, queries=queries, words=words, progress=view)
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:  # of any kind: it is the model's own code that runs here
        raise ValueError(f"{model} did not run on these tokens ({type(error).__name__}: {error})") from error
    source = text if text is not None else tokens
    facts = {"model": f"{_name(model)} ({type(network).__name__})", "text": source.name if source else ""}
    return dataclasses.replace(found, data=found.data.assign_attrs(facts))


def _lines(found: "Inspection") -> Iterator[Any]:
    """The summary, and a table of layers."""
    from ._tables import inspection_table

    yield from found.summary
    yield inspection_table(found.data)
