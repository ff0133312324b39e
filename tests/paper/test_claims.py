"""The rule that judges claims, and their errors on simulated seeds: how often chance alone decides."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from largeprompt.paper.claims import (
    ERRORS,
    ROLES,
    VERDICTS,
    Check,
    Finding,
    counted,
    mean_of_counts,
    mean_over_seeds,
    widened,
    worst,
)
from largeprompt.paper.experiments import CLAIMS
from significance import SIGMAS

RATE = float(norm.sf(ERRORS))
"""How often a check on one side of a true equality may come out decided: 1 in 741."""


def decided(seeds, estimate, **asked):
    """How often an inequality that is exactly an equality is called true, and how often false."""
    found = [Check("x", *_placed(estimate(values), **asked)).verdict for values in seeds]
    return found.count("holds"), found.count("does not hold")


def _placed(estimate, target=0.0):
    measured, error = estimate
    return measured, ">", target, error


def most(trials):
    """The most of so many trials that are decided by chance, up to the fluctuation of their number."""
    return trials * RATE + SIGMAS * math.sqrt(trials * RATE)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_few_continuous_seeds_decide_by_chance_as_rarely_as_many(n):
    seeds = np.random.default_rng(n).normal(size=(20_000, n))
    assert max(decided(seeds, mean_over_seeds)) <= most(len(seeds))
    plain = np.abs(seeds.mean(axis=1)) > ERRORS * seeds.std(axis=1, ddof=1) / math.sqrt(n)
    assert plain.sum() > 2 * most(len(seeds))  # what an error that is not widened would do


def test_seeds_that_agree_to_the_last_digit_leave_their_error_unknown():
    assert mean_over_seeds([0.3, 0.3, 0.3]) == (pytest.approx(0.3), math.inf)
    assert mean_over_seeds([0.3]) == (0.3, math.inf)
    assert Check("x", *_placed(mean_over_seeds([0.3, 0.3, 0.3]))).verdict == VERDICTS[2]


def test_numbers_read_off_a_grid_vary_by_its_spacing():
    mean, error = mean_over_seeds([5000.0, 5000.0, 5000.0], rounding=5000.0)
    assert mean == 5000
    assert error == pytest.approx(widened(3) * 5000 / 6)
    assert mean_over_seeds([1.0, 4.0], rounding=0.1) == mean_over_seeds([1.0, 4.0])


@pytest.mark.parametrize("n", [3, 8, 12, 20])
@pytest.mark.parametrize(
    ("law", "target", "step"),
    [
        (lambda rng, size: rng.integers(0, 2, size), 0.5, 1.0),
        (lambda rng, size: rng.integers(0, 2, size) * 2 - 1, 0.0, 1.0),
        (lambda rng, size: (rng.random(size) < 0.3) * 1.0 - (rng.random(size) < 0.3), 0.0, 1.0),
        (lambda rng, size: (rng.poisson(1.5, size) - rng.poisson(1.5, size)) / 2, 0.0, 0.5),
    ],
    ids=["starts that reach the optimum", "always one of two", "pairs that fail", "falls of a run"],
)
def test_counts_decide_by_chance_as_rarely_as_is_said_and_not_at_all_below_ten_seeds(law, target, step, n):
    seeds = law(np.random.default_rng(n), (10_000, n)).astype(float)
    found = decided(seeds, lambda values: mean_of_counts(values, target, step), target=target)
    assert max(found) <= (most(len(seeds)) if n > ERRORS**2 else 0)


def test_a_seed_counts_once_at_however_many_lengths():
    rng = np.random.default_rng(0)
    seeds = np.repeat(rng.integers(0, 2, (4000, 12, 1)) * 2.0 - 1, 5, axis=2)  # the same outcome at five lengths
    assert max(decided(seeds, lambda values: mean_of_counts(values, 0.0, 1.0))) <= most(len(seeds))
    as_many = [mean_of_counts(values.reshape(-1, 1), 0.0, 1.0) for values in seeds]
    assert sum(mean > ERRORS * error for mean, error in as_many) > 2 * most(len(seeds))


def test_equal_counts_hold_from_ten_seeds_on():
    verdicts = [Check("x", *_placed(mean_of_counts(np.ones(n), 0.0, 1.0))).verdict for n in range(1, 13)]
    assert verdicts == [VERDICTS[2]] * 9 + ["holds"] * 3


def test_the_error_of_a_share_of_one_half_is_wilsons_and_is_never_zero():
    for count in (0, 3, 7, 20):
        share, error = mean_of_counts(np.arange(20) < count, 0.5, 1.0)
        assert share == pytest.approx(count / 20)
        assert error == pytest.approx(0.5 / math.sqrt(20))
    assert mean_of_counts(np.zeros(8), 0.0, 0.5)[1] == pytest.approx(0.5 / 8)
    assert mean_of_counts(np.full((4, 2), math.nan), 0.0, 1.0)[1] == math.inf


def test_unknown_outcomes_widen_the_error_by_their_share():
    known, error = mean_of_counts(np.ones(20), 0.0, 1.0, unknown=0.3)
    assert known == 1.0
    assert error == pytest.approx(math.hypot(1 / math.sqrt(20), 0.3))


def test_what_was_not_run_is_left_out():
    values = np.array([[1.0, math.nan], [0.0, 1.0], [math.nan, math.nan]])
    mean, error = mean_of_counts(values, 0.0, 1.0)
    assert mean == pytest.approx(2 / 3)
    assert error == pytest.approx(max(math.sqrt(2) / 3, 1 / 2))


def test_the_worst_of_many_lengths_fails_by_chance_as_rarely_as_one():
    trials, lengths = 10_000, 19
    values = np.random.default_rng(3).normal(size=(trials, lengths))
    checks = [worst("x", row, np.ones(lengths), range(lengths)) for row in values]
    assert sum(check.verdict == "does not hold" for check in checks) <= most(trials)
    assert (values.min(axis=1) < -ERRORS).sum() > 2 * most(trials)  # the plain error of the worst one


def test_the_worst_of_several_is_named_and_unknown_ones_settle_nothing():
    check = worst("x", np.array([5.0, 2.0, 1.0]), np.array([0.1, 1.0, 0.1]), ["a", "b", "c"], "<", 9.0)
    assert (check.label, check.measured) == ("x, worst at b", 2.0)
    assert worst("x", np.array([1.0, math.nan]), np.ones(2), "ab").verdict == VERDICTS[2]
    assert worst("x", np.array([1.0, 2.0]), np.array([0.1, math.inf]), "ab").verdict == VERDICTS[2]


def test_an_inequality_within_three_errors_is_not_settled_on_either_side():
    for measured in (-0.2, 0.0, 0.2):
        assert Check("x", measured, ">", 0.0, 0.1).verdict == VERDICTS[2]


def test_every_claim_has_a_role_and_tests_are_counted_apart():
    roles = {key: claim.role for key, claim in CLAIMS.items()}
    assert set(roles.values()) == set(ROLES)
    assert {key for key, role in roles.items() if role == "bound"} == {"T3", "T4"}
    first = {key: key[0] for key in roles}
    assert all((role == "test") >= (first[key] == "C") for key, role in roles.items())
    assert all((role == "own") == (first[key] == "S") for key, role in roles.items())
    assert all((role == "context") == (first[key] in "FH" or key == "T15") for key, role in roles.items())
    entries = [{"role": role, "verdict": VERDICTS[0]} for role in roles.values()]
    entries[0]["verdict"] = VERDICTS[3]
    tests, rest, own, context = counted(entries)
    n, ours, beside = (list(roles.values()).count(role) for role in ("test", "own", "context"))
    assert tests == f"{n} tests of the paper: {n - 1} holds, 1 does not hold"
    assert rest.startswith(f"{len(roles) - n - ours - beside} identities and bounds")
    assert own == f"{ours} statements of our own: {ours} holds"
    assert context == f"{beside} for context: {beside} holds"


@pytest.mark.parametrize(
    ("measured", "relation", "target", "error", "tolerance", "expected"),
    [
        (2.0, ">", 1.0, 0.3, 0.0, "holds"),
        (2.0, ">", 1.0, 0.4, 0.0, "not settled at this preset"),
        (0.0, ">", 1.0, 0.4, 0.0, "not settled at this preset"),
        (0.0, ">", 1.0, 0.3, 0.0, "does not hold"),
        (0.0, "<", 1.0, 0.3, 0.0, "holds"),
        (2.0, "<", 1.0, 0.3, 0.0, "does not hold"),
        (1.0, "<", 1.0, 0.0, 0.0, "not settled at this preset"),
        (1.0, "=", 1.0, 0.0, 0.0, "holds"),
        (1.1, "=", 1.0, 0.01, 0.2, "holds"),
        (0.7, "=", 1.0, 0.01, 0.2, "does not hold"),
        (0.7, "=", 1.0, 0.1, 0.2, "holds within error"),
        (math.nan, "=", 1.0, 0.0, 0.2, "not settled at this preset"),
        (1.0, "<", math.inf, 0.0, 0.0, "not settled at this preset"),
        (1.0, "<", 2.0, math.nan, 0.0, "not settled at this preset"),
    ],
)
def test_a_check_is_decided_by_margin_and_error(measured, relation, target, error, tolerance, expected):
    assert Check("x", measured, relation, target, error, tolerance).verdict == expected


def test_an_error_above_the_resolution_settles_nothing():
    assert Check("x", 2.0, ">", 1.0, 0.1, resolution=0.05).verdict == "not settled at this preset"
    assert Check("x", 2.0, ">", 1.0, 0.1, resolution=0.2).verdict == "holds"


def test_a_finding_is_as_bad_as_its_worst_check():
    checks = [
        Check("x", 2.0, ">", 1.0),
        Check("x", 2.0, "=", 1.0, 1.0),
        Check("x", math.nan, ">", 1.0),
        Check("x", 0.0, ">", 1.0),
    ]
    assert [Finding((check,)).verdict for check in checks] == list(VERDICTS)
    for i, expected in enumerate(VERDICTS):
        assert Finding(tuple(checks[: i + 1])).verdict == Finding(tuple(checks[i::-1])).verdict == expected
    assert Finding(()).verdict == "not settled at this preset"
