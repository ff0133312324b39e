"""The best layers against formulas typed here, minimisation by scipy, and the tables of MATH.md."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial.legendre import leggauss
from scipy.optimize import minimize

import largeprompt as lp
from catalogue import matrix
from icl_catalogue import FLAT, KMS, TASKS, mild, zero_risk
from largeprompt.icl import (
    LinearRegression,
    aligned_blocks,
    blocks,
    from_blocks,
    gradient_descent,
    kms,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_function,
    risk_gradient,
    risk_rate,
)
from largeprompt.icl._risk._quadrature import AlignedRisk

ANISOTROPIC = LinearRegression(mild(7, 3), 0.3, mild(8, 3))


def least_linear_risk(task: LinearRegression, L: float) -> float:
    """(2.10) from the eigenvalues of ΣΩ."""
    eigenvalues = np.linalg.eigvals(np.asarray(task.Sigma) @ np.asarray(task.Omega)).real
    s2, tau1 = float(task.noise), eigenvalues.sum()
    left = eigenvalues * (eigenvalues + tau1 + s2) / ((L + 1) * eigenvalues + tau1 + s2)
    return task.targets * (s2 + left.sum()) / 2


def linear_risk(A, c, p, r, task: LinearRegression, L: float):
    """(2.2) + (2.5) as they stand in MATH.md, for one target and queries like the covariates."""
    S, O, s2 = jnp.asarray(task.Sigma), jnp.asarray(task.Omega), float(task.noise)
    tau1, tau2 = jnp.trace(S @ O), jnp.trace(S @ O) ** 2 + 2 * jnp.trace(S @ O @ S @ O)
    a0 = A.T @ S @ p + r * s2 * c
    M1 = r * A.T @ S + jnp.outer(c, p @ S)
    M = M1 - jnp.eye(len(c))
    k = c @ S @ c
    common = a0 @ S @ a0 + 2 * r * tau1 * a0 @ S @ c + r**2 * tau2 * k
    limit = (common + jnp.trace(M @ O @ M.T @ S) + s2) / 2
    alpha0, gamma0 = p @ S @ p + r**2 * s2, jnp.trace(A.T @ S @ A @ S) + k * s2
    G1 = alpha0 * gamma0 + alpha0 * k * tau1 + r**2 * gamma0 * tau1 + r**2 * k * tau2
    G1 += 4 * r * (S @ p) @ O @ (S @ A @ S @ c)
    return limit + (G1 + common + jnp.trace(M1 @ O @ M1.T @ S)) / (2 * L)


@jax.jit
@jax.value_and_grad
def value_and_slopes(theta, L):
    """Of all parameters in one row, for d = 3."""
    return linear_risk(theta[:9].reshape(3, 3), theta[9:12], theta[12:15], theta[15], ANISOTROPIC, L)


@pytest.mark.parametrize("L", [1, 3, 10, 1000])
def test_no_minimisation_of_linear_attention_finds_less_than_its_optimum(L):
    found = optimal_linear(ANISOTROPIC, L)
    starts = np.random.default_rng(L).normal(size=(6, 16)) / 2
    best = min(
        minimize(lambda theta: tuple(map(np.asarray, value_and_slopes(theta, L))), start, jac=True, method="BFGS").fun
        for start in starts
    )
    np.testing.assert_allclose(found.risk.value, least_linear_risk(ANISOTROPIC, L), rtol=1e-12)
    np.testing.assert_allclose(found.risk.value, best, rtol=1e-7)
    np.testing.assert_allclose(risk(found.attention, ANISOTROPIC, L).value, found.risk.value, rtol=1e-12)
    assert risk_gradient(found.attention, ANISOTROPIC, L, rtol=1.0).norm() < 1e-12


def test_the_optimum_of_linear_attention_is_that_of_zhang():
    """Ω = I without noise: Γ_L = (1 + 1/L)Σ + (tr Σ/L) I."""
    task, L = LinearRegression(kms(3)), 7
    parts = blocks(optimal_linear(task, L).attention, task)
    Sigma = np.asarray(task.Sigma)
    Gamma = (1 + 1 / L) * Sigma + np.trace(Sigma) / L * np.eye(3)
    np.testing.assert_allclose(parts.R[0, 0] * parts.A, np.linalg.inv(Gamma), rtol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(parts.A), np.linalg.norm(parts.R), rtol=1e-12)


@pytest.mark.parametrize("L", [1, 10, math.inf])
def test_singular_covariances_have_an_optimum(L):
    task = LinearRegression(np.diag([1.5, 0.7, 0.0]), 0.2, mild(8, 3))
    part = LinearRegression(np.diag([1.5, 0.7]), 0.2, mild(8, 3)[:2, :2])
    found = optimal_linear(task, L).risk.value
    np.testing.assert_allclose(found, optimal_linear(part, L).risk.value, rtol=1e-12)
    expected = float(task.noise) / 2 if math.inf == L else least_linear_risk(part, L)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_nothing_to_learn_is_best_predicted_by_zero():
    task = LinearRegression(np.eye(2), 0.3, np.zeros((2, 2)))
    for L in (3, math.inf):
        np.testing.assert_allclose(optimal_linear(task, L).risk.value, 0.15, rtol=1e-12)
        np.testing.assert_allclose(optimal_softmax(task, L).risk.value, 0.15, rtol=1e-12)


def test_two_targets_cost_twice_one():
    two = LinearRegression(ANISOTROPIC.Sigma, 0.3, ANISOTROPIC.Omega, targets=2)
    for L in (3, math.inf):
        one = optimal_linear(ANISOTROPIC, L).risk.value
        found = optimal_linear(two, L)
        np.testing.assert_allclose(found.risk.value, 2 * one, rtol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(found.attention.U), np.linalg.norm(found.attention.V), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "L"),
    [("two targets", 2), ("other queries", 50), ("singular", 2), ("singular", math.inf)]
    + [("two targets, other queries", L) for L in (2, 50, math.inf)],
)
def test_no_step_away_from_the_optimum_of_linear_attention_improves_it(name, L):
    task = TASKS[name]
    found = optimal_linear(task, L)
    function = risk_function(found.attention, task, L)
    steps = np.array([size * matrix(seed, 8, 8) for seed in range(20) for size in (1e-3, 0.1, 1.0)])

    def risk_after(step):
        U, V = step[: task.dim, : task.dim], step[task.dim : task.dim + task.targets, : task.dim]
        return function.value_and_error(lp.LinearAttention(found.attention.U + U, found.attention.V + V))[0]

    assert found.risk.value > 0
    assert np.all(jax.jit(jax.vmap(risk_after))(steps) >= found.risk.value * (1 - 1e-12))


def test_infinite_prompts_leave_the_label_noise_alone():
    for task in (FLAT, KMS, ANISOTROPIC):
        for found in (optimal_linear(task, math.inf).risk, optimal_softmax(task, math.inf).risk):
            np.testing.assert_allclose(found.value, task.noise / 2, rtol=1e-10)


@pytest.mark.parametrize("L", [2, 30, math.inf])
def test_the_best_step_of_gradient_descent_is_best(L):
    found = gradient_descent(ANISOTROPIC, L)
    step = float(found.attention.U[0, 0] * found.attention.V[0, -1])
    for other in (0.9 * step, 0.999 * step, 1.001 * step, 1.1 * step, -step):
        away = gradient_descent(ANISOTROPIC, L, step=other)
        assert away.risk.value > found.risk.value
    expected = linear_risk(step * np.eye(3), np.zeros(3), np.zeros(3), 1.0, ANISOTROPIC, L)
    np.testing.assert_allclose(found.risk.value, expected, rtol=1e-12)
    if math.isfinite(L):
        assert found.risk.value > optimal_linear(ANISOTROPIC, L).risk.value


def test_gradient_descent_with_the_best_preconditioner_is_optimal_linear_attention():
    for L in (2, 30, math.inf):
        best = optimal_linear(ANISOTROPIC, L)
        parts = blocks(best.attention, ANISOTROPIC)
        found = gradient_descent(ANISOTROPIC, L, preconditioner=3.0 * parts.R[0, 0] * parts.A)
        np.testing.assert_allclose(found.risk.value, best.risk.value, rtol=1e-12)


@pytest.mark.parametrize(
    ("L", "value", "omega", "r"),
    [(5, 0.434972, 1.233, 0.528), (100, 0.129334, 0.431, 2.025), (1000, 0.060008, 0.366, 2.685)],
)
def test_the_best_softmax_layer_on_isotropic_data_is_that_of_the_table(L, value, omega, r):
    found = optimal_softmax(FLAT, L)
    parts = blocks(found.attention, FLAT)
    assert found.risk.exact
    np.testing.assert_allclose(found.risk.value, value, atol=6e-7)
    np.testing.assert_allclose(parts.A, omega * np.eye(5), atol=6e-4)
    np.testing.assert_allclose(parts.R, [[r]], atol=6e-4)


@pytest.mark.parametrize(("L", "value"), [(10, 0.32870), (200, 0.09333)])
def test_the_best_softmax_layer_on_kms_data_is_that_of_the_table(L, value):
    found = optimal_softmax(KMS, L)
    assert found.risk.exact
    np.testing.assert_allclose(found.risk.value, value, atol=3e-5)


@pytest.mark.parametrize("task", [FLAT, KMS, TASKS["two targets, other queries"]], ids=["iso", "kms", "other queries"])
def test_no_other_aligned_softmax_layer_is_better(task):
    L = 20
    found = optimal_softmax(task, L)
    parts = blocks(found.attention, task)
    r = parts.R[0, 0]
    for seed in range(4):
        for size in (1e-3, 0.3):
            A = parts.A + size * matrix(seed, task.d, task.d)
            for factor in (1 - size, 1.0, 1 + size):
                layer = from_blocks(aligned_blocks(A, factor * r, task), lp.SoftmaxAttention)
                assert risk(layer, task, L).value > found.risk.value


def softmax_risk_by_polar_nodes(task: LinearRegression, L: int):
    """(2.23) with the best r as a function of the diagonal of A, for d = 2 and queries like the covariates."""
    S, O, s2 = np.diag(task.Sigma), np.diag(task.Omega), float(task.noise)
    node, weight = leggauss(12)
    edges = np.concatenate([[0.0], np.geomspace(0.02, 8.0, 12)])
    half = np.diff(edges)[:, None] / 2
    radius, share = (edges[:-1, None] + half * (node + 1)).ravel(), (half * weight).ravel()
    angle = np.linspace(0, np.pi / 2, 129)  # a quarter of the circle is enough, by reflections
    on_circle = np.full(129, 1 / 128)
    on_circle[[0, -1]] /= 2
    x = np.sqrt(S)[:, None, None] * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)])[:, None]
    weights = np.outer(share * radius * np.exp(-(radius**2) / 2), on_circle)
    moments, label = lp.attention.WeightMoments(L), S @ O + s2

    def value(a) -> float:
        h = (S * a)[:, None, None] * x
        Q, unheld, K2, _ = (np.asarray(m) for m in moments.shares(np.einsum("i,ijk,ijk->jk", a, x, h)))
        quadratic = np.sum(weights * (label * Q + K2 * np.einsum("i,ijk,ijk->jk", O, h, h)))
        linear = np.sum(weights * unheld * np.einsum("i,ijk,ijk->jk", O, h, x))
        return float(label - linear**2 / quadratic) / 2

    return value


@pytest.mark.parametrize(("width", "noise", "L"), [(0.05, 0.02, 2), (0.3, 0.0, 3), (0.01, 2.0, 5)])
def test_no_minimisation_over_nodes_of_our_own_finds_less_at_short_lengths(width, noise, L):
    task = LinearRegression(np.diag([1.0, width]), noise)
    found = optimal_softmax(task, L)
    value = softmax_risk_by_polar_nodes(task, L)
    ends = [
        minimize(lambda log: value(np.exp(log)), start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-10})
        for start in ([1.0, 1.0], [2.0, 4.0])
    ]
    np.testing.assert_allclose(found.risk.value, value(np.diag(blocks(found.attention, task).A)), rtol=1e-7)
    np.testing.assert_allclose(found.risk.value, min(end.fun for end in ends), rtol=1e-7)


@pytest.mark.parametrize(
    ("variances", "noise", "L", "value"),
    [((1.0, 0.1, 0.01), 0.0, 3, 0.372941), ((4.0, 1.0, 0.25, 0.06, 0.015), 0.0, 2, 2.300862)],
)
def test_uneven_covariates_have_their_best_softmax_layer_at_short_lengths(variances, noise, L, value):
    """The values are those of searches over all A from random starts."""
    task = LinearRegression(np.diag(variances), noise)
    found = optimal_softmax(task, L)
    assert found.risk.exact
    np.testing.assert_allclose(found.risk.value, value, atol=6e-7)
    np.testing.assert_allclose(risk(found.attention, task, L).value, found.risk.value, rtol=1e-12)


def test_one_token_teaches_softmax_attention_nothing():
    for task in (KMS, TASKS["two targets, other queries"]):
        found = optimal_softmax(task, 1)
        assert not np.any(found.attention.V)
        np.testing.assert_allclose(found.risk.value, zero_risk(task), rtol=1e-12)


@pytest.mark.parametrize("L", [2, 300])
def test_slopes_of_an_aligned_risk_are_its_differences(L):
    aligned = AlignedRisk.of(TASKS["other queries"], lp.attention.WeightMoments(L))
    A, step = 0.7 * matrix(31, 2, 2), 1e-4 * matrix(32, 2, 2)
    found, slopes = aligned.with_slopes(A)
    ahead, behind = aligned.coefficients(A + step), aligned.coefficients(A - step)
    np.testing.assert_allclose(found, aligned.coefficients(A), rtol=1e-13)
    for i in range(2):
        np.testing.assert_allclose(np.sum(slopes[i] * step), (ahead[i] - behind[i]) / 2, rtol=1e-6)


def test_small_steps_from_the_best_softmax_layer_change_the_risk_to_second_order_only():
    found = optimal_softmax(FLAT, 20)
    parts = blocks(found.attention, FLAT)
    values = [
        float(
            risk(
                from_blocks(aligned_blocks((1 + e) * parts.A, parts.R[0, 0], FLAT), lp.SoftmaxAttention), FLAT, 20
            ).value
        )
        for e in (-1e-3, 0.0, 1e-3)
    ]
    assert abs(values[2] - values[0]) < 1e-8
    assert values[0] > values[1] < values[2]


def test_the_best_scale_at_infinite_length_is_that_of_the_rate():
    """(2.32) for d = 5, τ1 = 1, s² = 0.1, whatever the covariance."""
    for task in (FLAT, KMS):
        found = optimal_softmax(task, math.inf)
        parts = blocks(found.attention, task)
        np.testing.assert_allclose(1 / parts.R[0, 0], 0.3524, atol=5e-5)
        np.testing.assert_allclose(parts.R[0, 0] * parts.A @ task.Sigma, np.eye(5), atol=1e-10)
        np.testing.assert_allclose(found.rate, 10.40, atol=5e-3)
        np.testing.assert_allclose(risk_rate(found.attention, task).value, found.rate, rtol=1e-9)


def test_the_rate_is_the_minimum_of_the_constant_in_one_over_L():
    omega = np.linspace(0.3, 0.4, 100_001)
    constant = (1 - 2 * omega**2) ** -2.5 * (1.1 / omega**2 + 1 / (1 - 2 * omega**2))
    np.testing.assert_allclose(optimal_softmax(FLAT, math.inf).rate, constant.min() / 2, rtol=1e-8)


def test_the_least_softmax_risk_falls_to_the_noise_at_the_rate():
    rate = float(optimal_softmax(FLAT, math.inf).rate)
    gaps = [abs(float(optimal_softmax(FLAT, L).risk.value - 0.05) * L / rate - 1) for L in (10**4, 10**6, 10**8)]
    assert gaps[0] < 0.01
    assert gaps[1] < 1e-4
    assert gaps[2] < 1e-5
