"""Tokens of a head as a mixture of Gaussians."""

import numpy as np
import pytest

from largeprompt.measures import Empirical, Gaussian, Mixture
from largeprompt.models import AttentionCall
from largeprompt.models._mixture import fitted


def clouds(rng, centres, tokens=200):
    """Tokens around centres in the plane, with different covariances, and weights between 1 and 3."""
    roots = [np.array([[1.0, 0.0], [0.8, 0.7]]), np.array([[0.7, 0.0], [-0.4, 1.0]]), np.eye(2)]
    drawn = [centre + rng.normal(size=(tokens, 2)) @ root.T for centre, root in zip(centres, roots, strict=False)]
    masses = rng.uniform(1, 3, tokens * len(centres))
    return np.concatenate(drawn), masses / masses.sum(), roots


def test_gaussians_far_apart_are_found():
    rng = np.random.default_rng(0)
    centres = np.array([[-20.0, 0.0], [20.0, 5.0]])
    points, masses, roots = clouds(rng, centres, tokens=2000)
    fit = fitted(points, masses, 2)
    order = np.argsort(fit.means[:, 0])
    np.testing.assert_allclose(fit.weights, 0.5, atol=0.02)
    np.testing.assert_allclose(fit.means[order], centres, atol=0.15)
    for k, root in zip(order, roots, strict=False):
        np.testing.assert_allclose(fit.covariances[k], root @ root.T, atol=0.1)


def density(points, fit, masses):
    """The mean log-likelihood under the covariances as they are."""
    parts = []
    for weight, mean, covariance in zip(fit.weights, fit.means, fit.covariances, strict=True):
        centred = points - mean
        squares = np.sum(centred * np.linalg.solve(covariance, centred.T).T, axis=1)
        parts.append(weight * np.exp(-squares / 2) / np.sqrt(np.linalg.det(2 * np.pi * covariance)))
    return masses @ np.log(np.sum(parts, axis=0))


def test_the_likelihood_never_falls_and_is_that_of_the_mixture():
    rounds = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        points, masses, _ = clouds(rng, 1.5 * rng.normal(size=(3, 2)))
        fit = fitted(points, masses, 3)
        assert (np.diff(fit.likelihoods) > -1e-12).all()
        assert fit.likelihoods[-1] > fit.likelihoods[0]
        assert fit.likelihoods[-1] == pytest.approx(density(points, fit, masses), abs=1e-9)
        rounds.append(len(fit.likelihoods))
    assert max(rounds) > 10


def test_the_likelihood_never_falls_where_covariances_are_singular():
    rng = np.random.default_rng(0)
    points, masses = rng.normal(size=(60, 30)) * np.geomspace(1, 1e-4, 30), np.full(60, 1 / 60)
    for components in (1, 2, 5, 60):
        fit = fitted(points, masses, components)
        assert (np.diff(fit.likelihoods) > -1e-9).all()
        assert np.linalg.eigvalsh(fit.covariances).min() > -1e-12


def head(seed=0, tokens=120, causal=True):
    rng = np.random.default_rng(seed)
    queries, keys, values = (rng.normal(size=(1, n, 3)) for n in (4, tokens, tokens))
    keys[:, ::2] += 2.0
    bias = rng.normal(size=(1, 4, tokens))
    bias[..., tokens - 20 :] = -np.inf if causal else 0.0
    return AttentionCall("layer", queries, keys, values, 0.4, bias).head(0)


@pytest.mark.parametrize("sinks", [(), (0, 3)])
@pytest.mark.parametrize("components", [2, 5])
def test_a_mixture_has_the_moments_of_the_tokens(components, sinks):
    one = head()
    law, prompt = one.law(1, sinks, components), one.prompt(1)
    assert isinstance(law, Mixture)
    assert [type(part) for part in law.components] == [Empirical] * bool(sinks) + [Gaussian] * components
    np.testing.assert_allclose(law.mean(), prompt.mean(), atol=1e-10)
    np.testing.assert_allclose(law.cov(), prompt.cov(), atol=1e-10)


def test_one_component_is_the_gaussian_and_as_many_as_tokens_are_the_prompt():
    one = head(tokens=30, causal=False)
    law, prompt, query = one.law(2), one.prompt(2), one.query(2)
    assert isinstance(law, Gaussian)
    np.testing.assert_allclose(law.m, prompt.mean(), atol=1e-12)
    np.testing.assert_allclose(law.Gamma, prompt.cov(), atol=1e-12)
    np.testing.assert_allclose(one.layer(one.law(2, (), 30), query), one.layer(prompt, query), rtol=1e-8)


def test_equal_tokens_share_a_component():
    fit = fitted(np.repeat([[1.0, 2.0], [3.0, 4.0]], 5, axis=0), np.full(10, 0.1), 4)
    np.testing.assert_allclose(sorted(fit.means.tolist()), [[1.0, 2.0], [3.0, 4.0]], rtol=1e-12)
    np.testing.assert_allclose(fit.covariances, 0, atol=1e-12)


@pytest.mark.parametrize(
    ("components", "words"),
    [
        (101, "components is 101; it must be at most 99, the tokens that are no sinks"),
        (0, "components is 0; it must be at least 1"),
        (1.5, "components is 1.5; it must be a whole number"),
    ],
)
def test_components_that_cannot_be_are_refused(components, words, as_a_stranger):
    with pytest.raises(ValueError, match=words):
        head().law(0, [0], components)
