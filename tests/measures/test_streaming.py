"""Streamed moments against the direct computation, forwards and through derivatives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax

import catalogue
import largeprompt as lp
from largeprompt.measures import _streaming
from largeprompt.measures._exponential import power_of_two

STREAMED: tuple[Any, ...] = (_streaming.tilted_log_mass, _streaming.tilted_mean, _streaming.tilted_cov)
DIRECT = (_streaming._direct_log_mass, _streaming._direct_mean, _streaming._direct_cov)
FUSED = [jax.jit(form) for form in (_streaming._fused_log_mass, _streaming._fused_mean)]
each_moment = pytest.mark.parametrize(
    ("streamed", "direct"), list(zip(STREAMED, DIRECT, strict=True)), ids=["log-mass", "mean", "cov"]
)
OVER_TILTS = (None, None, 0)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunks of 64 tokens and tiles of 1024 scores, so that short prompts go through every branch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("DIRECT", 8), ("ALONE", 64), ("CHUNK", 64), ("TILE", 1024), ("BLOCK", 16)):
            patch.setattr(_streaming, name, size)
        for moment in STREAMED:
            moment.clear_cache()
        yield
    for moment in STREAMED:
        moment.clear_cache()


# compiled once for all the tests
over_tilts = functools.cache(lambda moment: jax.jit(jax.vmap(moment, OVER_TILTS)))


def by_numpy(moment, points, log_weights, theta) -> np.ndarray:
    """The same moment at each of the tilts, all tokens at once."""
    points, thetas = np.asarray(points, float), np.atleast_2d(np.asarray(theta, float))
    scores = thetas @ points.T + (0.0 if log_weights is None else np.asarray(log_weights, float))
    if moment is _streaming.tilted_log_mass:
        found = np.asarray(logsumexp(scores, axis=1))
    else:
        masses = softmax(scores, axis=1)
        means = masses @ points
        centred = points - means[:, None]
        found = means if moment is _streaming.tilted_mean else (masses[:, :, None] * centred).swapaxes(1, 2) @ centred
    return found[0] if np.ndim(theta) == 1 else found


def prompt(L):
    return jnp.asarray(catalogue.matrix(1, L, 3)), jnp.asarray(log_softmax(catalogue.matrix(0, L)))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@each_moment
@pytest.mark.parametrize(("L", "weighted"), [(1, True), (9, False), (64, True), (65, False), (1000, True)])
def test_streamed_moments_are_those_of_numpy(streamed, direct, L, weighted):
    points, log_weights = prompt(L)
    weights = log_weights if weighted else None
    for size in (0.0, 1.0, 1e4):
        thetas = size * jnp.asarray(catalogue.matrix(2, 40, 3))
        close(streamed(points, weights, thetas[0]), by_numpy(streamed, points, weights, thetas[0]))
        close(over_tilts(streamed)(points, weights, thetas), by_numpy(streamed, points, weights, thetas))


@each_moment
@pytest.mark.parametrize("zero", [slice(0, 1), slice(0, 500), slice(300, 700), slice(700, 1000), slice(1, 1000)])
def test_tokens_of_weight_zero_do_not_count(streamed, direct, zero):
    """Padding on the left, in the middle, on the right, and all but one."""
    points, _ = prompt(1000)
    weights = np.ones(1000)
    weights[zero] = 0
    with np.errstate(divide="ignore"):
        log_weights = jnp.asarray(np.log(weights / weights.sum()))
    kept = np.asarray(points)[weights > 0]
    thetas = jnp.asarray(catalogue.matrix(9, 40, 3))
    uniform = np.full(len(kept), -np.log(len(kept)))
    close(streamed(points, log_weights, thetas[0]), by_numpy(streamed, kept, uniform, thetas[0]))
    close(over_tilts(streamed)(points, log_weights, thetas), by_numpy(streamed, kept, uniform, thetas))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_the_form_for_a_gpu_is_that_of_numpy(weighted, size):
    points, log_weights = prompt(300)
    weights, theta = log_weights if weighted else None, size * jnp.asarray(catalogue.matrix(2, 3))
    for form, moment in zip(FUSED, STREAMED[:2], strict=True):
        close(form(points, weights, theta), by_numpy(moment, points, weights, theta))


@each_moment
def test_single_precision_streams_to_single_precision(streamed, direct):
    points, log_weights = (array.astype(jnp.float32) for array in prompt(1000))
    thetas = jnp.asarray(catalogue.matrix(2, 40, 3), jnp.float32)
    ours = over_tilts(streamed)(points, log_weights, thetas)
    assert ours.dtype == jnp.float32
    theirs = by_numpy(streamed, *prompt(1000), thetas)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@each_moment
def test_scores_that_rise_along_the_prompt_are_rescaled(streamed, direct):
    """Each chunk holds scores far above all earlier ones: the shift must follow."""
    points, weights = np.linspace(-1, 1, 1000)[:, None] * np.ones(3), jnp.asarray(np.zeros(1000))
    theta = jnp.array([400.0, 200.0, 100.0])
    close(streamed(jnp.asarray(points), weights, theta), by_numpy(streamed, points, None, theta))
    close(streamed(jnp.asarray(points[::-1]), weights, theta), by_numpy(streamed, points, None, theta))


@each_moment
def test_gradients_in_the_tilt_stream_too(streamed, direct):
    points, log_weights = prompt(300)
    thetas = jnp.asarray(catalogue.matrix(3, 20, 3))

    def gradient(moment):
        return jax.grad(lambda theta: jnp.sin(moment(points, log_weights, theta)).sum())

    close(*(jax.jit(jax.vmap(gradient(moment)))(thetas) for moment in (streamed, direct)))


@each_moment
@pytest.mark.parametrize("L", [50, 300])
def test_two_derivatives_in_the_tilt_are_right(streamed, direct, L):
    points, log_weights = prompt(L)
    theta = jnp.asarray(catalogue.matrix(4, 3))

    def gradient_and_hessian(moment):
        def gradient(theta):
            slope = jax.grad(lambda theta: jnp.sin(moment(points, log_weights, theta)).sum())(theta)
            return slope, slope

        return jax.jit(jax.jacfwd(gradient, has_aux=True))(theta)

    for ours, theirs in zip(gradient_and_hessian(streamed), gradient_and_hessian(direct), strict=True):
        close(ours, theirs)


@each_moment
def test_derivatives_in_the_tokens_and_their_weights_are_right(streamed, direct):
    points, log_weights = prompt(300)
    theta = jnp.asarray(catalogue.matrix(4, 3))
    ours, theirs = (
        [jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), argument)) for argument in arguments]
        for f, arguments in ((streamed, (0, 1)), (direct, ((0, 1),)))
    )
    for mine, its in zip(ours, theirs[0](points, log_weights, theta), strict=True):
        close(mine(points, log_weights, theta), its)


@each_moment
def test_batches_of_prompts_and_nested_batches_of_tilts(streamed, direct):
    points, log_weights = prompt(200)
    stack, thetas = jnp.stack([points, 2 * points, -points]), jnp.asarray(catalogue.matrix(5, 3, 7, 3))

    def every_batch(moment):
        nested = jax.vmap(moment, OVER_TILTS)
        yield jax.vmap(moment, (0, None, 0))(stack, log_weights, thetas[:, 0])
        yield jax.vmap(moment, (0, None, None))(stack, log_weights, thetas[0, 0])
        yield jax.vmap(nested, (None, None, 0))(points, log_weights, thetas)
        yield jax.vmap(nested, (0, None, 0))(stack, log_weights, thetas)

    ours, theirs = (jax.jit(lambda moment=moment: list(every_batch(moment)))() for moment in (streamed, direct))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


def test_attention_on_a_streamed_prompt_is_differentiable_in_its_weights():
    points, _ = prompt(500)
    queries = jnp.asarray(catalogue.matrix(6, 30, 3))
    U, V = 0.3 * jnp.asarray(catalogue.matrix(7, 3, 3)), jnp.asarray(catalogue.matrix(8, 2, 3))

    def loss(U, V):
        return jnp.sum(lp.SoftmaxAttention(U, V).map(lp.Empirical(points), queries) ** 2)

    def plain(U, V):
        return jnp.sum((jax.nn.softmax(queries @ U.T @ points.T) @ points @ V.T) ** 2)

    for ours, theirs in zip(*(jax.jit(jax.grad(of, (0, 1)))(U, V) for of in (loss, plain)), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float64, 1020.0), (jnp.float32, 124.0)])
def test_the_polynomial_power_of_two_is_accurate(dtype, largest):
    x = np.linspace(-largest, largest, 200_001).astype(dtype)
    ours = np.asarray(jax.jit(power_of_two)(jnp.asarray(x)), np.longdouble)
    truth = np.exp2(x.astype(np.longdouble))
    assert np.max(np.abs(ours / truth - 1)) < 1.5 * np.finfo(dtype).eps
    assert float(power_of_two(jnp.zeros((), dtype))) == 1.0
    assert float(power_of_two(jnp.full((), -np.inf, dtype))) == 2.0**-largest
    slope = jax.jit(jax.vmap(jax.grad(power_of_two)))(jnp.asarray(x[::1000]))
    np.testing.assert_allclose(slope, (np.log(2) * truth[::1000]).astype(float), rtol=4 * np.finfo(dtype).eps)
