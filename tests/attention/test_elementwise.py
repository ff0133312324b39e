"""Sigmoid and ReLU attention, normalised or not: outputs, influences and errors against sampling and closed forms."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import catalogue
import largeprompt as lp
from largeprompt.attention import AbstractAttention, attention_of, heads_of
from significance import assert_close_in_sigmas

D = 3
U, V = 0.5 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D)
Z, z = catalogue.matrix(2, 17, D), catalogue.matrix(3, D)
KINDS = ("sigmoid", "normalised-sigmoid", "relu", "normalised-relu")
GAUSSIAN = lp.Gaussian(0.3 * catalogue.matrix(4, D), catalogue.covariance(5, D))
three_dimensional = {name: mu for name, mu in catalogue.MEASURES.items() if mu.dim == D}
each_measure = pytest.mark.parametrize("law", three_dimensional)
each_kind = pytest.mark.parametrize("kind", KINDS)
A, B = (jnp.asarray(catalogue.covariance(seed, D)) for seed in (6, 7))


def weight(kind, s):
    return 1 / (1 + np.exp(-s)) if "sigmoid" in kind else np.maximum(s, 0)


def reading(kind, tokens, u):
    """What NumPy reads off a prompt."""
    weights = weight(kind, tokens @ u)
    total = weights.sum() if kind.startswith("normalised") else len(tokens)
    return weights @ tokens / total if total > 0 else np.zeros(tokens.shape[1])


@each_kind
def test_the_output_on_a_prompt_is_the_textbook_sum(kind):
    layer = attention_of(kind)(U, V)
    found = jax.jit(lambda mu: layer(mu, z))(lp.Empirical(Z))
    np.testing.assert_allclose(found, V @ reading(kind, Z, U @ z), rtol=1e-13)


@functools.cache
def outputs_and_tokens(law):
    """Of every kind, and of 100,000 tokens."""

    @jax.jit
    def both(mu, key):
        return {kind: attention_of(kind)(U, V)(mu, z) for kind in KINDS}, mu.sample(key, 100_000)

    return jax.tree.map(np.asarray, both(three_dimensional[law], jax.random.key(8)))


@each_kind
@each_measure
def test_long_prompts_tend_to_the_output_on_the_measure(law, kind):
    """Over prompts of 2,000 tokens, whose bias is far below the spread of a mean of 50; a fixed sample has its own."""
    mu, (found, tokens), L, prompts = three_dimensional[law], outputs_and_tokens(law), 2000, 50
    outputs = np.stack([V @ reading(kind, prompt, U @ z) for prompt in tokens.reshape(prompts, L, D)])
    spread = outputs.std(axis=0, ddof=1)
    own = 0.0 if mu._averages_exactly() and not isinstance(mu, lp.FromSampler) else spread * np.sqrt(L / 2**14)
    allowance = 5 * spread**2
    excess = np.maximum(np.abs(outputs.mean(axis=0) - found[kind]) - allowance, 0)
    assert_close_in_sigmas(excess, 0.0, np.hypot(spread / np.sqrt(prompts), own) + 1e-12)


def test_relu_attention_on_a_gaussian_is_its_closed_form():
    """E max(s, 0)z = E max(s, 0) m + P(s > 0) Γu."""
    u, m, Gamma = U @ z, np.asarray(GAUSSIAN.m), np.asarray(GAUSSIAN.Gamma)
    mean, deviation = u @ m, np.sqrt(u @ Gamma @ u)
    Phi, phi = norm.cdf(mean / deviation), norm.pdf(mean / deviation)
    total = mean * Phi + deviation * phi
    plain = V @ (total * m + Phi * Gamma @ u)
    layers = [lp.ReLUAttention(U, V), lp.ReLUAttention(U, V, normalised=True)]
    found = jax.jit(lambda mu: [layer(mu, z) for layer in layers])(GAUSSIAN)
    np.testing.assert_allclose(found, [plain, plain / total], rtol=1e-12)


def test_a_prompt_without_a_positive_score_is_read_as_zero():
    layer, tokens = lp.ReLUAttention(np.eye(2), np.eye(2), normalised=True), np.array([[-1.0, 0.3], [-2.0, 0.1]])

    @jax.jit
    def found(prompt, z):
        return layer(prompt, z), layer.jacobian(prompt, z).U, jax.grad(lambda z: layer._output(prompt, z)[0])(z)

    for values in found(lp.Empirical(tokens), jnp.asarray(np.array([1.0, 0.0]))):
        np.testing.assert_array_equal(values, np.zeros(values.shape))


@pytest.mark.parametrize("name", ["softmax", "linear", "sigmoid", "sigmoid, normalised", "relu", "relu, normalised"])
@pytest.mark.parametrize("law", ["empirical", "gaussian", "mixture of Gaussians"])
def test_closed_forms_of_influences_and_errors_are_the_general_ones(name, law):
    """Influences by automatic differentiation through a perturbed measure; errors over the atoms of a prompt."""
    layer, mu, u = catalogue.LAYERS[name], catalogue.MEASURES[law], jnp.asarray(U @ z)
    assert isinstance(layer, AbstractAttention)
    general = AbstractAttention

    @eqx.filter_jit
    def pairs(layer, mu, u, tokens):
        influences = [
            (layer.reading_slope(mu, u), general.reading_slope(layer, mu, u)),
            (layer.influence(mu, u, tokens), general.influence(layer, mu, u, tokens)),
            (layer.slope_influence(mu, u, tokens), general.slope_influence(layer, mu, u, tokens)),
        ]
        if law != "empirical":
            return influences
        return [
            *influences,
            (layer.error_covariance(mu, u, layer, u), general.error_covariance(layer, mu, u, layer, u)),
            (layer.slope_error(mu, u, A, B), general.slope_error(layer, mu, u, A, B)),
            (layer.reading_bias(mu, u), general.reading_bias(layer, mu, u)),
        ]

    if law == "empirical":
        assert layer.errors_are_exact(mu)
        assert general.errors_are_exact(layer, mu)
    for ours, theirs in pairs(layer, mu, u, jnp.asarray(Z)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "linear", "sigmoid, normalised", "relu"])
def test_an_influence_is_the_slope_towards_a_prompt_with_one_token_more(name):
    layer, mu, u, h = catalogue.LAYERS[name], lp.Empirical(Z), jnp.asarray(U @ z), 1e-6
    assert isinstance(layer, AbstractAttention)
    tokens = jnp.asarray(catalogue.matrix(9, 3, D))

    @jax.jit
    @jax.vmap
    def slope(token):
        mixed = lp.Mixture([1 - h, h], [mu, lp.Empirical(token[None])])
        return (layer.reading(mixed, u) - layer.reading(mu, u)) / h

    found = jax.jit(lambda tokens: layer.influence(mu, u, tokens))(tokens)
    np.testing.assert_allclose(found, slope(tokens), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def gaussian_prompts():
    """20,000 prompts of 400 tokens, drawn by NumPy, and their scores."""
    normals = np.random.default_rng(10).standard_normal((20_000 * 400, D), np.float32)
    tokens = normals @ np.linalg.cholesky(np.asarray(GAUSSIAN.Gamma, np.float32)).T + np.asarray(GAUSSIAN.m, np.float32)
    return tokens.reshape(20_000, 400, D), (tokens @ (U @ z).astype(np.float32)).reshape(20_000, 400)


@each_kind
def test_errors_on_gaussian_prompts_follow_the_constants(kind, gaussian_prompts):
    """Covariance, bias and the slope's error at L = 400, over 20,000 prompts, up to a relative 1/L or so."""
    (tokens, scores), layer, u = gaussian_prompts, attention_of(kind)(U, V), jnp.asarray(U @ z)
    (prompts, L), weights = scores.shape, weight(kind, scores)

    @eqx.filter_jit
    def constants(layer, mu):
        return (
            layer.reading(mu, u),
            layer.error_covariance(mu, u, layer, u),
            layer.reading_bias(mu, u),
            layer.reading_slope(mu, u),
            layer.slope_error(mu, u, A, B),
        )

    mean, covariance, bias, slope, constant = map(np.asarray, constants(layer, GAUSSIAN))
    slopes = weights * (1 - weights) if "sigmoid" in kind else (scores > 0) * np.float32(1)
    m = (weights[:, None] @ tokens)[:, 0] / L
    H = (slopes[:, :, None] * tokens).transpose(0, 2, 1) @ tokens / L
    if kind.startswith("normalised"):
        total = weights.mean(axis=1)
        m = m / total[:, None]
        H = (H - m[:, :, None] * (slopes[:, None] @ tokens) / L) / total[:, None, None]
    off = np.sqrt(L) * (m - mean)
    products = np.einsum("pi,pj->pij", off, off).reshape(prompts, -1)
    covariance = covariance.ravel()
    allowed = 10 / L * np.abs(covariance)
    assert_close_in_sigmas(products.mean(axis=0), covariance, products.std(axis=0) / np.sqrt(prompts) + allowed)
    bias = bias / np.sqrt(L)
    assert_close_in_sigmas(off.mean(axis=0), bias, off.std(axis=0) / np.sqrt(prompts) + 0.1 * np.abs(bias))
    dH = H - slope
    forms = L * np.einsum("pji,jk,pkl,li->p", dH, A, dH, B, optimize=True)
    assert_close_in_sigmas(forms.mean(), constant, forms.std() / np.sqrt(prompts) + 10 / L * constant)


def test_errors_of_two_heads_of_any_kinds_go_together_as_their_influences_do():
    """Exact over the atoms of a prompt, whichever head is asked."""
    mu, u, v = lp.Empirical(Z), jnp.asarray(U @ z), jnp.asarray(U @ z)[::-1]
    named = [catalogue.LAYERS[name] for name in ("softmax", "linear", "sigmoid", "relu, normalised")]
    layers = [layer for layer in named if isinstance(layer, AbstractAttention)]
    assert len(layers) == 4

    @jax.jit
    def found_and_influences(mu, u, v):
        found = [[one.error_covariance(mu, u, other, v) for other in layers] for one in layers]
        return found, *([layer.influence(mu, at, mu.points) for layer in layers] for at in (u, v))

    found, at_u, at_v = found_and_influences(mu, u, v)
    for i, one in enumerate(layers):
        for j, other in enumerate(layers):
            product = np.asarray(at_u[i]).T @ np.asarray(at_v[j]) / mu.size
            np.testing.assert_allclose(found[i][j], product, rtol=1e-9, atol=1e-12)
            assert one.errors_are_exact(mu, other)
            exact = {type(one), type(other)} <= {lp.SoftmaxAttention, lp.LinearAttention} or one is other
            assert one.errors_are_exact(GAUSSIAN, other) == exact


def test_averages_over_given_tokens_tend_to_the_constants():
    layer, u = lp.SigmoidAttention(U, V, normalised=True), jnp.asarray(U @ z)
    tokens = jax.jit(lambda key: GAUSSIAN.sample(key, 200_000))(jax.random.key(12))

    @jax.jit
    def averages_and_constants(mu, u, tokens):
        averages = layer.error_covariance(mu, u, layer, u, tokens), layer.reading_bias(mu, u, tokens[:20_000])
        return averages, (layer.error_covariance(mu, u, layer, u), layer.reading_bias(mu, u))

    (covariance, bias), constants = averages_and_constants(GAUSSIAN, u, tokens)
    np.testing.assert_allclose(covariance, constants[0], rtol=0.03, atol=0.003)
    np.testing.assert_allclose(bias, constants[1], rtol=0.1, atol=0.01)


def test_heads_of_every_kind_are_found_by_name():
    head = lp.Head(np.eye(D), U, V, kind="normalised-sigmoid")
    heads = heads_of(head)
    assert heads is not None
    merged = heads[0]
    assert isinstance(merged, lp.SigmoidAttention)
    assert merged.normalised
    alike = head, lp.SigmoidAttention(U, V, normalised=True)
    np.testing.assert_allclose(*jax.jit(lambda mu: [layer(mu, z) for layer in alike])(GAUSSIAN), rtol=1e-13)
    several = lp.MultiHead.pytorch_default(jax.random.key(0), 4, 2, kind="relu")
    assert [type(part) for part in heads_of(several) or ()] == [lp.ReLUAttention] * 2
    with pytest.raises(ValueError, match="kind is 'cosine'; it must be one of 'linear', 'softmax'"):
        lp.Head(U, U, V, kind="cosine")
