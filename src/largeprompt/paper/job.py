"""The main job: what figures and claims need, made once and kept, and turned into pictures, data and a ledger."""

import contextlib
import dataclasses
import datetime
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from largeprompt import lab
from largeprompt.lab import Interrupted, Run, Store, Watcher, duration
from largeprompt.paper.claims import CLAIMS, RULE, entries
from largeprompt.paper.figures import FIGURES
from largeprompt.paper.files import plain, read_json, write, write_json
from largeprompt.paper.machine import machine, versions
from largeprompt.paper.pieces import AbstractPiece, Errata, Needed, Shelf
from largeprompt.paper.settings import PRESETS, Conventions, Settings

RUN, LEDGER = "run.json", "ledger.json"


class Listener(Watcher):
    """Is told how the job goes on, besides the runs of training; this one keeps still."""

    def planned(self, plan: "Plan") -> None:
        """The job is about to begin."""

    def began(self, piece: AbstractPiece) -> None:
        """A piece is being computed."""

    def part(self, piece: AbstractPiece, what: str) -> None:
        """A part of it is done."""

    def made(self, piece: AbstractPiece, found: bool) -> None:
        """A piece is there, or was `found` on the shelf."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What there is to do, and about what it takes."""

    runs: tuple[Run, ...]
    pieces: tuple[AbstractPiece, ...]
    seconds_of_run: Mapping[Run, float]
    pieces_to_do: tuple[AbstractPiece, ...]
    jobs: int
    memory: float
    disk: float

    @property
    def seconds(self) -> float:
        """About how long it takes: the work shared out over the cores, but at least its longest part."""
        training, pieces = sum(self.seconds_of_run.values()), sum(piece.seconds for piece in self.pieces_to_do)
        longest = max([*self.seconds_of_run.values(), pieces, 0.0])
        return max((training + pieces) / self.jobs, longest)

    @property
    def sentence(self) -> str:
        """The cost in words."""
        there = len(self.runs) - len(self.seconds_of_run) + len(self.pieces) - len(self.pieces_to_do)
        known = f"; {there} are there already" if there else ""
        what = f"{len(self.runs)} training runs and {len(self.pieces)} computations{known}"
        if not self.seconds_of_run and not self.pieces_to_do:
            return f"{what}: nothing to compute"
        sizes = f"{self.memory / 2**20:.0f} MB of memory, {self.disk / 2**20:.0f} MB of disk"
        cores = f"{self.jobs} core{'s' if self.jobs > 1 else ''}"
        return f"{what}: about {duration(self.seconds)} on {cores}, {sizes}"


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A finished job: its folder, the dataset of each figure, the ledger, and how the work went."""

    folder: Path
    datasets: Mapping[str, xr.Dataset]
    ledger: Mapping[str, Any]
    account: Mapping[str, Any]
    files: tuple[Path, ...]


def settings_for(
    preset: str = "quick", *, seeds: int | None = None, conventions: Conventions | None = None
) -> Settings:
    """A preset, perhaps with another number of seeds or other conventions."""
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(PRESETS)}")
    own = {"seeds": seeds, "conventions": conventions}
    return dataclasses.replace(PRESETS[preset], **{name: value for name, value in own.items() if value is not None})


def chosen(what: str, keys: Iterable[str] | None, known: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys among the known, in their order; a figure's number stands for its parts, none for all."""
    if keys is None:
        return tuple(known)
    found = set()
    for key in map(str, keys):
        matches = {name for name in known if name.lower() == key.lower()} or {
            name for name in known if name[:-1] == key and name[-1] in "ab"
        }
        if not matches:
            raise ValueError(f"{what} {key!r} is not one; they are {', '.join(known)}")
        found |= matches
    if not found:
        raise ValueError(f"no {what} was named; they are {', '.join(known)}")
    return tuple(name for name in known if name in found)


class Job:
    """Figures and claims of some settings, in a folder: `runs/` and `pieces/` hold what was computed, by content."""

    def __init__(
        self,
        settings: Settings,
        out: Path | str = "results",
        *,
        figures: Iterable[str] | None = None,
        claims: Iterable[str] | None = None,
        errata: bool = False,
        jobs: int | None = None,
        store: Path | str | None = None,
    ):
        self.settings, self.out = settings, Path(out)
        self.figures = [FIGURES[key] for key in chosen("figure", figures, FIGURES)] if figures != () else []
        self.claims = [CLAIMS[key] for key in chosen("claim", claims, CLAIMS)] if claims != () else []
        self.errata = errata and settings.errata
        self.jobs = lab.usable_cores() if jobs is None else jobs
        if self.jobs < 1:
            raise ValueError(f"jobs is {jobs}; it must be at least 1")
        self.store, self.shelf = Store(store or self.out / "runs"), Shelf(self.out / "pieces")

    @property
    def needs(self) -> tuple[Needed, ...]:
        """Every run and piece, once."""
        asked = [need for part in (*self.figures, *self.claims) for need in part.needs(self.settings)]
        return tuple(dict.fromkeys([*asked, *([Errata()] if self.errata else [])]))

    @property
    def kinds_of_runs(self) -> int:
        """How many runs are timed to tell the cost: one a length."""
        return len({need.L for need in self.needs if isinstance(need, Run)})

    def plan(self, timed: Any = lambda run, speed: None) -> Plan:
        """What is not there yet, and about how long it takes: a few steps of each kind of run are timed."""
        needs = self.needs
        runs = tuple(need for need in needs if isinstance(need, Run))
        pieces = tuple(need for need in needs if isinstance(need, AbstractPiece))
        expected = lab.forecast(runs, self.store, self.jobs, timed) if runs else None
        to_do = tuple(piece for piece in pieces if self.shelf.load(piece) is None)
        each, memory, disk = (expected.each, expected.memory, expected.disk) if expected else ({}, 0.0, 0.0)
        return Plan(runs, pieces, each, to_do, self.jobs, memory + 4e8, disk)

    def carry_out(self, plan: Plan, listener: Listener | None = None) -> dict[Needed, xr.Dataset]:
        """All results: training in the background, pieces meanwhile. An interrupt keeps what is done."""
        listener = listener or Listener()
        self.out.mkdir(parents=True, exist_ok=True)
        listener.planned(plan)
        with self._training(plan, listener) as trained:
            found: dict[Needed, xr.Dataset] = {piece: self._made(piece, listener) for piece in plan.pieces}
            return found | trained()

    @contextlib.contextmanager
    def _training(self, plan: Plan, listener: Listener) -> Iterator[Any]:
        stop, done = threading.Event(), threading.Event()
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                options: Any = {"watcher": listener, "jobs": self.jobs, "seconds": plan.seconds_of_run, "stop": stop}
                outcome["results"] = lab.sweep(plan.runs, self.store, **options) if plan.runs else []
            except BaseException as error:
                outcome["error"] = error
            finally:
                done.set()

        thread = threading.Thread(target=work, name="training")
        thread.start()

        def results() -> dict[Needed, xr.Dataset]:
            while not done.wait(0.2):  # in short waits, so that Ctrl-C is heard
                pass
            if "error" in outcome:
                raise outcome["error"]
            return dict(zip(plan.runs, outcome["results"], strict=True))

        try:
            yield results
        except BaseException as error:
            stop.set()
            thread.join()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted from None
            raise
        thread.join()

    def _made(self, piece: AbstractPiece, listener: Listener) -> xr.Dataset:
        kept = self.shelf.load(piece)
        if kept is not None:
            listener.made(piece, found=True)
            return kept
        listener.began(piece)
        began = time.perf_counter()
        data = piece.compute(lambda what: listener.part(piece, what))
        kept = self.shelf.keep(piece, data.assign_attrs(seconds=time.perf_counter() - began))
        listener.made(piece, found=False)
        return kept

    def ledger(self, results: Mapping[Needed, xr.Dataset]) -> dict[str, Any]:
        """Every claim with its verdict, and the errata."""
        return {
            "preset": self.settings.preset,
            "rule": RULE,
            "claims": [claim.entry(self.settings, results) for claim in self.claims],
            "errata": entries(results[Errata()]) if self.errata else [],
        }

    def reproduce(self, plan: Plan, listener: Listener | None = None) -> Reproduction:
        """Carry it out and write it up: pictures, data, ledger and report."""
        began, before = time.time(), self._before()
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / RUN, {"choice": self._choice(), "finished": False, "seconds": before})
        work = bool(plan.seconds_of_run or plan.pieces_to_do)
        try:
            results = self.carry_out(plan, listener)
        except Interrupted:
            spent = before + time.time() - began
            write_json(self.out / RUN, {"choice": self._choice(), "finished": False, "seconds": spent})
            raise
        ledger = self.ledger(results)
        datasets, files = self.draw(results)
        spent = before + time.time() - began if work or not before else before
        account = {"choice": self._choice(), "finished": True, **self.account(plan, results, began), "seconds": spent}
        files += [write_json(self.out / LEDGER, ledger), write_json(self.out / RUN, account), *write_report(self.out)]
        return Reproduction(self.out, datasets, ledger, account, tuple(files))

    def _options(self, figures: bool = False) -> list[str]:
        """The options of the command line that make this job."""
        choice, preset = self._choice(), PRESETS[self.settings.preset]
        given = {"seeds": choice["seeds"]} if choice["seeds"] != preset.seeds else {}
        usual = dataclasses.asdict(preset.conventions)
        given |= {name: value for name, value in choice["conventions"].items() if value != usual[name]}
        found = ["--preset", self.settings.preset]
        if figures and choice["figures"] is not None:
            found += ["--figures", ",".join(choice["figures"])]
        return found + [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]

    def _choice(self) -> dict[str, Any]:
        whole = len(self.figures) == len(FIGURES)
        return {
            "preset": self.settings.preset,
            "seeds": self.settings.seeds,
            "figures": None if whole else [figure.key for figure in self.figures],
            "conventions": dataclasses.asdict(self.settings.conventions),
        }

    def _before(self) -> float:
        """Seconds that earlier sittings at the same job have taken."""
        path = self.out / RUN
        with contextlib.suppress(ValueError, KeyError):
            kept = read_json(path) if path.exists() else {}
            return float(kept["seconds"]) if kept.get("choice") == plain(self._choice()) else 0.0
        return 0.0

    def account(self, plan: Plan, results: Mapping[Needed, xr.Dataset], began: float) -> dict[str, Any]:
        """How the work went, as plain data."""
        spent = {run: float(self.store.log(run.hash).get("seconds", 0.0)) for run in plan.runs}
        spent |= {piece: float(results[piece].attrs.get("seconds", 0.0)) for piece in plan.pieces}
        of_figures = {
            figure.key: sum(spent[need] for need in dict.fromkeys(figure.needs(self.settings)))
            for figure in self.figures
        }
        return {
            "preset": self.settings.preset,
            "command": " ".join(["largeprompt reproduce", *self._options(figures=True)]),
            "options": self._options(),
            "began": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(self.jobs),
            "versions": versions(),
            "settings": dataclasses.asdict(self.settings),
            "runs": {"count": len(plan.runs), "core_seconds": sum(spent[run] for run in plan.runs)},
            "pieces": {"count": len(plan.pieces), "core_seconds": sum(spent[p] for p in plan.pieces)},
            "figures": [figure.key for figure in self.figures],
            "figure_seconds": of_figures,
            "cost": plan.sentence,
        }

    def draw(self, results: Mapping[Needed, xr.Dataset]) -> tuple[dict[str, xr.Dataset], list[Path]]:
        """The dataset of each figure; its picture and data in files, each written at once."""
        from largeprompt.paper.drawing import draw

        folder, files, datasets = self.out / "figures", [], {}
        folder.mkdir(parents=True, exist_ok=True)
        for figure in self.figures:
            data = figure.dataset(self.settings, results).assign_attrs(paper="arXiv:2512.11784", figure=figure.key)
            files += write(folder, f"figure-{figure.key}", draw(figure.chart(data)), data)
            datasets[figure.key] = data
        return datasets, files


def job_of(
    preset: str = "quick",
    *,
    figures: Iterable[str] | None = None,
    seeds: int | None = None,
    conventions: Conventions | None = None,
    **where: Any,
) -> Job:
    """The job of all figures, claims and errata, or of some figures and the claims that they alone decide."""
    settings = settings_for(preset, seeds=seeds, conventions=conventions)
    keys = None if figures is None else chosen("figure", figures, FIGURES)
    keys = None if keys == tuple(FIGURES) else keys
    claims = None if keys is None else _decided_by(keys, settings)
    return Job(settings, figures=keys, claims=claims, errata=keys is None, **where)


def reproduce(preset: str = "quick", *, listener: Listener | None = None, **options: Any) -> Reproduction:
    """The paper, executed: figures, ledger and report in a folder.

    `figures`, `seeds` and `conventions` choose what; `out` is the folder, `results` by default, `store` that of
    training runs, `jobs` the cores. What was computed before is not computed again: an interrupted job goes on.
    """
    job = job_of(preset, **options)
    return job.reproduce(job.plan(), listener)


def figure(
    key: str, preset: str = "quick", *, seeds: int | None = None, conventions: Conventions | None = None, **where: Any
) -> tuple[dict[str, xr.Dataset], list[Path]]:
    """One figure, or both parts of one: its datasets, and the files of its pictures and data."""
    job = Job(settings_for(preset, seeds=seeds, conventions=conventions), figures=(key,), claims=(), **where)
    return job.draw(job.carry_out(job.plan()))


def verify(
    claims: Iterable[str] | None = None,
    preset: str = "quick",
    *,
    seeds: int | None = None,
    conventions: Conventions | None = None,
    **where: Any,
) -> dict[str, Any]:
    """The ledger of some claims, or of all with the errata; what they need is computed, or found in the folder."""
    settings = settings_for(preset, seeds=seeds, conventions=conventions)
    job = Job(settings, figures=(), claims=claims, errata=claims is None, **where)
    return job.ledger(job.carry_out(job.plan()))


def write_report(folder: Path | str = "results") -> list[Path]:
    """The report of a finished reproduction, written anew from what its folder holds."""
    from largeprompt.paper import report

    return report.write(Path(folder))


def kept_choice(folder: Path | str) -> dict[str, Any]:
    """The preset, seeds, figures and conventions that a folder was begun with, as `reproduce` takes them."""
    path = Path(folder) / RUN
    if not path.exists():
        raise ValueError(f"{path} is not there; nothing to resume, begin with largeprompt reproduce --out {folder}")
    choice = read_json(path)["choice"]
    return choice | {"conventions": Conventions(**choice["conventions"])}


def _decided_by(figures: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """The claims about these figures that need nothing else."""
    there = {need for key in figures for need in FIGURES[key].needs(settings)}
    about = [claim for claim in CLAIMS.values() if set(claim.figures) & set(figures)]
    return tuple(claim.key for claim in about if set(claim.needs(settings)) <= there)
