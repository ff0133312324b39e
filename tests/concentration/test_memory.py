"""Heads of a practitioner's size: blocks that fit into memory, and what does not fit is refused before any work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from largeprompt.concentration import _memory, deviation, predict
from largeprompt.concentration._memory import chunk_for, queries_at_once
from largeprompt.concentration._problem import Problem, problem_of
from largeprompt.concentration._prompts import _weighted_pairs
from largeprompt.concentration._rates import query_constants
from largeprompt.measures import AbstractMeasure

WIDE = 64


def test_constants_of_ten_thousand_wide_tokens_are_computed_in_bounded_memory():
    """Compiled, not run: a fourth moment that is formed would take gigabytes a query."""
    rng = np.random.default_rng(0)
    mu = lp.Empirical(rng.normal(size=(10_000, WIDE)))
    head = lp.Head(*(rng.normal(size=(3, 16, WIDE)) / 8), scale=0.25)
    problem, batch = problem_of(head, mu, None, 1, "gradient"), queries_at_once(mu, 256)
    assert isinstance(problem, Problem)
    heads, square, z = problem.heads or (), problem.squares["gradient"], mu.points[: 2 * batch]

    def constants(points):
        law = lp.Empirical(points)
        return jax.lax.map(lambda one: query_constants(heads, law, [square], one)[0], z, batch_size=batch)

    memory = jax.jit(constants).lower(mu.points).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**30


@pytest.mark.parametrize("name", ["empirical", "mixture of Gaussians", "cube"])
def test_contracted_fourth_moments_are_those_of_the_cumulants(name):
    mu = catalogue.MEASURES[name]
    D = mu.dim
    b, A, B = catalogue.matrix(1, D), catalogue.covariance(2, D), catalogue.covariance(3, D, rank=1)
    by_cumulants = jax.jit(lambda: AbstractMeasure._fourth(mu, jnp.asarray(b), jnp.asarray(A), jnp.asarray(B)))()
    third = jax.jit(jax.jacfwd(lambda s: mu._tilt(s)._cov()))(jnp.zeros(D))
    tensor = jax.jit(jax.hessian(lambda s: mu._tilt(s)._cov()))(jnp.zeros(D))
    C = np.asarray(mu.cov())
    second = np.einsum("ij,kl->ijkl", C, C)
    moments = tensor + second + second.transpose(0, 2, 1, 3) + second.transpose(0, 2, 3, 1)
    shifted = np.einsum("ijkl,ij,kl->", moments, A, B) + np.sum(A * C) * (b @ B @ b) + np.sum(B * C) * (b @ A @ b)
    shifted += 4 * b @ A @ C @ B @ b + (b @ A @ b) * (b @ B @ b)
    shifted += 2 * np.einsum("ijk,ij,k->", third, A, B @ b) + 2 * np.einsum("ijk,ij,k->", third, B, A @ b)
    np.testing.assert_allclose(by_cumulants, shifted, rtol=1e-10)
    np.testing.assert_allclose(jax.jit(lambda b: mu._fourth(b, jnp.asarray(A), jnp.asarray(B)))(b), shifted, rtol=1e-10)


def test_sums_of_pairs_are_the_same_through_either_array():
    y = jnp.asarray(catalogue.matrix(4, 50, 6))
    weights = jnp.abs(jnp.asarray(catalogue.matrix(5, 9, 50)))
    np.testing.assert_allclose(_weighted_pairs(weights, y)[:3], _weighted_pairs(weights[:3], y), rtol=1e-12)


def test_fewer_wide_tokens_are_drawn_at_once():
    assert chunk_for(10_000, 8, 5, True) == 4096
    assert chunk_for(10_000, 64, 512, True) == 512
    assert chunk_for(10_000, 64, 4096, True) == 64


def test_what_does_not_fit_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(_memory, "free_memory", lambda: 2.0**20)
    mu, layer = lp.Gaussian(np.zeros(80), np.eye(80)), lp.SoftmaxAttention(np.eye(80) / 9, np.eye(80))
    for call in (
        lambda: deviation(layer, mu, None, 10, "U", jax.random.key(0)),
        lambda: predict(layer, mu, None, 10, "U"),
    ):
        with pytest.raises(
            ValueError, match=r"of U with tokens of dimension 80 takes about .* GiB of memory, and 0.000977"
        ):
            call()


def test_the_free_memory_is_a_positive_number():
    assert _memory.free_memory() > 0
