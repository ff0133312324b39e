"""The main job: what figures and claims need, computed once and kept, and turned into pictures, data and a ledger."""

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import xarray as xr

from largeprompt import lab
from largeprompt._device import Device, DeviceName, resolve_device
from largeprompt.lab import Damaged, Interrupted, Progress, Run, Store
from largeprompt.paper.choice import Choice, Conventions, keys_among
from largeprompt.paper.claims import ROLES, RULE, Claim
from largeprompt.paper.errata import Errata, entries
from largeprompt.paper.experiment import Computation, Experiment, Needed
from largeprompt.paper.experiments import CLAIMS, FIGURES, settings
from largeprompt.paper.files import plain, read_json, write, write_json
from largeprompt.paper.machine import machine, versions
from largeprompt.paper.plan import Followed, Plan, cheapest_first, training_of
from largeprompt.paper.reproduction import LEDGER, RUN, Reproduction, read
from largeprompt.paper.unfinished import HowFar, Writer


class Job:
    """The figures and claims of a choice, in a folder: `store/` holds all that was computed, by content."""

    def __init__(
        self,
        choice: Choice | None = None,
        out: Path | str = "results",
        *,
        jobs: int | None = None,
        store: Path | str | None = None,
        device: Device = "cpu",
    ):
        self.choice = choice = choice or Choice()
        self.out = Path(out)
        keys = tuple(FIGURES) if choice.figures is None else keys_among("figure", choice.figures, FIGURES)
        self.figures = tuple(FIGURES[key] for key in keys)
        self.claims = tuple(CLAIMS[key] for key in self._claims(keys))
        if not self.figures and not self.claims:
            raise ValueError(f"no figure was named; they are {', '.join(FIGURES)}")
        self.errata = Errata() if choice.protocol.errata and len(self.claims) == len(CLAIMS) else None
        self.jobs = lab.usable_cores() if jobs is None else jobs
        if self.jobs < 1:
            raise ValueError(f"jobs is {jobs}; it must be at least 1")
        self.device: DeviceName = resolve_device(device, "cuda")
        self.store = Store(store or self.out / "store")
        self._begun: dict[Computation, Future[xr.Dataset]] = {}

    def _claims(self, figures: tuple[str, ...]) -> tuple[str, ...]:
        """The claims asked for; without any, those about the figures that need nothing else."""
        if self.choice.claims is not None:
            return keys_among("claim", self.choice.claims, CLAIMS)
        if figures == tuple(FIGURES):
            return tuple(CLAIMS)
        there = {need for key in figures for need in FIGURES[key].needs(self.choice)}
        about = [claim for claim in CLAIMS.values() if set(claim.figures) & set(figures)]
        return tuple(claim.key for claim in about if set(claim.needs(self.choice)) <= there)

    @property
    def experiments(self) -> dict[str, Experiment]:
        """All whose dataset is drawn or judged, each once."""
        judged = (experiment for claim in self.claims for experiment in claim.of)
        return {experiment.key: experiment for experiment in (*self.figures, *judged)}

    @property
    def needs(self) -> tuple[Needed, ...]:
        """Every run and computation, once."""
        asked = [need for experiment in self.experiments.values() for need in experiment.needs(self.choice)]
        return tuple(dict.fromkeys([*asked, *([self.errata] if self.errata else [])]))

    def plan(self, progress: Progress | None = None, *, begin: bool = False) -> Plan:
        """What is not there yet, and about how long it takes: a few steps of each kind of run are timed.

        Timing compiles these steps first. With `begin`, and a second core, computations begin meanwhile.
        """
        needs = self.needs
        runs = tuple(need for need in needs if isinstance(need, Run))
        missing = {item: item.seconds for item in needs if isinstance(item, Computation) and self._kept(item) is None}
        # before runs are timed, each is taken to last longer than all computations
        order = self._ordered({**dict.fromkeys(runs, math.inf), **missing}) if begin and runs and self.jobs > 1 else ()
        with self._begun_in_order(need for need in order if isinstance(need, Computation) and need in missing):
            expected = lab.forecast(runs, self.store, self.jobs, progress, self.device) if runs else None
        each, memory, disk = (expected.each, expected.memory, expected.disk) if expected else ({}, 0.0, 0.0)
        ordered = self._ordered({**each, **missing})
        runs = tuple(need for need in ordered if isinstance(need, Run))
        computations = tuple(need for need in ordered if isinstance(need, Computation))
        to_compute = tuple(item for item in computations if item in missing)
        return Plan(runs, computations, each, to_compute, self.jobs, memory + 4e8, disk, self.device)

    def _ordered(self, seconds: Mapping[Needed, float]) -> tuple[Needed, ...]:
        """All needs, in the order that completes figures soonest, then what claims need besides, then the errata."""
        others = [experiment for experiment in self.experiments.values() if experiment not in self.figures]
        groups = [[one.needs(self.choice) for one in group] for group in (self.figures, others)]
        return tuple(dict.fromkeys([*(n for group in groups for n in cheapest_first(group, seconds)), *self.needs]))

    def datasets(
        self, plan: Plan, progress: Progress | None = None, made: Callable[[str, xr.Dataset], None] | None = None
    ) -> dict[str, xr.Dataset]:
        """The dataset of every experiment, and that of the errata under `errata`; an interrupt keeps what is done.

        Training and computations run in the background. `made(key, data)` is called with each dataset as soon as all
        that it needs is there.
        """
        progress = Followed(progress)
        results: dict[Needed, xr.Dataset] = {}
        found: dict[str, xr.Dataset] = {}
        needs = {key: set(experiment.needs(self.choice)) for key, experiment in self.experiments.items()}
        needs |= {"errata": {self.errata}} if self.errata else {}
        running = {named.name: (named, run) for named, run in zip(lab.with_engines(plan.runs), plan.runs, strict=True)}

        def look() -> None:
            """Take the results of runs that have ended, and make what is complete."""
            for name in [name for name in running if name in progress.ended]:
                named, run = running[name]
                data = self._kept(named)
                if data is not None:
                    results[run] = data
                    del running[name]
            for key in [key for key, parts in needs.items() if parts <= results.keys()]:
                del needs[key]
                found[key] = self._dataset(key, results)
                if made is not None:
                    made(key, found[key])

        with training_of(plan, self.store, progress) as training, self._computing(plan, progress) as computing:
            to_compute, left, number = set(plan.to_compute), set(computing), itertools.count(1)
            with progress.task("computing", max(sum(item.seconds for item in to_compute), 1e-9)) as advance:
                while left:
                    if training.done():
                        training.result()  # raises what a run has raised
                    done, left = wait(left, 0.2, FIRST_COMPLETED)  # in short waits, so that Ctrl-C is heard
                    for future in done:
                        item = computing[future]
                        results[item] = future.result()
                        advance(item.seconds if item in to_compute else 0.0, f"{next(number)} of {len(computing)}")
                    look()
            while not training.done():
                wait([training], 0.2)
                look()
            results.update(zip(plan.runs, training.result(), strict=True))
            look()
        return {key: found[key] for key in (*self.experiments, *(["errata"] if self.errata else []))}

    @contextlib.contextmanager
    def _computing(self, plan: Plan, progress: Progress) -> Iterator[dict[Future[xr.Dataset], Computation]]:
        """The computations of a plan in the background of a block; at its end those under way are left to end alone."""
        pool = ThreadPoolExecutor(plan.at_once, "computing")
        try:
            yield {pool.submit(self._computed, item, progress): item for item in plan.computations}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _dataset(self, key: str, results: Mapping[Needed, xr.Dataset]) -> xr.Dataset:
        if self.errata and key == "errata":
            return results[self.errata]
        return self.experiments[key].dataset(self.choice, results)

    def _kept(self, item: Needed) -> xr.Dataset | None:
        """A result in the store; None also where it is damaged, for then it is computed again."""
        with contextlib.suppress(Damaged):
            return self.store.load(item.key)
        return None

    @contextlib.contextmanager
    def _begun_in_order(self, items: Iterable[Computation]) -> Iterator[None]:
        """Compute these one after the other in the background of a block; at its end the one under way goes on."""
        pool = ThreadPoolExecutor(1, "first")
        self._begun = {item: pool.submit(self._computed_now, item, Progress()) for item in items}
        try:
            yield
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._begun = {item: begun for item, begun in self._begun.items() if not begun.cancelled()}

    def _computed(self, item: Computation, progress: Progress) -> xr.Dataset:
        begun = self._begun.pop(item, None)
        if begun is not None:
            return begun.result()
        kept = self._kept(item)
        return self._computed_now(item, progress) if kept is None else kept

    def _computed_now(self, item: Computation, progress: Progress) -> xr.Dataset:
        began = time.perf_counter()
        data = item.compute(progress)
        return self.store.save(item, data, {"seconds": time.perf_counter() - began})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two jobs that write figures into one folder would mix them."""
        self.out.mkdir(parents=True, exist_ok=True)
        with lab.claimed(self.out / "job.lock") as alone:
            if not alone:
                raise ValueError(f"{self.out} is being written by another process; wait for it, or give another --out")
            for name in ("figures/.figure-*", "report/.index-*"):  # half-written by a job that was killed
                for left in self.out.glob(name):
                    left.unlink(missing_ok=True)
            yield

    def ledger(self, datasets: Mapping[str, xr.Dataset]) -> dict[str, Any]:
        """Every claim with its verdict, and the errata; a claim whose datasets are not all there is pending."""
        return {
            "preset": self.choice.preset,
            "choice": self.choice.stamp,
            "rule": RULE,
            "roles": ROLES,
            "claims": [self._entry(claim, datasets) for claim in self.claims],
            "errata": entries(datasets["errata"]) if "errata" in datasets else [],
        }

    def _entry(self, claim: Claim, datasets: Mapping[str, xr.Dataset]) -> dict[str, Any]:
        if any(experiment.key not in datasets for experiment in claim.of):
            return claim.pending
        entry = claim.entry(datasets)
        usual = dataclasses.replace(self.choice, conventions=Conventions())
        if usual != self.choice and claim.needs(usual) == claim.needs(self.choice):
            entry["remark"] = f"{entry['remark']} Measured by the paper's conventions, not those chosen.".strip()
        return entry

    @property
    def out_of_reach(self) -> tuple[str, ...]:
        """Claims that so few seeds cannot settle: the fewest that one of their covariances is trained from."""
        found = []
        for claim in self.claims:
            seeds: dict[str, set[int]] = {}
            for run in (need for need in claim.needs(self.choice) if isinstance(need, Run)):
                seeds.setdefault(str(run.sigma), set()).add(run.weight_seed)
            if claim.seeds > min(map(len, seeds.values()), default=self.choice.protocol.seeds):
                found.append(claim.key)
        return tuple(found)

    def make_figures(self, plan: Plan, progress: Progress | None = None) -> tuple[dict[str, xr.Dataset], list[Path]]:
        """The datasets of the figures, and the files of their pictures and data."""
        with self._alone():
            datasets = self.datasets(plan, progress)
            drawn = {figure.key: self._stamped(figure.key, datasets) for figure in self.figures}
            return drawn, [file for key, data in drawn.items() for file in self._draw(key, data)]

    def reproduce(self, plan: Plan, progress: Progress | None = None) -> Reproduction:
        """All of it, written into the folder: pictures, data, ledger and report."""
        from largeprompt.paper import report

        with self._alone():
            began, before = time.time(), self._before()
            kept = {"choice": self._kept_choice(), "finished": False}
            write_json(self.out / RUN, {**kept, "seconds": before})
            worked = plan.seconds_of_run or plan.to_compute or not before

            def so_far(datasets: Mapping[str, xr.Dataset], finished: bool = False) -> Reproduction:
                spent = before + time.time() - began if worked else before
                account: dict[str, Any] = {**kept, **self._account(plan, began), "finished": finished, "seconds": spent}
                drawn = {key: self._stamped(key, datasets) for key in account["figures"] if key in datasets}
                return Reproduction(self.out, plain(account), plain(self.ledger(datasets)), drawn)

            def draw(key: str, data: xr.Dataset) -> bool:
                if key in keys:
                    files[key] = self._draw(key, self._stamped(key, {key: data}))
                return key in keys

            def show(datasets: Mapping[str, xr.Dataset], how_far: HowFar) -> None:
                report.write_unfinished(so_far(datasets), how_far, self.figures, errata=self.errata is not None)

            keys, files = [figure.key for figure in self.figures], dict[str, list[Path]]()
            followed = Followed(progress)
            writer = Writer(plan, followed, draw, show)
            try:
                with writer.running():
                    datasets = self.datasets(plan, followed, writer.add)
            except Interrupted:
                write_json(self.out / RUN, {**kept, "seconds": before + time.time() - began})
                raise
            made = so_far(datasets, finished=True)
            written = [file for key in keys for file in files[key]]
            written += [write_json(self.out / LEDGER, made.ledger), write_json(self.out / RUN, made.account)]
            return dataclasses.replace(made, files=(*written, *report.write(made)))

    def _kept_choice(self) -> dict[str, Any]:
        """What `--resume` takes up again."""
        figures = None if len(self.figures) == len(FIGURES) else [figure.key for figure in self.figures]
        store = None if self.store.folder == self.out / "store" else str(self.store.folder)
        return plain({**self.choice.stamp, "figures": figures, "store": store})

    def _before(self) -> float:
        """Seconds that earlier processes have spent on the same job."""
        path = self.out / RUN
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # whatever a damaged file holds
            kept = read_json(path) if path.exists() else {}
            return float(kept["seconds"]) if kept.get("choice") == self._kept_choice() else 0.0
        return 0.0

    def _account(self, plan: Plan, began: float) -> dict[str, Any]:
        """How the work went, as plain data."""
        logs = {need: self.store.log(need.key) for need in (*plan.runs, *plan.computations)}
        # seconds by the clock, added up: several go on at once, and share the cores
        spent = {need: float(log.get("seconds", 0.0)) for need, log in logs.items()}
        by_gpu = sum(float(log.get("gpu_seconds", 0.0)) for log in logs.values())
        chosen, store = (self._kept_choice()[name] for name in ("figures", "store"))
        where = ["--out", str(self.out)] if self.out != Path("results") else []
        where += ["--store", store] if store else []
        figures = [] if chosen is None else ["--figures", ",".join(chosen)]
        preset, more = self.choice.options[:2], self.choice.options[2:]
        return {
            "preset": self.choice.preset,
            "command": shlex.join(["largeprompt", "reproduce", *preset, *figures, *more, *where]),
            "options": [*self.choice.options, *where],
            "began": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(self.jobs, self.device),
            "versions": versions(),
            "settings": settings(self.choice),
            "runs": {
                "count": len(plan.runs),
                "core_seconds": sum(spent[run] for run in plan.runs) - by_gpu,
                "gpu_seconds": by_gpu,
            },
            "pieces": {"count": len(plan.computations), "core_seconds": sum(spent[item] for item in plan.computations)},
            "figures": [figure.key for figure in self.figures],
            "figure_seconds": {
                figure.key: sum(spent[need] for need in dict.fromkeys(figure.needs(self.choice)))
                for figure in self.figures
            },
            "cost": plan.sentence,
        }

    def _stamped(self, key: str, datasets: Mapping[str, xr.Dataset]) -> xr.Dataset:
        """The dataset of a figure, which says what it belongs to."""
        choice = json.dumps(plain(self.choice.stamp))
        return datasets[key].assign_attrs(paper="arXiv:2512.11784", figure=key, choice=choice)

    def _draw(self, key: str, data: xr.Dataset) -> list[Path]:
        """The picture and the data of a figure in files, each written at once."""
        from largeprompt.paper.drawing import draw  # imports matplotlib

        folder = self.out / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        return write(folder, f"figure-{key}", draw(self.experiments[key].chart(data)), data)


def reproduce(
    choice: Choice | None = None, out: Path | str = "results", *, progress: Progress | None = None, **where: Any
) -> Reproduction:
    """The paper, executed: figures, ledger and report in a folder.

    `where` are options of `Job`: `store` is the folder of what is computed, `jobs` the cores, `device` where runs are
    trained. What was computed before is not computed again: an interrupted job goes on.
    """
    job = Job(choice, out, **where)
    return job.reproduce(job.plan(), progress)


def figure(
    key: str, choice: Choice | None = None, out: Path | str = "results", **where: Any
) -> tuple[dict[str, xr.Dataset], list[Path]]:
    """One figure, or both parts of one: its datasets, and the files of its pictures and data."""
    job = Job(dataclasses.replace(choice or Choice(), figures=(key,), claims=()), out, **where)
    return job.make_figures(job.plan())


def verify(
    claims: Iterable[str] | None = None, choice: Choice | None = None, out: Path | str = "results", **where: Any
) -> dict[str, Any]:
    """The ledger of some claims, or of all with the errata; what they need is computed, or found in the store."""
    keys = tuple(CLAIMS if claims is None else claims)
    job = Job(dataclasses.replace(choice or Choice(), figures=(), claims=keys), out, **where)
    return job.ledger(job.datasets(job.plan()))


def write_report(folder: Path | str = "results") -> list[Path]:
    """The report of a finished reproduction, written again from what its folder holds."""
    from largeprompt.paper import report

    return report.write(read(Path(folder), FIGURES))


def kept_choice(folder: Path | str) -> tuple[Choice, str | None]:
    """The choice that a folder was begun with, and its store if that is elsewhere."""
    path = Path(folder) / RUN
    if not path.exists():
        raise ValueError(f"{path} is not there; nothing to resume, begin with largeprompt reproduce --out {folder}")
    try:
        kept = dict(read_json(path)["choice"])
        figures = None if kept["figures"] is None else tuple(kept["figures"])
        conventions = Conventions(**kept["conventions"])
        return Choice(kept["preset"], kept["seeds"], conventions, figures), kept["store"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} does not say what was chosen; give the options again, without --resume") from None
