"""Sweeps on a cluster: run a grid, and print how far its runs are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, app, screen
from ._output import complain, interruptible, print_json, runs_kept, show
from ._train import Folder
from ._view import View

if TYPE_CHECKING:
    from largeprompt.lab import AbstractStore, Outcome, Run

_MANY = 2000  # so many results are read for a table; of more there is a count
_SHOWN = 20


_HELP = (
    "Run a sweep on a Dask cluster: each run is a task, the results are in one store that all workers see.\n\n"
    "Give it again at any time: finished runs are skipped, others go on from their last checkpoint. A run that fails "
    "is reported and stops no other; the exit status is then 1.\n\n"
    "sweep status [GRID] prints how far the runs of a grid, or all in the store, are."
)


@app.command(help=_HELP)
def sweep(
    what: Annotated[
        str,
        typer.Argument(
            metavar="GRID", help="Settings in TOML, as for train --config; or the word status.", show_default=False
        ),
    ],
    grid: Annotated[
        Path | None, typer.Argument(metavar="GRID", help="After status: settings in TOML.", show_default=False)
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Address of a Dask scheduler, tcp://HOST:PORT; by default a local one is started."),
    ] = None,
    store: Folder = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes of the local scheduler; by default one per core.", show_default=False)
    ] = None,
    checkpoint: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Run a grid, or print how far its runs are."""
    from largeprompt import lab

    asked = what == "status"
    if grid is not None and not asked:
        raise ValueError(f"{what} {grid} was given; it must be one grid, or status and at most one grid")
    if workers is not None and (workers < 1 or scheduler is not None or asked):
        raise ValueError(f"--workers is {workers}; it must be at least 1, and goes with neither --scheduler nor status")
    if not checkpoint >= 0:
        raise ValueError(f"--checkpoint is {checkpoint}; it must be at least 0")
    path = grid if asked else Path(what)
    runs = lab.with_engines(lab.runs_from(lab.read_toml(path))) if path is not None else None
    kept = lab.store_at(store)
    _hush_dask()
    if asked or runs is None:
        kept.check_readable()
        _print_status(kept, runs, scheduler, as_json)
        return
    kept.check_writable()
    with interruptible(View(), lambda: runs_kept(kept, runs)) as view:
        options: Any = {"workers": workers, "checkpoint_seconds": checkpoint, "progress": view}
        outcome = lab.sweep_on(runs, kept, scheduler, **options)
    _report(runs, kept, outcome, as_json)
    if outcome.failed:
        raise typer.Exit(1)


def _hush_dask() -> None:
    """What Dask logs on its own is not for a user's terminal."""
    try:
        from dask import config
    except ImportError:
        return
    config.set({"logging": {"distributed": "critical", "distributed.client": "critical"}})


def _report(runs: "tuple[Run, ...]", store: "AbstractStore", outcome: "Outcome", as_json: bool) -> None:
    from largeprompt import lab

    from ._tables import training_tables

    lost = {failed.run.key for failed in outcome.failed}
    good = [run.key for run in runs if run.key not in lost] if len(runs) <= _MANY else []
    results, damaged = [], []
    for key in good:
        try:
            results.append(store.load(key))
        except lab.Damaged as error:
            kept = store.set_aside(key, "nc")
            damaged.append(f"{error}; it is kept as {kept}, and the same command makes it again")
    results = [data for data in results if data is not None]
    rows = lab.summary(results) if results else []
    if as_json:
        counts = {"runs": outcome.runs, "found": outcome.found, "finished": outcome.finished}
        failed = [{"hash": run.key, "title": run.title, "error": message} for run, message in outcome.failed]
        print_json([], {"store": store.location, **counts, "failed": failed, "rows": rows})
    else:
        if rows:
            show(training_tables(rows), width=120)
        there = f"{outcome.finished} of {outcome.runs} runs are finished, {outcome.found} were before"
        screen.print(f"{there}; they are in {store.location}", markup=False, highlight=False, soft_wrap=True)
    for message in damaged:
        complain(message)
    for run, message in outcome.failed[:_SHOWN]:
        complain(f"run {run.key[:12]} ({run.title}) failed: {message}")
    if len(outcome.failed) > _SHOWN:
        complain(f"{len(outcome.failed) - _SHOWN} more runs failed; see largeprompt sweep status")


def _print_status(store: "AbstractStore", runs: "tuple[Run, ...] | None", scheduler: str | None, as_json: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from largeprompt import lab
    from largeprompt.lab._forecast import plural

    running = lab.running_runs(scheduler, store) if scheduler is not None else None
    found = lab.statuses(store, runs, running)
    counts = lab.counted(found)
    if as_json:
        names = ("stage", "title", "step", "steps", "message")
        each = [{"hash": run.key, **{name: getattr(run, name) for name in names}} for run in found]
        print_json([], {"store": store.location, "counts": counts, "runs": each})
        return
    of_each = ", ".join(f"{count} {stage}" for stage, count in counts.items()) or "none"
    line = f"{plural(len(found), 'run')} in {store.location}: {of_each}"
    screen.print(line, markup=False, highlight=False, soft_wrap=True)
    unfinished = [run for stage in ("failed", "running", "interrupted", "begun") for run in found if run.stage == stage]
    if not unfinished:
        return
    table = Table("hash", "run", "status", "step", "of", box=box.SIMPLE_HEAD)
    for run in unfinished[:_SHOWN]:
        status = f"failed: {run.message}" if run.stage == "failed" else run.stage
        table.add_row(*map(Text, (run.key[:12], run.title, status, str(run.step), str(run.steps))))
    show([table], width=100)
    if len(unfinished) > _SHOWN:
        screen.print(f"and {len(unfinished) - _SHOWN} more; --json prints them all", highlight=False)
