"""Long prompts with the constants of the package as they are: agreement and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp

D = 6
U, V = 0.3 * jnp.asarray(catalogue.matrix(0, D, D)), jnp.asarray(catalogue.matrix(1, 2, D))


def output(U, points, queries):
    return lp.SoftmaxAttention(U, V).map(lp.Empirical(points), queries)


def plain(U, points, queries):
    return jax.nn.softmax(queries @ U.T @ points.T) @ points @ V.T


@pytest.mark.parametrize(("L", "queries"), [(300_001, 1), (150_001, 40)])
def test_a_long_prompt_agrees_with_the_plain_softmax(L, queries):
    points, Q = catalogue.matrix(2, L, D), catalogue.matrix(3, queries, D)
    np.testing.assert_allclose(jax.jit(output)(U, points, Q), plain(U, points, Q), rtol=1e-10, atol=1e-10)
    ours, theirs = (
        jax.jit(jax.grad(lambda *given, f=f: jnp.sum(f(*given) ** 2)))(U, points, Q[:3]) for f in (output, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def loss(U, points, queries):
    return jnp.sum(output(U, points, queries) ** 2)


def temporary_bytes(function, L, queries):
    """What the compiled program sets aside beside its arguments and results; nothing is run."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in ((D, D), (L, D), (queries, D))]
    analysis = jax.jit(function).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("queries", [1, 1000])
@pytest.mark.parametrize("function", [output, jax.grad(loss)], ids=["output", "gradient"])
def test_extra_memory_does_not_grow_with_the_prompt(function, queries):
    """A hundred million tokens of dimension 6 are 4.8 GB; a plain softmax of 1,000 queries would hold 800 GB."""
    assert temporary_bytes(function, 10**8, queries) < 50e6


def test_wide_tokens_are_not_copied():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in ((256, 256), (200_000, 256), (32, 256))]

    def wide(U, points, queries):
        return lp.SoftmaxAttention(U, jnp.eye(256)).map(lp.Empirical(points), queries)

    analysis = jax.jit(wide).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 150e6  # the prompt itself has 410 MB


def test_the_measure_of_memory_sees_a_plain_softmax():
    assert temporary_bytes(plain, 10**7, 1) > 70e6
