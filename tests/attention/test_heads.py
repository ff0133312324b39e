import jax
import numpy as np

import catalogue
import largeprompt as lp

D = 4
MU, z = lp.Gaussian(catalogue.matrix(0, D), catalogue.covariance(1, D)), catalogue.matrix(2, D)


def test_a_head_is_its_merged_form():
    K, Q, V, O = (catalogue.matrix(seed, D, D) for seed in range(3, 7))
    head = lp.Head(K, Q, V, O, scale=0.5)
    merged = head.merged()
    np.testing.assert_allclose(merged.U, 0.5 * K.T @ Q, rtol=1e-14)
    np.testing.assert_allclose(merged.V, O @ V, rtol=1e-14)
    np.testing.assert_allclose(head(MU, z), merged(MU, z), rtol=1e-14)
    assert isinstance(lp.Head(K, Q, V, kind="linear").merged(), lp.LinearAttention)


def test_heads_add():
    heads = [lp.Head.pytorch_default(jax.random.key(i), D) for i in range(3)]
    summed = lp.MultiHead(heads)(MU, z)
    np.testing.assert_allclose(summed, sum(head(MU, z) for head in heads), rtol=1e-13)


def test_heads_add_as_concatenation_followed_by_one_output_matrix():
    heads = lp.MultiHead.pytorch_default(jax.random.key(0), D, 2)
    stacked = np.concatenate([lp.Head(h.K, h.Q, h.V, scale=h.scale)(MU, z) for h in heads.heads])
    O = np.concatenate([h.O for h in heads.heads if h.O is not None], axis=1)
    np.testing.assert_allclose(heads(MU, z), O @ stacked, rtol=1e-13)


def test_the_default_initialisation_is_uniform_within_one_over_root_fan_in():
    head = lp.Head.pytorch_default(jax.random.key(1), 100, head_dim=25, outputs=7)
    assert head.O is not None
    assert head.K.shape == head.Q.shape == head.V.shape == (25, 100)
    assert head.O.shape == (7, 25)
    for array, fan_in in ((head.K, 100), (head.Q, 100), (head.V, 100), (head.O, 25)):
        entries = np.asarray(array).ravel() * np.sqrt(fan_in)
        assert np.abs(entries).max() <= 1
        # a uniform on [-1, 1] has variance 1/3, known here to a standard error of sqrt(4/45/n)
        np.testing.assert_allclose(entries.var(), 1 / 3, atol=5 * np.sqrt(4 / 45 / entries.size))


def test_the_output_matrix_of_many_heads_is_drawn_as_one():
    """Concatenated, the heads' O is one torch.nn.Linear(64, 64): entries within 1/√64, filling that range."""
    heads = lp.MultiHead.pytorch_default(jax.random.key(2), 64, 4).heads
    largest = max(float(np.abs(h.O).max()) for h in heads if h.O is not None)
    assert 0.99 / 8 < largest <= 1 / 8
    assert 0.99 / 8 < max(float(np.abs(h.K).max()) for h in heads) <= 1 / 8


def test_the_default_score_scale_is_one_and_scale_multiplies_u():
    K, Q, V = (catalogue.matrix(seed, D, D) for seed in range(7, 10))
    np.testing.assert_allclose(lp.Head(K, Q, V).merged().U, K.T @ Q)
    np.testing.assert_allclose(lp.Head(K, Q, V, scale=0.25).merged().U, K.T @ Q / 4)
