"""Several heads on one prompt: their risk exactly over prompts, and the best of them."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from icl_catalogue import FLAT, KMS, TASKS, attend, simulated
from largeprompt.dynamics import gradient_flow
from largeprompt.icl import (
    bayes_risk,
    best_reading,
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
    flow = gradient_flow(start, TASK, 5, [0.0, 1.0, 300.0])
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
    with pytest.raises(ValueError, match="heads is 3; the least risk is known for 1 and 2 softmax heads"):
        optimal_heads(TASK, 9, 3)


def test_scores_too_wide_for_the_table_are_sampled():
    task, eye = lp.icl.LinearRegression.experiment(lp.icl.identity(3)), np.eye(4)
    heads = [lp.Head(K=eye, Q=scale * eye, V=np.sign(scale) * eye, O=eye[3:]) for scale in (30.0, -30.0)]
    found = lp.icl.risk(lp.MultiHead(heads), task, 7, rtol=0.1)
    assert found.method.startswith("Monte Carlo over")
    assert "standard deviations above 8" in found.reason
    assert 1.0 < found.value < 1.5


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
