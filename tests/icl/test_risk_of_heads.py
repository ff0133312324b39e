"""Several heads on one prompt: their risk exactly over prompts, and the best of them."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import roots_genlaguerre

import largeprompt as lp
from icl_catalogue import FLAT, KMS, TASKS, attend, simulated
from largeprompt.attention import WeightMoments
from largeprompt.attention._joint_integrals import Accuracy, joint_integrals
from largeprompt.dynamics import gradient_flow
from largeprompt.icl import (
    LinearRegression,
    bayes_risk,
    best_reading,
    best_reading_of_rank,
    blocks,
    optimal_heads,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_function,
    risk_gradient,
)
from largeprompt.icl._risk._heads import OverHeads
from largeprompt.icl._stationary._differences import differences, replicate_gradients
from largeprompt.icl._stationary._symmetries import all_flat
from refusals import assert_refused
from significance import assert_close_in_sigmas, assert_mean_is

TASK = TASKS["other queries"]
KINDS = {"softmax": lp.SoftmaxAttention, "linear": lp.LinearAttention}


def heads(kinds, aligned: bool, seed: int = 0, head_dim: int = 2) -> lp.MultiHead:
    rng = np.random.default_rng(seed)
    found = []
    for kind in kinds:
        K, Q, V = (0.6 * rng.normal(size=shape) for shape in ((head_dim, 3), (head_dim, 3), (1, 3)))
        if aligned:
            K[:, 2:], V[:, :2] = 0, 0
        found.append(lp.Head(K, Q, V, kind=kind))
    return lp.MultiHead(found)


def simulated_losses(layer: lp.MultiHead, L: int, n: int) -> np.ndarray:
    losses = []
    for batch in simulated(TASK, L, n):
        outputs = []
        for head in layer.heads:
            U, V = np.asarray(head.merged().U), np.asarray(head.merged().V)
            outputs.append(attend(KINDS[head.kind], U, V, batch.tokens, batch.queries))
        losses.append(np.sum((np.sum(outputs, axis=0) - batch.targets) ** 2, axis=1) / 2)
    return np.concatenate(losses)


def test_aligned_heads_of_both_kinds_have_the_risk_of_simulated_prompts():
    L = 5  # the length of the other table here
    layer = heads(("softmax", "softmax", "linear"), aligned=True)
    found = risk(layer, TASK, L, rtol=1e-2)
    assert found.method == "exact over prompts and W, quasi-Monte Carlo over x"
    assert found.reason == "3 heads with P = C = 0 on Gaussian tokens"
    assert_mean_is(simulated_losses(layer, L, 40_000), found.value, float(found.stderr))


def test_heads_that_read_all_of_a_token_have_the_risk_of_simulated_prompts_and_their_gradient():
    layer = heads(("linear", "softmax"), aligned=False, seed=1)
    found = risk(layer, TASK, 7, rtol=1e-2)
    assert found.method == "exact over prompts, quasi-Monte Carlo over (W, x)"
    assert_mean_is(simulated_losses(layer, 7, 40_000), found.value, float(found.stderr))
    function = risk_function(layer, TASK, 7, draws=256)
    _, gradient = eqx.filter_jit(function.value_and_gradient)(layer)
    value = eqx.filter_jit(lambda layer: function.value_and_error(layer)[0])
    direction = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), layer)
    ahead, behind = (value(jax.tree.map(lambda a, b, s=s: a + s * b, layer, direction)) for s in (1e-5, -1e-5))
    slope = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-6)


def test_a_sum_of_heads_on_an_infinite_prompt_has_a_closed_form():
    layer = heads(("softmax", "linear"), aligned=False, seed=2)
    found = risk(layer, TASK, math.inf)
    assert found.exact
    sampled = risk(layer, TASK, math.inf, jax.random.key(1), rtol=0.02, method="sampled")
    assert_close_in_sigmas(found.value, sampled.value, sampled.stderr)
    alone = lp.MultiHead(layer.heads[:1])
    np.testing.assert_allclose(
        risk(alone, TASK, math.inf).value, risk(layer.heads[0], TASK, math.inf).value, rtol=1e-12
    )


def test_a_pair_of_opposite_heads_is_exact_and_a_flow_keeps_it():
    best = optimal_heads(TASK, 5, 2)
    found = risk(best.attention, TASK, 5)
    assert found.exact
    np.testing.assert_allclose(found.value, best.risk.value, rtol=1e-12)
    assert risk_gradient(best.attention, TASK, 5, rtol=1e9).norm() < 1e-5
    start = jax.tree.map(lambda leaf: 0.5 * leaf, best.attention)
    flow = gradient_flow(start, TASK, 5, [0.0, 1.0, 300.0], rtol=1e-4)  # its end is a minimum
    one, other = flow.last.heads
    np.testing.assert_allclose(one.merged().U, -other.merged().U, atol=1e-12)
    np.testing.assert_allclose(one.V, -other.V, atol=1e-12)
    assert float(best.risk.value) < float(flow.risk[-1]) < float(best.risk.value) + 1e-3


def test_the_gradient_of_a_pair_is_that_over_nodes():
    pair = optimal_heads(TASK, 5, 2).attention
    moved = jax.tree.map(lambda leaf: 1.3 * leaf, pair)
    exact = risk_gradient(moved, TASK, 5)
    # a change of the last bit is no pair any more, and the same layer to rounding
    nearly = eqx.tree_at(lambda layer: layer.heads[0].V, moved, moved.heads[0].V * (1 + 1e-15))
    over_nodes = risk_gradient(nearly, TASK, 5, rtol=1e9)
    assert "quasi-Monte Carlo" in over_nodes.method
    for a, b, error in zip(*map(jax.tree.leaves, (exact.layer, over_nodes.layer, over_nodes.stderr)), strict=True):
        np.testing.assert_allclose(a, b, atol=6 * float(jnp.max(error)) + 1e-4)


@pytest.mark.parametrize("L", [5, 10, 100])
def test_the_best_pair_lies_between_linear_attention_with_one_token_less_and_with_all(L):
    for task in (FLAT, KMS, TASK):
        pair = float(optimal_heads(task, L, 2).risk.value)
        assert float(optimal_linear(task, L).risk.value) < pair < float(optimal_linear(task, L - 1).risk.value)
        assert float(bayes_risk(task, L).value) < pair < float(optimal_softmax(task, L).risk.value)


def test_the_best_pair_of_isotropic_tasks_is_that_of_the_table():
    found = [float(optimal_heads(FLAT, L, 2).risk.value) for L in (10, 100)]
    np.testing.assert_allclose(found, (0.2574156, 0.0808046), atol=2e-7)


@pytest.mark.parametrize("L", [5, 10])
def test_a_finite_scale_lowers_the_risk_of_a_pair_as_derived(L):
    """dR/dε² = −2(L−1)/L³ E[n gᵀΩg] at ε = 0, n = xᵀBᵀΣBx and g = ΣBx, where B is linear attention's at L − 1."""
    task = KMS
    B = np.asarray(best_reading(task, L - 1)) * L / (L - 1)
    Sigma, Omega = np.asarray(task.Sigma), np.asarray(task.Omega)
    one, two = B.T @ Sigma @ B @ Sigma, B.T @ Sigma @ Omega @ Sigma @ B @ Sigma
    slope = -2 * (L - 1) / L**3 * (np.trace(one) * np.trace(two) + 2 * np.trace(one @ two))

    def risk_at(scale: float) -> float:
        K, Q, V = np.eye(6)[:5], np.zeros((5, 6)), np.eye(6)[5:] / (2 * scale)
        Q[:, :5] = scale * B
        return float(risk(lp.MultiHead([lp.Head(K, Q, V), lp.Head(K, -Q, -V)]), task, L).value)

    small, smaller, limit = risk_at(0.08), risk_at(0.04), float(optimal_linear(task, L - 1).risk.value)
    first = 16 * (smaller - limit) / (0.08**2 * 3) - (small - limit) / (0.08**2 * 3)  # without the term in ε⁴
    np.testing.assert_allclose(first, slope, rtol=0.03)


def test_one_head_is_the_best_softmax_layer_and_ends_of_the_range_are_known():
    one, single = optimal_heads(TASK, 9, 1), optimal_softmax(TASK, 9)
    np.testing.assert_allclose(risk(one.attention.heads[0].merged(), TASK, 9).value, single.risk.value, rtol=1e-10)
    endless = optimal_heads(TASK, math.inf, 2)
    np.testing.assert_allclose(risk(endless.attention, TASK, math.inf).value, endless.risk.value, rtol=1e-12)
    np.testing.assert_allclose(endless.risk.value, optimal_linear(TASK, math.inf).risk.value, rtol=1e-12)
    excess = float(optimal_heads(TASK, 10**5, 2).risk.value - endless.risk.value)
    np.testing.assert_allclose(endless.rate, excess * 10**5, rtol=1e-3)
    lone = optimal_heads(TASK, 1, 2)
    np.testing.assert_allclose(risk(lone.attention, TASK, 1).value, lone.risk.value, rtol=1e-12)


def test_more_heads_are_never_worse_and_four_are_those_of_the_table():
    found = [optimal_heads(FLAT, 10, heads) for heads in range(1, 5)]
    risks = [float(optimum.risk.value) for optimum in found]
    assert np.all(np.diff(risks) < -1e-5)
    np.testing.assert_allclose(risks, [0.35446, 0.25742, 0.25663, 0.25506], atol=6e-6)
    assert all(optimum.risk.exact for optimum in found)
    assert risks[-1] > float(optimal_linear(FLAT, 10).risk.value)
    np.testing.assert_allclose([optimum.rate for optimum in found[1:]], found[1].rate)
    for optimum in found[2:]:
        assert len(optimum.attention.heads) == found.index(optimum) + 1
    sampled = risk(found[3].attention, FLAT, 10, method="sampled", rtol=0.02)
    assert_close_in_sigmas(sampled.value, risks[3], sampled.stderr)


@pytest.mark.parametrize("heads", [3, 4])
def test_the_least_risk_of_several_heads_is_that_of_the_quadrature_at_their_scores(heads):
    """Scores are multiples a of the identity: an average over |x| of `joint_integrals` at correlations of ±1."""
    optimum = optimal_heads(FLAT, 10, heads)
    a, r = (np.array([float(at(head)) for head in optimum.attention.heads]) for at in (scale_of, value_of))
    x, weights = roots_genlaguerre(48, 1.5)  # |x|²/2 has the density of Γ(5/2)
    label, omega, x = float(FLAT.tau1 + FLAT.noise), float(FLAT.Omega[0, 0]), np.sqrt(2 * x)
    kept = weights > 1e-9 * weights.max()
    x, weights = x[kept], weights[kept] / weights.sum()
    total = float(jnp.sum(FLAT.Omega * FLAT.query_Sigma) + FLAT.noise) / 2
    for i in range(heads):
        one_minus_Q = np.asarray(WeightMoments(10).shares((a[i] * x) ** 2)[1])
        total -= r[i] * a[i] * omega * weights @ (one_minus_Q * x**2)
        for j in range(i, heads):
            sign = np.sign(a[i] * a[j])
            q, uu, uv, vu, vv = np.array(
                [joint_integrals(abs(a[i]) * t, abs(a[j]) * t, sign, 10.0, Accuracy(0.4, 11.0)) for t in x]
            ).T
            form = label * q + omega * x**2 * (uu * a[i] ** 2 + vv * a[j] ** 2 + (uv + vu) * a[i] * a[j])
            total += (0.5 if i == j else 1.0) * r[i] * r[j] * weights @ form
    np.testing.assert_allclose(optimum.risk.value, total, rtol=1e-5)


def scale_of(head):
    return head.merged().U[0, 0]


def value_of(head):
    return head.V[0, -1]


def test_narrow_heads_share_the_directions_and_come_near_linear_attention_of_their_rank_with_one_token_less():
    task = LinearRegression(np.diag([1.0, 0.5]), 0.1, np.diag([0.4, 0.8]))
    one, two = (optimal_heads(task, 5, heads, head_dim=1) for heads in (1, 2))
    for optimum, rank in ((one, 1), (two, 2)):
        assert {head.K.shape[0] for head in optimum.attention.heads} == {1}
        assert float(optimum.risk.value) > best_reading_of_rank(task, 5, rank).risk
        sampled = risk(optimum.attention, task, 5, method="sampled", rtol=0.01)
        assert_close_in_sigmas(sampled.value, optimum.risk.value, np.hypot(sampled.stderr, optimum.risk.stderr))
    linear = best_reading_of_rank(task, 4, 2).risk
    assert float(one.risk.value) - 0.1 > linear > float(two.risk.value) - 3 * float(two.risk.stderr) > linear - 0.02
    endless = optimal_heads(task, math.inf, 3, head_dim=1)
    np.testing.assert_allclose(risk(endless.attention, task, math.inf).value, endless.risk.value, rtol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_best_reading_of_a_rank_has_its_risk_as_a_layer_of_linear_attention(rank):
    found = best_reading_of_rank(KMS, 20, rank)
    U, V = np.zeros((6, 6)), np.zeros((1, 6))
    U[:5, :5], V[0, 5] = found.reading, 1.0
    np.testing.assert_allclose(risk(lp.LinearAttention(U, V), KMS, 20).value, found.risk, rtol=1e-12)
    assert np.linalg.matrix_rank(found.reading) == rank
    if rank == 5:
        np.testing.assert_allclose(found.risk, optimal_linear(KMS, 20).risk.value, rtol=1e-12)


def test_in_long_prompts_a_pair_is_enough_and_the_other_heads_are_idle():
    pair, more = (optimal_heads(FLAT, 10**5, heads) for heads in (2, 4))
    assert float(more.risk.value) == float(pair.risk.value)
    assert [float(jnp.abs(head.V).max()) > 0 for head in more.attention.heads] == [True, True, False, False]


def test_narrow_heads_need_a_common_basis():
    assert_refused(
        lambda: optimal_heads(TASKS["two targets, other queries"], 5, 3, head_dim=1), "head_dim is 1, below 2"
    )
    assert_refused(lambda: optimal_heads(FLAT, 2000, 2, head_dim=1), "L is 2000; several narrow heads")


def test_scores_too_wide_for_the_table_are_sampled():
    task, eye = lp.icl.LinearRegression.experiment(lp.icl.identity(3)), np.eye(4)
    heads = [lp.Head(K=eye, Q=scale * eye, V=np.sign(scale) * eye, O=eye[3:]) for scale in (30.0, -30.0)]
    found = lp.icl.risk(lp.MultiHead(heads), task, 7, rtol=0.1)
    assert found.method.startswith("Monte Carlo over")
    assert "standard deviations above 8" in found.reason
    assert 1.0 < found.value < 1.5


def test_heads_of_both_kinds_over_a_law_of_lengths_have_the_risk_of_simulated_prompts():
    law = lp.Lengths([0, 1, 3, 8], [0.1, 0.3, 0.2, 0.4])
    layer = heads(("softmax", "softmax", "linear"), aligned=False, seed=2)
    found, sampled = (risk(layer, TASK, law, method=method, rtol=0.03) for method in ("auto", "sampled"))
    assert found.method.startswith("exact over prompts")
    assert_close_in_sigmas(sampled.value, found.value, np.hypot(sampled.stderr, found.stderr))


def test_linear_heads_over_a_law_of_lengths_have_the_average_of_their_risks():
    law, layer = lp.Lengths([0, 1, 3, 8], [0.1, 0.3, 0.2, 0.4]), heads(("linear", "linear"), aligned=False, seed=3)
    empty = float(np.sum(TASK.query_Sigma * TASK.Omega) + TASK.noise) * TASK.targets / 2
    each = [float(risk(layer, TASK, L).value) for L in (1, 3, 8)]
    np.testing.assert_allclose(risk(layer, TASK, law).value, np.dot([0.1, 0.3, 0.2, 0.4], [empty, *each]), rtol=1e-12)


def test_linear_heads_have_a_closed_form_at_every_length():
    layer = heads(("linear", "linear", "linear"), aligned=False, seed=4)
    found = risk(layer, TASK, 7)
    assert found.exact
    assert found.reason == "linear heads on Gaussian tokens"
    assert_mean_is(simulated_losses(layer, 7, 40_000), found.value, 0.0)


def test_a_linear_head_shared_by_two_has_its_risk():
    (one,) = heads(("linear",), aligned=False, seed=5).heads
    shared = lp.MultiHead([lp.Head(one.K, one.Q, share * one.V, kind="linear") for share in (0.3, 0.7)])
    for L in (3, 10**12):
        np.testing.assert_allclose(risk(shared, TASK, L).value, risk(one, TASK, L).value, rtol=1e-12)


def test_hessians_from_differences_are_those_of_the_average_over_nodes():
    layer, L = heads(("softmax", "softmax"), aligned=True, head_dim=1), 5
    function = risk_function(layer, TASK, L, draws=64)
    assert isinstance(function, OverHeads)
    x = all_flat(blocks(head.merged(), TASK) for head in layer.heads)
    found = differences(function, x)
    # values along a line through A and R: a second difference
    line = 1e-3 * np.where(found.gradients.any(axis=0), np.cos(np.arange(x.size)), 0.0)
    ahead, still, behind = (replicate_gradients(function, x + s * line)[0].mean() for s in (1, 0, -1))
    np.testing.assert_allclose(line @ found.hessians.mean(axis=0) @ line, ahead + behind - 2 * still, rtol=1e-3)
