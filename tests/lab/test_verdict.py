"""Where a run ended, on trajectories made up for it, and the interval of a share."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from largeprompt import lab
from largeprompt.icl import predicted_excess
from largeprompt.lab import yardstick

STICK = lab.Yardstick(optimum=0.08, zero=0.55, spurious=0.1, long_enough=50.0)
STEPS = np.unique(np.concatenate([[0], np.geomspace(1, 500_000, 60).round()]))


def ended(risk, stderr=0.0, steps=STEPS, **options):
    return lab.verdict(steps, risk, stderr, STICK, **{"time": 500.0, **options})


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


@pytest.mark.parametrize("L", [10, 100, 10_000, 10**6])
def test_no_spurious_minimum_is_within_the_tolerance_at_any_length(L):
    run = lab.Run(L=L, attention="linear")
    stick = yardstick(run, "linear")
    assert stick.tolerance(0.0) <= float(predicted_excess(run.task(), L)) / 2
    assert stick.tolerance(0.0) <= 0.01 * 0.55
    assert stick.long_enough == pytest.approx(100)


def test_where_no_spurious_minima_are_known_a_share_of_the_trivial_risk_remains():
    flat = lab.Run(sigma="diagonal:1,0", d=2, attention="linear")
    assert yardstick(flat, "linear").tolerance(0.0) == pytest.approx(0.01 * 0.3)
    assert yardstick(lab.Run(d=2, L=math.inf), "linear").tolerance(0.0) == pytest.approx(0.01 * 0.55)


@pytest.mark.parametrize(("count", "total"), [(0, 8), (3, 8), (8, 8), (1, 1), (40, 1000)])
def test_the_interval_of_a_share_is_wilson_s(count, total):
    known = binomtest(count, total).proportion_ci(0.95, "wilson")
    assert lab.wilson(count, total) == pytest.approx((known.low, known.high), abs=1e-4)


def test_of_no_runs_any_share_is_possible():
    assert lab.wilson(0, 0) == (0.0, 1.0)


def test_where_nothing_can_be_learnt_no_run_is_long_enough_to_be_trapped():
    run = lab.Run(d=2, L=8, omega=((0.0, 0.0), (0.0, 0.0)), attention="linear", steps=20)
    assert yardstick(run, "linear").long_enough == math.inf
