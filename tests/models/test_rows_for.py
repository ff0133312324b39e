"""How many rows an error needs, and how a score grows with them: against closed forms, beyond the rows at hand."""

import matplotlib as mpl
import numpy as np
import pytest

from largeprompt.models.sensitivity import error_bars, learning_curve, rows_for
from refusals import assert_refused
from significance import assert_mean_is
from weighted_prompts import Growing, Mean

mpl.use("Agg")


def rows(seed: int, n: int = 64, outputs: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, outputs))


def test_the_rows_for_a_mean_are_its_variance_over_the_squared_error():
    x = rows(0)
    found = rows_for(Mean(x), 0.01, method="influence")
    assert found.rows == pytest.approx(x.var(axis=0, ddof=1) / 0.01**2, rel=1e-4)
    assert (found.low < found.rows).all()
    assert (found.rows < found.high).all()
    assert found.exponent == 1


def test_with_the_rows_named_the_error_is_what_was_asked_for():
    """Beyond the rows at hand, where the variance falls like the root of their number."""
    found = [rows_for(Growing(rows(seed), 0.25), 0.25, draws=800) for seed in range(6)]
    truth = (1 / 0.25**2) ** 2  # variance m^(-1/2)
    assert np.median([each.rows for each in found]) == pytest.approx(truth, rel=0.5)
    assert np.mean([(each.low < truth) & (truth < each.high) for each in found]) > 0.7


def test_intervals_of_rows_cover():
    found = [rows_for(Mean(rows(seed, outputs=2)), 0.1, method="influence") for seed in range(200)]
    share = np.mean([(each.low < 100) & (each.high > 100) for each in found])
    assert abs(share - 0.9) < 5 * np.sqrt(0.9 * 0.1 / 400)


def test_a_variance_that_does_not_fall_is_refused():
    found = rows_for(Growing(rows(0)), 0.1, draws=400)
    assert not found.trusted.any()
    assert np.isnan(found.rows).all()
    assert found.reason[0].startswith("with more rows the variance does not fall at all;")


def test_error_bars_that_are_known_serve_for_every_error():
    bars = error_bars(Mean(rows(0)), method="influence")
    one, other = rows_for(bars, 0.01), rows_for(bars, 0.02)
    assert one.rows == pytest.approx(4 * other.rows)
    assert one.rows == pytest.approx(rows_for(Mean(rows(0)), 0.01, method="influence").rows)
    assert "rows now: 64" in repr(one)
    assert one.plot().get_yscale() == "log"
    assert_refused(lambda: rows_for(bars, 0.01, level=0.5), "level: error bars that are known take no options")


@pytest.mark.parametrize("error", [0.0, -1.0, float("nan"), float("inf")])
def test_errors_that_are_none_are_refused(error):
    assert_refused(lambda: rows_for(Mean(rows(0)), error), "it must be a positive number")


def loss(outputs: np.ndarray) -> float:
    """The squared error of means whose truth is 0: 1/m on m rows."""
    return float(np.mean(outputs**2))


def test_a_learning_curve_predicts_the_score_on_more_rows_than_there_are():
    bands = [learning_curve(Mean(rows(seed, n=128, outputs=4)), loss).at([32, 512]) for seed in range(60)]
    for i, m in enumerate((32, 512)):
        assert_mean_is(np.array([band.score[i] for band in bands]), 1 / m)
        # the intervals are cautious: they take the whole error of the score at hand
        assert np.mean([(band.low[i] <= 1 / m) & (band.high[i] >= 1 / m) for band in bands]) > 0.8


def test_the_scores_of_a_learning_curve_are_those_of_subsets():
    found = learning_curve(Mean(rows(0, n=40)), loss, rows=[5, 10, 20, 40])
    assert found.rows.tolist() == [5, 10, 20, 40]
    assert found.score[-1] == pytest.approx(loss(rows(0, n=40).mean(axis=0)), rel=1e-5)
    assert found.spread[-1] == 0
    assert found.score[0] > found.score[2]
    assert found.to_dataset().attrs["repeats"] == 8
    assert found.plot().get_xscale() == "log"
    bounded = learning_curve(Mean(rows(0, n=40)), loss, rows=[5, 10, 20, 40], bounds=(0, 1))
    assert found.at([1e3]).low < 0
    assert bounded.at([1e3]).low == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: learning_curve(p, loss, rows=[1, 2, 3]), "rows are [1, 2, 3]; give at least four"),
        (lambda p: learning_curve(p, loss, rows=[1, 2, 3, 65]), "different numbers from 1 to 64"),
        (lambda p: learning_curve(p, lambda x: float("nan")), "is nan; it must be a finite number"),
        (lambda p: learning_curve(p, lambda x: x), "it must be a finite number"),  # pyrefly: ignore[bad-argument-type]
        (lambda p: learning_curve(p, loss, rows=[1.5, 2, 3, 4]), "they must be whole numbers"),  # pyrefly: ignore[bad-argument-type]
        (lambda p: learning_curve(p, loss, bounds=(1, 0)), "the first must be below the second"),
        (lambda p: learning_curve(p, loss, repeats=1), "repeats is 1; it must be at least 2"),
        (lambda p: learning_curve(p, loss, level=2.0), "level is 2.0; it must lie between 0 and 1"),
        (lambda p: learning_curve(p, loss).at(0.5), "they must be numbers of at least 1"),
    ],
)
def test_curves_that_are_asked_for_wrongly_are_refused(call, message):
    assert_refused(lambda: call(Mean(rows(0))), message)
