"""The main job: what figures and claims need, made once and kept, and turned into pictures, data and a ledger."""

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import xarray as xr

from largeprompt import lab
from largeprompt._device import DeviceName, resolve_device
from largeprompt.lab import Interrupted, Run, Store
from largeprompt.paper.claims import CLAIMS, ROLES, RULE, Claim, entries
from largeprompt.paper.figures import FIGURES
from largeprompt.paper.files import plain, read_json, write, write_json
from largeprompt.paper.machine import machine, versions
from largeprompt.paper.pieces import AbstractPiece, Errata, Needed, Results, Shelf
from largeprompt.paper.plan import Listener, Plan, Training
from largeprompt.paper.settings import PRESETS, Conventions, Settings

RUN, LEDGER = "run.json", "ledger.json"


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
        device: Literal["auto", "cpu", "gpu"] = "cpu",
    ):
        self.settings, self.out = settings, Path(out)
        self.figures = [FIGURES[key] for key in chosen("figure", figures, FIGURES)] if figures != () else []
        self.claims = [CLAIMS[key] for key in chosen("claim", claims, CLAIMS)] if claims != () else []
        self.errata = errata and settings.errata
        self.jobs = lab.usable_cores() if jobs is None else jobs
        if self.jobs < 1:
            raise ValueError(f"jobs is {jobs}; it must be at least 1")
        self.device: DeviceName = resolve_device(device, "cuda")
        self.store, self.shelf = Store(store or self.out / "runs"), Shelf(self.out / "pieces")

    @property
    def needs(self) -> tuple[Needed, ...]:
        """Every run and piece, once."""
        asked = [need for part in (*self.figures, *self.claims) for need in part.needs(self.settings)]
        return tuple(dict.fromkeys([*asked, *([Errata()] if self.errata else [])]))

    def plan(self, progress: lab.Progress | None = None) -> Plan:
        """What is not there yet, and about how long it takes: a few steps of each kind of run are timed."""
        needs = self.needs
        runs = tuple(need for need in needs if isinstance(need, Run))
        pieces = tuple(need for need in needs if isinstance(need, AbstractPiece))
        expected = lab.forecast(runs, self.store, self.jobs, progress, self.device) if runs else None
        to_do = tuple(piece for piece in pieces if self.shelf.load(piece) is None)
        each, memory, disk = (expected.each, expected.memory, expected.disk) if expected else ({}, 0.0, 0.0)
        return Plan(runs, pieces, each, to_do, self.jobs, memory + 4e8, disk, self.device)

    def carry_out(self, plan: Plan, listener: Listener | None = None) -> dict[Needed, xr.Dataset]:
        """All results: training in the background, pieces meanwhile. An interrupt keeps what is done."""
        listener = listener or Listener()
        self.out.mkdir(parents=True, exist_ok=True)
        listener.planned(plan)
        found: dict[Needed, xr.Dataset] = {}
        with self._training(plan, listener) as training:
            for piece in plan.pieces:
                training.fail_if_it_failed()
                found[piece] = self._made(piece, listener)
            return found | training.results()

    @contextlib.contextmanager
    def _training(self, plan: Plan, listener: Listener) -> Iterator["Training"]:
        training = Training(plan, self.store, listener)
        try:
            yield training
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            training.end()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two jobs that write figures into one folder would mix them."""
        self.out.mkdir(parents=True, exist_ok=True)
        with lab.claimed(self.out / "job.lock") as alone:
            if not alone:
                raise ValueError(f"{self.out} is being written by another process; wait for it, or give another --out")
            yield

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

    def ledger(self, results: Results) -> dict[str, Any]:
        """Every claim with its verdict, and the errata."""
        return {
            "preset": self.settings.preset,
            "choice": self._stamp(),
            "rule": RULE,
            "roles": ROLES,
            "claims": [self._entry(claim, results) for claim in self.claims],
            "errata": entries(results[Errata()]) if self.errata else [],
        }

    def _entry(self, claim: Claim, results: Results) -> dict[str, Any]:
        entry = claim.entry(self.settings, results)
        usual = dataclasses.replace(self.settings, conventions=Conventions())
        if usual != self.settings and claim.needs(usual) == claim.needs(self.settings):
            entry["remark"] = f"{entry['remark']} Measured by the paper's conventions, not those chosen.".strip()
        return entry

    @property
    def out_of_reach(self) -> tuple[str, ...]:
        """Claims that so few seeds cannot settle: the fewest that one of their covariances is trained from."""
        found = []
        for claim in self.claims:
            seeds: dict[str, set[int]] = {}
            for run in (need for need in claim.needs(self.settings) if isinstance(need, Run)):
                seeds.setdefault(str(run.sigma), set()).add(run.weight_seed)
            if claim.seeds > min(map(len, seeds.values()), default=self.settings.seeds):
                found.append(claim.key)
        return tuple(found)

    def reproduce(self, plan: Plan, listener: Listener | None = None) -> Reproduction:
        """Carry it out and write it up: pictures, data, ledger and report."""
        with self._alone():
            return self._reproduce(plan, listener)

    def make_figures(self, plan: Plan, listener: Listener | None = None) -> tuple[dict[str, xr.Dataset], list[Path]]:
        """The datasets of the figures, and the files of their pictures and data."""
        with self._alone():
            return self._draw(self.carry_out(plan, listener))

    def _reproduce(self, plan: Plan, listener: Listener | None) -> Reproduction:
        began, before = time.time(), self._before()
        write_json(self.out / RUN, {"choice": self._choice(), "finished": False, "seconds": before})
        work = bool(plan.seconds_of_run or plan.pieces_to_do)
        try:
            results = self.carry_out(plan, listener)
        except Interrupted:
            spent = before + time.time() - began
            write_json(self.out / RUN, {"choice": self._choice(), "finished": False, "seconds": spent})
            raise
        ledger = self.ledger(results)
        datasets, files = self._draw(results)
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
        given |= {"out": self.out} if self.out != Path("results") else {}
        return found + [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]

    def _choice(self) -> dict[str, Any]:
        whole = len(self.figures) == len(FIGURES)
        return {
            "preset": self.settings.preset,
            "seeds": self.settings.seeds,
            "figures": None if whole else [figure.key for figure in self.figures],
            "conventions": dataclasses.asdict(self.settings.conventions),
            "store": None if self.store.folder == self.out / "runs" else str(self.store.folder),
        }

    def _stamp(self) -> dict[str, Any]:
        """What all numbers of a folder must have in common."""
        return {name: self._choice()[name] for name in ("preset", "seeds", "conventions")}

    def _before(self) -> float:
        """Seconds that earlier sittings at the same job have taken."""
        path = self.out / RUN
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # whatever a damaged file holds
            kept = read_json(path) if path.exists() else {}
            return float(kept["seconds"]) if kept.get("choice") == plain(self._choice()) else 0.0
        return 0.0

    def account(self, plan: Plan, results: Results, began: float) -> dict[str, Any]:
        """How the work went, as plain data."""
        logs = {run: self.store.log(run.key) for run in plan.runs}
        spent = {run: float(log.get("seconds", 0.0)) for run, log in logs.items()}
        by_gpu = sum(float(log.get("gpu_seconds", 0.0)) for log in logs.values())
        by_cores = sum(spent.values()) - by_gpu
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
            "machine": machine(self.jobs, self.device),
            "versions": versions(),
            "settings": dataclasses.asdict(self.settings),
            "runs": {"count": len(plan.runs), "core_seconds": by_cores, "gpu_seconds": by_gpu},
            "pieces": {"count": len(plan.pieces), "core_seconds": sum(spent[p] for p in plan.pieces)},
            "figures": [figure.key for figure in self.figures],
            "figure_seconds": of_figures,
            "cost": plan.sentence,
        }

    def _draw(self, results: Results) -> tuple[dict[str, xr.Dataset], list[Path]]:
        """The dataset of each figure; its picture and data in files, each written at once."""
        from largeprompt.paper.drawing import draw

        folder, files, datasets = self.out / "figures", [], {}
        folder.mkdir(parents=True, exist_ok=True)
        for figure in self.figures:
            stamp = {"paper": "arXiv:2512.11784", "figure": figure.key, "choice": json.dumps(plain(self._stamp()))}
            data = figure.dataset(self.settings, results).assign_attrs(stamp)
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
    training runs, `jobs` the cores, `device` where runs are trained. What was computed before is not computed again: an
    interrupted job goes on.
    """
    job = job_of(preset, **options)
    return job.reproduce(job.plan(), listener)


def figure(
    key: str, preset: str = "quick", *, seeds: int | None = None, conventions: Conventions | None = None, **where: Any
) -> tuple[dict[str, xr.Dataset], list[Path]]:
    """One figure, or both parts of one: its datasets, and the files of its pictures and data."""
    job = Job(settings_for(preset, seeds=seeds, conventions=conventions), figures=(key,), claims=(), **where)
    return job.make_figures(job.plan())


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
    try:
        choice = dict(read_json(path)["choice"])
        return choice | {"conventions": Conventions(**choice["conventions"])}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} does not say what was chosen; give the options again, without --resume") from None


def _decided_by(figures: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """The claims about these figures that need nothing else."""
    there = {need for key in figures for need in FIGURES[key].needs(settings)}
    about = [claim for claim in CLAIMS.values() if set(claim.figures) & set(figures)]
    return tuple(claim.key for claim in about if set(claim.needs(settings)) <= there)
