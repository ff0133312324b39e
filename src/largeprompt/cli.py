"""The command line: thin, no mathematics."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from largeprompt import __version__, use_float64

app = typer.Typer(
    help="Attention as a map on measures: finite prompts, their limit, and how fast one reaches the other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
screen, errors = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")]
Out = Annotated[Path, typer.Option(help="Folder for figures and data.")]
Sigma = Annotated[str, typer.Option(help="Covariance: identity, kms:RHO, spiked:SIZE, diagonal:A,B,...")]
Dimension = Annotated[int, typer.Option("--d", help="Dimension of the covariates.")]
Noise = Annotated[float, typer.Option(help="Variance of the label noise.")]
Lengths = Annotated[str, typer.Option("--L", help="Prompt lengths, separated by commas.")]


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
    out: Out = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of weights, queries and prompts.")] = 0,
    as_json: Json = False,
) -> None:
    """Convergence to the infinite prompt, the least in-context risks, and gradient flows by prompt length."""
    from largeprompt.paper import convergence, drawing, learning, tables

    if preset not in convergence.PRESETS:
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(convergence.PRESETS)}")
    settings = dataclasses.replace(convergence.PRESETS[preset], seed=seed)
    in_context = learning.PRESETS[preset]
    out.mkdir(parents=True, exist_ok=True)
    # Each measurement also pays for compilation, about as long as a thousand tokens a prompt take.
    work = {step: 1000 + step[1] for step in convergence.steps(settings)}
    with _progress("measuring", sum(work.values())) as done:
        data = convergence.measure(settings, lambda name, L: done(f"measured {name}, L = {L}", work[name, L]))
    files = _write(out, "convergence", drawing.convergence(data), data)
    least = _optima(in_context)
    files += _write(out, "optima", drawing.optima(least), least)
    rungs = _flows(in_context)
    files += _write(out, "flows", drawing.ladder(rungs), rungs)
    if as_json:
        parts = {**tables.convergence_numbers(data), "optima": _records(least), "flows": _records(rungs)}
        _print_json(files, parts)
    else:
        _print(tables.convergence_tables(data, settings))
        _print(tables.optima_tables(least))
        _print(tables.flow_tables(rungs))
        _name_files(files)


@app.command()
def optima(
    sigma: Sigma = "identity",
    d: Dimension = 5,
    noise: Noise = 0.1,
    lengths: Lengths = "5,10,20,50,100,200,500,1000",
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """The least in-context risk of softmax and linear attention beside the Bayes risk, by prompt length, exactly."""
    from largeprompt.paper import drawing, learning, tables

    settings = learning.Settings(covariances=(sigma,), d=d, noise=noise, lengths=_whole_numbers("--L", lengths))
    out.mkdir(parents=True, exist_ok=True)
    data = _optima(settings)
    files = _write(out, "optima", drawing.optima(data), data)
    if as_json:
        _print_json(files, {"optima": _records(data)})
    else:
        _print(tables.optima_tables(data))
        _name_files(files)


@app.command()
def flows(
    sigma: Sigma = "identity",
    d: Dimension = 5,
    noise: Noise = 0.1,
    lengths: Lengths = "10,100,1000,10000",
    time: Annotated[float, typer.Option(help="Final time of the flows.")] = 1000.0,
    alpha: Annotated[float, typer.Option(help="Scale of the start of Assumption 5.1.")] = 0.3,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Gradient flows of softmax attention at finite lengths beside the infinite-prompt flow: distances and risks."""
    from largeprompt.paper import drawing, learning, tables

    ladder = _whole_numbers("--L", lengths)
    settings = learning.Settings(covariances=(sigma,), d=d, noise=noise, ladder=ladder, time=time, alpha=alpha)
    out.mkdir(parents=True, exist_ok=True)
    data = _flows(settings)
    files = _write(out, "flows", drawing.ladder(data), data)
    if as_json:
        _print_json(files, {"flows": _records(data)})
    else:
        _print(tables.flow_tables(data))
        _name_files(files)


def _whole_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be whole numbers separated by commas") from None


def _optima(settings) -> xr.Dataset:
    from largeprompt.paper import learning

    with _progress("least risks", len(settings.covariances) * len(settings.lengths)) as done:
        return learning.optima(settings, done)


def _flows(settings) -> xr.Dataset:
    from largeprompt.paper import learning

    with _progress("following flows", len(settings.covariances) * (len(settings.ladder) + 1)) as done:
        return learning.ladder(settings, done)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar with the time left, on a terminal; what it yields is told of each piece of work done."""
    left = TextColumn("left"), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda description, work=1: progress.update(task, advance=work, description=description)


def _write(out: Path, stem: str, figure, data: xr.Dataset) -> list[Path]:
    from largeprompt.lab import replacing

    writers = {
        ".svg": lambda path: figure.savefig(path, metadata={"Date": None}),
        ".pdf": lambda path: figure.savefig(path, metadata={"CreationDate": None}),
        ".png": lambda path: figure.savefig(path, dpi=200),
        ".csv": lambda path: data.to_dataframe().to_csv(path),
        ".nc": lambda path: data.to_netcdf(path, engine="scipy"),
    }
    files = [out / f"{stem}{suffix}" for suffix in writers]
    for file in files:
        with replacing(file) as path:
            writers[file.suffix](path)
    return files


def _records(data: xr.Dataset) -> dict:
    return {"settings": data.attrs, "rows": data.to_dataframe().reset_index().to_dict(orient="records")}


def _print_json(files: list[Path], numbers: dict) -> None:
    print(json.dumps({"files": [str(file) for file in files], **numbers}, indent=1))


def _print(parts) -> None:
    for part in parts:
        # a table needs its width: on a narrower terminal lines wrap, but no digit is cut
        screen.print(part, width=max(76, screen.width), crop=False)


def _name_files(files: list[Path]) -> None:
    screen.print("written: " + ", ".join(str(file) for file in files), soft_wrap=True)


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
