"""Sigmoid and ReLU attention, normalised or not: outputs, influences and errors against sampling and closed forms."""

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
each_measure = pytest.mark.parametrize("mu", three_dimensional.values(), ids=three_dimensional.keys())
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
    found = attention_of(kind)(U, V)(lp.Empirical(Z), z)
    np.testing.assert_allclose(found, V @ reading(kind, Z, U @ z), rtol=1e-13)


@each_kind
@each_measure
def test_long_prompts_tend_to_the_output_on_the_measure(mu, kind):
    """Over prompts of 2,000 tokens, whose bias is far below the spread of a mean of 50; a fixed sample has its own."""
    layer, L, prompts = attention_of(kind)(U, V), 2000, 50
    tokens = np.asarray(mu.sample(jax.random.key(8), L * prompts)).reshape(prompts, L, D)
    outputs = np.stack([V @ reading(kind, prompt, U @ z) for prompt in tokens])
    spread = outputs.std(axis=0, ddof=1)
    own = 0.0 if mu._averages_exactly() and not isinstance(mu, lp.FromSampler) else spread * np.sqrt(L / 2**14)
    allowance = 5 * spread**2
    excess = np.maximum(np.abs(outputs.mean(axis=0) - np.asarray(layer(mu, z))) - allowance, 0)
    assert_close_in_sigmas(excess, 0.0, np.hypot(spread / np.sqrt(prompts), own) + 1e-12)


def test_relu_attention_on_a_gaussian_is_its_closed_form():
    """E max(s, 0)z = E max(s, 0) m + P(s > 0) Γu."""
    u, m, Gamma = U @ z, np.asarray(GAUSSIAN.m), np.asarray(GAUSSIAN.Gamma)
    mean, deviation = u @ m, np.sqrt(u @ Gamma @ u)
    Phi, phi = norm.cdf(mean / deviation), norm.pdf(mean / deviation)
    total = mean * Phi + deviation * phi
    plain = V @ (total * m + Phi * Gamma @ u)
    np.testing.assert_allclose(lp.ReLUAttention(U, V)(GAUSSIAN, z), plain, rtol=1e-12)
    np.testing.assert_allclose(lp.ReLUAttention(U, V, normalised=True)(GAUSSIAN, z), plain / total, rtol=1e-12)


def test_a_prompt_without_a_positive_score_is_read_as_zero():
    layer, tokens = lp.ReLUAttention(np.eye(2), np.eye(2), normalised=True), np.array([[-1.0, 0.3], [-2.0, 0.1]])
    prompt = lp.Empirical(tokens)
    np.testing.assert_array_equal(layer(prompt, [1.0, 0.0]), np.zeros(2))
    np.testing.assert_array_equal(layer.jacobian(prompt, [1.0, 0.0]).U, np.zeros((2, 2, 2)))
    np.testing.assert_array_equal(jax.grad(lambda z: layer._output(prompt, z)[0])(jnp.array([1.0, 0.0])), np.zeros(2))


@pytest.mark.parametrize("name", ["softmax", "linear", "sigmoid", "sigmoid, normalised", "relu", "relu, normalised"])
@pytest.mark.parametrize("law", ["empirical", "gaussian", "mixture of Gaussians"])
def test_closed_forms_of_influences_and_errors_are_the_general_ones(name, law):
    """Influences by automatic differentiation through a perturbed measure; errors over the atoms of a prompt."""
    layer, mu, u = catalogue.LAYERS[name], catalogue.MEASURES[law], jnp.asarray(U @ z)
    assert isinstance(layer, AbstractAttention)
    general, tokens = AbstractAttention, jnp.asarray(Z)
    pairs = [
        (layer.reading_slope(mu, u), general.reading_slope(layer, mu, u)),
        (layer.influence(mu, u, tokens), general.influence(layer, mu, u, tokens)),
        (layer.slope_influence(mu, u, tokens), general.slope_influence(layer, mu, u, tokens)),
    ]
    if law == "empirical":
        pairs += [
            (layer.error_covariance(mu, u, layer, u), general.error_covariance(layer, mu, u, layer, u)),
            (layer.slope_error(mu, u, A, B), general.slope_error(layer, mu, u, A, B)),
            (layer.reading_bias(mu, u), general.reading_bias(layer, mu, u)),
        ]
        assert layer.errors_are_exact(mu)
        assert general.errors_are_exact(layer, mu)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "linear", "sigmoid, normalised", "relu"])
def test_an_influence_is_the_slope_towards_a_prompt_with_one_token_more(name):
    layer, mu, u, h = catalogue.LAYERS[name], lp.Empirical(Z), jnp.asarray(U @ z), 1e-6
    assert isinstance(layer, AbstractAttention)
    for token in catalogue.matrix(9, 3, D):
        mixed = lp.Mixture([1 - h, h], [mu, lp.Empirical(token[None])])
        difference = (layer.reading(mixed, u) - layer.reading(mu, u)) / h
        np.testing.assert_allclose(
            layer.influence(mu, u, jnp.asarray(token)[None])[0], difference, rtol=1e-4, atol=1e-5
        )


@each_kind
def test_errors_on_gaussian_prompts_follow_the_constants(kind):
    """Covariance, bias and the slope's error at L = 400, over 20,000 prompts, up to a relative 1/L or so."""
    layer, u, L, prompts = attention_of(kind)(U, V), U @ z, 400, 20_000
    tokens = np.asarray(GAUSSIAN.sample(jax.random.key(10), L * prompts), np.float32).reshape(prompts, L, D)
    scores = tokens @ u.astype(np.float32)
    weights = weight(kind, scores)
    slopes = weights * (1 - weights) if "sigmoid" in kind else (scores > 0) * np.float32(1)
    m = np.einsum("pl,pli->pi", weights, tokens) / L
    H = np.einsum("pl,pli,plj->pij", slopes, tokens, tokens, optimize=True) / L
    if kind.startswith("normalised"):
        total = weights.mean(axis=1)
        m = m / total[:, None]
        H = (H - np.einsum("pi,pl,plj->pij", m, slopes, tokens, optimize=True) / L) / total[:, None, None]
    u = jnp.asarray(u)
    off = np.sqrt(L) * (m - np.asarray(layer.reading(GAUSSIAN, u)))
    products = np.einsum("pi,pj->pij", off, off).reshape(prompts, -1)
    covariance = np.ravel(layer.error_covariance(GAUSSIAN, u, layer, u))
    allowed = 10 / L * np.abs(covariance)
    assert_close_in_sigmas(products.mean(axis=0), covariance, products.std(axis=0) / np.sqrt(prompts) + allowed)
    bias = np.asarray(layer.reading_bias(GAUSSIAN, u)) / np.sqrt(L)
    assert_close_in_sigmas(off.mean(axis=0), bias, off.std(axis=0) / np.sqrt(prompts) + 0.1 * np.abs(bias))
    dH = H - np.asarray(layer.reading_slope(GAUSSIAN, u))
    forms = L * np.einsum("pji,jk,pkl,li->p", dH, A, dH, B, optimize=True)
    constant = float(layer.slope_error(GAUSSIAN, u, A, B))
    assert_close_in_sigmas(forms.mean(), constant, forms.std() / np.sqrt(prompts) + 10 / L * constant)


def test_errors_of_two_heads_of_any_kinds_go_together_as_their_influences_do():
    """Exact over the atoms of a prompt, whichever head is asked."""
    mu, u, v = lp.Empirical(Z), jnp.asarray(U @ z), jnp.asarray(U @ z)[::-1]
    layers = [catalogue.LAYERS[name] for name in ("softmax", "linear", "sigmoid", "relu, normalised")]
    for one in layers:
        for other in layers:
            assert isinstance(one, AbstractAttention)
            assert isinstance(other, AbstractAttention)
            found = one.error_covariance(mu, u, other, v)
            product = one.influence(mu, u, mu.points).T @ other.influence(mu, v, mu.points) / mu.size
            np.testing.assert_allclose(found, product, rtol=1e-9, atol=1e-12)
            assert one.errors_are_exact(mu, other)
            exact = {type(one), type(other)} <= {lp.SoftmaxAttention, lp.LinearAttention} or one is other
            assert one.errors_are_exact(GAUSSIAN, other) == exact


def test_averages_over_given_tokens_tend_to_the_constants():
    layer, u = lp.SigmoidAttention(U, V, normalised=True), jnp.asarray(U @ z)
    tokens = GAUSSIAN.sample(jax.random.key(12), 200_000)
    sampled = layer.error_covariance(GAUSSIAN, u, layer, u, tokens)
    np.testing.assert_allclose(sampled, layer.error_covariance(GAUSSIAN, u, layer, u), rtol=0.03, atol=0.003)
    sampled = layer.reading_bias(GAUSSIAN, u, tokens[:20_000])
    np.testing.assert_allclose(sampled, layer.reading_bias(GAUSSIAN, u), rtol=0.1, atol=0.01)


def test_heads_of_every_kind_are_found_by_name():
    head = lp.Head(np.eye(D), U, V, kind="normalised-sigmoid")
    heads = heads_of(head)
    assert heads is not None
    merged = heads[0]
    assert isinstance(merged, lp.SigmoidAttention)
    assert merged.normalised
    np.testing.assert_allclose(head(GAUSSIAN, z), lp.SigmoidAttention(U, V, normalised=True)(GAUSSIAN, z), rtol=1e-13)
    several = lp.MultiHead.pytorch_default(jax.random.key(0), 4, 2, kind="relu")
    assert [type(part) for part in heads_of(several) or ()] == [lp.ReLUAttention] * 2
    with pytest.raises(ValueError, match="kind is 'cosine'; it must be one of 'linear', 'softmax'"):
        lp.Head(U, U, V, kind="cosine")
