"""Training runs: settings from options and a file, a sweep over the cores, a table and a figure."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import DeviceName, Json, Out, app, screen, value, with_options
from ._output import device_for, interruptible, print_json, print_result, ready, remark, runs_kept, written
from ._view import View

if TYPE_CHECKING:
    from largeprompt.lab import Forecast

Folder = Annotated[
    str | None,
    typer.Option("--store", help="Folder or address (s3://…) of results; by default $LARGEPROMPT_STORE, or runs."),
]
_SEEDS = ("seed", "seeds", "weight_seed", "data_seed")
_WITH_NUMBERS = ("sigma", "omega", "query_sigma", "optimiser")  # whose values may contain commas
_SETTINGS = {
    "L": "Prompt length: 100, 1e3 or inf; 10,100 or 10:1000:log. [100]",
    "attention": "pair (softmax and linear on the same tokens), or a kind: softmax, sigmoid, relu ... [pair]",
    "sigma": "Covariance of covariates: identity, kms:RHO, FILE.npz ... [identity]",
    "d": "Dimension of the covariates. [5]",
    "noise": "Variance of the label noise. [0.1]",
    "omega": "Covariance of the coefficients. [I/d]",
    "query_sigma": "Covariance of queries. [that of covariates]",
    "parameters": "KQVO or UV. [KQVO]",
    "heads": "Number of heads. [1]",
    "head_dim": "Rows of K, Q and V of a head. [(d+1)/heads, or d+1]",
    "outputs": "Rows of O: d+1 as in the paper, or 1. [d+1]",
    "score_scale": "Factor of the scores. [1]",
    "start": "pytorch, structured:ALPHA (Assumption 5.1), FILE.npz. [pytorch]",
    "batch": "Prompts per step. [128]",
    "rate": "Learning rate. [0.001]",
    "optimiser": "sgd, momentum:0.9, adam:0.9,0.999,1e-8; numbers may be left out. [sgd]",
    "loss_factor": "1: half the squared error; 2: the squared error. [1]",
    "steps": "Steps. [500000]",
    "seed": "Seed of weights and of data. [0]",
    "seeds": "Number of seeds, from 0 on.",
    "weight_seed": "Seed of the weights alone.",
    "data_seed": "Seed of the data alone.",
    "engine": "auto, fused or reference. [auto]",
    "record": "Beside the risk: norms,distances,parameters,circuits.",
    "points": "Log-spaced steps to record. [100]",
    "every": "Record every n-th step as well.",
    "draws": "Nodes of a risk that is not in closed form. [32768]",
}


@app.command()
@with_options(_SETTINGS)
def train(
    *,
    config: Annotated[Path | None, typer.Option(help="Settings in TOML; options override them.")] = None,
    given: dict[str, str],
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default one per core.")] = None,
    device: DeviceName = "auto",
    store: Folder = None,
    checkpoint: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    estimate: Annotated[bool, typer.Option("--estimate", help="Print what it would take, and stop.")] = False,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Train attention by SGD on fresh prompts. Most settings take several values, with commas."""
    from largeprompt import lab

    settings = lab.read_toml(config) if config is not None else {}
    if {"seed", "seeds"} & set(given):  # they stand for all of these
        settings = {name: value for name, value in settings.items() if name not in _SEEDS}
    settings |= lab.with_files({name: _parsed(name, text) for name, text in given.items() if name not in _RECORD})
    recorded = {("what" if name == "record" else name): _parsed(name, given[name]) for name in _RECORD if name in given}
    if recorded:
        table = settings.get("record", {})
        if not isinstance(table, dict):
            raise ValueError(f"record is {table!r}; it must be a table such as [record] with points = 100")
        settings["record"] = {**table, **recorded}
    runs = lab.runs_from(settings)
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1")
    if not checkpoint >= 0:
        raise ValueError(f"--checkpoint is {checkpoint}; it must be at least 0")
    jobs = min(jobs or lab.usable_cores(), len(runs))
    folder = lab.store_at(store)
    where = device_for(device, "cuda")
    slow = lab.without_fused(runs)  # refuses what no engine can run, before anything is written
    if not estimate:
        ready(out, "training")
        folder.check_writable()
    for reason, count in slow.items():
        remark(f"{count} of {len(runs)} runs take the slower reference engine: {reason}")
    with View() as view:
        expected = lab.forecast(runs, folder, jobs, view, where)
    if not as_json:
        screen.print(_sentence(expected, len(runs), jobs, where), highlight=False, soft_wrap=True)
    if estimate:
        if as_json:
            print_json([], {"estimate": _plain(expected, len(runs), jobs)})
        return
    with interruptible(View(), lambda: runs_kept(folder, runs)) as view:
        options: Any = {"progress": view, "checkpoint_seconds": checkpoint, "seconds": expected.each, "device": where}
        results = lab.sweep(runs, folder, jobs=jobs, **options)
    _report(results, out, as_json, _plain(expected, len(runs), jobs))


_RECORD = ("record", "points", "every", "draws")


def _parsed(name: str, text: str) -> Any:
    """A value, or with commas a list of them; the numbers of `diagonal:1,2` and `adam:0.9,0.99` stay together."""
    if name == "L":
        return text  # `lab.runs_from` reads lengths, for files and options alike
    parts = re.split(r",(?=\s*[a-zA-Z./])" if name in _WITH_NUMBERS else ",", text)
    values = [value(part.strip()) for part in parts]
    return values if len(values) > 1 or name == "record" else values[0]


def _report(results: list, out: Path, as_json: bool, estimate: dict[str, Any]) -> None:
    from largeprompt import lab
    from largeprompt.paper.drawing import draw

    from ._charts import training_chart
    from ._tables import rows_as_dataset, training_tables

    rows = lab.summary(results)
    files = written(out, "training", draw(training_chart(results)), rows_as_dataset(rows))
    runs = [
        {"hash": data.attrs["hash"], **{str(m): str(data.verdict.sel(member=m).values) for m in data.member.values}}
        for data in results
    ]
    print_result(as_json, {"estimate": estimate, "rows": rows, "runs": runs}, training_tables(rows), files, width=120)


def _plain(expected: "Forecast", runs: int, jobs: int) -> dict[str, Any]:
    sizes = {"seconds": expected.seconds, "memory": expected.memory, "disk": expected.disk}
    return {"runs": runs, "to_do": len(expected.each), "jobs": jobs, **sizes}


def _sentence(expected: "Forecast", runs: int, jobs: int, device: str) -> str:
    from largeprompt.lab._forecast import duration, plural

    if not expected.each:
        return f"{plural(runs, 'run')}, all in the store"
    there = f", {runs - len(expected.each)} in the store" if runs > len(expected.each) else ""
    sizes = f"{expected.memory / 2**20:.0f} MB of memory, {expected.disk / 2**20:.1f} MB of disk"
    at_a_time = "side by side on the GPU" if device == "gpu" else f"{jobs} at a time"
    to_do = f"{plural(len(expected.each), 'run')} to do{there}"
    return f"{to_do}, {at_a_time}: about {duration(expected.seconds)}, {sizes}"
