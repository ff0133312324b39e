"""The Gram matrix behind what softmax heads read off a prompt, against the coefficients of single tokens."""

import numpy as np
import pytest

from largeprompt.engine._lanes import LANES
from largeprompt.engine._readings import cholesky, coefficients
from largeprompt.engine._tokens import sums_of


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
    assert len(sums) == sums_of.py_func(m) * LANES

    a = weight / weight.sum(axis=1, keepdims=True)
    p = a * (values - np.sum(a * values, axis=1, keepdims=True))
    kappa = np.concatenate([np.stack([a, p], axis=3).reshape(LANES, L, m), g], axis=2)
    exact = np.einsum("jla,jlb->abj", kappa, kappa)
    gram, root = np.zeros(n * n * LANES), np.zeros(n * n * LANES)
    coefficients(m, sums, True, gram)
    lower = np.tril_indices(n)
    np.testing.assert_allclose(gram.reshape(n, n, LANES)[lower], exact[lower], rtol=1e-10, atol=1e-12)

    cholesky(gram, n, n, root)
    triangle = root.reshape(n, n, LANES)
    assert not triangle[np.triu_indices(n, 1)].any()
    # seven tokens have no eight independent columns: there the last pivot is 0 up to the root of rounding
    np.testing.assert_allclose(np.einsum("acj,bcj->abj", triangle, triangle), exact, rtol=1e-6, atol=1e-7)
