"""Where gradient flows from default starts end."""

import jax
import pytest

from largeprompt.dynamics import start_shares
from largeprompt.dynamics._shares import _place
from largeprompt.icl import LinearRegression, identity, stationary_points

TASK = LinearRegression.experiment(identity(2))


@pytest.fixture(scope="module")
def ends():
    """Of one linear head at L = 100."""
    points = stationary_points(TASK, 100, "linear", starts=0)
    return start_shares(TASK, 100, "linear", jax.random.key(0), starts=16, points=points)


def test_some_default_starts_end_at_the_spurious_minimum_and_the_others_at_the_optimum(ends):
    assert [point.kind for point in ends.points] == ["global minimum", "local minimum"]
    assert sum(ends.counts) + ends.elsewhere == ends.starts == 16
    assert ends.elsewhere == 0
    assert all(count > 0 for count in ends.counts)
    spurious = float(ends.points[1].risk.value)
    assert sum(abs(float(risk) - spurious) < 1e-4 for risk in ends.risks) == ends.counts[1]


def test_shares_have_wilson_s_interval(ends):
    data = ends.to_dataset()
    assert float(data.share.sum()) == 1
    assert bool(((data.low < data.share) & (data.share < data.high)).all())
    assert data.attrs["starts"] == 16
    ends.plot()


def test_an_end_is_at_a_point_if_it_is_ten_times_as_near_as_the_next():
    levels = [0.1, 0.2]
    assert _place(0.1005, levels, 0.5) == 0
    assert _place(0.209, levels, 0.5) == 1
    assert _place(0.12, levels, 0.5) is None
    assert _place(float("inf"), levels, 0.5) is None


def test_bad_input_is_refused_in_one_line(as_a_stranger):
    with pytest.raises(ValueError, match=r"^points is empty; there must be at least one stationary point$"):
        start_shares(TASK, 100, "linear", points=[])
    with pytest.raises(ValueError, match=r"^starts is 0; it must be at least 1$"):
        start_shares(TASK, 100, "linear", starts=0)
