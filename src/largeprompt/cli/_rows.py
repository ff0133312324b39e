"""What predictions from a table rest on: intervals, the rows that carry them, and how many rows it takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, Out, app
from ._inspect import running
from ._interrupts import interrupts
from ._output import print_result, remark

if TYPE_CHECKING:
    from largeprompt.models.tables import RowsStudy


@app.command()
def rows(
    table: Annotated[Path, typer.Argument(help="CSV file with a header; numbers, categories and empty cells.")],
    target: Annotated[str, typer.Option(help="The column to predict: at most 10 classes.")],
    rows: Annotated[int | None, typer.Option(help="Labelled rows of the prompt; at most 256 by default.")] = None,
    held_out: Annotated[int, typer.Option(help="Other rows, which are predicted.")] = 16,
    error: Annotated[float, typer.Option(help="Standard error of log-odds for which rows are counted.")] = 0.25,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.9,
    method: Annotated[str, typer.Option(help="Of intervals: auto, partitions, bootstrap or influence.")] = "auto",
    draws: Annotated[int, typer.Option(help="Prompts drawn again for the intervals.")] = 100,
    members: Annotated[int, typer.Option(help="Members of TabPFN's ensemble.")] = 3,
    seed: Annotated[int, typer.Option(help="Which rows are drawn.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="TabPFN's checkpoint; else that of package pfns.")] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch the checkpoint by pip (98 MB, once).")] = False,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Predict rows of a table with TabPFN v1, and see how sure that is, what carries it and what more rows would do."""
    from largeprompt.lab import writable_folder
    from largeprompt.models._load import INSTALL

    try:
        from largeprompt.models.tables import TabPFNClassifier, read_table, study_rows
        from largeprompt.models.tables._study import checked
        from largeprompt.models.tables.report import FILES, write_report
        from largeprompt.models.tables.report import as_json as numbers_of
    except ImportError as problem:
        raise ValueError(f"{table}: {INSTALL} ({problem})") from None
    given = read_table(table, target)
    options: dict[str, Any] = {"rows": rows, "held_out": held_out, "error": error, "level": level, "method": method}
    options |= {"draws": draws, "seed": seed}
    checked(given, **options)  # refused before anything is loaded or fetched
    writable_folder(out, "--out", files=FILES)
    for line in given.remarks:
        remark(line)
    with running(str(table)) as view:
        classifier = TabPFNClassifier(members, seed=seed, checkpoint=checkpoint, fetch=fetch)
        found = study_rows(given, classifier, **options, progress=view)
    with interrupts.raised():
        files = write_report(found, out, title=f"What predictions of {target} rest on: {table.name}")
    print_result(as_json, numbers_of(found), _lines(found), files, width=100)


def _lines(found: "RowsStudy") -> Iterator[Any]:
    """The summary, and a table of the rows held out."""
    from ._tables import rows_table

    yield from found.summary
    yield rows_table(found.rows(3))
