"""Sigmoid, ReLU and a kind known by its reading alone, from deviations to training, against what NumPy finds."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from largeprompt import attention, concentration, dynamics, engine, icl
from largeprompt.concentration import deviation, predict, prompt_length_for
from significance import assert_close_in_sigmas, assert_mean_is
from test_kinds import KEY, MU, TASK, D, Difference, U, V, Z

EVERY: dict[str, attention.AbstractAttention] = {
    "sigmoid": lp.SigmoidAttention(U, V),
    "normalised-relu": lp.ReLUAttention(U, V, normalised=True),
    "difference": Difference(U, V),
}


def read(name: str, tokens: np.ndarray, u: np.ndarray) -> np.ndarray:
    """What NumPy reads off each of many prompts, along a direction of its own."""
    s = np.einsum("pli,pi->pl", tokens, np.broadcast_to(u, (len(tokens), D)))

    def mean(weights):
        return np.einsum("pl,pli->pi", weights, tokens)

    if name == "difference":
        one, two = np.exp(s), np.exp(s / 2)
        return mean(one / one.sum(axis=1, keepdims=True)) - mean(two / two.sum(axis=1, keepdims=True)) / 2
    weights = 1 / (1 + np.exp(-s)) if name == "sigmoid" else np.maximum(s, 0)
    total = s.shape[1] if name == "sigmoid" else np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    return mean(weights / total)


def task_losses(name: str, L: int, n: int) -> np.ndarray:
    """Half the squared errors of n prompts of the task."""
    rng = np.random.default_rng(1)
    root = np.sqrt(np.array([1.0, 0.5]))
    w, x, query = rng.normal(size=(n, 2)), rng.normal(size=(n, L, 2)) * root, rng.normal(size=(n, 2)) * root
    noise = np.sqrt(0.2) * rng.normal(size=(n, L + 1))
    tokens = np.concatenate([x, (np.einsum("pli,pi->pl", x, w) + noise[:, :L])[:, :, None]], axis=2)
    u = np.concatenate([query, np.zeros((n, 1))], axis=1) @ U.T
    return (read(name, tokens, u) @ V[0] - np.sum(query * w, axis=1) - noise[:, L]) ** 2 / 2


@functools.cache
def prompts(n: int, L: int) -> np.ndarray:
    return np.random.default_rng(0).multivariate_normal(MU.m, MU.Gamma, (n, L))


@pytest.mark.parametrize("name", EVERY)
def test_deviations_constants_and_lengths_of_every_kind_are_those_of_prompts(name):
    layer, L, n = EVERY[name], 300, 6000
    squares = np.sum(((read(name, prompts(n, L), U @ Z[0]) @ V.T) - np.asarray(layer(MU, Z[0]))) ** 2, axis=1)
    there, error = squares.mean(), squares.std() / np.sqrt(n)
    found = deviation(layer, MU, Z[:1], [L], "output", KEY, replicates=1000)
    assert_close_in_sigmas(found.mean_square[0], there, np.hypot(found.stderr[0], error))
    predicted = predict(layer, MU, Z[:1], [L], "output")
    assert predicted.regime.name == "1/L"
    allowed = np.hypot(error, 0.01 * there)  # the law is that of long prompts
    assert_close_in_sigmas(predicted.constant / L, there, np.hypot(allowed, predicted.constant_stderr / L))
    rates = concentration.rates(layer, MU, Z[0])
    assert_close_in_sigmas(float(rates.output) / L, there, np.hypot(allowed, float(rates.stderr[0]) / L))
    length = prompt_length_for(float(np.sqrt(there)), layer, MU, Z[:1], key=KEY, replicates=200)
    assert 0.6 * L < length.L < 1.5 * L


@pytest.mark.parametrize("name", EVERY)
def test_risks_and_steps_of_training_of_every_kind_are_those_of_prompts(name):
    """Steps so small that the parameters stay: on average they are the rate times the slope of the risk."""
    layer, losses = EVERY[name], task_losses(name, 5, 100_000)
    found = icl.risk(layer, TASK, 5, rtol=0.02)
    assert_close_in_sigmas(found.value, losses.mean(), np.hypot(found.stderr, losses.std() / np.sqrt(len(losses))))
    trainer = engine.trainer_for(dynamics.Training(TASK, 5, batch=512, rate=1e-6), (layer,))
    assert trainer.name == "reference"
    states: list[Any] = [trainer.start()]
    for step in range(1, 61):
        states.append(trainer.advance(states[-1], step))
    slope = icl.risk_gradient(layer, TASK, 5, rtol=0.05)
    for name in ("U", "V"):
        path = np.stack([getattr(state.layers[0], name) for state in states])
        found, error = getattr(slope.layer, name), getattr(slope.stderr, name)
        assert_mean_is(-np.diff(path, axis=0) / 1e-6, found, np.asarray(error))


def test_relu_attention_on_infinite_prompts_learns_as_linear_attention_of_half_the_scores():
    """On centred Gaussians E max(s, 0)z = Γu/2: the risk is that of U/2, and the flow the one that this risk has."""
    layer = lp.ReLUAttention(U, V)
    found, twin = icl.risk(layer, TASK, math.inf, rtol=0.01), icl.risk(lp.LinearAttention(U / 2, V), TASK, math.inf)
    assert_close_in_sigmas(found.value, twin.value, np.hypot(found.stderr, 1e-9))

    def risk(parameters):
        return icl.risk(lp.LinearAttention(parameters[0] / 2, parameters[1]), TASK, math.inf).value

    slope, point, steps = jax.jit(jax.grad(risk)), (jnp.asarray(U), jnp.asarray(V)), 40
    for _ in range(steps):  # by the midpoint rule
        middle = jax.tree.map(lambda p, g: p - 0.4 / steps / 2 * g, point, slope(point))
        point = jax.tree.map(lambda p, g: p - 0.4 / steps * g, point, slope(middle))
    flow = dynamics.gradient_flow(layer, TASK, math.inf, [0.0, 0.4], draws=2**11)
    assert_close_in_sigmas(flow.risk[-1], float(risk(point)), np.hypot(flow.risk_stderr[-1], 1e-6))
    np.testing.assert_allclose(flow.last.U, point[0], atol=0.03)
    np.testing.assert_allclose(flow.last.V, point[1], atol=0.03)
