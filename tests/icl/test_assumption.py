"""Lemma F.1: linear regression satisfies Assumption 4.2."""

import jax
import jax.numpy as jnp
import numpy as np

import largeprompt as lp
from largeprompt.icl import LinearRegression, kms


def test_tokens_given_a_task_are_sub_gaussian_with_a_constant_that_has_moments():
    task = LinearRegression(kms(4), noise=0.3, targets=2)
    Ws = jax.random.normal(jax.random.key(0), (500, 2, 4))
    sigma = jax.jit(jax.vmap(task.subgaussian))(Ws)
    largest = float(jnp.linalg.eigvalsh(task.Sigma)[-1])
    spectral = jnp.linalg.norm(Ws, ord=2, axis=(1, 2))
    assert np.all(sigma**2 <= largest * (1 + spectral**2) + 0.3 + 1e-12)
    assert np.all(sigma**2 >= largest)
    # it is the least such constant: along the top direction the cumulant generating function attains it
    law = lp.Gaussian(np.zeros(6), task.token_covariance(Ws[0]))
    top = np.linalg.eigh(np.asarray(law.cov()))[1][:, -1]
    np.testing.assert_allclose(law.cgf(top), sigma[0] ** 2 / 2, rtol=1e-12)
    np.testing.assert_allclose(law.subgaussian(), sigma[0], rtol=1e-12)


def test_the_printed_constant_of_the_lemma_is_too_small():
    task = LinearRegression(np.eye(3))
    w = np.array([[0.5, 0.6, 0.2]])
    assert float(task.subgaussian(w)) ** 2 > 1.5 * max(1, float(np.sum(w**2)))
