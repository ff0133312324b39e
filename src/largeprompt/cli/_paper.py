"""The executable paper: every figure, every claim, the report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import DeviceName, Json, Out, app, errors, screen, with_options
from ._interrupts import interrupts
from ._output import device_for, interruptible, name_files, print_json, print_result, show
from ._view import View

if TYPE_CHECKING:
    from largeprompt.paper import Choice, Job, Plan

Folder = Annotated[str | None, typer.Option("--store", help="Folder of results.", show_default="OUT/store")]
_PRESET = {
    "preset": "How much: quick (minutes), paper (the full protocol), smoke (a trial). [quick]",
}
_REST = {
    "seeds": Annotated[int | None, typer.Option(help="Seeds of training.", show_default="the preset's")],
    "score_scale": Annotated[
        float | None, typer.Option(help="Factor of the scores; 0.40825 is 1/√(d+1).", show_default="1")
    ],
    "loss_factor": Annotated[
        float | None,
        typer.Option(help="1: half the squared error, as printed; 2: the squared error.", show_default="1"),
    ],
    "query_sigma": "Covariance of queries. [that of the covariates]",
}
Jobs = Annotated[int | None, typer.Option(help="Cores to use.", show_default="all")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the settings that --out was begun with.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Say what it would take, and stop.")]


@app.command()
@with_options({**_PRESET, "figures": "Some figures alone, as 1,2,5a. [all]", **_REST})
def reproduce(
    *,
    given: dict[str, Any],
    out: Out = Path("results"),
    store: Folder = None,
    jobs: Jobs = None,
    device: DeviceName = "auto",
    resume: Resume = False,
    estimate: Estimate = False,
    as_json: Json = False,
) -> None:
    """Make every figure of the paper and judge every claim: pictures, data, a ledger and a report."""
    from largeprompt import lab, paper

    from ._tables import ledger_table

    if resume:
        also = [f"--{name.replace('_', '-')}" for name in given] + (["--store"] if store is not None else [])
        if also:
            raise ValueError(f"--resume takes all settings from {out}; leave out {', '.join(also)}")
        choice, store = paper.kept_choice(out)
    else:
        choice = _choice(given, figures=_keys("figures", given))
    job = paper.Job(choice, out, jobs=jobs, store=store, device=device_for(device, "cuda"))
    plan = _planned(job, as_json, None if estimate else out)
    if estimate:
        if as_json:
            print_json([], {"estimate": {"seconds": plan.seconds, "sentence": plan.sentence}})
        return
    page = out / "report" / "index.html"
    with _in_view(out, as_json, f"; the report fills as it goes: {page}") as view:
        made = job.reproduce(plan, view)
    if as_json:
        print_json(list(made.files), {"run": made.account, "ledger": made.ledger})
        return
    show(ledger_table(made.ledger), width=110)
    screen.print(f"{lab.duration(made.account['seconds'])} in all; the report: {page}", soft_wrap=True)


@app.command()
@with_options({**_PRESET, **_REST})
def figure(
    *,
    key: Annotated[
        str,
        typer.Argument(help="1a to 8, diversity, flows, generalise, heads, laws, phases or spurious; 1 is 1a and 1b."),
    ],
    given: dict[str, Any],
    out: Out = Path("results"),
    store: Folder = None,
    jobs: Jobs = None,
    device: DeviceName = "auto",
    as_json: Json = False,
) -> None:
    """Make one figure: its pictures and data, from what is in --out already or made now."""
    from largeprompt import paper
    from largeprompt.paper.experiments import FIGURES

    choice = _choice(given, figures=(key,), claims=())
    job = paper.Job(choice, out, jobs=jobs, store=store, device=device_for(device, "cuda"))
    plan = _planned(job, as_json, out)
    with _in_view(out, as_json) as view:
        datasets, files = job.make_figures(plan, view)
    summaries = {key: FIGURES[key].summary(data) for key, data in datasets.items()}
    if as_json:
        print_json(files, {"figures": summaries})
        return
    for key, lines in summaries.items():
        screen.print(f"{FIGURES[key].name}. {FIGURES[key].title}", style="bold", highlight=False)
        for line in lines:
            screen.print(line, highlight=False, markup=False)
    name_files(files)


@app.command()
@with_options({"claims": "Some claims alone, as C3,T7. [all]", **_PRESET, **_REST})
def verify(
    *,
    given: dict[str, Any],
    out: Out = Path("results"),
    store: Folder = None,
    jobs: Jobs = None,
    device: DeviceName = "auto",
    as_json: Json = False,
) -> None:
    """Judge claims of the paper: what was measured, with its error, and a verdict by one rule."""
    from largeprompt import paper
    from largeprompt.paper.experiments import CLAIMS

    from ._tables import claim_lines, ledger_table

    keys = _keys("claims", given)
    choice = _choice(given, figures=(), claims=tuple(CLAIMS) if keys is None else keys)
    job = paper.Job(choice, out, jobs=jobs, store=store, device=device_for(device, "cuda"))
    plan = _planned(job, as_json, out)
    with _in_view(out, as_json) as view:
        ledger = job.ledger(job.datasets(plan, view))
    print_result(as_json, ledger, ledger_table(ledger) if keys is None else claim_lines(ledger), width=110)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished reproduction.")] = Path("results"),
) -> None:
    """Write the report of a reproduction again."""
    from largeprompt import paper
    from largeprompt.lab import writable_folder

    if folder.is_dir():
        writable_folder(folder, "the folder", folders=("report",))
    with interrupts.raised():
        files = paper.write_report(folder)
    name_files(files)


def _choice(given: dict[str, Any], **parts: Any) -> "Choice":
    from largeprompt.paper import Choice, Conventions

    conventions = {name: given[name] for name in ("score_scale", "loss_factor", "query_sigma") if name in given}
    return Choice(given.get("preset", "quick"), given.get("seeds"), Conventions(**conventions), **parts)


def _keys(name: str, given: dict[str, str]) -> tuple[str, ...] | None:
    """The keys in an option, with commas; None for all of them."""
    if name not in given:
        return None
    keys = tuple(part.strip() for part in given[name].split(",") if part.strip())
    if not keys:
        raise ValueError(f"--{name} is {given[name]!r}; it must name at least one, or be left out for all")
    return keys


def _planned(job: "Job", quiet: bool, out: Path | None) -> "Plan":
    """What there is to do, said before it begins."""
    if out is not None:
        from largeprompt.lab import writable_folder

        writable_folder(out, "--out", folders=("figures", "report"))
        job.store.check_writable()
    with View() as view:
        plan = job.plan(view, begin=out is not None)
    if not quiet:
        screen.print(f"{job.choice.preset}: {plan.sentence}", highlight=False, soft_wrap=True)
        if job.out_of_reach:
            seeds = job.choice.protocol.seeds
            few = f"{seeds} seed{'s' if seeds > 1 else ''} cannot settle {', '.join(job.out_of_reach)}"
            enough = max(claim.seeds for claim in job.claims if claim.key in job.out_of_reach)
            screen.print(f"{few}; --seeds {enough} may", highlight=False, soft_wrap=True)
    return plan


def _in_view(out: Path, quiet: bool, more: str = "") -> Any:
    if not quiet:
        line = f"into {out}; Ctrl-C keeps what is done, and the same command goes on{more}"
        errors.print(line, style="dim", highlight=False, soft_wrap=True)
    return interruptible(View(), lambda: f"what is done is kept in {out}")
