"""The store of runs: list, show, risk, export, rm."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Commands, Json, app, screen, value
from ._interrupts import interrupts
from ._output import complain, in_one_line, print_json, print_result, records
from ._train import Folder
from ._view import View

if TYPE_CHECKING:
    import xarray as xr

    from largeprompt.lab import AbstractStore

commands = Commands(help="Results of training that are kept in the store.", no_args_is_help=True)
app.add_typer(commands, name="runs")

Prefix = Annotated[str, typer.Argument(help="The hash of a run, or how it begins.")]
Prefixes = Annotated[list[str], typer.Argument(help="Hashes of runs, or how they begin.")]


@commands.command("list")
def _list(store: Folder = None, as_json: Json = False) -> None:
    """All runs, finished or not."""
    from rich import box
    from rich.table import Table

    from largeprompt import lab
    from largeprompt.lab._forecast import plural

    folder = _opened(store)
    found, damaged = [], []
    for key in folder.run_keys():
        try:
            found.append(folder.status(key))
        except (lab.Damaged, OSError) as error:
            damaged.append(in_one_line(error))
    known = [{"hash": one.key, "status": one.stage, "step": one.step, **one.run.as_dict()} for one in found if one.run]
    title = f"{plural(len(found), 'run')} in {folder.location}"
    table = Table("hash", "run", "steps", "status", title=title, box=box.SIMPLE_HEAD)
    for run in found:
        status = run.stage if run.stage == "finished" else f"{run.stage} at step {run.step}"
        table.add_row(run.key[:12], run.title, str(run.steps), status)
    print_result(as_json, {"runs": known, "damaged": damaged}, [table])
    for message in damaged:
        complain(f"{message}; {_REMEDY}")


@commands.command("show")
def _show(run: Prefix, store: Folder = None, as_json: Json = False) -> None:
    """The settings of a run, and where it ended."""
    from largeprompt import lab

    folder = _opened(store)
    key = folder.find(run)
    with _remedy():
        data = folder.load(key)
    if data is None:
        with _remedy():
            status = folder.status(key)
        facts = {"hash": key, "status": status.stage, "step": status.step}
        settings = "" if status.run is None else lab.as_toml(status.run)
    else:
        facts = {"hash": key, "status": "finished", **folder.log(key), **_ends(data)}
        settings = data.attrs["toml"]
    if as_json:
        print_json([], {**facts, "toml": settings})
        return
    for line in (settings, *(f"{name}: {known}" for name, known in facts.items())):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


@commands.command("risk")
def _risk(
    run: Prefix,
    lengths: Annotated[str, typer.Option("--L", help="Lengths of the test: 50,1e3,inf or 10:1000:log.")] = "inf",
    noise: Annotated[
        str | None, typer.Option(help="Label noise of the test.", show_default="that of the training")
    ] = None,
    query_sigma: Annotated[
        str | None, typer.Option(help="Covariance of queries in the test.", show_default="that of the training")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it, into this file: .svg, .pdf or .png.")] = None,
    store: Folder = None,
    as_json: Json = False,
) -> None:
    """The risk of the layers of a run at other lengths, beside the best layers there and the Bayes risk."""
    from largeprompt import lab
    from largeprompt.paper import drawing

    from ._charts import length_chart
    from ._tables import length_table

    folder = _opened(store)
    asked = lab.listed_lengths(lengths, "--L")
    if plot is not None:
        if plot.suffix not in _PICTURES:
            raise ValueError(f"--plot is {str(plot)!r}; its name must end in {', '.join(_PICTURES)}")
        lab.writable_folder(plot.parent, "the folder of --plot", files=[plot.name])
    with _remedy():
        found = lab.trained(folder, folder.find(run))
    test = {name: text for name, text in (("noise", noise), ("query_sigma", query_sigma)) if text is not None}
    options: Any = lab.with_files({name: value(text) for name, text in test.items()})
    with View() as view:
        data = lab.risks_by_length(found, asked, **options, progress=view)
    if plot is not None:
        with interrupts.raised(), lab.replacing(plot) as path:
            drawing.save(drawing.draw(length_chart(data)), path)
    files = [] if plot is None else [plot]
    numbers = records(data)
    for row in numbers["rows"]:
        row["L"] = "inf" if math.inf == row["L"] else int(row["L"])
    print_result(as_json, {**numbers, "test": test}, [length_table(data)], files, width=100)


_PICTURES = (".svg", ".pdf", ".png")


@commands.command("export")
def _export(
    run: Prefix,
    to: Annotated[Path, typer.Argument(help="File to write: .nc, .csv (risks by step) or .toml (settings).")],
    store: Folder = None,
) -> None:
    """Copy a finished run out of the store."""
    from largeprompt import lab

    folder = _opened(store)
    key = folder.find(run)
    with _remedy():
        data = folder.load(key)
    if data is None:
        raise ValueError(f"run {key[:12]} is not finished; only finished runs can be exported")
    small = [name for name in ("risk", "risk_stderr", "from_start", "distance") if name in data]
    writers = {
        ".nc": lambda path: data.to_netcdf(path, engine="scipy"),
        ".csv": lambda path: data[small].to_dataframe().to_csv(path),
        ".toml": lambda path: path.write_text(data.attrs["toml"]),
    }
    if to.suffix not in writers:
        raise ValueError(f"the file is {str(to)!r}; its name must end in {', '.join(writers)}")
    with interrupts.raised(), lab.replacing(to) as path:
        writers[to.suffix](path)
    screen.print(f"written: {to}", soft_wrap=True)


@commands.command("rm")
def _rm(runs: Prefixes, store: Folder = None) -> None:
    """Delete runs from the store."""

    folder = _opened(store)
    keys = [folder.find(prefix) for prefix in runs]  # all of them before any is deleted
    for key in dict.fromkeys(keys):
        folder.remove(key)
        screen.print(f"deleted: {key[:12]}", highlight=False)


_REMEDY = "training it again sets this file aside, largeprompt runs rm deletes it"


@contextmanager
def _remedy() -> Iterator[None]:
    """What to do about a damaged file, after what is wrong with it."""
    from largeprompt.lab import Damaged

    try:
        yield
    except Damaged as error:
        raise ValueError(f"{error}; {_REMEDY}") from None


def _opened(store: str | None) -> "AbstractStore":
    from largeprompt import lab

    folder = lab.store_at(store)
    folder.check_readable()
    return folder


def _ends(data: "xr.Dataset") -> dict:
    ends = {}
    for member in data.member.values:
        own = data.sel(member=member)
        numbers = {name: float(own[name]) for name in ("optimum", "attainable", "diverged")}
        ends[str(member)] = {"verdict": str(own.verdict.values), "risk": float(own.risk[-1]), **numbers}
    return ends
