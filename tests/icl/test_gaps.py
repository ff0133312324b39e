"""How far softmax and linear attention are from one another on the same prompts."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from catalogue import matrix
from icl_catalogue import TASKS, aligned, attend, simulated, token_covariance, weights
from largeprompt.attention import WeightMoments
from largeprompt.icl._gaps import _mean_gaps, same_prompt_gap
from largeprompt.icl._risk._nodes import Nodes
from significance import assert_mean_is

SOFTMAX, LINEAR = lp.SoftmaxAttention, lp.LinearAttention
KMS = TASKS["anisotropic"]


def shared_prompt_squares(soft, lin, task, L: int, n: int) -> np.ndarray:
    """Squared distances between the two outputs on simulated prompts."""
    found = []
    for batch in simulated(task, L, n):
        outputs = [attend(kind, U, V, batch.tokens, batch.queries) for kind, (U, V) in ((SOFTMAX, soft), (LINEAR, lin))]
        found.append(np.sum((outputs[0] - outputs[1]) ** 2, axis=1))
    return np.concatenate(found)


@pytest.mark.parametrize("L", [1, 4, 20])
@pytest.mark.parametrize("name", ["anisotropic", "two targets, other queries"])
def test_the_same_prompt_gap_is_that_of_simulated_prompts(name, L):
    task = TASKS[name]
    soft, other = weights(14, task, size=0.3), weights(18, task, size=0.3)
    for lin in (soft, other):
        found = same_prompt_gap(SOFTMAX(*soft), LINEAR(*lin), task, L)
        assert_mean_is(shared_prompt_squares(soft, lin, task, L, 60_000), found.value, float(found.stderr))


@pytest.mark.parametrize("L", [1, 3, 25])
@pytest.mark.parametrize("size", [1.0, 0.0])
def test_the_same_prompt_gap_holds_query_by_query(L, size):
    """At one (W, x) the tails are light: ±W, as the average is taken; at size 0 the scores vanish, and so does ν."""
    task, n = TASKS["two targets, other queries"], 60_000
    (U, V), lin = weights(50, task), weights(52, task)
    U = size * U
    x, W = matrix(54, 2), 0.8 * matrix(55, 2, 2)
    WS = W @ np.asarray(task.Sigma)
    nodes = Nodes(*(jnp.asarray(m[None, ..., None]) for m in (x, W, WS, WS @ W.T)))
    one, two = (lp.icl.blocks(layer, task) for layer in (SOFTMAX(U, V), LINEAR(*lin)))
    found = _mean_gaps(one, two, task, WeightMoments(L), jnp.asarray(float(L)), nodes)[0]
    rng, query = np.random.default_rng(3), np.tile(np.append(x, [0, 0]), (n, 1))
    squares = []
    for sign in (1, -1):
        factor = np.linalg.cholesky(token_covariance(task, sign * W))
        tokens = rng.normal(size=(n, L, 4)) @ factor.T
        outputs = attend(SOFTMAX, U, V, tokens, query) - attend(LINEAR, *lin, tokens, query)
        squares.append(np.sum(outputs**2, axis=1))
    assert_mean_is(np.mean(squares, axis=0), found)


def test_the_same_prompt_gap_of_one_layer_vanishes_at_infinite_length_and_decays_to_it():
    task = TASKS["other queries"]
    U, V = aligned(0.2 * np.eye(2), 1.5, task)
    gaps = [float(same_prompt_gap(SOFTMAX(U, V), LINEAR(U, V), task, L).value) for L in (10**4, 10**8, 10**12)]
    np.testing.assert_allclose(np.diff(np.log10(gaps)), -4, atol=1e-3)
    assert same_prompt_gap(SOFTMAX(U, V), LINEAR(U, V), task, math.inf).value == 0


def test_the_same_prompt_gap_at_infinite_length_is_that_of_the_limits():
    soft, lin = weights(14, KMS, size=0.3), weights(18, KMS, size=0.3)
    found = same_prompt_gap(SOFTMAX(*soft), LINEAR(*lin), KMS, math.inf, draws=2**14)
    samples = []
    for batch in simulated(KMS, 1, 60_000):
        gammas = token_covariance(KMS, batch.W)
        ends = [np.einsum("pi,bij,bj->bp", V, gammas, batch.queries @ U.T) for U, V in (soft, lin)]
        samples.append(np.sum((ends[0] - ends[1]) ** 2, axis=1))
    assert_mean_is(np.concatenate(samples), found.value, float(found.stderr))


def test_the_same_prompt_gap_takes_heads_and_refuses_the_wrong_kind():
    U, V = weights(14, KMS, size=0.3)
    head, straight = lp.Head(np.eye(3), U, V), lp.Head(np.eye(3), U, V, kind="linear")
    merged = same_prompt_gap(SOFTMAX(U, V), LINEAR(U, V), KMS, 5)
    np.testing.assert_allclose(same_prompt_gap(head, straight, KMS, 5).value, merged.value, rtol=1e-12)
    with pytest.raises(ValueError, match="the layer is softmax attention; this holds of linear attention only"):
        same_prompt_gap(head, head, KMS, 5)
    with pytest.raises(ValueError, match="the layer is linear attention; this holds of softmax attention only"):
        same_prompt_gap(straight, straight, KMS, 5)
