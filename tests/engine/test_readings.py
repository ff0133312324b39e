"""The Gram matrix behind what softmax heads read off a prompt, against the coefficients of single tokens."""

import numba
import numpy as np
import pytest
from scipy.special import softmax

from compiled import from_python
from largeprompt.engine import _cpu_tokens, _gpu_tokens, _readings
from largeprompt.engine._kernel import workspace
from largeprompt.engine._lanes import LANES
from largeprompt.engine._tokens import sums_of

cholesky, coefficients = from_python(_readings.cholesky), from_python(_readings.coefficients)
split_value, two_tokens = from_python(_readings.split_value), from_python(_gpu_tokens.two_tokens)


@numba.njit
def sums_of_one_head(L, stride, products, w, prompt, step, k0, k1):
    _cpu_tokens.sums_of_one_head(L, stride, products, w, prompt, step, k0, k1)


@pytest.mark.parametrize("m", [2, 4])
def test_the_gram_matrix_of_weights_values_and_coordinates_is_that_of_the_tokens(m):
    """Over L tokens: a, p = a (f - Σ a f) of each head, and the coordinates g; and its root."""
    rng, L, n = np.random.default_rng(m), 7, 2 * m
    g = rng.normal(size=(LANES, L, m))
    scores, values = (g @ rng.normal(size=(m, m // 2)) for _ in range(2))
    weight = np.exp(scores)
    x = np.stack([weight, weight * values], axis=3).reshape(LANES, L, m)
    blocks = [x.sum(axis=1), *(np.einsum("jla,jlb->jab", a, b).reshape(LANES, -1) for a, b in ((x, g), (x, x), (g, g)))]
    sums = np.concatenate(blocks, axis=1).T.ravel().copy()
    assert len(sums) == sums_of(m) * LANES

    a = weight / weight.sum(axis=1, keepdims=True)
    p = a * (values - np.sum(a * values, axis=1, keepdims=True))
    kappa = np.concatenate([np.stack([a, p], axis=3).reshape(LANES, L, m), g], axis=2)
    exact = np.einsum("jla,jlb->abj", kappa, kappa)
    gram, root = np.zeros(n * n * LANES), np.zeros(n * n * LANES)
    coefficients(m, sums, True, gram)
    lower = np.tril_indices(n)
    np.testing.assert_allclose(gram.reshape(n, n, LANES)[lower], exact[lower], rtol=1e-10, atol=1e-12)

    cholesky(gram, n, n, n, root, np.zeros(LANES))
    triangle = root.reshape(n, n, LANES)
    assert not triangle[np.triu_indices(n, 1)].any()
    # seven tokens have no eight independent columns: there the last pivot is 0 up to the root of rounding
    np.testing.assert_allclose(np.einsum("acj,bcj->abj", triangle, triangle), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.1, 1.0])
@pytest.mark.parametrize("angle", [1.2, 1e-3, 0.0], ids=["apart", "nearly along the score", "along the score"])
def test_rounded_sums_move_the_root_of_one_head_by_rounding_alone_however_small_the_scores(beta, angle):
    """With small scores the value is nearly in the span of the softmax coefficients, by less than rounding shows."""
    L, size, level = 8, 1.3, np.exp2(-((beta / np.log(2)) ** 2))
    g = np.random.default_rng(5).normal(size=(LANES, L, 2))
    R = size * np.array([np.cos(angle), np.sin(angle)])
    weight, value = np.exp(beta * g[:, :, 0]), g @ R
    x = np.stack([weight, weight * value], axis=2)
    blocks = [x.sum(axis=1), *(np.einsum("jla,jlb->jab", a, b).reshape(LANES, -1) for a, b in ((x, g), (x, x), (g, g)))]
    rest = np.sum((value - level * x[:, :, 1]) ** 2, axis=1)
    extra = np.stack([np.full(LANES, level), rest, np.zeros(LANES)], axis=1)
    sums = np.concatenate([*blocks, extra], axis=1).T.ravel().copy()
    rows = np.repeat([[beta], [R[0]], [0.0], [R[1]]], LANES, axis=1).ravel()

    def root_of(sums):
        gram, root = np.zeros(16 * LANES), np.zeros(16 * LANES)
        coefficients(2, sums, True, gram)
        cholesky(gram, 4, 2, 4, root, np.zeros(LANES))
        split_value(rows, 2, sums, gram, root)
        return root.reshape(4, 4, LANES)

    root = root_of(sums)
    a = weight / weight.sum(axis=1, keepdims=True)
    p = a * (value - np.sum(a * value, axis=1, keepdims=True))
    kappa = np.concatenate([np.stack([a, p], axis=2), g], axis=2)
    exact = np.einsum("jla,jlb->abj", kappa, kappa)
    np.testing.assert_allclose(np.einsum("acj,bcj->abj", root, root), exact, rtol=1e-10, atol=1e-11)
    rounded = root_of(sums.astype(np.float32).astype(np.float64))
    np.testing.assert_allclose(rounded, root, atol=3e-6 * np.sqrt(L))


@pytest.mark.parametrize("L", [8, 9])
@pytest.mark.parametrize("beta", [0.01, 3.0], ids=["small scores", "nearly one token alone"])
def test_sums_of_float32_give_the_root_of_the_tokens_to_rounding(beta, L):
    """Though with either kind of scores some of the coefficients nearly depend on the others."""
    R = np.array([0.7, 1.1], np.float32)
    w, key = workspace(1, 2, 2), (np.uint32(3), np.uint32(4))
    w.R.reshape(-1, LANES)[[0, 1, 5]] = np.array([[beta], [R[0]], [R[1]]])
    sums_of_one_head(L, 4, True, w, 0, np.uint32(0), *key)
    coefficients(2, w.sums, True, w.gram64)
    cholesky(w.gram64, 4, 2, 4, w.root64, w.carried)
    split_value(w.R, 4, w.sums, w.gram64, w.root64)

    pairs = [[two_tokens(i, j, np.uint32(0), *key) for i in range((L + 1) // 2)] for j in range(LANES)]
    g = np.array(pairs, np.float64).reshape(LANES, -1, 2)[:, :L]
    value, size = g @ R, np.hypot(*R.astype(np.float64))
    a = softmax(np.float32(beta) * g[:, :, 0], axis=1)
    p = a * (value - np.sum(a * value, axis=1, keepdims=True))
    q, upper = np.linalg.qr(np.stack([a, p, g @ [R[1], -R[0]] / size, value / size], axis=2))
    signs = np.sign(np.einsum("jcc->jc", upper))
    expected = np.einsum("jlc,jc,jla->acj", q, signs, np.concatenate([np.stack([a, p], axis=2), g], axis=2))
    np.testing.assert_allclose(w.root64.reshape(-1, LANES)[:16].reshape(4, 4, LANES), expected, atol=3e-5)


@pytest.mark.parametrize("L", [2, 9, 200])
@pytest.mark.parametrize("beta", [4.0, 13.0, 60.0], ids=["guessed", "guessed, at times far off", "no guess"])
def test_large_scores_are_counted_from_where_float32_holds_their_weights(beta, L):
    """At β = 13 and L = 2 the guess is far off in two of three groups of prompts."""
    R = np.array([0.7, 1.1], np.float32)
    w, key = workspace(1, 2, 2), (np.uint32(3), np.uint32(4))
    w.R.reshape(-1, LANES)[[0, 1, 5]] = np.array([[beta], [R[0]], [R[1]]])
    for step in map(np.uint32, range(4)):
        sums_of_one_head(L, 4, True, w, 0, step, *key)
        coefficients(2, w.sums, True, w.gram64)
        found = w.gram64.reshape(-1, LANES)[:16].reshape(4, 4, LANES)
        pairs = [[two_tokens(i, j, step, *key) for i in range((L + 1) // 2)] for j in range(LANES)]
        g = np.array(pairs, np.float64).reshape(LANES, -1, 2)[:, :L]
        a = softmax(np.float32(beta) * g[:, :, 0], axis=1)
        p = a * (g @ R - np.sum(a * (g @ R), axis=1, keepdims=True))
        kappa = np.concatenate([np.stack([a, p], axis=2), g], axis=2)
        exact, lower = np.einsum("jla,jlb->abj", kappa, kappa), np.tril_indices(4)
        np.testing.assert_array_less(np.abs(found - exact)[lower], 3e-5 * (1 + np.abs(exact[lower])))
