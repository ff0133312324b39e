"""Whole runs: the same bits however they are run, the law of the reference, and what divergence leaves."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from scipy import stats

import largeprompt as lp
from engine_catalogue import CASES, KMS, flat, pair, readings, reference_ends
from largeprompt.dynamics import FAR, Layers, ReferenceTrainer, State, Training
from largeprompt.engine import FusedTrainer
from significance import SIGMAS

FALSE_ALARM = 2 * stats.norm.sf(SIGMAS)
TWO_HEADS = CASES["two heads"]


def run(steps: int, *, seed: int = 0, L: int | float = 9, layers: Layers | None = None, batch: int = 70) -> State:
    trainer = FusedTrainer(Training(KMS, L, batch=batch, rate=0.02, seed=seed), layers or pair(3))
    return trainer.advance(trainer.start(), steps)


def assert_same(one: State, other: State) -> None:
    assert one.step == other.step
    assert one.diverged == other.diverged
    np.testing.assert_array_equal(flat(one.layers), flat(other.layers))


@pytest.mark.parametrize("cuts", [[30], [0, 1, 29], [7, 7, 15]])
@pytest.mark.parametrize("L", [2, 9, np.inf])
def test_a_run_in_pieces_ends_where_one_in_one_go_does(L, cuts):
    trainer = FusedTrainer(Training(KMS, L, batch=70, rate=0.02), pair(3))
    state = trainer.start()
    for stop in (*cuts, 30):
        state = trainer.advance(state, stop)
    whole = run(30, L=L)
    assert_same(state, whole)
    assert not np.array_equal(flat(whole.layers), flat(pair(3)))


def test_a_state_is_not_changed_by_advancing_from_it():
    trainer = FusedTrainer(Training(TWO_HEADS.task, 9, batch=8, rate=0.02), TWO_HEADS.layers)
    start = trainer.start()
    before = flat(start.layers)
    first, again = (trainer.advance(start, 5) for _ in range(2))
    assert_same(first, again)
    np.testing.assert_array_equal(flat(start.layers), before)


def test_steps_are_counted_upwards_from_the_state():
    trainer = FusedTrainer(Training(KMS, 9), pair(3))
    state = trainer.advance(trainer.start(), 3)
    for stop in (2, -1, 2**32):
        with pytest.raises(ValueError, match=f"stop is {stop}"):
            trainer.advance(state, stop)


@pytest.mark.parametrize("workers", [2, 4])
def test_runs_beside_others_in_threads_end_where_they_do_alone(workers):
    alone = [run(200, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(workers) as threads:
        beside = list(threads.map(lambda seed: run(200, seed=seed), range(8)))
    for one, other in zip(alone, beside, strict=True):
        assert_same(one, other)


def test_other_seeds_make_other_runs():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1]
    ends = [flat(run(3, seed=seed).layers) for seed in seeds]
    for i, one in enumerate(ends):
        for other in ends[:i]:
            assert np.abs(one - other).max() > 1e-4


@pytest.mark.parametrize(("L", "layers"), [(9, pair(3)), (3, pair(3)), (np.inf, pair(3))])
def test_layers_may_be_given_in_any_order(L, layers):
    one, other = run(20, L=L, layers=layers), run(20, L=L, layers=layers[::-1])
    assert_same(one, State(20, other.layers[::-1], other.diverged[::-1]))


def test_after_twenty_steps_both_engines_have_the_same_law():
    """256 seeds; Kolmogorov and Smirnov's test on ten numbers, false alarms 6e-6 in all."""
    runs, steps = 256, 20
    training = Training(KMS, 6, batch=8, rate=0.02)
    ends = []
    for seed in range(runs):
        trainer = FusedTrainer(Training(KMS, 6, batch=8, rate=0.02, seed=seed), pair(3))
        ends.append(trainer.advance(trainer.start(), steps).layers)
    fused = jax.tree.map(lambda *leaves: np.stack(leaves), *ends)
    reference = reference_ends(training, pair(3), steps, runs)
    for one, other in zip(readings(fused), readings(reference), strict=True):
        assert one.std() > 1e-2
        assert stats.kstest(one, other).pvalue > FALSE_ALARM


@pytest.mark.parametrize("engine", [FusedTrainer, ReferenceTrainer])
def test_a_layer_that_diverges_stays_and_the_other_goes_on(engine):
    softmax, linear = pair(3)
    training = Training(KMS, 6, batch=8, rate=0.3)
    trainer = engine(training, (lp.LinearAttention(3 * linear.U, 3 * linear.V), softmax))
    before, state = trainer.start(), trainer.advance(trainer.start(), 1)
    while state.diverged[0] is None:
        assert state.step < 50
        before, state = state, trainer.advance(state, state.step + 1)
    assert state.diverged == (before.step, None)
    assert np.linalg.norm(flat(state.layers[0])) <= FAR
    np.testing.assert_array_equal(flat(state.layers[0]), flat(before.layers[0]))
    assert np.any(flat(state.layers[1]) != flat(before.layers[1]))
    later = trainer.advance(state, state.step + 10)
    assert later.diverged == state.diverged
    np.testing.assert_array_equal(flat(later.layers[0]), flat(state.layers[0]))
    assert np.all(np.isfinite(flat(later.layers[1])))
    assert np.any(flat(later.layers[1]) != flat(state.layers[1]))
    assert_same(trainer.advance(trainer.start(), later.step), later)


@pytest.mark.parametrize("engine", [FusedTrainer, ReferenceTrainer])
def test_a_run_whose_layers_have_all_diverged_counts_on_and_changes_nothing(engine):
    trainer = engine(Training(KMS, 6, batch=8, rate=1e9), pair(3))
    state = trainer.advance(trainer.start(), 40)
    assert state.step == 40
    assert state.diverged == (0, 0)
    np.testing.assert_array_equal(flat(state.layers), flat(pair(3)))


def test_the_softmax_layer_of_a_pair_learns_what_it_learns_alone():
    """On the same prompts; the linear layer beside it only costs rounding."""
    for layers in (pair(3), TWO_HEADS.layers):
        task = KMS if layers[0].dim == 3 else TWO_HEADS.task
        training = Training(task, 9, batch=70, rate=0.02)
        trainers = FusedTrainer(training, layers), FusedTrainer(training, layers[:1])
        beside, alone = (trainer.advance(trainer.start(), 50).layers[0] for trainer in trainers)
        np.testing.assert_allclose(flat(beside), flat(alone), atol=1e-5)
        assert np.abs(flat(alone) - flat(layers[0])).max() > 1e-2


@pytest.mark.parametrize("size", [1e5, 1e10])
def test_however_large_the_scores_of_softmax_linear_attention_beside_it_stays_its_own(size):
    soft, line = pair(3)
    soft = lp.SoftmaxAttention(size * soft.U, soft.V)
    trainer = FusedTrainer(Training(KMS, 9, batch=64, rate=1e-30), (soft, line))
    assert trainer.advance(trainer.start(), 20).diverged[1] is None


def test_linear_attention_trains_at_every_length_and_comes_near_the_infinite_one_like_its_root():
    """The instances are those of L = inf: what is left between the two is the noise of the prompts."""
    linear = (pair(3)[1],)
    ends = {L: flat(run(40, L=L, layers=linear).layers) for L in (10**4, 10**8, 10**12, 10**18, 10**23, 1e300, np.inf)}
    off = {L: float(np.linalg.norm(end - ends[np.inf])) for L, end in ends.items()}
    assert 0.2 < off[10**4] / (100 * off[10**8]) < 5
    for L in (10**12, 10**18, 10**23, 1e300):
        assert off[L] < 1e-6  # of float32
