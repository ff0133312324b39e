"""Many runs: shared among threads, forecast, summed up, tabled and drawn with failures as their own population."""

import dataclasses
import io
import math
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

import stand_in
from largeprompt import _device, engine, lab
from largeprompt.cli._charts import training_chart
from largeprompt.cli._tables import rows_as_dataset, training_tables
from largeprompt.lab import _forecast
from largeprompt.lab._forecast import _makespan, _shorter, recorded_bytes
from largeprompt.paper.plan import Plan

pytestmark = pytest.mark.usefixtures("quick")
RUN = lab.Run(L=math.inf, d=2, attention="linear", rate=1e-2, steps=40, record=lab.Record(points=4))
RUNS = [dataclasses.replace(RUN, weight_seed=seed, data_seed=seed) for seed in range(6)]


class Listening(lab.Progress):
    def __init__(self):
        self.ends = []

    def close(self, name, outcome=""):
        if name != "training":
            self.ends.append(seed_of(name))


class Timed(lab.Progress):
    """Keeps the speeds that a forecast reports."""

    def __init__(self):
        self.speeds = []

    def step(self, name, done, note=""):
        self.speeds.append(float(note.split()[-2]))


def seed_of(name):
    return int(name.rpartition(" ")[2])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Six runs, of which two were made to look trapped and one diverged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "trainer_for", stand_in.trainer_for)
        found = lab.sweep(RUNS, lab.Store(tmp_path_factory.mktemp("runs")))
    ends = ["converged", "trapped", "converged", "diverged", "unfinished", "trapped"]
    final = [0.05, 0.5, 0.06, np.nan, 0.07, 0.7]
    made = []
    for data, end, value in zip(found, ends, final, strict=True):
        data = data.copy(deep=True)
        data["verdict"].values[:] = end
        data["risk"].values[:, -1] = value
        made.append(data)
    return made


def test_a_sweep_gives_the_results_of_its_runs_in_their_order(store):
    progress = Listening()
    found = lab.sweep(RUNS, store, jobs=3, progress=progress)
    assert [lab.run_of(data).weight_seed for data in found] == [0, 1, 2, 3, 4, 5]
    assert sorted(progress.ends) == [0, 1, 2, 3, 4, 5]
    again = lab.sweep(RUNS, store, jobs=1)
    assert all(one.identical(other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize(("in_order", "ends"), [(False, [3, 2, 1, 5, 0, 4]), (True, [0, 1, 2, 3, 4, 5])])
def test_the_longest_runs_come_first_or_the_first_that_were_given(in_order, ends, store):
    progress, seconds = Listening(), {run: run.weight_seed % 4 for run in RUNS}
    lab.sweep(RUNS, store, jobs=1, progress=progress, seconds=seconds, in_order=in_order)
    assert progress.ends == ends


def test_runs_with_a_checkpoint_come_before_all_others(store):
    stop = threading.Event()

    class Stopping(lab.Progress):
        def step(self, name, done, note=""):
            stop.set()

    with pytest.raises(lab.Interrupted):
        lab.train(RUNS[4], store, progress=Stopping(), stop=stop)
    progress = Listening()
    lab.sweep(
        RUNS, store, jobs=1, progress=progress, seconds=dict(zip(RUNS, (5.0, 6.0, 1.0, 1.0, 0.5, 9.0), strict=True))
    )
    assert progress.ends == [4, 5, 1, 0, 2, 3]


def test_a_run_that_fails_stops_the_sweep_and_what_is_done_stays(store, monkeypatch):
    class Failing(Listening):
        def step(self, name, done, note=""):
            if name != "training" and seed_of(name) == 3:
                raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        lab.sweep(RUNS, store, jobs=1, progress=Failing())
    assert [store.path(run.key).exists() for run in RUNS] == [True, True, True, False, False, False]


def test_the_forecast_counts_what_is_left_to_do(store):
    everything = lab.forecast(RUNS, store, jobs=2)
    assert set(everything.each) == set(RUNS)
    assert everything.seconds > 0
    assert everything.memory > 2**20
    lab.train(RUNS[0], store)
    assert set(lab.forecast(RUNS, store, jobs=2).each) == set(RUNS[1:])
    sizes = store.path(RUNS[0].key).stat().st_size
    assert recorded_bytes(RUN) < sizes < 10 * recorded_bytes(RUN) + 2**14


@pytest.mark.parametrize("waits", [(), (1,), (700,)])
def test_one_step_that_has_to_wait_does_not_count_for_all(monkeypatch, waits):
    clock = [0.0]

    class Trainer:
        def start(self):
            return SimpleNamespace(step=0)

        def advance(self, state, until):
            clock[0] += (until - state.step) * 1e-4 + sum(0.17 for step in waits if state.step <= step < until)
            return SimpleNamespace(step=until)

    monkeypatch.setattr(lab.Run, "trainer", lambda _: Trainer())
    monkeypatch.setattr(_forecast.time, "monotonic", lambda: clock[0])
    speed = _forecast._speed(dataclasses.replace(RUN, steps=100_000))
    assert speed == pytest.approx(1e4)
    assert clock[0] < 1


@pytest.fixture
def card(monkeypatch):
    """A GPU on which every run of the compiled loops goes ten steps a launch, and takes a tenth of it."""

    class GpuBatch:
        shares = property(lambda self: [0.1] * len(self._states))

        def __init__(self, runs, among=None):
            self._states = [run.state for run in runs]

        def advance(self, seconds):
            self._states = [state._replace(step=state.step + 10) for state in self._states]
            return {i: engine.Segment(state, np.zeros(0), ()) for i, state in enumerate(self._states)}

    monkeypatch.setattr(engine, "GpuBatch", GpuBatch)
    monkeypatch.setattr(_device, "gpu_refusal", lambda library: None)


def test_seeds_cost_next_to_nothing_before_work_begins(store, monkeypatch):
    counted = {"checked": 0, "sized": 0, "hashed": 0}

    def counting(name, function):
        def call(*arguments):
            counted[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(lab.Run, "__post_init__", counting("checked", lab.Run.__post_init__))
    monkeypatch.setattr(_forecast, "recorded_bytes", counting("sized", recorded_bytes))
    monkeypatch.setattr(lab.Run, "as_dict", counting("hashed", lab.Run.as_dict))
    runs = lab.runs_from({"L": math.inf, "d": 2, "steps": 40, "seeds": 2000})
    assert len(lab.forecast(runs, store, 2).each) == 2000
    assert counted["checked"] < 10
    assert counted["sized"] == 1
    assert counted["hashed"] == 0  # nothing is in the store
    assert runs[7] == lab.Run(L=math.inf, d=2, steps=40, weight_seed=7, data_seed=7)
    assert runs[7].key == lab.Run(L=math.inf, d=2, steps=40, weight_seed=7, data_seed=7).key


@pytest.mark.usefixtures("card")
def test_on_a_gpu_runs_side_by_side_take_as_long_as_the_longest_and_the_others_come_after(store):
    short, long, other = (
        dataclasses.replace(RUN, steps=steps, engine=name)
        for steps, name in ((40, "fused"), (4000, "fused"), (80, "reference"))
    )
    timed = Timed()
    found = lab.forecast([short, long, other], store, 2, timed, "gpu")
    assert len(timed.speeds) == 2  # of the two on a GPU, one: they differ in their steps alone
    assert found.each[long] == pytest.approx(100 * found.each[short])
    assert found.seconds == pytest.approx(found.each[long] + found.each[other])
    alone = lab.forecast([short], store, 2, device="cpu")
    assert alone.seconds == alone.each[short]


@pytest.mark.usefixtures("card")
def test_more_runs_than_a_gpu_holds_at_once_take_as_long_as_their_shares_of_it(store, monkeypatch):
    timed, timing = [], _forecast._on_gpu
    monkeypatch.setattr(_forecast, "_on_gpu", lambda *given: timed.append(timing(*given)) or timed[-1])
    runs = [dataclasses.replace(RUN, steps=400, engine="fused", data_seed=seed) for seed in range(25)]
    for n, expected in ((1, 1.0), (10, 1.0), (25, 2.5)):
        found = lab.forecast(runs[:n], store, 2, device="gpu")
        (speed,) = timed[-1][0].values()
        assert found.seconds == pytest.approx(expected * 400 / speed)
        assert found.each[runs[0]] == pytest.approx(found.seconds)


@pytest.mark.usefixtures("card")
def test_kinds_of_runs_that_find_no_room_on_a_gpu_are_timed_later(store, monkeypatch):
    launches, roomy = [], cast(Any, engine.GpuBatch)

    class Crowded(roomy):
        def advance(self, seconds):
            launches.append(len(self._states))
            segments = super().advance(seconds)
            return {i: segment for i, segment in segments.items() if i == 0 or (i == 1 and len(launches) % 2 == 0)}

    monkeypatch.setattr(engine, "GpuBatch", Crowded)
    runs = [dataclasses.replace(RUN, L=L, steps=400, engine="fused") for L in (5, 6, 7, 8)]
    timed = Timed()
    found = lab.forecast(runs, store, 2, timed, "gpu")
    assert launches == [4, 4, 2, 2]
    assert len(timed.speeds) == 4
    assert all(math.isfinite(found.each[run]) and found.each[run] > 0 for run in runs)


def test_a_plan_on_a_gpu_names_it_and_takes_as_long_as_its_longest_part():
    seconds = {run: 10.0 * (1 + run.weight_seed) for run in RUNS}
    on_gpu, on_cpu = (Plan(tuple(RUNS), (), seconds, (), 2, 2.0**30, 2.0**20, device) for device in ("gpu", "cpu"))
    sizes = "1024 MB of memory, 1 MB of disk"
    assert on_gpu.sentence == f"6 training runs and 0 computations: about 1 min 0 s on the GPU and 2 cores, {sizes}"
    assert on_cpu.sentence == f"6 training runs and 0 computations: about 1 min 45 s on 2 cores, {sizes}"


def test_a_makespan_is_that_of_the_longest_first():
    assert _makespan([1, 1, 1, 3], 2) == 3
    assert _makespan([4, 3, 2], 1) == 9
    assert _makespan([], 4) == 0


def test_steps_too_long_to_be_timed_are_foreseen_from_shorter_ones():
    run = dataclasses.replace(RUN, L=10**9, attention="softmax", batch=128)
    shorter, factor = _shorter(run)
    assert shorter.L * 128 <= 2**23
    assert factor == run.L / shorter.L
    for other in (RUN, dataclasses.replace(RUN, L=math.inf), dataclasses.replace(run, attention="linear", L=10**23)):
        assert _shorter(other) == (other, 1.0)
    assert lab.duration(5e8) == "15.8 years"
    assert lab.duration(1e300) == "3.17e+292 years"


def test_a_summary_averages_good_runs_only_and_counts_the_others(results):
    (row,) = lab.summary(results)
    assert (row["runs"], row["converged"], row["trapped"], row["unfinished"], row["diverged"]) == (6, 2, 2, 1, 1)
    good = np.asarray([0.05, 0.06, 0.07])
    assert row["risk"] == pytest.approx(good.mean())
    assert row["risk_stderr"] == pytest.approx(good.std(ddof=1) / math.sqrt(3))
    assert row["trapped_risk"] == pytest.approx(0.6)
    assert (row["trapped_low"], row["trapped_high"]) == lab.wilson(2, 6)
    assert row["linear_optimum"] == pytest.approx(0.05)
    assert row["softmax_optimum"] == pytest.approx(0.05)
    assert row["Bayes"] == pytest.approx(0.05)


def test_a_summary_has_a_row_for_all_that_differs_but_seeds(results, store):
    other = [dataclasses.replace(RUN, attention="pair", steps=0), dataclasses.replace(RUN, rate=0.5, steps=0)]
    assert lab.varying([*RUNS, *other]) == ("sigma", "L", "rate", "steps")
    rows = lab.summary([*results, *lab.sweep(other, store)])
    shown = [(row["rate"], row["steps"], row["attention"], row["runs"]) for row in rows]
    assert shown == [(0.01, 40, "linear", 6), (0.01, 0, "softmax", 1), (0.01, 0, "linear", 1), (0.5, 0, "linear", 1)]


def test_a_table_tells_shares_and_both_populations(results):
    console = Console(width=120, record=True, file=io.StringIO())
    rows = lab.summary(results)
    for part in training_tables(rows):
        console.print(part)
    text = console.export_text()
    assert "0.06000 ± 6e-03" in text
    assert "33% [10, 70]" in text
    assert "17% [3, 56]" in text
    assert "2 end at a mean risk of 0.60000" in text
    assert "1 of 6 were not finished" in text
    data = rows_as_dataset(rows)
    assert float(data.risk[0]) == rows[0]["risk"]


def test_a_drawing_shows_each_seed_the_mean_and_the_trapped_in_their_own_style(results):
    (panel,) = training_chart(results).panels
    seeds = [series for series in panel.series if series.role == "seed"]
    assert [series.dash for series in seeds].count("dot") == 2
    (thick,) = [series for series in panel.series if series.width > 1.5]
    assert thick.y[-1] == pytest.approx(0.06)
    assert [series.mark for series in seeds].count("x") == 1
    labels = {series.label for series in panel.series if series.in_legend}
    assert labels == {"linear, mean", "linear, trapped", "linear, diverged", "best linear", "Bayes"}
