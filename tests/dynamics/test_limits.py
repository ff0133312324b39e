"""Gradient flows from Assumption 5.1 land where theory says: Remark 5.3, Appendix F.3, and beyond."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from largeprompt.dynamics import flow_limit, gradient_flow, structured_start
from largeprompt.icl import (
    LinearRegression,
    aligned_blocks,
    diagonal,
    from_blocks,
    identity,
    kms,
    norm,
    optimal_linear,
    risk,
)


def flat(seed: int, rank: int) -> np.ndarray:
    """A singular covariance in directions of its own, with no slow ones among those that it has."""
    basis, _ = np.linalg.qr(catalogue.matrix(seed, 3, rank))
    return basis @ basis.T


SINGULAR = catalogue.covariance(1, 3, rank=2)
TASKS = {
    "isotropic": LinearRegression(identity(3)),
    "correlated, noisy": LinearRegression(kms(3), noise=0.5),
    "general tasks": LinearRegression(kms(3, 0.3), noise=0.1, Omega=catalogue.covariance(0, 3) + 0.3 * np.eye(3)),
    "query shift": LinearRegression(
        kms(3), Omega=np.eye(3) / 3, query_Sigma=catalogue.covariance(2, 3) + 0.3 * np.eye(3)
    ),
    "two targets": LinearRegression(kms(3, 0.2), noise=0.1, targets=2),
    "singular": LinearRegression(SINGULAR),
    "singular, noisy": LinearRegression(SINGULAR, noise=0.3),
    "singular queries": LinearRegression(kms(3, 0.3), query_Sigma=flat(4, 2)),
    "singular, general tasks": LinearRegression(SINGULAR, 0.1, catalogue.covariance(0, 3) + 0.3 * np.eye(3)),
    "all singular": LinearRegression(flat(5, 2), 0.2, flat(6, 2), flat(7, 2)),
    "two targets, singular tasks and queries": LinearRegression(kms(3, 0.2), 0.0, flat(6, 1), flat(7, 2), targets=2),
}
THETA = catalogue.matrix(3, 3, 3)
THETA = THETA / math.sqrt(np.linalg.norm(THETA @ THETA.T))


def distance(layer, other) -> float:
    """Of all their parameters."""
    pairs = zip(jax.tree.leaves(layer), jax.tree.leaves(other), strict=True)
    return math.sqrt(sum(np.sum((np.asarray(one) - np.asarray(two)) ** 2) for one, two in pairs))


def assert_the_flow_from_ends_at_its_limit(task, start, L):
    flow = gradient_flow(start, task, L, [3000.0], rtol=1e-9, atol=1e-11, solver="implicit")
    assert flow.ending == "completed"
    assert distance(flow.last, flow_limit(task, start, L)) < 3e-7
    assert float(flow.gradient_norm[-1]) < 1e-8


@pytest.mark.parametrize(
    ("name", "L"),
    # several targets at a finite length: below, by the least risk and what is conserved
    [(name, math.inf) for name in TASKS]
    + [(name, 20) for name in ("correlated, noisy", "general tasks", "query shift")]
    + [(name, 20) for name in ("singular", "singular, general tasks", "all singular")],
)
def test_the_flow_ends_at_its_known_limit(name, L):
    start = structured_start(TASKS[name], 0.4, THETA, "linear")
    assert_the_flow_from_ends_at_its_limit(TASKS[name], start, L)


def softmax_flow(task, alpha, Theta, times):
    start = structured_start(task, alpha, Theta, "softmax")
    flow = gradient_flow(start, task, math.inf, times, rtol=1e-9, atol=1e-11, solver="implicit", dense=True)
    return flow, flow_limit(task, start)


def test_the_infinite_softmax_flow_is_the_infinite_linear_one_and_once_settled_can_be_asked_for_any_time():
    flow, limit = softmax_flow(TASKS["correlated, noisy"], 0.4, THETA, [10.0, 3000.0])
    assert flow.ending == "completed"
    assert distance(flow.last, limit) < 3e-7
    assert float(flow.gradient_norm[-1]) < 1e-8
    assert flow._dense is not None
    settled = flow._dense[2]  # where the solver stopped, for nothing moved any more
    assert settled < 3000
    assert distance(flow.at((settled + 3000) / 2), flow.last) < 1e-9


def test_the_limit_is_that_of_the_remark_whatever_noise_and_tasks():
    inverse = np.linalg.inv(np.asarray(kms(4)))
    fourth_root = np.trace(inverse @ inverse) ** 0.25
    for task in (LinearRegression(kms(4)), LinearRegression(kms(4), 0.7, catalogue.covariance(5, 4) + np.eye(4))):
        limit = flow_limit(task, structured_start(task, 0.2))
        np.testing.assert_allclose(limit.U[:4, :4], inverse / fourth_root, rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(limit.V, fourth_root * np.eye(5)[4:], rtol=1e-11)
        assert float(risk(limit, task, math.inf).value) == pytest.approx(float(task.noise) / 2, abs=1e-12)


def test_the_limit_for_singular_covariates_is_that_of_the_appendix():
    task, alpha = LinearRegression(SINGULAR), 0.4
    pseudo = np.linalg.pinv(SINGULAR, hermitian=True)
    projection = SINGULAR @ pseudo
    start = THETA @ THETA.T
    unseen = start - projection @ start @ projection
    size, t = alpha**2 * np.sum(unseen**2), np.trace(pseudo @ pseudo)
    gamma = math.sqrt((math.sqrt(size**2 + 4 * t) - size) / (2 * t))
    limit = flow_limit(task, structured_start(task, alpha, THETA))
    np.testing.assert_allclose(limit.U[:3, :3], gamma * pseudo + alpha * unseen, rtol=1e-9)
    assert float(limit.V[0, -1]) == pytest.approx(1 / gamma, rel=1e-10)


def test_what_no_query_reaches_is_not_read_off():
    """Σ_q = diag(1, 0): A₂₂ stays, r⁴ − r²α²/2 = 1."""
    task = LinearRegression(np.eye(2), query_Sigma=np.diag([1.0, 0.0]))
    limit = flow_limit(task, structured_start(task, 0.4))
    r = math.sqrt(0.04 + math.sqrt(0.04**2 + 1))
    np.testing.assert_allclose(limit.V, [[0, 0, r]], rtol=1e-12)
    np.testing.assert_allclose(limit.U[:2, :2], np.diag([1 / r, 0.4 / math.sqrt(2)]), rtol=1e-12)


def test_with_nothing_to_learn_only_what_predicts_fades():
    """Coefficients along the first axis, queries along the second: the risk is least where A₁₂ = 0."""
    task = LinearRegression(np.eye(2), 0.1, np.diag([1.0, 0.0]), np.diag([0.0, 1.0]))
    limit = flow_limit(task, structured_start(task, 0.4, np.full((2, 1), math.sqrt(0.5))))
    np.testing.assert_allclose(limit.V, [[0, 0, 0.4 * math.sqrt(0.75)]], rtol=1e-12)
    np.testing.assert_allclose(limit.U[:2, :2], [[0.2, 0], [0.2, 0.2]], rtol=1e-12)


def start_from(A, r, task):
    return from_blocks(aligned_blocks(jnp.asarray(A), r, task), lp.LinearAttention)


def test_a_start_with_a_larger_A_keeps_the_sign_of_r_where_covariances_commute():
    task = TASKS["correlated, noisy"]
    start = start_from(3 * np.eye(3), -0.1, task)
    with pytest.raises(ValueError, match=r"not a start of Assumption 5\.1"):
        flow_limit(task, start)
    start = start_from(-3 * np.eye(3), -0.1, task)
    assert_the_flow_from_ends_at_its_limit(task, start, math.inf)


def test_a_start_whose_r_may_turn_is_refused():
    """Here it does: tr AΣΩΣ_q < 0, and r ends below 0."""
    narrow = [np.outer(n, n) for n in np.array([[math.cos(t), math.sin(t)] for t in (0.2, 1.6, 1.9, 2.6)])]
    Sigma, Omega, query_Sigma = (M + 0.05 * np.eye(2) for M in narrow[:3])
    task = LinearRegression(Sigma, 0.0, Omega, query_Sigma)
    start = start_from(1.3 * narrow[3], 0.2, task)
    assert float(gradient_flow(start, task, math.inf, [200.0]).last.V[0, -1]) < -0.1
    with pytest.raises(ValueError, match="where r may change its sign; the limit is not known"):
        flow_limit(task, start)


def test_float32_starts_have_a_limit():
    with jax.enable_x64(False):
        task = LinearRegression(kms(3), 0.1)
        start = structured_start(task, 0.3, THETA[:, :1] / np.linalg.norm(THETA[:, 0]), "linear")
        limit = flow_limit(task, start, 10**12)
        assert limit.U.dtype == jnp.float32
        inverse = np.linalg.inv(np.asarray(task.Sigma, float))
        np.testing.assert_allclose(limit.V[0, -1] * limit.U[:3, :3], inverse, rtol=1e-5, atol=1e-5)


def test_at_finite_length_the_linear_flow_ends_at_the_optimum():
    for L in (1, 7, 1000):
        task = TASKS["general tasks"]
        limit, best = flow_limit(task, structured_start(task, 0.3, kind="linear"), L), optimal_linear(task, L)
        assert distance(limit, best.attention) < 1e-10


@pytest.mark.parametrize("name", ["two targets", "two targets, singular tasks and queries"])
def test_with_several_targets_the_limit_has_the_least_risk_and_what_the_flow_conserves(name):
    """k r² − ‖A‖²: with the product rA, as far as the risk sees it, that is all of a limit."""
    task = TASKS[name]
    start = structured_start(task, 0.4, THETA, "linear")
    limit = flow_limit(task, start, 20)
    assert float(risk(limit, task, 20).value) == pytest.approx(float(optimal_linear(task, 20).risk.value), rel=1e-12)
    kept = [np.sum(np.asarray(layer.V) ** 2) - np.sum(np.asarray(layer.U) ** 2) for layer in (start, limit)]
    assert kept[1] == pytest.approx(kept[0], rel=1e-10)


def test_ill_conditioned_covariates_take_their_time():
    task = LinearRegression(diagonal([1.0, 0.3, 0.1]), noise=0.1)
    flow, limit = softmax_flow(task, 0.3, None, [10.0, 1e4])
    assert distance(flow.layer(0), limit) > 1
    assert distance(flow.last, limit) < 1e-6 * float(norm(limit))


def test_a_negative_start_mirrors_the_positive_one():
    task = TASKS["isotropic"]
    with pytest.warns(UserWarning, match="alpha is -0.3"):
        start = structured_start(task, -0.3)
    mirrored = flow_limit(task, structured_start(task, 0.3))
    limit = flow_limit(task, start)
    np.testing.assert_allclose(limit.U, -mirrored.U, rtol=1e-12)
    np.testing.assert_allclose(limit.V, -mirrored.V, rtol=1e-12)


def test_a_start_outside_the_range_of_the_theorem_still_converges_and_warns():
    task = LinearRegression(0.1 * identity(3))
    with pytest.warns(UserWarning, match=r"0 < alpha < 10\.75 as printed, 3\.398 as corrected"):
        start = structured_start(task, 30.0)
    flow = gradient_flow(start, task, math.inf, [500.0], rtol=1e-9, atol=1e-11)
    assert distance(flow.last, flow_limit(task, start)) < 1e-5


def test_a_start_of_another_form_has_no_known_limit():
    task = TASKS["isotropic"]
    with pytest.raises(ValueError, match=r"not a start of Assumption 5\.1"):
        flow_limit(task, lp.LinearAttention(np.ones((4, 4)), np.ones((1, 4))))
    with pytest.raises(ValueError, match="known at L = inf only"):
        flow_limit(task, structured_start(task, 0.3), 10)
