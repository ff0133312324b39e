"""The main job on small stand-ins: what is needed is made once, kept, and found again."""

import dataclasses
import functools
import json
from typing import ClassVar

import numpy as np
import pytest
import xarray as xr

from largeprompt.dynamics import gradient_flow
from largeprompt.lab import Interrupted, Record, Run, claimed
from largeprompt.paper import Conventions, Job, Listener, Settings, job, kept_choice, settings_for
from largeprompt.paper.chart import Chart, Panel, Series
from largeprompt.paper.claims import Check, Claim, Finding
from largeprompt.paper.figures import FIGURES, AbstractFigure
from largeprompt.paper.files import plain
from largeprompt.paper.pieces import AbstractPiece, Flow, InfiniteFlow, Needed, Shelf, population
from refusals import assert_refused


@dataclasses.dataclass(frozen=True)
class Squares(AbstractPiece):
    upto: int
    made: ClassVar[list[int]] = []
    breaks_at: ClassVar[int | None] = None

    @property
    def title(self):
        return f"squares up to {self.upto}"

    @property
    def seconds(self):
        return 0.1

    def _compute(self, done):
        if self.upto == Squares.breaks_at:
            raise KeyboardInterrupt
        Squares.made.append(self.upto)
        done("all of them")
        return xr.Dataset({"y": ("x", np.arange(self.upto) ** 2.0)}, coords={"x": np.arange(self.upto)})


class Drawn(AbstractFigure):
    @property
    def title(self):
        return "squares"

    @property
    def look(self):
        return "a parabola"

    def needs(self, settings: Settings):
        return (Squares(3), Squares(int(self.covariance)), RUN)

    def dataset(self, settings, results):
        return results[Squares(int(self.covariance))].assign_attrs(risk=float(results[RUN].risk[0, -1]))

    def chart(self, data):
        return Chart((Panel("squares", "x", "y", (Series("y", data.x, data.y),), x_log=False, y_log=False),))

    def told(self, data):
        return ["they grow."]


RUN = Run(L=5, steps=20, record=Record(points=3, draws=64), engine="reference", attention="linear", d=1, batch=2)
STAND_INS = {"1a": Drawn("1a", "4"), "1b": Drawn("1b", "5"), "9": Drawn("9", "6"), "laws": Drawn("laws", "8")}


def _claim(key, size, figures):
    def judge(settings, results):
        return Finding((Check("largest", float(results[Squares(size)].y[-1]), "<", 10.0),))

    return Claim(key, "here", "squares are small", "the largest", lambda settings: (Squares(size),), judge, figures)


CLAIMS = {"C1": _claim("C1", 4, ("1a",)), "C2": _claim("C2", 7, ("1a",))}


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(job, "FIGURES", STAND_INS)
    monkeypatch.setattr(job, "CLAIMS", CLAIMS)
    monkeypatch.setattr(job, "write_report", lambda folder: [])
    monkeypatch.setattr(Squares, "made", [])
    monkeypatch.setattr(Squares, "breaks_at", None)


def test_what_figures_and_claims_share_is_made_once_and_found_again(stand_ins, tmp_path):
    made = job.reproduce("smoke", figures=("1", "9"), out=tmp_path)
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
    again = job.reproduce(**kept_choice(tmp_path), out=tmp_path)
    assert Squares.made == []
    assert again.account["seconds"] == account["seconds"]  # nothing was done
    assert again.account["cost"].endswith("nothing to compute")


def test_the_seconds_of_a_gpu_are_told_apart_from_those_of_cores(stand_ins, tmp_path):
    job.reproduce("smoke", figures=("9",), out=tmp_path)
    (log,) = (tmp_path / "runs").glob("*.json")
    log.write_text(json.dumps(json.loads(log.read_text()) | {"seconds": 5.0, "gpu_seconds": 3.0}))
    told = job.reproduce("smoke", figures=("9",), out=tmp_path).account["runs"]
    assert told == {"count": 1, "core_seconds": 2.0, "gpu_seconds": 3.0}


def test_a_damaged_or_foreign_file_is_made_anew(stand_ins, tmp_path):
    shelf = Shelf(tmp_path / "pieces")
    shelf.keep(Squares(3), Squares(3).compute())
    shelf.path(Squares(3)).write_bytes(shelf.path(Squares(3)).read_bytes()[:100])
    assert shelf.load(Squares(3)) is None
    Squares(4).compute().to_netcdf(shelf.path(Squares(3)), engine="scipy")
    assert shelf.load(Squares(3)) is None
    job.figure("9", "smoke", out=tmp_path)
    assert 3 in Squares.made


def test_an_interrupt_keeps_what_is_done_and_the_job_goes_on(stand_ins, tmp_path):
    Squares.breaks_at = 6
    with pytest.raises(Interrupted):
        job.reproduce("smoke", figures=("1a", "9"), out=tmp_path)
    assert Squares.made == [3, 4]
    assert not json.loads((tmp_path / "run.json").read_text())["finished"]
    Squares.breaks_at = None
    made = job.reproduce(**kept_choice(tmp_path), out=tmp_path)
    assert Squares.made == [3, 4, 6]
    assert set(made.datasets) == {"1a", "9"}


def test_the_cost_is_said_before_and_counts_what_is_there(stand_ins, tmp_path):
    work = Job(settings_for("smoke"), tmp_path, figures=("1a",), claims=(), jobs=1)
    plan = work.plan()
    assert plan.sentence.startswith("1 training runs and 2 computations: about ")
    heard = []

    class Hears(Listener):
        def planned(self, plan):
            heard.append(plan.sentence)

        def made(self, piece, found):
            heard.append((piece.title, found))

    work.carry_out(plan, Hears())
    work.carry_out(work.plan(), Hears())
    assert heard[1:3] == [("squares up to 3", False), ("squares up to 4", False)]
    assert heard[3].endswith("nothing to compute")
    assert heard[4:] == [("squares up to 3", True), ("squares up to 4", True)]


def test_what_cannot_be_chosen_is_refused_in_one_line(stand_ins, tmp_path):
    assert_refused(lambda: settings_for("huge"), "preset is 'huge'; it must be one of smoke, quick, paper")
    assert_refused(lambda: settings_for("smoke", seeds=0), "seeds is 0; it must be at least 1")
    assert_refused(lambda: settings_for("smoke", conventions=Conventions(loss_factor=-1.0)), "loss_factor is -1")
    assert_refused(lambda: job.figure("12", "smoke", out=tmp_path), "figure '12' is not one; they are 1a, 1b, 9, laws")
    assert_refused(lambda: job.verify(["X9"], "smoke", out=tmp_path), "claim 'X9' is not one; they are C1, C2")
    assert_refused(lambda: job.reproduce("smoke", figures=(), out=tmp_path), "no figure was named")
    assert_refused(lambda: kept_choice(tmp_path / "empty"), "nothing to resume")
    assert_refused(lambda: Job(settings_for("smoke"), tmp_path, jobs=0), "jobs is 0; it must be at least 1")


def test_two_jobs_do_not_write_into_one_folder(stand_ins, tmp_path):
    with claimed(tmp_path / "job.lock") as alone:
        assert alone
        assert_refused(lambda: job.figure("9", "smoke", out=tmp_path), "is being written by another process")
    job.figure("9", "smoke", out=tmp_path)


def test_figures_and_ledger_say_which_choice_they_belong_to(stand_ins, tmp_path):
    made = job.reproduce("smoke", figures=("9",), seeds=3, conventions=Conventions(0.4), out=tmp_path)
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
    job.reproduce("smoke", figures=("9",), out=tmp_path)


def test_a_failing_run_is_heard_before_the_next_piece(stand_ins, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("largeprompt.lab.sweep", fails)
    with pytest.raises(OSError, match="the disk is full"):
        job.figure("9", "smoke", out=tmp_path)


def test_a_flow_that_ends_early_is_kept_up_to_there_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(population, "gradient_flow", functools.partial(gradient_flow, max_steps=12))
    run = Run(L=5, steps=10**6, record=Record(points=12, draws=64), d=1)
    pieces = Flow(run, "linear"), InfiniteFlow(run)
    shelf = Shelf(tmp_path)
    for piece in pieces:
        shelf.keep(piece, piece.compute())
        data = shelf.load(piece)
        assert data is not None
        how, _, step = data.attrs["cut_short"].partition(" at step ")
        assert how == "out of steps"
        reached = data.step.values <= float(step)
        assert 1 < reached.sum() < len(reached)
        for values in data.values():
            assert np.isfinite(values[reached]).all()
            assert np.isnan(values[~reached]).all()
        assert np.all(np.diff(data.risk[reached]) < 0)


def test_the_risk_along_training_is_drawn_beside_what_there_is_of_a_flow():
    settings, figure = settings_for("smoke"), FIGURES["4"]
    steps = settings.record.steps(settings.steps).astype(float)
    fall = np.linspace(0.5, 0.2, len(steps))
    half = np.where(steps < 1000, fall, np.nan)
    of_member = {"optimum": ("member", [0.1, 0.1]), "verdict": ("member", ["unfinished"] * 2), "Bayes": ((), 0.1)}
    trained = xr.Dataset(
        {"risk": (("member", "step"), 1.1 * np.stack([fall, fall])), **of_member},
        {"member": ["softmax", "linear"], "step": steps},
    )
    flows = [piece for piece in figure.needs(settings) if isinstance(piece, Flow)]
    results: dict[Needed, xr.Dataset] = {run: trained for run in figure.needs(settings) if isinstance(run, Run)}
    results |= {piece: xr.Dataset({"risk": ("step", fall)}, {"step": steps}, {"cut_short": ""}) for piece in flows}
    whole = figure.dataset(settings, results)
    assert not any("end before training" in line for line in figure.told(whole))
    results[flows[0]] = xr.Dataset({"risk": ("step", half)}, {"step": steps}, {"cut_short": "diverged at step 1000"})
    data = figure.dataset(settings, results)
    told = figure.told(data)
    assert "softmax, L = 10, seed 0: diverged at step 1000." in told[-1]
    assert f"Of {len(flows) - 1} runs beside their population flow" in told[-2]
    curves = [series.y for series in figure.chart(data).panels[0].series if "softmax, population flow" in series.label]
    assert len(curves) == 1
    np.testing.assert_array_equal(curves[0], half[steps >= settings.steps / 5000])


def test_numbers_that_json_cannot_say_are_text_or_null():
    assert plain({"a": (np.float64(1.5), float("inf"), float("nan"))}) == {"a": [1.5, "inf", None]}


def test_presets_are_the_protocol_of_the_paper():
    settings = settings_for("paper")
    assert settings.lengths == (*range(10, 100, 10), *range(100, 1001, 100))
    assert (settings.steps, settings.seeds) == (500_000, 1)
    (run,) = settings.runs("identity", (50,))
    assert (run.attention, run.batch, run.rate, run.loss_factor, run.score_scale) == ("pair", 128, 1e-3, 1.0, 1.0)
    assert settings_for("paper", seeds=8).seeds_at("identity", 100) == 20
    other = settings_for("quick", conventions=Conventions(0.4, 2.0, "identity")).runs("kms:0.5", (50,), 1)[0]
    assert (other.score_scale, other.loss_factor, other.query_sigma) == (0.4, 2.0, "identity")
