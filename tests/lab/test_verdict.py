"""Where a run ended, on trajectories made up for it, and the interval of a share."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from largeprompt import lab

STICK = lab.Yardstick(optimum=0.08, zero=0.55, spurious=0.1, long_enough=50.0)
STEPS = np.unique(np.concatenate([[0], np.geomspace(1, 500_000, 100).round()]))


def ended(risk, stderr=0.0, steps=STEPS, time=500.0, **options):
    return lab.verdict(steps, risk, stderr, STICK, time=time, **options)


def falling_to(level, pace):
    return level + (0.55 - level) * np.exp(-STEPS / pace)


def test_a_run_at_the_optimum_has_converged_and_the_noise_of_sgd_does_not_matter():
    noise = 1e-3 * np.random.default_rng(0).normal(size=len(STEPS))
    assert ended(falling_to(0.08, 20_000)) == "converged"
    assert ended(falling_to(0.08, 20_000) + noise) == "converged"
    assert ended(falling_to(0.079, 20_000)) == "converged"


def test_a_run_that_stays_at_a_spurious_minimum_is_trapped():
    noise = 1e-3 * np.random.default_rng(0).normal(size=len(STEPS))
    assert ended(falling_to(0.18, 20_000)) == "trapped"
    assert ended(falling_to(0.18, 20_000) + noise) == "trapped"
    assert ended(falling_to(0.09, 20_000)) == "trapped"


def test_a_run_that_is_still_falling_is_unfinished_not_trapped():
    assert ended(falling_to(0.08, 300_000)) == "unfinished"
    assert ended(falling_to(0.18, 300_000)) == "unfinished"


def test_a_run_that_was_too_short_to_tell_is_unfinished():
    assert ended(falling_to(0.18, 20_000), time=49.0) == "unfinished"
    assert ended([0.55], steps=np.zeros(1), time=0.0) == "unfinished"
    assert ended([0.0801], steps=np.zeros(1), time=0.0) == "converged"


def test_a_diverged_run_is_nothing_else():
    risk = falling_to(0.08, 20_000)
    assert ended(risk, diverged=17) == "diverged"
    risk[-1] = math.nan
    assert ended(risk) == "diverged"


def test_an_excess_within_its_own_error_is_no_excess():
    assert ended(falling_to(0.09, 20_000), stderr=0.0021) == "converged"
    assert ended(falling_to(0.09, 20_000), stderr=0.0019) == "trapped"


def test_an_error_that_reaches_a_spurious_minimum_leaves_it_open_whether_a_run_has_converged():
    at_the_spurious_level = falling_to(0.18, 20_000)
    assert ended(at_the_spurious_level, stderr=0.01) == "trapped"
    for stderr in (0.021, 0.03, 0.2):
        assert ended(at_the_spurious_level, stderr=stderr) == "settled"
        assert ended(falling_to(0.08, 20_000), stderr=stderr) == "settled"
        assert ended(falling_to(0.18, 300_000), stderr=stderr) == "unfinished"


def test_a_risk_that_rises_is_not_that_of_a_trapped_run():
    steadily = np.linspace(0.06, 0.3, len(STEPS))
    early = 0.3 - 0.24 * np.exp(-STEPS / 1000)
    late = np.where(STEPS < 300_000, 0.085, 0.3)
    for risk in (steadily, early, late):
        assert ended(risk) == "unfinished"
    assert ended(0.3 + 0.25 * np.exp(-STEPS / 1000)) == "trapped"


@pytest.mark.parametrize("off", [0.0, 0.08, 0.3, 5.0])
def test_one_last_record_that_is_off_decides_nothing(off):
    converged, trapped = falling_to(0.08, 20_000), falling_to(0.18, 20_000)
    converged[-1] = trapped[-1] = off
    assert ended(converged) == "converged"
    assert ended(trapped) == ("trapped" if off > 0.18 else "unfinished")


def test_a_noisy_plateau_above_the_optimum_is_a_trap_and_noise_around_it_is_none():
    for seed in range(20):
        noise = 0.002 * np.random.default_rng(seed).normal(size=len(STEPS))
        assert ended(falling_to(0.18, 20_000) + noise) == "trapped"
        assert ended(falling_to(0.08, 20_000) + noise) == "converged"


def test_a_run_that_leaves_a_saddle_is_unfinished_until_it_has_arrived():
    for leaves_at, end in ((200_000, "converged"), (420_000, "unfinished"), (470_000, "unfinished")):
        fall = np.exp(-np.maximum(STEPS - leaves_at, 0) / 40_000)
        assert ended(0.08 + 0.1 * fall + 0.37 * np.exp(-STEPS / 20_000)) == end
    assert ended(falling_to(0.18, 20_000)) == "trapped"  # it never leaves


def test_a_few_records_are_enough_to_see_the_optimum_and_too_few_to_see_a_trap():
    steps = np.array([0.0, 500_000.0])
    assert ended([0.55, 0.0801], steps=steps) == "converged"
    assert ended([0.55, 0.18], steps=steps) == "unfinished"
    assert ended([0.18, 0.18], steps=steps) == "unfinished"
    assert ended([0.18, 0.18, 0.18], steps=np.array([0.0, 250_000.0, 500_000.0])) == "trapped"


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_records_that_are_not_finite_count_only_at_the_end(missing):
    risk = falling_to(0.18, 20_000)
    risk[[3, -4]] = missing
    assert ended(risk) == "trapped"
    risk[-1] = missing
    assert ended(risk) == "diverged"


def test_a_small_spurious_minimum_is_told_from_the_optimum_unless_scatter_hides_it():
    long = lab.Yardstick(optimum=0.05, zero=0.55, spurious=2e-3)
    quiet, loud = (size * np.random.default_rng(2).normal(size=len(STEPS)) for size in (1e-6, 1e-3))
    at_optimum, at_spurious = (level + 0.5 * np.exp(-STEPS / 20_000) for level in (0.0502, 0.052))
    assert lab.verdict(STEPS, at_optimum + quiet, 0.0, long) == "converged"
    assert lab.verdict(STEPS, at_spurious + quiet, 0.0, long) == "trapped"
    assert lab.verdict(STEPS, at_spurious + loud, 0.0, long) == "settled"
    longer = lab.Yardstick(optimum=0.05, zero=0.55, spurious=1e-6)  # nothing that matters
    assert lab.verdict(STEPS, at_optimum + 0.1 * loud, 0.0, longer) == "converged"


def test_without_a_known_optimum_nothing_has_converged_short_of_what_no_layer_can_beat():
    heads = lab.Yardstick(math.nan, 0.55, 0.12, 100.0, floor=0.0526, attainable=0.0808)

    def rests_at(level, time=500.0, **options):
        return lab.verdict(STEPS, level + 0.4 * np.exp(-STEPS / 20_000), 1e-4, heads, time=time, **options)

    assert rests_at(0.134) == "trapped"
    assert rests_at(0.0808) == "settled"
    assert rests_at(0.07) == "settled"
    assert rests_at(0.053) == "converged"
    assert rests_at(0.07, time=99.0) == "unfinished"
    assert rests_at(0.07, diverged=3) == "diverged"


@pytest.mark.parametrize(("count", "total"), [(0, 8), (3, 8), (8, 8), (1, 1), (40, 1000)])
def test_the_interval_of_a_share_is_wilson_s(count, total):
    known = binomtest(count, total).proportion_ci(0.95, "wilson")
    assert lab.wilson(count, total) == pytest.approx((known.low, known.high), abs=1e-4)


def test_of_no_runs_any_share_is_possible():
    assert lab.wilson(0, 0) == (0.0, 1.0)
