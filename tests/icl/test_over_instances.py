"""Risks of any kind of attention: averages over sampled instances, against prompts simulated in NumPy."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss

import largeprompt as lp
from icl_catalogue import TASKS, simulated, token_covariance, weights, zero_risk
from largeprompt.attention import AbstractAttention, Head, MultiHead, ReLUAttention, SigmoidAttention
from largeprompt.icl import (
    optimal_linear,
    risk,
    risk_function,
    risk_gradient,
    same_prompt_gap,
    stationary_points,
)
from significance import assert_close_in_sigmas

TASK = TASKS["anisotropic"]
WEIGHTS = {
    SigmoidAttention: lambda s: 1 / (1 + np.exp(-s)),
    ReLUAttention: lambda s: np.maximum(s, 0),
}
SLOPES = {
    SigmoidAttention: lambda s: 1 / (2 + 2 * np.cosh(s)),
    ReLUAttention: lambda s: np.heaviside(s, 0.5),
}
KINDS = pytest.mark.parametrize("kind", WEIGHTS, ids=lambda kind: kind.kind)


class Cubic(AbstractAttention):
    """A kind of a user's own, known by its reading alone: E s³z of the scores s."""

    def reading(self, mu, u):
        if isinstance(mu, lp.Empirical):
            scores = mu.points @ u
            return (scores**3) @ mu.points / mu.size
        return 3 * (u @ mu.cov() @ u) * mu.cov() @ u  # of a centred Gaussian


def finite_excess(weight, U, V, L: int, n: int) -> np.ndarray:
    """Losses on simulated prompts less those of predicting 0."""
    found = []
    for batch in simulated(TASK, L, n):
        shares = weight(np.einsum("bld,bd->bl", batch.tokens, batch.queries @ U.T)) / L
        output = np.einsum("bl,bld->bd", shares, batch.tokens) @ V.T
        found.append(np.sum(output * (output - 2 * batch.targets), axis=1) / 2)
    return np.concatenate(found)


def infinite_excess(slope, U, V, n: int) -> np.ndarray:
    """The same on infinite prompts, which read E φ(s)z = Γu E φ′(s) by Stein's identity."""
    nodes, shares = hermegauss(101)
    found = []
    for batch in simulated(TASK, 1, n):
        u = batch.queries @ U.T
        tilted = np.einsum("bij,bj->bi", token_covariance(TASK, batch.W), u)
        nu = np.sum(u * tilted, axis=1)
        mean = slope(np.sqrt(nu)[:, None] * nodes) @ shares / shares.sum()
        output = mean[:, None] * tilted @ V.T
        found.append(np.sum(output * (output - 2 * batch.targets), axis=1) / 2)
    return np.concatenate(found)


@KINDS
@pytest.mark.parametrize("L", [5, math.inf])
def test_sigmoid_and_relu_attention_have_the_risk_of_simulated_prompts(kind, L):
    U, V = weights(12, TASK, size=0.6)
    found = risk(kind(U, V), TASK, L, rtol=1e-2)
    n = 20_000
    excess = finite_excess(WEIGHTS[kind], U, V, L, n) if L == 5 else infinite_excess(SLOPES[kind], U, V, n)
    assert "instances" in found.method
    assert kind.__name__ in found.reason
    error = math.hypot(float(found.stderr), excess.std() / math.sqrt(n))
    assert_close_in_sigmas(found.value, zero_risk(TASK) + excess.mean(), error)


@pytest.mark.parametrize(
    ("kind", "L"), [(SigmoidAttention, 4), (SigmoidAttention, math.inf), (ReLUAttention, math.inf), (Cubic, 4)]
)
def test_the_gradient_of_any_kind_is_that_of_the_mean_loss(kind, L):
    layer = kind(*map(jnp.asarray, weights(12, TASK, size=0.4)))
    function: Any = risk_function(layer, TASK, L, draws=8)

    def mean_loss(layer):
        def loss(key):
            of_instance, of_prompt = jax.random.split(key)
            one = TASK.draw(of_instance).prompt(of_prompt, L)
            return jnp.sum((layer(one.measure, one.query) - one.target) ** 2) / 2

        return jax.vmap(loss)(function.keys).mean()

    value, gradient = eqx.filter_jit(function.value_and_gradient)(layer)
    expected, slope = eqx.filter_jit(eqx.filter_value_and_grad(mean_loss))(layer)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(gradient.U, slope.U, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(gradient.V, slope.V, rtol=1e-7, atol=1e-12)


def test_heads_of_several_kinds_have_a_risk():
    keys = jax.random.split(jax.random.key(0))
    heads = [Head.pytorch_default(keys[0], 3, outputs=1, kind="sigmoid"), Head.pytorch_default(keys[1], 3, outputs=1)]
    found = risk(MultiHead(heads), TASK, 5, rtol=0.1)
    assert "sigmoid" in found.reason
    assert risk_gradient(heads[0], TASK, math.inf, rtol=1.0).norm() > 0


@KINDS
def test_what_is_known_for_softmax_and_linear_attention_refuses_other_kinds_by_name(kind, as_a_stranger):
    layer, linear = kind(*weights(12, TASK)), optimal_linear(TASK, 5).attention
    with pytest.raises(ValueError, match=rf"the layer is of type {kind.__name__}; it must be one head of softmax"):
        same_prompt_gap(layer, linear, TASK, 5)
    with pytest.raises(ValueError, match="kind is 'sigmoid'; it must be 'softmax' or 'linear'"):
        stationary_points(TASK, 5, "sigmoid")  # pyrefly: ignore[bad-argument-type]
