"""Gradients of the risk against MATH.md's formulas coded here, simulated prompts, and finite differences."""

import math

import equinox as eqx
import jax
import numpy as np
import pytest
from scipy.special import softmax

import largeprompt as lp
from catalogue import matrix
from icl_catalogue import TASKS, attend, simulated, square_root, token_covariance, weights
from largeprompt.attention import WeightMoments
from largeprompt.icl import (
    LinearRegression,
    identity,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_function,
    risk_gradient,
)
from significance import assert_close_in_sigmas, assert_mean_is

SOFTMAX, LINEAR = lp.SoftmaxAttention, lp.LinearAttention
KMS = TASKS["anisotropic"]
ANY = 1e6  # a tolerance that any gradient meets: the first draws are the last


def linear_gradient(U, V, task: LinearRegression, L: float) -> tuple[np.ndarray, np.ndarray]:
    """(2.3) + [(2.6) + 2 × (2.3) with M1 for M] / 2L, for one target and queries like the covariates."""
    d = task.d
    A, c, p, r = U[:d, :d], U[d, :d], V[0, :d], V[0, d]
    S, O, s2 = np.asarray(task.Sigma), np.asarray(task.Omega), float(task.noise)
    tau1, tau2 = np.trace(S @ O), np.trace(S @ O) ** 2 + 2 * np.trace(S @ O @ S @ O)
    a0 = A.T @ S @ p + r * s2 * c
    M1 = r * A.T @ S + np.outer(c, p @ S)

    def first_order(M):
        h0, H = S @ (a0 + r * tau1 * c), S @ M @ O
        in_A = np.outer(S @ p, h0) + r * S @ H.T
        in_c = r * s2 * h0 + H @ S @ p + r * tau1 * S @ a0 + r**2 * tau2 * S @ c
        in_p = S @ A @ h0 + S @ H.T @ c
        in_r = s2 * c @ h0 + np.sum(H * (A.T @ S)) + tau1 * a0 @ S @ c + r * tau2 * c @ S @ c
        return in_A, in_c, in_p, in_r

    k, beta, delta = c @ S @ c, S @ p, S @ A @ S @ c
    alpha0, gamma0 = p @ S @ p + r**2 * s2, np.trace(A.T @ S @ A @ S) + k * s2
    d_alpha, d_gamma = gamma0 + k * tau1, alpha0 + r**2 * tau1
    d_k = alpha0 * tau1 + r**2 * tau2 + s2 * d_gamma
    wishart = (
        2 * d_gamma * S @ A @ S + 4 * r * np.outer(S @ O @ beta, S @ c),
        2 * d_k * S @ c + 4 * r * S @ A.T @ S @ O @ beta,
        2 * d_alpha * S @ p + 4 * r * S @ O @ delta,
        2 * d_alpha * r * s2 + 2 * r * gamma0 * tau1 + 2 * r * k * tau2 + 4 * beta @ O @ delta,
    )
    parts = zip(first_order(M1 - np.eye(d)), wishart, first_order(M1), strict=True)
    in_A, in_c, in_p, in_r = (limit + (one + 2 * two) / (2 * L) for limit, one, two in parts)
    in_U = np.zeros((d + 1, d + 1))
    in_U[:d, :d], in_U[d, :d] = in_A, in_c
    return in_U, np.append(in_p, in_r)[None]


@pytest.mark.parametrize("L", [1, 5, 300, math.inf])
def test_the_gradient_of_linear_attention_is_the_formula_of_the_paper(L):
    U, V = weights(70, KMS, size=0.7)
    found = risk_gradient(LINEAR(U, V), KMS, L)
    in_U, in_V = linear_gradient(U, V, KMS, L)
    np.testing.assert_allclose(found.layer.U, in_U, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.layer.V, in_V, rtol=1e-10, atol=1e-12)
    assert not np.any(found.stderr.U)
    np.testing.assert_allclose(found.norm(), math.hypot(np.linalg.norm(in_U), np.linalg.norm(in_V)), rtol=1e-12)
    if math.inf == L:
        np.testing.assert_allclose(risk_gradient(SOFTMAX(U, V), KMS, L).layer.U, in_U, rtol=1e-10, atol=1e-12)


def assert_slopes(value, gradient, layer: lp.SoftmaxAttention | lp.LinearAttention, step: float = 1e-4) -> None:
    """Central differences of `value` along three directions are those of the gradient."""
    for seed in range(3):
        dU, dV = matrix(seed, *layer.U.shape), matrix(seed + 3, *layer.V.shape)
        ends = [float(value(type(layer)(layer.U + s * dU, layer.V + s * dV))) for s in (step, -step)]
        expected = float(np.sum(gradient.U * dU) + np.sum(gradient.V * dV))
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_the_gradient_of_linear_attention_is_the_slope_of_its_risk(inside):
    task = TASKS["two targets, other queries"]
    layer = LINEAR(*weights(72, task))
    found = risk_gradient(layer, task, 6, query_in_prompt=inside).layer
    assert_slopes(lambda at: risk(at, task, 6, query_in_prompt=inside).value, found, layer)
    assert not np.any(found.U[:, 2:])  # meets the zeros of the query


def test_the_gradient_over_nodes_is_the_slope_over_nodes():
    task = TASKS["two targets, other queries"]
    layer = SOFTMAX(*weights(74, task))
    function = risk_function(layer, task, 7, draws=2**9)
    value_and_gradient = eqx.filter_jit(lambda at: function.value_and_gradient(at))
    value, gradient = value_and_gradient(layer)
    assert_slopes(lambda at: value_and_gradient(at)[0], gradient, layer)
    np.testing.assert_allclose(value, eqx.filter_jit(function.value_and_error)(layer)[0], rtol=1e-12)


def prompt_gradients(U, V, task: LinearRegression, L: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """∂ of the loss in U and V on each simulated prompt, by (1.2)."""
    in_U, in_V = [], []
    for batch in simulated(task, L, n):
        shares = softmax(np.einsum("bld,bd->bl", batch.tokens, batch.queries @ U.T), axis=1)
        m = np.einsum("bl,bld->bd", shares, batch.tokens)
        error = m @ V.T - batch.targets
        heights = batch.tokens @ V.T - (m @ V.T)[:, None]
        slope = np.einsum("bl,blk,bld,bk->bd", shares, heights, batch.tokens, error, optimize=True)
        in_U.append(slope[:, :, None] * batch.queries[:, None])
        in_V.append(error[:, :, None] * m[:, None])
    return np.concatenate(in_U), np.concatenate(in_V)


@pytest.mark.parametrize(("name", "L"), [("anisotropic", 1), ("anisotropic", 20), ("two targets, other queries", 3)])
def test_the_gradient_of_softmax_attention_is_that_of_simulated_prompts(name, L):
    task = TASKS[name]
    U, V = weights(76, task, size=0.35)
    found = risk_gradient(SOFTMAX(U, V), task, L, rtol=ANY)
    in_U, in_V = prompt_gradients(U, V, task, L, 50_000)
    assert_mean_is(in_U, found.layer.U, found.stderr.U)
    assert_mean_is(in_V, found.layer.V, found.stderr.V)


def test_the_gradient_of_softmax_attention_is_the_formula_in_the_weights_moments():
    """(2.22) over (w, x) drawn here, with the slopes of Q and K₂ by differences."""
    L, n, task = 12, 200_000, TASKS["other queries"]
    U, V = weights(78, task)
    moments, rng = WeightMoments(L), np.random.default_rng(0)
    W = rng.normal(size=(n, 1, 2)) @ square_root(task.Omega)
    x = rng.normal(size=(n, 2)) @ square_root(task.query_Sigma)
    query, gamma, v = np.append(x, np.zeros((n, 1)), axis=1), token_covariance(task, W), V[0]
    u = query @ U.T
    Gu, Gv = np.einsum("bij,bj->bi", gamma, u), gamma @ v
    nu, b, a, t = np.sum(u * Gu, axis=1), Gu @ v, Gv @ v, np.sum(W[:, 0] * x, axis=1)
    Q, K2 = (np.asarray(m) for m in moments.shares(nu)[::2])
    step = 1e-4 * (1 + nu)
    ends = [[np.asarray(m) for m in moments.shares(nu + s * step)[::2]] for s in (1, -1)]
    # a ν below the step is read as 0 on its far side
    width = np.where(nu < step, nu + step, 2 * step)
    dQ, dK2 = ((up - down) / width for up, down in zip(*ends, strict=True))
    e = b * K2 - t * (1 - Q)
    k2 = b**2 * dK2 + a * dQ + 2 * b * t * dQ
    found = risk_gradient(SOFTMAX(U, V), task, L, rtol=ANY)
    assert_mean_is((e[:, None] * Gu + Q[:, None] * Gv)[:, None], found.layer.V, found.stderr.V)
    in_U = (e[:, None] * Gv + k2[:, None] * Gu)[:, :, None] * query[:, None]
    assert_mean_is(in_U, found.layer.U, found.stderr.U)


@pytest.mark.parametrize(("kind", "method"), [("softmax", "auto"), ("linear", "auto"), ("softmax", "sampled")])
def test_the_gradient_of_a_head_follows_by_the_chain_rule(kind, method):
    """∇_K = s Q ∇_Uᵀ, ∇_Q = s K ∇_U, ∇_V = Oᵀ∇, ∇_O = ∇ Vᵀ."""
    K, Q, V, O = (0.6 * matrix(80 + i, *shape) for i, shape in enumerate([(2, 3), (2, 3), (2, 3), (1, 2)]))
    s = 0.5
    head = lp.Head(K, Q, V, O, scale=s, kind=kind)
    found = risk_gradient(head, KMS, 5, rtol=ANY, method=method).layer
    merged = (SOFTMAX if kind == "softmax" else LINEAR)(s * K.T @ Q, O @ V)
    g = risk_gradient(merged, KMS, 5, rtol=ANY, method=method).layer
    np.testing.assert_allclose(found.K, s * Q @ g.U.T, atol=1e-12)
    np.testing.assert_allclose(found.Q, s * K @ g.U, atol=1e-12)
    np.testing.assert_allclose(found.V, O.T @ g.V, atol=1e-12)
    np.testing.assert_allclose(found.O, g.V @ V.T, atol=1e-12)


def test_sampled_gradients_agree_with_the_exact_ones():
    U, V = weights(76, KMS, size=0.35)
    exact = risk_gradient(LINEAR(U, V), KMS, 5)
    sampled = risk_gradient(LINEAR(U, V), KMS, 5, jax.random.key(3), rtol=ANY, method="sampled")
    assert_close_in_sigmas(sampled.layer.U, exact.layer.U, sampled.stderr.U)
    assert_close_in_sigmas(sampled.layer.V, exact.layer.V, sampled.stderr.V)
    assert np.linalg.norm(sampled.stderr.V) < 0.2 * sampled.norm()


def test_many_heads_have_the_gradient_of_simulated_prompts():
    (U, V), (U2, V2) = weights(76, KMS, size=0.35), weights(84, KMS, size=0.35)
    layer = lp.MultiHead([lp.Head(np.eye(3), U, V), lp.Head(np.eye(3), U2, V2)])
    found = risk_gradient(layer, KMS, 5, rtol=ANY)
    in_V = []
    for batch in simulated(KMS, 5, 50_000):
        m, m2 = (attend(SOFTMAX, W, np.eye(3), batch.tokens, batch.queries) for W in (U, U2))
        in_V.append((m @ V.T + m2 @ V2.T - batch.targets)[:, :, None] * m[:, None])
    assert_mean_is(np.concatenate(in_V), found.layer.heads[0].V, found.stderr.heads[0].V)


def test_the_gradient_vanishes_at_the_optima():
    task = LinearRegression(identity(2), 0.1)
    best = optimal_linear(task, 9).attention
    assert risk_gradient(best, task, 9, rtol=ANY).norm() < 1e-13
    curved = optimal_softmax(task, 9).attention
    found = risk_gradient(curved, task, 9, rtol=ANY)
    assert_close_in_sigmas(found.layer.U, 0, found.stderr.U + 1e-6)
    assert_close_in_sigmas(found.layer.V, 0, found.stderr.V + 1e-6)
    assert found.norm() < 1e-2
    # all directions, also those that leave P = C = 0: the same layer as a head
    head = lp.Head(np.eye(3), curved.U, curved.V)
    full = risk_gradient(head, task, 9, rtol=ANY)
    assert_close_in_sigmas(full.layer.Q, 0, full.stderr.Q + 1e-6)


def test_aligned_layers_have_a_gradient_within_their_own_kind():
    U, V = np.diag([0.5, 0.3, 0.0]), np.array([[0.0, 0.0, 1.2]])
    aligned = risk_gradient(SOFTMAX(U, V), KMS, 9, rtol=ANY)
    any_layer = risk_gradient(lp.Head(np.eye(3), U, V), KMS, 9, rtol=ANY)
    assert_close_in_sigmas(aligned.layer.U, any_layer.layer.Q, np.hypot(aligned.stderr.U, any_layer.stderr.Q) + 1e-9)
    assert_close_in_sigmas(aligned.layer.V, any_layer.layer.V, np.hypot(aligned.stderr.V, any_layer.stderr.V) + 1e-9)
    assert not np.any(aligned.layer.U[2])
    assert not np.any(aligned.layer.V[0, :2])


@pytest.mark.parametrize("method", ["auto", "sampled"])
def test_standard_errors_are_honest(method):
    """Across keys, values and gradients scatter as much as their standard errors say."""
    layer = SOFTMAX(*weights(76, KMS, size=0.35))
    keys = jax.random.split(jax.random.key(9), 24)
    given = {"rtol": ANY, "method": method, "max_draws": 2**9}
    risks = [risk(layer, KMS, 5, key, **given) for key in keys]
    gradients = [risk_gradient(layer, KMS, 5, key, **given) for key in keys]
    values, errors = np.array([r.value for r in risks]), np.array([r.stderr for r in risks])
    slopes, slope_errors = (
        np.array([np.append(part.U[:, :2], part.V) for part in parts])
        for parts in ([g.layer for g in gradients], [g.stderr for g in gradients])
    )
    for x, error in ((values[:, None], errors[:, None]), (slopes, slope_errors)):
        spread, reported = x.std(axis=0, ddof=1), np.sqrt(np.mean(error**2, axis=0))
        # 23 degrees of freedom: a ratio within 2 both ways, for each of ten numbers, is beyond five standard errors
        assert np.all(spread < 2 * reported), spread / reported
        assert np.all(spread > reported / 2), spread / reported
