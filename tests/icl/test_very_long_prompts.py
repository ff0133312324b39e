"""Prompt lengths beyond int32, int64 and float32: what is exact works, what cannot says so in a line."""

import math

import jax
import numpy as np
import pytest

import largeprompt as lp
from largeprompt.attention import WeightMoments
from largeprompt.dynamics import flow_limit, gradient_flow, structured_start
from largeprompt.icl import (
    LinearRegression,
    RegressionOn,
    bayes_risk,
    deterministic_equivalent,
    gradient_descent,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_expansion,
    risk_gradient,
)

PRECISIONS = pytest.mark.parametrize(("x64", "rounding"), [(True, 1e-10), (False, 1e-5)], ids=["float64", "float32"])
LENGTHS = [10**12, 2**63, 10**25, 1e30, 10**60, 10**300]


@PRECISIONS
def test_what_a_layer_of_linear_attention_reaches_tends_to_its_limit_at_every_length(x64, rounding):
    with jax.enable_x64(x64):
        task = LinearRegression([[1.0, 0.3], [0.3, 0.5]], 0.1)
        layer = lp.LinearAttention(np.arange(9).reshape(3, 3) / 10, [[0.2, -0.1, 0.5]])
        start = structured_start(task, 0.3, kind="linear")
        found = [
            [
                float(part)
                for part in (
                    optimal_linear(task, L).risk.value,
                    gradient_descent(task, L).risk.value,
                    risk(layer, task, L).value,
                    risk(layer, task, L, query_in_prompt=True).value,
                    risk_gradient(layer, task, L).norm(),
                    bayes_risk(task, L).value,
                    deterministic_equivalent(task, L).value,
                    flow_limit(task, start, L).V[0, -1],
                    risk_expansion(structured_start(task, 0.3), task, L).value,
                )
            ]
            for L in (math.inf, *LENGTHS)
        ]
        for at_length in found[1:]:
            np.testing.assert_allclose(at_length, found[0], rtol=rounding)


def test_an_optimum_at_a_long_length_is_that_of_the_formula():
    """(2.10) at 10²⁵, where the noise does not hide it."""
    task = LinearRegression(np.diag([1.0, 0.25]))
    expected = (1 * 2.25 / 1 + 0.25 * 1.5 / 0.25) / 2 * 1e-25
    assert float(optimal_linear(task, 10**25).risk.value) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [1, 3])
def test_the_bayes_risk_of_long_prompts_joins_that_of_shorter_ones(n):
    """Variances so small that a prompt of 10¹⁵ teaches half of what there is."""
    task = LinearRegression(1e-15 * np.diag([1.0, 2.0, 5.0][:n]), 1.0, query_Sigma=np.eye(n))
    below, above = (float(bayes_risk(task, L).value) for L in (10**15, 10**15 + 1))
    assert 0.6 < below < 0.51 + n / 4
    assert above == pytest.approx(below, rel=1e-9)
    assert float(bayes_risk(task, 10**60).value) == 0.5


def test_the_best_softmax_layer_has_its_limit_at_long_lengths():
    task = LinearRegression(np.eye(2), 0.1)
    assert float(optimal_softmax(task, 10**23).risk.value) == pytest.approx(0.05, rel=1e-12)


def gap_of_one_covariate(layer: lp.SoftmaxAttention, L: int, draws: int) -> tuple[float, float]:
    """R_L − R_∞ of (2.21) for Σ = Ω = 1 without noise, over queries and coefficients drawn 1.8 times as wide."""
    x, w = wide = 1.8 * np.random.default_rng(0).normal(size=(2, draws))
    weights = 1.8**2 * np.exp(-(1 - 1.8**-2) * np.sum(wide**2, axis=0) / 2)
    u, v = np.asarray(layer.U[:, 0])[:, None] * x, np.asarray(layer.V[0])
    score, value = u[0] + w * u[1], v[0] + w * v[1]  # Γ is the square of (1, w)
    Q, _, _, lost = (np.asarray(part) for part in WeightMoments(L).shares(score**2))
    b = score * value
    gap = weights * (value**2 * Q - b**2 * lost + 2 * b * w * x * Q) / 2
    return gap.mean(), gap.std() / math.sqrt(draws)


@pytest.mark.parametrize("L", [10**12, 10**25])
def test_rare_queries_make_the_risk_of_long_prompts(L):
    """Plain nodes see none of them, and their standard error is then far too small."""
    task = LinearRegression([[1.0]])
    layer = lp.SoftmaxAttention([[0.5, 0.0], [0.7, 0.0]], [[0.3, 0.9]])
    found, limit = risk(layer, task, L, rtol=1.0), float(risk(layer, task, math.inf).value)
    gap, error = gap_of_one_covariate(layer, L, 10**6)
    assert gap < -20 * error
    assert abs(float(found.value) - limit - gap) < 5 * math.hypot(float(found.stderr), error)
    assert 0 < float(found.stderr) < 0.5 * abs(gap)


@pytest.mark.parametrize(("x64", "size", "L"), [(True, 1e150, 10**25), (False, 1e15, 10)], ids=["float64", "float32"])
def test_a_large_risk_has_a_finite_standard_error(x64, size, L):
    with jax.enable_x64(x64):
        task = LinearRegression(np.eye(2), 0.1)
        layer = lp.SoftmaxAttention(np.arange(9).reshape(3, 3) / 20, np.array([[0.2, -0.1, 0.5]]))
        large = risk(lp.SoftmaxAttention(layer.U, size * layer.V), task, L, rtol=1.0)
        assert 0.01 * size**2 < float(large.value) < 10 * size**2
        assert math.isfinite(float(large.stderr))
        assert float(large.stderr) < 0.1 * float(large.value)


LAYER = lp.SoftmaxAttention(np.eye(3), np.ones((1, 3)))
REFUSED = {
    "beyond float64": (lambda: optimal_linear(LinearRegression(np.eye(2)), 10**400), "L is about 1e400; a prompt"),
    "beyond text": (
        lambda: risk(LAYER, LinearRegression(np.eye(2)), 10**5000),
        "L is about 1e5000; a prompt length is",
    ),
    "a long prompt to draw": (
        lambda: risk(LAYER, LinearRegression(np.eye(2)), 10**12, method="sampled"),
        r"L is 1e\+12; a prompt of that many tokens takes",
    ),
    "a prompt beyond int64 to draw": (
        lambda: gradient_flow(LAYER, RegressionOn(lp.Cube(np.ones(2))), 10**23, [1.0]),
        r"L is 1e\+23; a prompt of that many tokens takes",
    ),
    "long prompts without noise": (
        lambda: bayes_risk(RegressionOn(lp.Cube(np.ones(2))), 10**12),
        "L is 1000000000000; for covariates that are not Gaussian such prompts are drawn, up to L = 1000000000",
    ),
}


@pytest.mark.parametrize(("call", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_length_that_cannot_work_is_refused_in_a_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
