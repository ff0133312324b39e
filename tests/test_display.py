import io
import math
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import catalogue
import largeprompt as lp
from largeprompt._display import AbstractShown, AbstractTable, named_arrays
from largeprompt.concentration import Deviation, Prediction, Regime

REGIME = Regime("1/L", 1.0, 0.2, 3.0, math.nan)


def prediction(*lengths: int) -> Prediction:
    L = np.array(lengths)
    return Prediction("output", L, 2.5 / L.astype(float), np.zeros(len(L)), 2.5, 0.0, REGIME, "c/L", False)


def measured(*lengths: int) -> Deviation:
    L = np.array(lengths)
    square, one = 2.5 / L, np.ones(len(L))
    trusted = np.arange(len(L)) != 1
    quantiles = np.stack([square / 9, square / 2, 3 * square], axis=1)
    parts = (square, square / 10, 0.8 * square, 1.2 * square, quantiles, 99 * one, one, 10 * one, trusted)
    return Deviation("output", L, *parts, replicates=100, method="whole prompts")


def flow(level: float = 0.1) -> lp.dynamics.Trajectory:
    times = jnp.array([0.5, 1.0, 40.0])
    layers = jax.vmap(lambda t: lp.SoftmaxAttention(t * jnp.eye(2), t * jnp.ones((1, 2))))(times)
    zero, conserved = jnp.zeros(3), {"‖U‖² − ‖V‖²": jnp.array([0.1, 0.2, 0.3])}
    parts = (
        level + 1 / times,
        zero,
        1 / times**2,
        zero,
        conserved,
        7,
        "completed",
        40.0,
        "closed form",
        "an infinite prompt",
        None,
    )
    return lp.dynamics.Trajectory(times, layers, *parts)


def ladder() -> lp.dynamics.Ladder:
    finite, infinite = (flow(0.3), flow(0.2)), flow()
    risk = jnp.stack([one.risk for one in finite])
    return lp.dynamics.Ladder((10, 100), infinite.times, risk / 3, risk, 0 * risk, infinite, finite)


TABLES = {
    "prediction": lambda: prediction(10, 100),
    "deviation": lambda: measured(10, 100, 1000),
    "trajectory": flow,
    "ladder": ladder,
    "prefixes": lambda: lp.icl.PrefixRisks((1, 10), jnp.array([0.3, 0.1]), jnp.zeros(2), "closed form"),
}


@pytest.mark.parametrize("name", catalogue.MEASURES)
def test_a_measure_prints_numbers_and_no_empty_fields(name):
    text = repr(catalogue.MEASURES[name])
    assert text.startswith(type(catalogue.MEASURES[name]).__name__ + "(")
    assert re.search(r"\d", text)
    assert "None" not in text
    assert "(jax)" not in text


def test_a_gaussian_prints_its_mean_and_covariance():
    assert (
        repr(lp.Gaussian([1.0, -0.0], [[1.0, 0.4], [0.4, 0.5]])) == "Gaussian(m=[1, 0], Gamma=[[1, 0.4], [0.4, 0.5]])"
    )


def test_a_tilt_is_printed_where_there_is_one():
    assert repr(lp.Cube([1.0, 2.0])) == "Cube(h=[1, 2])"
    assert repr(lp.Cube([1.0, 2.0]).tilt([0.5, 0.0])) == "Cube(h=[1, 2], theta=[0.5, 0])"


def test_a_mixture_prints_weights_not_their_logarithms():
    assert "weights=[0.25, 0.75]" in repr(lp.Mixture([0.25, 0.75], [lp.Cube([1.0]), lp.Cube([2.0])]))


def test_a_long_prompt_prints_its_size_and_extent():
    points = np.linspace(-1, 3, 2000).reshape(1000, 2)
    assert repr(lp.Empirical(points)) == "Empirical(points=float64[1000,2] from -1 to 3)"


def test_what_is_traced_prints_by_its_shape():
    seen = []
    jax.jit(lambda mu: seen.append(repr(mu)) or mu.mean())(lp.Mixture([0.5, 0.5], [lp.Cube([1.0]), lp.Cube([2.0])]))
    jax.vmap(lambda x: seen.append(repr(lp.Gaussian(x, jnp.eye(2)))) or x)(jnp.ones((3, 2)))
    assert "f64[2]" in seen[0]
    assert "Gaussian(m=f64[2]" in seen[1]


def test_a_placeholder_in_a_result_prints():
    broken = jax.tree.map(lambda leaf: object(), prediction(10, 100))
    assert repr(broken).startswith("Prediction(")
    assert broken._repr_html_() is None


def test_layers_and_what_they_return_print_numbers():
    layer = lp.SoftmaxAttention([[0.5, 0.2], [0.0, 0.4]], [[1.0, -1.0]])
    assert repr(layer) == "SoftmaxAttention(U=[[0.5, 0.2], [0, 0.4]], V=[[1, -1]])"
    assert "V=[[[1, 0]]]" in repr(layer.jacobian(lp.Gaussian([1.0, 0.0], np.eye(2)), [0.0, 0.0]))
    optimum = lp.icl.optimal_linear(lp.icl.LinearRegression(np.eye(2)), 10)
    assert "risk=Estimate(" in repr(optimum)


class Named(AbstractShown):
    label: str
    known: object


class Page(HTMLParser):
    """The texts of HTML in order; every element that is opened must be closed, the last one first."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("name", [*catalogue.MEASURES, *catalogue.LAYERS])
def test_a_measure_or_layer_is_html_without_colours_that_names_each_field(name):
    shown = {**catalogue.MEASURES, **catalogue.LAYERS}[name]
    page = Page(shown._repr_html_())
    assert page.texts[0] == type(shown).__name__
    assert set(shown._shown()) <= set(page.texts)
    assert {tag for tag, _ in page.elements} <= {"div", "b", "table", "tr", "th", "td"}
    assert not re.search("color|background|#", " ".join(each.get("style", "") for _, each in page.elements))
    for array in shown._shown().values():
        if isinstance(array, jax.Array) and array.ndim:
            assert f"float64[{','.join(map(str, array.shape))}]" in page.texts


def test_html_has_the_numbers_of_every_row():
    rng = np.random.default_rng(0)
    m, root = 100 * rng.normal(size=3), rng.normal(size=(3, 3))
    text = str(lp.Gaussian(m, root @ root.T)._repr_html_())
    inner = [re.findall("<tr>(.*?)</tr>", table) for table in re.findall("<table style.*?</table>", text)]
    numbers = [[[float(cell) for cell in Page(row).texts] for row in rows] for rows in inner]
    np.testing.assert_allclose(numbers[0], [m], rtol=6e-4)
    np.testing.assert_allclose(numbers[1], root @ root.T, rtol=6e-4)
    stacked = catalogue.LAYERS["softmax"].jacobian(catalogue.MEASURES["gaussian"], np.ones(3))
    cells = [float(cell) for cell in Page(stacked._repr_html_()).texts if re.fullmatch(r"[-+.e\d]+", cell)]
    np.testing.assert_allclose(cells, np.concatenate([stacked.U.ravel(), stacked.V.ravel(), stacked.z.ravel()]), 6e-4)


def test_html_summarises_what_the_text_does():
    points = np.linspace(-1, 3, 2000).reshape(1000, 2)
    assert Page(lp.Empirical(points)._repr_html_()).texts == ["Empirical", "points", "float64[1000,2]", "from -1 to 3"]


def test_html_nests_objects_and_tables():
    mixture = lp.Mixture([0.25, 0.75], [lp.Cube([1.0, 2.0]), lp.Product(lp.Sphere(2.0, 1), lp.Cube([4.0]))])
    texts = Page(mixture._repr_html_()).texts
    assert [text for text in texts if text[0].isupper()] == ["Mixture", "Cube", "Product", "Sphere", "Cube"]
    page = Page(Named("one", prediction(10, 100))._repr_html_())
    assert page.texts[:4] == ["Named", "label", "'one'", "known"]
    assert page.texts[4].startswith("Prediction (")
    assert "0.25" in page.texts  # 2.5 / 10


def test_html_is_escaped_wherever_text_comes_from():
    nasty = "</td><script>alert('&')</script>"
    page = Page(Named(nasty, lambda x: x)._repr_html_())
    assert repr(nasty) in page.texts
    assert any("<lambda>" in text for text in page.texts)
    assert "script" not in {tag for tag, _ in page.elements}
    estimate = lp.icl.Estimate(jnp.array(0.5), jnp.array(0.1), nasty)
    assert Page(estimate._repr_html_()).texts == [repr(estimate)]


def test_what_is_traced_has_no_html():
    seen = []
    jax.jit(lambda mu: seen.append(mu._repr_html_()) or mu.mean())(lp.Cube([1.0]))
    jax.vmap(lambda x: seen.append(lp.Mixture([1.0], [lp.Gaussian(x, jnp.eye(2))])._repr_html_()) or x)(
        jnp.ones((3, 2))
    )
    assert seen == [None, None]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_line_for_each_row_and_the_same_cells_as_html(name):
    result = TABLES[name]()
    title, names, *rows = repr(result).splitlines()
    data = result.to_dataset()
    along = next(iter(data.sizes))
    assert title.startswith(type(result).__name__)
    assert names.split()[0] == along
    assert [float(row.split()[0]) for row in rows] == [float(f"{x:.4g}") for x in data[along].values]
    html = result._repr_html_()
    assert html is not None
    assert html.count("<tr>") == 1 + len(rows)
    assert re.findall(r"<td>(.*?)</td>", html) == [cell for row in rows for cell in row.split()]


def test_a_long_table_is_cut_in_the_middle():
    lines = repr(prediction(*range(1, 101))).splitlines()
    assert len(lines) == 2 + 6 + 1 + 6
    assert set(lines[8].split()) == {"…"}
    assert lines[-1].split()[0] == "100"


@pytest.mark.parametrize("name", TABLES)
def test_a_dataset_holds_the_numbers_and_survives_a_file(name):
    result = TABLES[name]()
    data = result.to_dataset()
    for variable in set(data.data_vars) & set(result.__dataclass_fields__):
        np.testing.assert_array_equal(data[variable], getattr(result, str(variable)))
    kept = xr.load_dataset(io.BytesIO(data.to_netcdf(engine="scipy")), engine="scipy")
    xr.testing.assert_allclose(kept.astype(float), data.astype(float))


def test_a_dataset_names_every_parameter():
    np.testing.assert_array_equal(flow().to_dataset()["U"], flow().layers.U)
    heads = lp.MultiHead.pytorch_default(jax.random.key(0), 4, 2)
    assert set(named_arrays(heads)) == {f"heads_{h}_{name}" for h in (0, 1) for name in "KQVO"}


def test_lengths_past_64_bits_become_floats_in_a_dataset():
    assert prediction(10, 10**30).to_dataset()["L"].values.tolist() == [10.0, 1e30]


@pytest.mark.parametrize("name", TABLES)
def test_a_plot_draws_the_numbers_on_new_or_given_axes(name):
    import matplotlib.pyplot as plt

    result = TABLES[name]()
    ax = result.plot()
    lines = len(ax.lines)
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.lines])
    for value in np.ravel(getattr(result, "mean_square" if hasattr(result, "mean_square") else "risk")):
        assert np.any(np.isclose(drawn, value))
    assert result.plot(ax) is ax
    assert len(ax.lines) == 2 * lines
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    plt.close(ax.figure)  # pyrefly: ignore[bad-argument-type]


def test_every_public_result_prints_itself():
    from largeprompt import concentration, dynamics, icl

    results = {**vars(concentration), **vars(dynamics), **vars(icl)}
    modules = [kind for kind in results.values() if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")]
    silent = {kind.__name__ for kind in modules if not issubclass(kind, AbstractShown)}
    plain = {"AbstractRisk", "Training", "SGD", "Momentum", "Adam"}  # settings print as dataclasses do
    assert silent == plain | {"AbstractTrainer", "ReferenceTrainer"} & silent
    assert {kind.__name__ for kind in modules if issubclass(kind, AbstractTable)} == {
        "AttentionFlow",
        "Deviation",
        "Prediction",
        "Trajectory",
        "Ladder",
        "Generalisation",
        "PrefixRisks",
        "StartShares",
    }
