"""Momentum and Adam in the fused engine: the rule on its own gradients, the law of the reference, runs in pieces."""

from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from engine_catalogue import KMS, Pair, flat, head_pair, pair, readings, reference_ends
from largeprompt.dynamics import SGD, AbstractOptimiser, Adam, Layers, Momentum, State, Training
from largeprompt.engine import FusedTrainer
from largeprompt.icl import LinearRegression, kms
from significance import SIGMAS

FALSE_ALARM = 2 * stats.norm.sf(SIGMAS)
THREE = LinearRegression(kms(3, 0.5), 0.1)
CASES: dict[str, tuple[LinearRegression, Layers]] = {
    "U V": (KMS, pair(3)),
    "linear first": (KMS, pair(3)[::-1]),
    "two heads": (THREE, head_pair(2, 4, rank=3)),
}
OPTIMISERS = [Momentum(0.8), Adam(0.7, 0.9, 1e-3)]


def training(task: LinearRegression, optimiser: AbstractOptimiser, rate: float = 0.003, **options) -> Training:
    usual: dict[str, Any] = {"batch": 70, "loss_factor": 2.0}
    return Training(task, 9, rate=rate, optimiser=optimiser, **usual | options)


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_steps_follow_the_rule_on_the_gradients_of_plain_descent(case, optimiser):
    """A step of SGD at rate 1 from the same state shows the gradient; the rest is NumPy."""
    task, layers = CASES[case]
    trainer = FusedTrainer(training(task, optimiser), layers)
    plain = FusedTrainer(training(task, SGD(), 1.0), layers)
    state, weights = trainer.start(), flat(layers)
    moments = (np.zeros_like(weights),) * optimiser.moments
    for t in range(1, 6):
        slope = flat(state.layers) - flat(plain.advance(State(t - 1, state.layers, state.diverged), t).layers)
        direction, moments = optimiser.direction(slope, moments, t)
        weights = weights - 0.003 * direction
        state = trainer.advance(state, t)
        np.testing.assert_allclose(flat(state.layers), weights, rtol=0, atol=1e-11)
        for one, other in zip(state.moments, moments, strict=True):
            np.testing.assert_allclose(flat(one), other, rtol=0, atol=1e-11)
    assert np.abs(weights - flat(layers)).max() > 0.005


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_run_in_pieces_ends_at_the_same_bits_and_leaves_its_states_alone(case, optimiser):
    task, layers = CASES[case]
    trainer = FusedTrainer(training(task, optimiser), layers)
    whole, states = trainer.advance(trainer.start(), 12), [trainer.start()]
    for stop in (1, 1, 7, 12):
        states.append(trainer.advance(states[-1], stop))
    for part in ("layers", "moments"):
        np.testing.assert_array_equal(flat(getattr(states[-1], part)), flat(getattr(whole, part)))
    np.testing.assert_array_equal(flat(states[0].moments), 0 * flat(states[0].moments))
    assert np.any(flat(states[1].moments) != flat(states[2].moments)) == (states[1].step != states[2].step)


@pytest.mark.parametrize("optimiser", [Momentum(0.8), Adam(0.7, 0.9)], ids=str)
def test_after_twenty_steps_both_engines_have_the_same_law(optimiser):
    """256 seeds; Kolmogorov and Smirnov's test on ten numbers, false alarms 6e-6 in all."""
    runs, steps, ends = 256, 20, []
    options: dict = {"batch": 8, "rate": 0.01, "optimiser": optimiser}
    for seed in range(runs):
        trainer = FusedTrainer(Training(KMS, 6, seed=seed, **options), pair(3))
        ends.append(trainer.advance(trainer.start(), steps).layers)
    fused: Pair = jax.tree.map(lambda *leaves: np.stack(leaves), *ends)
    reference = reference_ends(Training(KMS, 6, **options), pair(3), steps, runs)
    for one, other in zip(readings(fused), readings(reference), strict=True):
        assert one.std() > 1e-2
        assert stats.kstest(one, other).pvalue > FALSE_ALARM


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_a_layer_that_diverges_with_moments_stays(optimiser):
    trainer = FusedTrainer(training(KMS, optimiser, 1e12), pair(3))
    state = trainer.advance(trainer.start(), 5)
    assert (state.step, state.diverged) == (5, (0, 0))
    np.testing.assert_array_equal(flat(state.layers), flat(pair(3)))
