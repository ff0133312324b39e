"""The store of runs: list, show, export, rm."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import Json, app, errors, screen
from ._output import print_json, show
from ._train import Folder

if TYPE_CHECKING:
    import xarray as xr

commands = typer.Typer(help="Results of training that are kept in the store.", no_args_is_help=True)
app.add_typer(commands, name="runs")

Prefix = Annotated[str, typer.Argument(help="The hash of a run, or how it begins.")]
Prefixes = Annotated[list[str], typer.Argument(help="Hashes of runs, or how they begin.")]


@commands.command("list")
def _list(store: Folder = None, as_json: Json = False) -> None:
    """All runs, finished or not."""
    from rich import box
    from rich.table import Table

    from largeprompt import lab

    folder = lab.store_at(store)
    entries, damaged = [], []
    for address in folder.addresses():
        try:
            entries.append(folder.entry(address))
        except (lab.Damaged, FileNotFoundError) as error:
            damaged.append(str(error))
    if as_json:
        known = [{"hash": e.address, "status": e.status, "step": e.step, **e.run.as_dict()} for e in entries]
        print_json([], {"runs": known, "damaged": damaged})
    else:
        table = Table(title=f"{len(entries)} runs in {folder.location}", box=box.SIMPLE_HEAD)
        for name in ("hash", "run", "steps", "status"):
            table.add_column(name)
        for entry in entries:
            status = entry.status if entry.status == "finished" else f"{entry.status} at step {entry.step}"
            table.add_row(entry.address[:12], entry.run.title, str(entry.run.steps), status)
        show([table])
    for message in damaged:
        errors.print(f"largeprompt: {message}", markup=False, highlight=False, soft_wrap=True)


@commands.command("show")
def _show(run: Prefix, store: Folder = None, as_json: Json = False) -> None:
    """The settings of a run, and where it ended."""
    from largeprompt import lab

    folder = lab.store_at(store)
    address = folder.find(run)
    data = folder.load(address)
    if data is None:
        entry = folder.entry(address)
        told = {"hash": address, "status": entry.status, "step": entry.step}
        settings = lab.as_toml(entry.run)
    else:
        told = {"hash": address, "status": "finished", **folder.log(address), **_ends(data)}
        settings = data.attrs["toml"]
    if as_json:
        print_json([], {**told, "toml": settings})
        return
    screen.print(settings, markup=False, highlight=False, soft_wrap=True)
    for name, value in told.items():
        screen.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)


@commands.command("export")
def _export(
    run: Prefix,
    to: Annotated[Path, typer.Argument(help="File to write: .nc, .csv (risks by step) or .toml (settings).")],
    store: Folder = None,
) -> None:
    """Copy a finished run out of the store."""
    from largeprompt import lab

    folder = lab.store_at(store)
    address = folder.find(run)
    data = folder.load(address)
    if data is None:
        raise ValueError(f"run {address[:12]} is not finished; only finished runs can be exported")
    small = [name for name in ("risk", "risk_stderr", "from_start", "distance") if name in data]
    writers = {
        ".nc": lambda path: data.to_netcdf(path, engine="scipy"),
        ".csv": lambda path: data[small].to_dataframe().to_csv(path),
        ".toml": lambda path: path.write_text(data.attrs["toml"]),
    }
    if to.suffix not in writers:
        raise ValueError(f"the file is {str(to)!r}; its name must end in {', '.join(writers)}")
    with lab.replacing(to) as path:
        writers[to.suffix](path)
    screen.print(f"written: {to}", soft_wrap=True)


@commands.command("rm")
def _rm(runs: Prefixes, store: Folder = None) -> None:
    """Delete runs from the store."""
    from largeprompt import lab

    folder = lab.store_at(store)
    addresses = [folder.find(prefix) for prefix in runs]  # all of them before any is deleted
    for address in dict.fromkeys(addresses):
        folder.remove(address)
        screen.print(f"deleted: {address[:12]}", highlight=False)


def _ends(data: "xr.Dataset") -> dict:
    return {
        str(member): {
            "verdict": str(data.verdict.sel(member=member).values),
            "risk": float(data.risk.sel(member=member)[-1]),
            "optimum": float(data.optimum.sel(member=member)),
            "attainable": float(data.attainable.sel(member=member)),
            "diverged": float(data.diverged.sel(member=member)),
        }
        for member in data.member.values
    }
