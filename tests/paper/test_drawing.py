"""Charts as pictures."""

import io

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from largeprompt.paper.chart import BLUE, PURPLE, Chart, HeatMap, Panel, Series, sequence
from largeprompt.paper.drawing import draw, save
from refusals import assert_refused

L = np.array([10.0, 100.0, 1000.0])


def panel(bound: float) -> Panel:
    """A curve from 0.1 to 0.001 with a bound that much above it."""
    series = (
        Series("measured", L, 1 / L, colour=BLUE),
        Series("each seed", L, 2 / L, "seed", BLUE),
        Series("Theorem 1", L, bound / L, "bound", PURPLE, dash="dot"),
    )
    return Panel("isotropic", "length L", "gap", series, remarks=("far above",))


def points(ax: Axes) -> list[list[list[float]]]:
    return [np.asarray(line.get_xydata()).tolist() for line in ax.lines]


def curves(ax: Axes) -> list[float]:
    """The first value of every series on the axes."""
    return sorted(line[0][1] for line in points(ax) if len(line) == len(L))


def legend(figure: Figure) -> set[str]:
    (found,) = figure.legends
    return {text.get_text() for text in found.get_texts()}


@pytest.mark.parametrize("bound", [1e6, 1e30, 1e308])
def test_a_far_bound_is_drawn_past_a_break_of_the_axis(bound):
    figure = draw(Chart((panel(bound),)))
    figure.savefig(io.BytesIO(), format="png")
    upper, lower = figure.axes
    assert curves(upper) == [bound / 10]
    assert curves(lower) == [0.1, 0.2]
    assert legend(figure) == {"measured", "each seed", "Theorem 1"}
    assert lower.get_ylim()[1] < upper.get_ylim()[0] < bound / 1000 < bound / 10 < upper.get_ylim()[1]
    assert upper.get_xlim() == lower.get_xlim()
    np.testing.assert_allclose(lower.get_position().height / upper.get_position().height, 3.2, rtol=1e-6)
    assert [ax.get_ylabel() for ax in (upper, lower)] == ["", "gap"]
    assert [ax.get_xlabel() for ax in (upper, lower)] == ["", "length L"]
    assert [ax.get_title() for ax in (upper, lower)] == ["isotropic", ""]
    assert not upper.spines.bottom.get_visible()
    assert not lower.spines.top.get_visible()
    assert [text.get_text() for text in lower.texts] == ["far above"]
    strokes = [points(ax)[-1] for ax in (upper, lower)]
    assert strokes == [[[0, 0]], [[0, 1]]]


def test_a_near_bound_is_drawn_with_the_rest():
    figure = draw(Chart((panel(100.0),)))
    (ax,) = figure.axes
    assert curves(ax) == [0.1, 0.2, 10.0]
    assert to_rgba(PURPLE) in {to_rgba(line.get_color()) for line in ax.lines}


def test_beside_other_panels_a_far_bound_is_left_out():
    figure = draw(Chart((panel(1e6), panel(1e6)), columns=2))
    assert [curves(ax) for ax in figure.axes] == [[0.1, 0.2]] * 2
    assert legend(figure) == {"measured", "each seed"}


def test_bands_bars_and_the_file_itself(tmp_path):
    line = Series("line", L, 1 / L, colour=sequence(3)[1], low=0.5 / L, high=2 / L)
    bars = Series("points", L, 1 / L, line=False, mark="o", low=0.9 / L, high=1.1 / L)
    figure = draw(Chart((Panel("a", "x", "y", (line, bars), remarks=("note",)),)))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["note"]
    assert len(axes.collections) == 2  # the band, and the bars
    for suffix in ("svg", "pdf"):
        save(figure, tmp_path / f"a.{suffix}")
        save(figure, tmp_path / f"b.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_a_series_of_unequal_sizes_is_refused():
    assert_refused(lambda: Series("s", L, L[:2]), "s: x, y and its limits have [2, 3] points")


def test_plain_mathematics_gets_its_scripts():
    figure = draw(Chart((Panel("‖θ_soft − θ_∞‖², 0.5^|i−j|", "x", "∇_U T", (Series("y", L, 1 / L),)),)))
    (axes,) = figure.axes
    assert axes.get_title() == r"‖θ$_{\mathrm{soft}}$ − θ$_{\mathrm{\infty}}$‖², 0.5$^{|i-j|}$"
    assert axes.get_ylabel() == r"∇$_{\mathrm{U}}$ T"
    figure.draw_without_rendering()  # which reads the mathematics


def test_powers_of_ten_are_plain_text_and_a_figure_is_laid_out_once():
    figure = draw(Chart((panel(100.0),)))
    (axes,) = figure.axes
    labels = [[label.get_text() for label in axis.get_ticklabels(which="both")] for axis in (axes.xaxis, axes.yaxis)]
    assert {"10¹", "10²", "10³"} <= set(labels[0])
    assert {"10⁻³", "10⁻¹", "10¹"} <= set(labels[1])
    assert not any("$" in label for label in [*labels[0], *labels[1]])
    assert figure.get_layout_engine() is None
    narrow = draw(Chart((Panel("a", "x", "y", (Series("s", L / L * [20.0, 30.0, 50.0], L),)),)))
    shown = [label.get_text() for label in narrow.axes[0].xaxis.get_ticklabels(which="both")]
    assert {"2×10¹", "3×10¹"} <= set(shown)


def test_heat_maps_share_one_bar_of_colours_and_show_what_is_no_number():
    one, other = np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[1.0, 16.0], [np.inf, 0.0]])
    maps = [
        HeatMap(name, "test", "trained", ("a", "b"), ("c", "d"), it, "x") for name, it in (("1", one), ("2", other))
    ]
    figure = draw(Chart(tuple(maps), columns=2))
    first, second, bar = figure.axes
    assert first.images[0].get_clim() == second.images[0].get_clim() == (1.0, 16.0)
    assert [text.get_text() for text in first.texts] == ["1.00", "2.00", "–", "4.00"]
    assert [text.get_text() for text in second.texts] == ["1.00", "16", "∞", "0"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["c", "d"]
    assert first.get_ylim() == (-0.5, 1.5)
    assert (first.get_ylabel(), bar.get_ylabel()) == ("trained", "x")
    assert not figure.legends


def test_a_heat_map_has_a_name_for_every_row_and_column():
    assert_refused(
        lambda: HeatMap("m", "x", "y", ("a",), ("b",), np.ones((2, 1)), "s"), "m: the values have shape (2, 1)"
    )
