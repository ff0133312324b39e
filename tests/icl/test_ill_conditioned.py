"""Small variances keep their digits, in float64 and in float32: against closed forms and arithmetic of 60 digits."""

import math

import jax
import mpmath
import numpy as np
import pytest

from catalogue import matrix
from largeprompt.icl import LinearRegression, bayes_risk, best_reading, blocks, optimal_linear, risk

PRECISIONS = pytest.mark.parametrize(("x64", "rounding"), [(True, 1e-13), (False, 3e-7)], ids=["float64", "float32"])
VARIANCES = {"1e-9": [1.0, 1e-5, 1e-9], "1e-8": [1.0, 1e-8], "1e-12": [1e-12, 1.0, 1e-3]}


def in_many_digits(task: LinearRegression, L: float) -> tuple[np.ndarray, float]:
    """The solution of the normal equations (2.9) for invertible matrices, and the risk it leaves."""
    with mpmath.workdps(60):
        S, O, Q = (mpmath.matrix(np.asarray(M, float).tolist()) for M in (task.Sigma, task.Omega, task.query_Sigma))
        share, noise = mpmath.mpf(0) if math.isinf(L) else mpmath.mpf(1) / L, mpmath.mpf(float(task.noise))
        SO = S * O
        spread = sum(SO[i, i] for i in range(task.d)) + noise
        reading = ((1 + share) * SO * S + spread * share * S) ** -1 * SO
        left = Q * (O - O * S * reading)
        value = (noise + sum(left[i, i] for i in range(task.d))) / 2
        return np.array(reading.tolist(), float), float(value)


def turned(seed: int, values) -> np.ndarray:
    rotation, _ = np.linalg.qr(matrix(seed, len(values), len(values)))
    return (rotation * np.asarray(values)) @ rotation.T


@PRECISIONS
@pytest.mark.parametrize("name", VARIANCES)
@pytest.mark.parametrize("L", [7, 10**6, math.inf])
def test_small_variances_keep_their_digits(name, L, x64, rounding):
    with jax.enable_x64(x64):
        for Omega, noise in ((None, 0.0), (np.diag(VARIANCES[name][::-1]), 1e-3)):
            task = LinearRegression(np.diag(VARIANCES[name]), noise, Omega)
            expected, least = in_many_digits(task, L)
            found = optimal_linear(task, L)
            parts = blocks(found.attention, task)
            np.testing.assert_allclose(best_reading(task, L), expected, rtol=rounding)
            product = np.asarray(parts.R[0, 0], float) * np.asarray(parts.A, float)
            np.testing.assert_allclose(product, expected, rtol=2 * rounding)
            np.testing.assert_allclose(found.risk.value, least, rtol=rounding, atol=1e-50)


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_a_reading_is_exact_to_rounding_times_the_condition_number(condition):
    for seed, L in enumerate((5, 10**9, math.inf)):
        Sigma = turned(seed, np.geomspace(1, 1 / condition, 4))
        task = LinearRegression(Sigma, 0.0 if seed else 1e-6, turned(9, [2, 1, 0.5, 0.1]), turned(8, [1, 2, 3, 4]))
        expected, least = in_many_digits(task, L)
        off = np.abs(np.asarray(best_reading(task, L)) - expected).max() / np.abs(expected).max()
        assert off < 1e-15 * condition + 1e-13
        assert float(optimal_linear(task, L).risk.value) == pytest.approx(
            least, rel=1e-15 * condition + 1e-13, abs=1e-30
        )


def test_the_best_reading_is_the_least():
    task = LinearRegression(np.diag([1.0, 0.0]), Omega=[[1.0, 0.5], [0.5, 1.0]])
    np.testing.assert_allclose(best_reading(task, math.inf), np.diag([1.0, 0.0]), atol=1e-15)
    np.testing.assert_allclose(best_reading(task, 5), np.diag([1 / 1.4, 0.0]), atol=1e-15)


def test_an_eigenvalue_that_rounding_could_make_is_refused():
    almost = np.array([[1.0, 1 - 1e-6], [1 - 1e-6, 1.0]])
    np.testing.assert_allclose(best_reading(LinearRegression(almost), math.inf), np.linalg.inv(almost), rtol=1e-9)
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"Sigma has correlations .* float32; .* use float64"):
        best_reading(LinearRegression(almost), math.inf)
    with pytest.raises(
        ValueError, match="Omega has correlations with the eigenvalue 2e-14, which is lost in the rounding"
    ):
        optimal_linear(LinearRegression(np.eye(2), 0.0, [[1, 1 - 2e-14], [1 - 2e-14, 1]]), 3)
    with jax.enable_x64(False):  # of exact rank 1
        found = best_reading(LinearRegression(np.full((2, 2), 0.3)), math.inf)
        np.testing.assert_allclose(found, np.full((2, 2), 1 / 1.2), rtol=1e-6)


def test_a_traced_optimum_is_refused(as_a_stranger):
    with pytest.raises(ValueError, match="the optimum of linear attention is not traced; call it outside of jit"):
        jax.jit(lambda s2: optimal_linear(LinearRegression(np.eye(2), s2), 3).risk.value)(0.1)


def test_the_risk_of_the_best_layer_is_no_difference_of_large_numbers():
    """No noise, infinite length: 0, to rounding times the condition number, squared."""
    task = LinearRegression(turned(3, [1, 1e-2, 1e-5]))
    layer = optimal_linear(task, math.inf).attention
    assert 0 <= float(risk(layer, task, math.inf).value) < 1e-21


@PRECISIONS
def test_bayes_risks_keep_small_variances_that_queries_ask_for(x64, rounding):
    """Diagonal, one pair, no noise: in a direction alone, (d−L)/d of it is left; in float32 it was taken for 0."""
    with jax.enable_x64(x64):
        task = LinearRegression(np.diag([1e-9, 1.0]), 1e-12, query_Sigma=np.diag([1.0, 0.0]))
        alone = LinearRegression([[1e-9]], 1e-12, query_Sigma=[[1.0]])
        found, bound = float(bayes_risk(task, 2000).value), float(bayes_risk(alone, 1999).value)
        assert found == pytest.approx(bound, rel=1e-5)
