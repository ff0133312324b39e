"""The main job on small stand-ins: what is needed is made once, kept, and found again."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import xarray as xr

from largeprompt.lab import Interrupted, Progress, Record, Run, claimed
from largeprompt.paper import Choice, Conventions, Job, job, kept_choice, report, unfinished
from largeprompt.paper.chart import Chart, Panel, Series
from largeprompt.paper.claims import Check, Finding, claim
from largeprompt.paper.experiment import Computation, Experiment, Measurement, Needed
from largeprompt.paper.files import plain
from largeprompt.paper.plan import Followed, Plan, cheapest_first
from largeprompt.paper.reproduction import read as read_back
from refusals import assert_refused


@dataclasses.dataclass(frozen=True)
class Squares(Computation):
    upto: int
    made: ClassVar[list[int]] = []
    breaks_at: ClassVar[int | None] = None
    before: ClassVar[dict[int, Callable[[], None]]] = {}

    @property
    def title(self):
        return f"squares up to {self.upto}"

    @property
    def seconds(self):
        return 0.1

    def _compute(self, progress):
        Squares.before.get(self.upto, lambda: None)()
        if self.upto == Squares.breaks_at:
            raise KeyboardInterrupt
        Squares.made.append(self.upto)
        return xr.Dataset({"y": ("x", np.arange(self.upto) ** 2.0)}, coords={"x": np.arange(self.upto)})


class Drawn(Experiment):
    @property
    def title(self):
        return "squares"

    @property
    def look(self):
        return "a parabola"

    def needs(self, choice):
        return (Squares(3), Squares(int(self.covariance)), RUN)

    def dataset(self, choice, results):
        return results[Squares(int(self.covariance))].assign_attrs(risk=float(results[RUN].risk[0, -1]))

    def chart(self, data):
        return Chart((Panel("squares", "x", "y", (Series("y", data.x, data.y),), x_log=False, y_log=False),))

    def summary(self, data):
        return ["they grow."]


RUN = Run(L=5, steps=20, record=Record(points=3, draws=64), engine="reference", attention="linear", d=1, batch=2)
STAND_INS = {"1a": Drawn("1a", "4"), "1b": Drawn("1b", "5"), "9": Drawn("9", "6"), "laws": Drawn("laws", "8")}


def _claim(key, size):
    squares = Measurement(f"squares up to {size}", computation=lambda choice: Squares(size))

    @claim(key, "here", squares, figures=("1a",))
    def small(data):
        """squares are small

        the largest
        """
        return Finding((Check("largest", float(data.y[-1]), "<", 10.0),))

    return small


PAGES = report.write, report.write_unfinished
CLAIMS = {"C1": _claim("C1", 4), "C2": _claim("C2", 7)}
SMOKE, NINE = Choice("smoke"), Choice("smoke", figures=("9",))


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(job, "FIGURES", STAND_INS)
    monkeypatch.setattr(job, "CLAIMS", CLAIMS)
    monkeypatch.setattr("largeprompt.paper.report.write", lambda made: [])
    monkeypatch.setattr("largeprompt.paper.report.write_unfinished", lambda *_, **__: None)
    monkeypatch.setattr(Squares, "made", [])
    monkeypatch.setattr(Squares, "breaks_at", None)
    monkeypatch.setattr(Squares, "before", {})


def test_what_figures_and_claims_share_is_made_once_and_found_again(stand_ins, tmp_path):
    made = job.reproduce(Choice("smoke", figures=("1", "9")), tmp_path)
    assert sorted(Squares.made) == [3, 4, 5, 6]
    assert set(made.datasets) == {"1a", "1b", "9"}
    assert [entry["key"] for entry in made.ledger["claims"]] == ["C1"]  # C2 needs more than these figures
    assert made.ledger["claims"][0]["verdict"] == "holds"
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"figure-{key}.{suffix}" for key in ("1a", "1b", "9") for suffix in ("svg", "pdf", "png", "csv", "nc")
    }
    account = json.loads((tmp_path / "run.json").read_text())
    assert account["finished"]
    assert account["command"] == f"largeprompt reproduce --preset smoke --figures 1a,1b,9 --out {tmp_path}"
    Squares.made.clear()
    again = job.reproduce(kept_choice(tmp_path)[0], tmp_path)
    assert Squares.made == []
    assert again.account["seconds"] == account["seconds"]  # nothing was done
    assert again.account["cost"].endswith("nothing to compute")


def test_commands_name_the_store_and_quote_folders(stand_ins, tmp_path):
    out, store = tmp_path / "my out", tmp_path / "my store"
    made = job.reproduce(NINE, out, store=store)
    words = f"--preset smoke --figures 9 --out '{out}' --store '{store}'"
    assert made.account["command"] == f"largeprompt reproduce {words}"
    assert made.command("9") == f"largeprompt figure 9 {words.replace('--figures 9 ', '')}"
    assert made.to_go_on == f"largeprompt reproduce --resume --out '{out}'"
    choice, kept = kept_choice(out)
    Squares.made.clear()
    job.reproduce(choice, out, store=kept)
    assert Squares.made == []


def test_the_seconds_of_a_gpu_are_counted_apart_from_those_of_cores(stand_ins, tmp_path):
    job.reproduce(NINE, tmp_path)
    (log,) = (path for path in (tmp_path / "store").glob("*.json") if "experiment" not in path.name)
    log.write_text(json.dumps(json.loads(log.read_text()) | {"seconds": 5.0, "gpu_seconds": 3.0}))
    account = job.reproduce(NINE, tmp_path).account["runs"]
    assert account == {"count": 1, "core_seconds": 2.0, "gpu_seconds": 3.0}


def test_a_damaged_or_foreign_file_is_computed_again(stand_ins, tmp_path):
    job.figure("9", SMOKE, tmp_path)
    three, six = (tmp_path / "store" / f"{Squares(n).key}.nc" for n in (3, 6))
    Squares.made.clear()
    three.write_bytes(three.read_bytes()[:100])
    job.figure("9", SMOKE, tmp_path)
    assert Squares.made == [3]
    three.write_bytes(six.read_bytes())
    job.figure("9", SMOKE, tmp_path)
    assert Squares.made == [3, 3]


def test_an_interrupt_keeps_what_is_done_and_the_job_goes_on(stand_ins, tmp_path):
    Squares.breaks_at = 6
    with pytest.raises(Interrupted):
        job.reproduce(Choice("smoke", figures=("1a", "9")), tmp_path, jobs=1)
    assert Squares.made == [3, 4]
    assert not json.loads((tmp_path / "run.json").read_text())["finished"]
    Squares.breaks_at = None
    made = job.reproduce(kept_choice(tmp_path)[0], tmp_path)
    assert Squares.made == [3, 4, 6]
    assert set(made.datasets) == {"1a", "9"}


@pytest.fixture
def pages(stand_ins, monkeypatch, tmp_path):
    """Reports are written; with a function that waits for a text in the page, and gives the page."""
    write, write_unfinished = PAGES
    monkeypatch.setattr("largeprompt.paper.report.write", lambda made: write(made, STAND_INS))
    monkeypatch.setattr("largeprompt.paper.report.write_unfinished", write_unfinished)
    page = tmp_path / "report" / "index.html"

    def wait_for(text):
        for _ in range(600):
            if page.exists() and text in (found := page.read_text("utf-8")):
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {text} in the page")

    return wait_for


def test_a_stopped_job_leaves_a_page_of_what_is_done_and_what_is_pending(pages, tmp_path):
    Squares.before[6] = lambda: pages('data-figure="1a"') and None
    Squares.breaks_at = 6
    with pytest.raises(Interrupted):
        job.reproduce(Choice("smoke", figures=("1a", "9")), tmp_path)
    page = pages("Stopped before the end.")
    assert "1 of 2 figures and 1 of 1 claim are here" in page
    assert '<article id="figure-9" class="figure pending"' in page
    assert f"<code>largeprompt reproduce --resume --out {tmp_path}</code>" in page
    assert "location.reload" not in page
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"figure-1a.svg", "figure-1a.nc"}
    with pytest.raises(ValueError, match="is of a job that is not finished; `largeprompt reproduce --resume"):
        job.write_report(tmp_path)


def test_the_page_fills_as_the_job_goes_on_and_is_never_half_written(pages, tmp_path):
    seen, over, page = [], threading.Event(), tmp_path / "report" / "index.html"

    def read():
        while not over.is_set():
            if page.exists():
                seen.append(page.read_text("utf-8"))
            time.sleep(0.01)

    reader = threading.Thread(target=read)
    reader.start()
    Squares.before[3] = lambda: pages("0 of 2 figures and 0 of 2 claims are here") and None
    Squares.before[6] = lambda: pages("1 of 2 figures and ") and None
    Squares.before[7] = lambda: pages("2 of 2 figures and 1 of 2 claims are here") and None
    try:
        made = Job(Choice("smoke", figures=("1a", "9"), claims=("C1", "C2")), tmp_path, jobs=1)
        files = made.reproduce(made.plan()).files
    finally:
        over.set()
        reader.join()
    assert all(text.endswith("</html>\n") for text in seen)
    assert page in files
    finished = page.read_text("utf-8")
    assert "location.reload" not in finished
    assert 'class="unfinished"' not in finished
    assert finished == PAGES[0](read_back(tmp_path, STAND_INS), STAND_INS)[0].read_text("utf-8")


def test_the_time_left_is_steady_and_follows_the_pace_in_the_end(monkeypatch):
    clock, followed = [0.0], Followed()
    monkeypatch.setattr(unfinished.time, "monotonic", lambda: clock[0])
    plan = Plan((), (Squares(6),), {RUN: 59.9}, (Squares(6),), 1, 0.0, 0.0)
    writer = unfinished.Writer(plan, followed, lambda *_: True, lambda *_: None)

    def left(seconds, share):
        clock[0], followed.done["training"] = seconds, share * 60.0
        return writer._how_far().left

    # long without an end of anything, then several at once
    assert all(45 < left(*at) < 75 for at in [(0, 0), (10, 0.04), (11, 0.06), (12, 0.08), (13, 0.16), (15, 0.2)])
    assert left(30, 0.5) == pytest.approx(30)
    assert left(171, 0.95) == pytest.approx(9, rel=0.05)  # three times slower than planned


def test_a_picture_that_cannot_be_written_ends_the_job(stand_ins, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(job, "write", fails)
    with pytest.raises(OSError, match="the disk is full"):
        job.reproduce(NINE, tmp_path)


def test_what_completes_a_figure_at_the_least_cost_comes_first():
    costs: dict[Needed, float] = {Squares(n): float(n) for n in range(1, 10)}
    wanted = [(Squares(9),), (Squares(5), Squares(2)), (Squares(5), Squares(3)), (Squares(8),)]
    # once 5 and 2 are there, 3 completes the third, and is cheaper than 8
    assert cheapest_first(wanted, costs) == tuple(map(Squares, (5, 2, 3, 8, 9)))
    assert cheapest_first(wanted, {}) == tuple(map(Squares, (9, 5, 2, 3, 8)))


def test_the_first_computation_begins_while_runs_are_timed_and_is_made_once(stand_ins, tmp_path):
    work = Job(Choice("smoke", figures=("9",)), tmp_path, jobs=2)
    begun = threading.Event()
    Squares.before[3] = begun.set
    plan = work.plan(begin=True)
    assert begun.wait(30)
    assert "2 computations: about " in plan.sentence
    work.reproduce(plan)
    assert sorted(Squares.made) == [3, 6]


@pytest.mark.parametrize("preset", ["smoke", "quick", "paper"])
def test_computations_that_go_on_at_once_have_names_of_their_own(preset, tmp_path):
    titles = [need.title for need in Job(Choice(preset), tmp_path).needs if isinstance(need, Computation)]
    assert len(set(titles)) == len(titles)


def test_the_cost_is_said_before_and_counts_what_is_there(stand_ins, tmp_path):
    work = Job(Choice("smoke", figures=("1a",), claims=()), tmp_path, jobs=1)
    steps = []

    class Noting(Progress):
        def step(self, name, done, note=""):
            if name == "computing":
                steps.append((round(done, 6), note))

    for expected, sentence in (([0.1, 0.2], "2 computations: about "), ([0.0, 0.0], "nothing to compute")):
        plan = work.plan()
        assert plan.sentence.startswith("1 training run and 2 computations")
        assert sentence in plan.sentence
        steps.clear()
        work.datasets(plan, Noting())
        assert steps == list(zip(expected, ("1 of 2", "2 of 2"), strict=True))


def test_what_cannot_be_chosen_is_refused_in_one_line(stand_ins, tmp_path):
    assert_refused(lambda: Choice("huge"), "preset is 'huge'; it must be one of smoke, quick, paper")
    assert_refused(lambda: Choice("smoke", 0), "seeds is 0; it must be at least 1")
    assert_refused(lambda: Choice("smoke", conventions=Conventions(loss_factor=-1.0)), "loss_factor is -1")
    assert_refused(lambda: job.figure("12", SMOKE, tmp_path), "figure '12' is not one; they are 1a, 1b, 9, laws")
    assert_refused(lambda: job.verify(["X9"], SMOKE, tmp_path), "claim 'X9' is not one; they are C1, C2")
    assert_refused(lambda: job.reproduce(Choice("smoke", figures=()), tmp_path), "no figure was named")
    assert_refused(lambda: kept_choice(tmp_path / "empty"), "nothing to resume")
    assert_refused(lambda: Job(SMOKE, tmp_path, jobs=0), "jobs is 0; it must be at least 1")


def test_two_jobs_do_not_write_into_one_folder(stand_ins, tmp_path):
    with claimed(tmp_path / "job.lock") as alone:
        assert alone
        assert_refused(lambda: job.figure("9", SMOKE, tmp_path), "is being written by another process")
    left = tmp_path / "figures" / ".figure-9-abc.svg"
    left.parent.mkdir()
    left.write_text("of a job that was killed")
    job.figure("9", SMOKE, tmp_path)
    assert not left.exists()


def test_figures_and_ledger_say_which_choice_they_belong_to(stand_ins, tmp_path):
    made = job.reproduce(Choice("smoke", 3, Conventions(0.4), ("9",)), tmp_path)
    choice = {
        "preset": "smoke",
        "seeds": 3,
        "conventions": {"score_scale": 0.4, "loss_factor": 1.0, "query_sigma": None},
    }
    assert made.ledger["choice"] == choice
    kept = xr.load_dataset(tmp_path / "figures" / "figure-9.nc", engine="scipy")
    assert json.loads(kept.attrs["choice"]) == choice
    assert "--score-scale 0.4" in made.account["command"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"choice": null}', '{"choice": {"preset": "smoke"}}', "{", ""])
def test_a_damaged_account_is_named_and_does_not_stop_a_new_start(text, stand_ins, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json"):
        kept_choice(tmp_path)
    job.reproduce(NINE, tmp_path)


def test_a_failing_run_is_raised_before_the_next_computation(stand_ins, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("largeprompt.lab.sweep", fails)
    with pytest.raises(OSError, match="the disk is full"):
        job.figure("9", SMOKE, tmp_path)


def test_numbers_that_json_cannot_say_are_text_or_null():
    assert plain({"a": (np.float64(1.5), float("inf"), float("nan"))}) == {"a": [1.5, "inf", None]}


def test_presets_are_the_protocol_of_the_paper():
    full = Choice("paper")
    protocol = full.protocol
    assert protocol.lengths == (*range(10, 100, 10), *range(100, 1001, 100))
    assert (protocol.steps, protocol.seeds) == (500_000, 1)
    (run,) = full.runs("identity", (50,))
    assert (run.attention, run.batch, run.rate, run.loss_factor, run.score_scale) == ("pair", 128, 1e-3, 1.0, 1.0)
    assert len(Choice("paper", 8).all_runs("identity", (100,))[100]) == 20
    other = Choice("quick", conventions=Conventions(0.4, 2.0, "identity")).runs("kms:0.5", (50,), 1)[0]
    assert (other.score_scale, other.loss_factor, other.query_sigma) == (0.4, 2.0, "identity")
