"""The engine of a GPU on a real one: the law of the reference, the numbers of the processor's engine.

Every kind of training is compiled once, in half a minute: all tests together have few, so that very few tokens come in
pairs of five covariates alone. They need neither xdist nor the settings of the other tests:
`PYTHONPATH=src:tests python -m pytest --noconftest -o addopts= tests/engine/test_gpu.py`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

import largeprompt as lp
from engine_catalogue import (
    CASES,
    KMS,
    Case,
    ends_on_gpu,
    flat,
    fused_gradients,
    gpu_gradients,
    head_pair,
    pair,
    readings,
    reference_ends,
    reference_gradients,
)
from largeprompt import lab
from largeprompt._device import gpu_refusal
from largeprompt.dynamics import FAR, Adam, Layers, Momentum, State, Training
from largeprompt.engine import FusedTrainer, GpuBatch, GpuRun, GpuTrainer, trainer_for
from largeprompt.engine._tokens import SHORT
from largeprompt.icl import LinearRegression, kms
from significance import SIGMAS, assert_same_moments

lp.use_float64()
N = 1500
ROUNDING = 1e-5  # of gradients, in the mean over steps: float32 and a GPU's own functions
DRIFT = 1e-5  # of where 300 steps have led, by rounding that each step passes on
# Where one of many tokens has nearly all of the weight, the coefficients a (f - Σ a f) are rounding alone, and so is
# the direction in which a linear head shares its randomness with them: another path, the same law. In long prompts,
# whose values are not centred, a query far out does the same, in a step or two of a few hundred.
OTHER_PATH, OTHER_DRIFT = 5e-3, 1e-3
FALSE_ALARM = 2 * stats.norm.sf(SIGMAS)
LONG = {"long prompts": Case(KMS, 301, pair(3)), "long prompts, hard maximum": Case(KMS, 301, pair(3, 15.0))}
OF_TWO_HEADS = ("two heads", "two heads, hard maximum")
OF_TWO_COVARIATES = tuple(name for name, case in CASES.items() if case.task.d == 2 and case.L > 3)  # all of one kind
ALL = CASES | LONG
LAWS = ("infinitely many tokens", "correlated", "general prior", "other queries", "singular", "hard maximum")
LAWS += ("U = 0", "two heads", *LONG)
PAPER = LinearRegression(kms(5, 0.5), 0.1, np.eye(5) / 5)
SOFTMAX, LINEAR = head_pair(1, 6, rank=6)
MEMBERS: dict[str, Layers] = {"softmax": (SOFTMAX,), "linear": (LINEAR,), "pair": (SOFTMAX, LINEAR)}


@pytest.fixture(scope="module", autouse=True)
def _gpu():
    reason = gpu_refusal("cuda")
    if reason is not None:
        pytest.skip(reason)


def long(L: int | float, seed: int = 7) -> Training:
    """A training in the paper's dimension and batch, faster than the paper's."""
    return Training(PAPER, L, batch=128, rate=0.02, seed=seed)


def small(seed: int = 0, L: int | float = 6, **options) -> Training:
    usual: dict[str, Any] = {"batch": 8, "rate": 0.02}
    return Training(KMS, L, seed=seed, **usual | options)


def run(training: Training, layers: Layers, stop: int) -> GpuRun:
    return GpuRun(training, FusedTrainer(training, layers).start(), stop)


def assert_same(one: State, other: State) -> None:
    assert one.step == other.step
    assert one.diverged == other.diverged
    np.testing.assert_array_equal(flat(one.layers), flat(other.layers))


@functools.cache
def gradients(name: str) -> np.ndarray:
    case = ALL[name]
    return gpu_gradients(Training(case.task, case.L, batch=4, rate=1.0), case.layers, N)


@pytest.mark.parametrize("name", [*OF_TWO_COVARIATES, *OF_TWO_HEADS, *LONG])
def test_gradients_are_those_of_the_processor(name):
    """On the same random numbers; the root mean square over steps, for each layer, and in long prompts the median."""
    case = ALL[name]
    expected = fused_gradients(Training(case.task, case.L, batch=4, rate=1.0), case.layers, 300)
    first = len(flat(case.layers[0]))
    tolerance = OTHER_PATH if name in ("two heads, hard maximum", *LONG) else ROUNDING
    for part in (slice(0, first), slice(first, None)):
        one, other = gradients(name)[:300, part], expected[:, part]
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)
        if name == "long prompts":
            size = np.sqrt(np.mean(np.sum(other**2, axis=1)))
            assert np.median(np.linalg.norm(one - other, axis=1)) <= ROUNDING * size


@pytest.mark.parametrize("name", LAWS)
def test_gradients_of_a_pair_have_the_mean_and_the_covariances_of_the_reference(name):
    case = ALL[name]
    reference = reference_gradients(Training(case.task, case.L, batch=4, rate=1.0), case.layers, N)
    assert_same_moments(gradients(name), reference, rounding=ROUNDING)


def test_after_twenty_steps_runs_have_the_law_of_the_reference():
    """256 seeds; Kolmogorov and Smirnov's test on ten numbers, false alarms 6e-6 in all."""
    runs, steps = 256, 20
    ends = ends_on_gpu([run(small(seed), pair(3), steps) for seed in range(runs)])
    found = jax.tree.map(lambda *leaves: np.stack(leaves), *(end.layers for end in ends))
    reference = reference_ends(small(), pair(3), steps, runs)
    for one, other in zip(readings(found), readings(reference), strict=True):
        assert one.std() > 1e-2
        assert stats.kstest(one, other).pvalue > FALSE_ALARM


@pytest.mark.parametrize("optimiser", [Momentum(0.8), Adam(0.7, 0.9, 1e-3)], ids=str)
def test_momentum_and_adam_go_the_way_of_the_processor(optimiser):
    training, layers = small(optimiser=optimiser), pair(3)
    one, other = (kind(training, layers) for kind in (FusedTrainer, GpuTrainer))
    expected, found = one.advance(one.start(), 30), other.advance(other.advance(other.start(), 11), 30)
    for part in ("layers", "moments"):
        ends = flat(getattr(expected, part))
        np.testing.assert_allclose(flat(getattr(found, part)), ends, rtol=0, atol=DRIFT * np.abs(ends).max())


@pytest.mark.parametrize(
    ("members", "L"),
    [(members, L) for members in MEMBERS for L in (3, 10, 100, 1000, math.inf) if (members, L) != ("softmax", 3)],
)
def test_for_300_steps_both_engines_go_the_same_way(members, L):
    training, layers = long(L), MEMBERS[members]
    trainers = FusedTrainer(training, layers), GpuTrainer(training, layers)
    one, other = (trainer.advance(trainer.start(), 300) for trainer in trainers)
    assert one.diverged == other.diverged == (None,) * len(layers)
    tolerance = OTHER_DRIFT if members == "pair" and SHORT < L < math.inf else DRIFT
    for start, expected, found in zip(layers, one.layers, other.layers, strict=True):
        change = np.abs(flat(expected) - flat(start)).max()
        assert change > 0.05
        np.testing.assert_allclose(flat(found), flat(expected), rtol=0, atol=tolerance * change)


@pytest.mark.parametrize("L", [10, 1000, math.inf])
def test_a_run_in_pieces_ends_where_one_in_one_go_does(L):
    trainer = GpuTrainer(long(L), MEMBERS["pair"])
    state, whole = trainer.start(), trainer.advance(trainer.start(), 30)
    for stop in (0, 1, 7, 7, 29, 30):
        state = trainer.advance(state, stop)
    assert_same(state, whole)
    assert not np.array_equal(flat(whole.layers), flat(MEMBERS["pair"]))


@pytest.mark.parametrize("L", [100, 1000])
def test_launches_end_by_the_clock_and_anywhere(L):
    start = run(long(L), MEMBERS["pair"], 2000)
    (whole,), (cut,) = ends_on_gpu([start]), ends_on_gpu([start], seconds=1e-3)
    assert whole.step == 2000
    assert_same(cut, whole)
    steps = GpuBatch([start]).advance(1e-3)[0].state.step
    assert 0 < steps < 2000


@pytest.mark.parametrize("L", [10, 1000])
def test_states_kept_on_the_way_are_those_reached_by_stopping_there(L):
    marks = (1, 2, 50, 51, 199, 200)
    start = run(long(L), MEMBERS["pair"], 200)._replace(marks=marks)
    segment = GpuBatch([start]).advance()[0]
    trainer = GpuTrainer(start.training, MEMBERS["pair"])
    assert tuple(segment.steps) == marks
    for i, stop in enumerate(marks):
        kept = jax.tree.map(lambda leaf, i=i: leaf[i] if np.ndim(leaf) else leaf, segment.kept)
        np.testing.assert_array_equal(flat(kept), flat(trainer.advance(trainer.start(), stop).layers))


def test_runs_beside_others_end_where_they_do_alone():
    """Of three kinds and several lengths; more of them than a card has processors."""
    lengths = (3, 10, 100, 301, math.inf)
    runs = [run(long(lengths[i % 5], seed=i), MEMBERS["pair"], 40 + i % 7) for i in range(300)]
    runs += [run(small(i, L), pair(3), 20) for i, L in enumerate(lengths[1:])]
    runs += [run(Training(ALL["two heads"].task, 10, batch=4), ALL["two heads"].layers, 20)]
    beside = ends_on_gpu(runs)
    for i in (*range(0, 300, 37), *range(300, len(runs))):
        (alone,) = ends_on_gpu([runs[i]])
        assert_same(beside[i], alone)
    assert len({flat(end.layers).tobytes() for end in beside}) == len(beside)


@pytest.mark.parametrize("batch", [128, 200])
@pytest.mark.parametrize("L", [65, 100, 193, 1001, 20001])
def test_a_run_on_several_processors_ends_where_one_on_one_does(L, batch):
    """With all prompts at once or not, an odd number of tokens or not, and sums that are carried over or not."""
    start = run(dataclasses.replace(long(L), batch=batch), MEMBERS["pair"], 20)
    assert GpuBatch([start]).shares[0] > GpuBatch([start], among=1000).shares[0]
    (sixteen,), (eight, *_), (one, *_) = (ends_on_gpu([start] * copies) for copies in (1, 10, 40))
    assert_same(sixteen, one)
    assert_same(eight, one)


def test_scores_taken_from_their_maximum_are_the_same_on_several_processors():
    """Some prompts of a block need that, others do not."""
    start = run(dataclasses.replace(long(301), rate=1e-4), head_pair(1, 6, rank=6, size=3.0), 10)
    (one,), (other, *_) = ends_on_gpu([start]), ends_on_gpu([start] * 40)
    assert_same(one, other)


def test_a_run_on_several_processors_whose_layers_have_diverged_stops():
    training = dataclasses.replace(long(1000), rate=1e9)
    trainer = GpuTrainer(training, MEMBERS["pair"])
    state = trainer.advance(trainer.start(), 40)
    assert (state.step, state.diverged) == (40, (0, 0))
    np.testing.assert_array_equal(flat(state.layers), flat(MEMBERS["pair"]))


def test_a_loop_from_disk_is_the_one_that_was_compiled(tmp_path, monkeypatch):
    from largeprompt.engine._gpu_kernel import train

    monkeypatch.setenv("LARGEPROMPT_CACHE", str(tmp_path))
    start, ends = run(small(), pair(3), 20), []
    train.cache_clear()
    ends += ends_on_gpu([start])
    (file,) = (tmp_path / "gpu").iterdir()
    for damaged in (False, True):
        if damaged:  # compiled again, and kept
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            train.cache_clear()
            ends += ends_on_gpu([start])
        train.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr("numba.cuda.dispatcher.CUDADispatcher.compile", None)  # a call would fail
            ends += ends_on_gpu([start])
    for end in ends[1:]:
        assert_same(end, ends[0])


def test_a_layer_that_diverges_stays_and_the_other_goes_on():
    softmax, linear = pair(3)
    layers = lp.LinearAttention(3 * linear.U, 3 * linear.V), softmax
    training = small(rate=0.3)
    one, other = FusedTrainer(training, layers), GpuTrainer(training, layers)
    expected, found = (trainer.advance(trainer.start(), 12) for trainer in (one, other))
    assert found.diverged == expected.diverged
    assert found.diverged[0] is not None
    assert found.diverged[1] is None
    before = other.advance(other.start(), found.diverged[0])
    np.testing.assert_array_equal(flat(found.layers[0]), flat(before.layers[0]))
    assert np.linalg.norm(flat(found.layers[0])) <= FAR
    assert np.all(np.isfinite(flat(found.layers[1])))
    np.testing.assert_allclose(flat(found.layers[1]), flat(expected.layers[1]), atol=OTHER_DRIFT)


def test_a_run_whose_layers_have_all_diverged_counts_on_and_changes_nothing():
    trainer = GpuTrainer(small(rate=1e9), pair(3))
    state = trainer.advance(trainer.start(), 40)
    assert (state.step, state.diverged) == (40, (0, 0))
    np.testing.assert_array_equal(flat(state.layers), flat(pair(3)))


def test_a_sweep_on_a_gpu_records_what_one_on_a_processor_does(tmp_path):
    record = lab.Record(what=("parameters",), points=5, draws=256)
    run = lab.Run(L=10, d=5, rate=0.01, steps=200, record=record)
    runs = [run, dataclasses.replace(run, weight_seed=1, data_seed=1)]
    store = lab.Store(tmp_path / "gpu")
    on_gpu = lab.sweep(runs, store, device="auto")
    assert [store.log(one.key)["device"] for one in runs] == ["gpu", "gpu"]
    for one, other in zip(on_gpu, lab.sweep(runs, lab.Store(tmp_path / "cpu")), strict=True):
        assert one.step.values.tolist() == other.step.values.tolist()
        for name in ("risk", "K", "Q", "V", "O"):
            np.testing.assert_allclose(one[name].values, other[name].values, rtol=OTHER_DRIFT, atol=0.1 * OTHER_DRIFT)
        np.testing.assert_array_equal(one.verdict.values, other.verdict.values)


def test_the_gpu_is_chosen_where_it_is_not_refused():
    layers = pair(3)
    assert type(trainer_for(small(), layers, device="auto")) is GpuTrainer
    assert type(trainer_for(small(), layers, device="gpu")) is GpuTrainer
    assert type(trainer_for(small(), layers, device="cpu")) is FusedTrainer
