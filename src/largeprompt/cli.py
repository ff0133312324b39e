"""The command line: thin, no mathematics."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import xarray as xr
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from largeprompt import __version__, use_float64

app = typer.Typer(
    help="Attention as a map on measures: finite prompts, their limit, and how fast one reaches the other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
screen, errors = Console(), Console(stderr=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    use_float64()


@app.command()
def reproduce(
    preset: Annotated[str, typer.Option(help="How much to run: quick or smoke.")] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for figures and data.")] = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of weights, queries and prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")] = False,
) -> None:
    """Measure how fast softmax attention and its gradients reach the infinite-prompt limit, beside the prediction."""
    from largeprompt.paper import convergence

    if preset not in convergence.PRESETS:
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(convergence.PRESETS)}")
    settings = dataclasses.replace(convergence.PRESETS[preset], seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    data = _with_progress(settings)
    files = _write(data, out)
    if as_json:
        print(json.dumps({"files": [str(f) for f in files], **_as_numbers(data)}, indent=1))
    else:
        _print_tables(data, settings)
        screen.print("written: " + ", ".join(str(f) for f in files), soft_wrap=True)


def _with_progress(settings) -> xr.Dataset:
    from largeprompt.paper import convergence

    # Each step also pays for compilation, about as long as a thousand tokens a prompt take.
    work = {step: 1000 + step[1] for step in convergence.steps(settings)}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("measuring", total=sum(work.values()))

        def done(name: str, L: int) -> None:
            progress.update(task, advance=work[name, L], description=f"measured {name}, L = {L}")

        return convergence.measure(settings, done)


def _write(data: xr.Dataset, out: Path) -> list[Path]:
    from largeprompt.lab import replacing
    from largeprompt.paper import drawing

    figure = drawing.convergence(data)
    writers = {
        ".svg": lambda path: figure.savefig(path, metadata={"Date": None}),
        ".pdf": lambda path: figure.savefig(path, metadata={"CreationDate": None}),
        ".png": lambda path: figure.savefig(path, dpi=200),
        ".csv": lambda path: data.to_dataframe().to_csv(path),
        ".nc": lambda path: data.to_netcdf(path, engine="scipy"),
    }
    files = [out / f"convergence{suffix}" for suffix in writers]
    for file in files:
        with replacing(file) as path:
            writers[file.suffix](path)
    return files


def _as_numbers(data: xr.Dataset) -> dict:
    from largeprompt.paper import convergence

    return {
        "settings": data.attrs,
        "deviations": data.to_dataframe().reset_index().to_dict(orient="records"),
        "slopes": convergence.slopes(data).to_dataframe().reset_index().to_dict(orient="records"),
    }


def _print_tables(data: xr.Dataset, settings) -> None:
    from largeprompt.paper import convergence

    slopes = convergence.slopes(data)
    names = {"output": "output", "V": "∇_V", "U": "∇_U"}
    for law in data.law.values:
        title = f"{law} tokens: mean squared deviation, and its ratio to the predicted c/L"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        table.add_column("L", justify="right")
        for quantity in data.quantity.values:
            table.add_column(names[str(quantity)], justify="right", style="bold")
            table.add_column("ratio", justify="right")
        for L in data.L.values:
            cells = []
            for quantity in data.quantity.values:
                point = data.sel(law=law, quantity=quantity, L=L)
                value, stderr, predicted = (float(point[k]) for k in ("mean_square", "stderr", "predicted"))
                cells += [f"{value:.2e}", f"{value / predicted:.2f}±{stderr / predicted:.2f}"]
            table.add_row(f"{int(L)}", *cells)
        table.add_section()
        fits = [slopes.sel(law=law, quantity=q) for q in data.quantity.values]
        table.add_row("slope", *[c for fit in fits for c in (f"{float(fit.slope):.3f}", f"±{float(fit.stderr):.3f}")])
        # a table needs its width: on a narrower terminal lines wrap, but no digit is cut
        screen.print(table, width=max(76, screen.width), crop=False)
    screen.print(
        f"{settings.replicates} prompts a length, {settings.queries} queries, token dimension {settings.dim}, "
        f"seed {settings.seed}, {data.attrs['seconds']:.0f} s; slopes over the longer half of the lengths, predicted -1"
    )


def main() -> None:
    """Run the command line; what a user did wrong is one line on the error stream, never a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        errors.print(f"largeprompt: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code != 130:
            raise
        # Ctrl-C, as the command-line library reports it. Leave at once: XLA's threads may be at work, and taking the
        # interpreter down around them crashes.
        errors.print("largeprompt: interrupted; files already written are whole", highlight=False)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
