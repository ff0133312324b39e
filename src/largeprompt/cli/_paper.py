"""The executable paper: every figure, every claim, the report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Json, Out, app, errors, screen
from ._output import interruptible, name_files, print_json, progress, show
from ._train import Folder

if TYPE_CHECKING:
    from largeprompt.paper import Conventions

Preset = Annotated[
    str, typer.Option(help="How much: quick (minutes), paper (the full protocol) or smoke (seconds, for a trial).")
]
Seeds = Annotated[int | None, typer.Option(help="Seeds of training.", show_default="the preset's")]
Scale = Annotated[float, typer.Option(help="Factor of the scores; 0.40825 is 1/√(d+1).")]
Factor = Annotated[float, typer.Option(help="1: the loss is half the squared error, as printed; 2: the squared error.")]
QuerySigma = Annotated[str | None, typer.Option(help="Covariance of queries.", show_default="that of the covariates")]
Jobs = Annotated[int | None, typer.Option(help="Cores to use.", show_default="all")]
Figures = Annotated[str | None, typer.Option(help="Some figures alone, as 1,2,5a.", show_default="all")]
Claims = Annotated[str | None, typer.Option(help="Some claims alone, as C3,T7.", show_default="all")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the settings that --out was begun with.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Say what it would take, and stop.")]


@app.command()
def reproduce(
    preset: Preset = "quick",
    figures: Figures = None,
    seeds: Seeds = None,
    score_scale: Scale = 1.0,
    loss_factor: Factor = 1.0,
    query_sigma: QuerySigma = None,
    out: Out = Path("results"),
    store: Folder = None,
    jobs: Jobs = None,
    resume: Resume = False,
    estimate: Estimate = False,
    as_json: Json = False,
) -> None:
    """Make every figure of the paper and judge every claim: pictures, data, a ledger and a report."""
    from largeprompt import lab, paper
    from largeprompt.paper.ledger import ledger_table

    if resume:
        choice = paper.kept_choice(out)
    else:
        conventions = _conventions(score_scale, loss_factor, query_sigma)
        choice = {"preset": preset, "figures": _keys(figures), "seeds": seeds, "conventions": conventions}
    job = paper.job_of(**choice, out=out, jobs=jobs, store=store)
    plan = _planned(job, as_json, out=None if estimate else out)
    if estimate:
        if as_json:
            print_json([], {"estimate": {"seconds": plan.seconds, "sentence": plan.sentence}})
        return
    with _followed(plan, out, as_json) as listener:
        made = job.reproduce(plan, listener)
    if as_json:
        print_json(list(made.files), {"run": made.account, "ledger": made.ledger})
        return
    show(ledger_table(made.ledger), width=110)
    page = made.folder / "report" / "index.html"
    screen.print(f"{lab.duration(made.account['seconds'])} in all; the report: {page}", soft_wrap=True)


@app.command()
def figure(
    key: Annotated[str, typer.Argument(help="1a to 8, laws or flows; 1 is 1a and 1b.")],
    preset: Preset = "quick",
    seeds: Seeds = None,
    score_scale: Scale = 1.0,
    loss_factor: Factor = 1.0,
    query_sigma: QuerySigma = None,
    out: Out = Path("results"),
    store: Folder = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Make one figure: its pictures and data, from what is in --out already or made anew."""
    from largeprompt import paper
    from largeprompt.paper.figures import FIGURES

    settings = paper.settings_for(preset, seeds=seeds, conventions=_conventions(score_scale, loss_factor, query_sigma))
    job = paper.Job(settings, out, figures=(key,), claims=(), jobs=jobs, store=store)
    plan = _planned(job, as_json, out)
    with _followed(plan, out, as_json) as listener:
        datasets, files = job.draw(job.carry_out(plan, listener))
    told = {key: FIGURES[key].told(data) for key, data in datasets.items()}
    if as_json:
        print_json(files, {"figures": told})
        return
    for key, lines in told.items():
        screen.print(f"{FIGURES[key].name}. {FIGURES[key].title}", style="bold", highlight=False)
        for line in lines:
            screen.print(line, highlight=False, markup=False)
    name_files(files)


@app.command()
def verify(
    claims: Claims = None,
    preset: Preset = "quick",
    seeds: Seeds = None,
    score_scale: Scale = 1.0,
    loss_factor: Factor = 1.0,
    query_sigma: QuerySigma = None,
    out: Out = Path("results"),
    store: Folder = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Judge claims of the paper: what was measured, with its error, and a verdict by one rule."""
    from largeprompt import paper
    from largeprompt.paper.ledger import claim_lines, ledger_table

    settings = paper.settings_for(preset, seeds=seeds, conventions=_conventions(score_scale, loss_factor, query_sigma))
    keys = _keys(claims)
    job = paper.Job(settings, out, figures=(), claims=keys, errata=keys is None, jobs=jobs, store=store)
    plan = _planned(job, as_json, out)
    with _followed(plan, out, as_json) as listener:
        ledger = job.ledger(job.carry_out(plan, listener))
    if as_json:
        print_json([], ledger)
        return
    show(ledger_table(ledger) if keys is None else claim_lines(ledger), width=110)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished reproduction.")] = Path("results"),
) -> None:
    """Write the report of a reproduction anew."""
    from largeprompt import paper

    name_files(paper.write_report(folder))


def _conventions(score_scale: float, loss_factor: float, query_sigma: str | None) -> "Conventions":
    from largeprompt.paper import Conventions

    return Conventions(score_scale, loss_factor, query_sigma)


def _keys(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _planned(job: Any, quiet: bool, out: Path | None) -> Any:
    """What there is to do, said before it begins."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with progress("timing a few steps (the first time, compiling them)", job.kinds_of_runs) as done:
        plan = job.plan(lambda run, speed: done(f"{run.title}: {speed:.0f} steps/s"))
    if not quiet:
        screen.print(f"{job.settings.preset}: {plan.sentence}", highlight=False, soft_wrap=True)
    return plan


def _followed(plan: Any, out: Path, quiet: bool) -> Any:
    from ._paper_bars import PaperBars

    if not quiet:
        told = f"into {out}; Ctrl-C keeps what is done, and the same command goes on"
        errors.print(told, style="dim", highlight=False, soft_wrap=True)
    return interruptible(PaperBars(plan), lambda: f"what is done is kept in {out}")
