"""Figures 1 and 5, claims C1 and C2: softmax against linear attention before training."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from icl_catalogue import KMS, attend, simulated
from judging import judged
from largeprompt import Head, LinearAttention, SoftmaxAttention
from largeprompt.icl import initial_gaps, norm, risk_gradient, squared_mean, widened
from largeprompt.lab import Store
from largeprompt.paper import Choice, Conventions
from largeprompt.paper.choice import COVARIANCES
from largeprompt.paper.experiment import Results
from largeprompt.paper.experiments import FIGURES
from largeprompt.paper.experiments._gaps import Gaps
from largeprompt.paper.experiments.figure_1 import SIZES, gaps, long_slope, ratio_of_means
from significance import assert_close_in_sigmas, assert_mean_is

QUICK = Choice("quick")
MILD = Conventions(score_scale=0.5, loss_factor=2.0, query_sigma="identity")


def pair(seed: int, scale: float) -> tuple[Head, Head]:
    """The same weights as softmax and as linear attention."""
    head = Head.pytorch_default(jax.random.key(seed), KMS.dim, scale=scale)
    return head, dataclasses.replace(head, kind="linear")


@pytest.fixture(scope="module")
def small() -> tuple[Gaps, xr.Dataset]:
    item = Gaps("kms:0.5", (4, 25), heads=3, prompts=2000, conventions=MILD, measured_heads=2, draws=2**13)
    return item, item.compute()


def test_measured_gaps_are_the_exact_ones(small):
    """Of every head that is measured; the error of the mean over heads knows that they share prompts."""
    _, data = small
    read = data.isel(head=slice(2))
    assert_close_in_sigmas(read.measured, read.exact, np.hypot(read.measured_stderr, read.exact_stderr))
    assert_close_in_sigmas(data.measured_mean, read.exact.mean("head"), data.measured_mean_stderr)
    assert (data.measured_mean_stderr < 0.1 * data.measured_mean).all()
    assert np.isnan(data.measured.isel(head=2)).all()


def test_bounds_lie_above(small):
    _, data = small
    assert (data.bound_log10 > np.log10(data.exact) + 1).all()


def test_a_computation_survives_the_store(small, tmp_path):
    item, data = small
    xr.testing.assert_identical(Store(tmp_path).save(item, data, {}), data)


def test_the_exact_gaps_are_those_of_plain_averages():
    """Outputs against prompts simulated in NumPy; gradients against the risks' own, over nodes that are not widened."""
    soft, lin = pair(5, 0.5)
    output, gradient = initial_gaps(soft, lin, KMS, 6)
    U, V = soft.merged().U, soft.merged().V
    squares = [
        (
            attend(SoftmaxAttention, U, V, batch.tokens, batch.queries)
            - attend(LinearAttention, U, V, batch.tokens, batch.queries)
        )[:, -1]
        ** 2
        for batch in simulated(KMS, 6, 40_000)
    ]
    assert_mean_is(np.concatenate(squares), output.value, float(output.stderr))
    ones, others = (risk_gradient(layer, KMS, 6, rtol=3e-3, max_draws=2**17) for layer in (soft, lin))
    apart = float(norm(jax.tree.map(jnp.subtract, jax.tree.leaves(ones.layer), jax.tree.leaves(others.layer))))
    error = 2 * apart * float(norm(ones.stderr))
    assert error < 0.1 * apart**2
    assert_close_in_sigmas(gradient.value, apart**2, np.hypot(gradient.stderr, error))


def test_gaps_vanish_at_infinite_length():
    assert all(abs(gap.value) < 1e-20 for gap in initial_gaps(*pair(5, 0.5), KMS, math.inf))


def test_gaps_refuse_layers_of_the_wrong_kind():
    soft, lin = pair(0, 1.0)
    with pytest.raises(ValueError, match="the layer is softmax attention; this holds of linear attention only"):
        initial_gaps(soft, soft, KMS, 5)
    with pytest.raises(ValueError, match="parameters of different shapes; their gradients have no difference"):
        initial_gaps(soft, lin.merged(), KMS, 5)
    with pytest.raises(ValueError, match="prompts is 1"):
        Gaps("identity", (10,), heads=1, prompts=1)


@pytest.mark.parametrize(("mean", "most"), [(0.0, 1.5), (0.3, 1.15)])
def test_a_squared_mean_is_without_bias_and_knows_its_error(mean, most):
    rng = np.random.default_rng(3)
    scales = np.array([1.0, 0.5, 2.0, 0.1])
    found = np.array([squared_mean(mean + scales * rng.normal(size=(40, 4))) for _ in range(800)])
    assert_mean_is(found[:, 0], 4 * mean**2)
    assert 0.87 < found[:, 1].mean() / found[:, 0].std() < most


def test_widened_numbers_have_the_moments_of_normal_ones():
    wide, weights = widened(np.random.default_rng(0).normal(size=(100_000, 10)))
    assert_mean_is(weights, 1.0)
    assert_mean_is(weights[:, None] * wide**2, 1.0)
    assert_mean_is(weights * wide[:, 0] ** 4, 3.0)


def test_slopes_and_ratios_are_those_of_power_laws():
    L, sizes = np.array([10, 100, 1000, 10_000]), np.array([[1.0], [3.0], [0.2]])
    slope, error = long_slope(sizes * L**-0.9, L)
    assert math.isclose(slope, -0.9)
    assert error < 1e-12
    assert ratio_of_means(2 * sizes[:, 0], sizes[:, 0]) == (2.0, 0.0)


def doctored(power: float = -1.0, bump: float = 1.0, off: float = 1.0, error: float = 0.01) -> Results:
    """Results of the quick preset in which every gap is a power of L, but for a bump at the fourth length."""
    L, heads = np.array(SIZES["quick"].short_to_long), SIZES["quick"].heads
    curve = 0.01 * L**power
    curve[3] *= bump
    tilt = np.linspace(-0.05, 0.05, heads)[:, None]
    sizes = np.linspace(0.5, 1.5, heads)[:, None] * np.exp(tilt * np.log(L / L[0]))
    exact = np.stack([sizes * curve] * 2)
    mean = exact.mean(axis=1)
    shape = ("quantity", "head", "L")
    data = xr.Dataset(
        {
            "exact": (shape, exact),
            "exact_stderr": (shape, 0.001 * exact),
            "measured": (shape, off * exact),
            "measured_stderr": (shape, 3 * error * exact),
            "bound_log10": (shape, np.full_like(exact, 9.0)),
            "size": (shape[1:], exact[0]),
            "measured_mean": (("quantity", "L"), off * mean),
            "measured_mean_stderr": (("quantity", "L"), error * mean),
        },
        coords={"quantity": ["output", "risk-gradient"], "head": np.arange(heads), "L": L},
        attrs={"measured_heads": heads, "bound_refusal": ""},
    )
    return {gaps(QUICK, covariance): data.assign_attrs(covariance=covariance) for covariance in COVARIANCES}


@pytest.mark.parametrize("key", ["C1", "C2"])
def test_verdicts_follow_the_data(key):
    def verdict(**how):
        return judged(key, QUICK, doctored(**how)).verdict

    assert verdict() == "holds"
    assert verdict(bump=5.0) == "does not hold"  # it does not fall everywhere
    assert verdict(power=-0.2) == "does not hold"  # nor towards 0
    assert verdict(off=1.4) == "does not hold"  # or sampled prompts have another gap
    assert verdict(error=0.2) == "not settled at this preset"
    short = {item: data.isel(L=slice(2)) for item, data in doctored().items()}
    assert judged(key, QUICK, short).verdict == "not settled at this preset"


def test_figures_say_what_they_draw():
    results = doctored(power=-0.8, off=1.02)
    for key in ("1a", "1b", "5a", "5b"):
        figure = FIGURES[key]
        data = figure.dataset(QUICK, results)
        summary, (panel,) = " ".join(figure.summary(data)), figure.chart(data).panels
        assert "-0.80" in summary
        assert "1.020 ± 0.00" in summary
        assert {series.role for series in panel.series} == {"measured", "seed", "theory", "bound"}
        line, points = (next(s for s in panel.series if s.role == role) for role in ("theory", "measured"))
        np.testing.assert_allclose(points.y, 1.02 * line.y)
        assert panel.remarks == (f"bound at L = 10000: {9 - math.log10(line.y[-1]):.0f} decades above",)


def test_a_measured_gap_below_zero_is_said_to_be_missing():
    results = doctored()
    for data in results.values():
        data["measured_mean"].values[:, -1] = -1e-9
    figure = FIGURES["1b"]
    (panel,) = figure.chart(figure.dataset(QUICK, results)).panels
    assert "measured below 0, so not drawn: L = 10000" in panel.remarks
