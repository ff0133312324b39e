import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

import largeprompt as lp
from largeprompt.attention import Lengths, QueryMoments, WeightMoments
from largeprompt.attention._query_integrals import query_integrals, token_integrals
from refusals import assert_refused
from significance import assert_mean_is

BETAS = (0.01, 0.7, 1.0, 3.0, 25.0, 300.0)


def integrals(beta, L, lam):
    return query_integrals(token_integrals(beta, np.array([float(L)]), np.ones(1)), np.asarray(lam, float))


@pytest.mark.parametrize("beta", BETAS)
def test_one_token_beside_the_query_agrees_with_an_integral_over_its_score(beta):
    step = min(0.05, 0.1 / beta)
    g = np.arange(-9.5, 9.5, step)
    density = np.exp(-(g**2) / 2) * step / math.sqrt(2 * math.pi)
    lams = np.array([-35.0, -3.0, 0.0, 2.0, 8.0, 30.0]) * max(1, beta / 4)
    a = expit(beta * g - lams[:, None])
    c = expit(lams[:, None] - beta * g)
    second = a**2 * (g**2 - 1) / beta**2 if beta > 1 else 4 * a**2 - 10 * a**3 + 6 * a**4
    truth = np.stack([c, c * a, a**2, a * c, second, c * (a - 2 * a**2)]) @ density
    np.testing.assert_allclose(np.stack(integrals(beta, 1, lams)), truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("beta", "L"), [(0.5, 2), (6.0, 30)])
def test_moments_are_the_means_over_random_prompts(beta, L):
    rng = np.random.default_rng(L)
    g = rng.standard_normal((100_000, L))
    lam = math.log(L) + 0.6 * beta
    scores = np.concatenate([beta * g, np.full((len(g), 1), lam)], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    a, c = np.split(weights / weights.sum(axis=1, keepdims=True), [L], axis=1)
    c, s2, m1 = c[:, 0], (a**2).sum(axis=1), (a * g).sum(axis=1)
    found = QueryMoments(L).shares(beta**2, lam)
    truth = [found.C, found.C2, found.Q, beta * found.kept, found.Q + beta**2 * found.K2, beta * found.X]
    assert_mean_is(np.stack([c, c**2, s2, m1, m1**2, c * m1], axis=1), truth)


@pytest.mark.parametrize("L", [1, 10**6])
def test_the_table_is_the_integrals_at_every_score(L):
    moments, rng = QueryMoments(L), np.random.default_rng(0)
    for beta in (1e-6, 0.7, 3.0, 25.0, 1000.0):
        tokens = token_integrals(beta, np.array([float(L)]), np.ones(1))
        lam = tokens.mean_log + np.concatenate([3 * rng.normal(size=40), 15 * rng.normal(size=20)]) * max(1, beta / 3)
        C, spread, *rest = query_integrals(tokens, lam)
        found = np.stack(moments.shares(np.full(60, beta**2), lam))
        assert np.abs(found - np.stack([C, C - spread, *rest])).max() < 1e-9


def test_all_moments_but_K2_are_derivatives_of_one_function():
    moments = QueryMoments(7)
    nu, lam = jnp.asarray([0.3, 1.0, 4.0, 40.0]), jnp.asarray([0.5, 3.0, 2.0, 20.0])
    found = moments.shares(nu, lam)
    (C_nu, _), (C_lam, Q_lam) = (
        jax.jvp(lambda nu, lam: moments.shares(nu, lam)[:3:2], (nu, lam), tangents)[1]
        for tangents in ((jnp.ones(4), jnp.zeros(4)), (jnp.zeros(4), jnp.ones(4)))
    )
    np.testing.assert_allclose(found.X, -2 * C_nu, atol=1e-9)
    np.testing.assert_allclose(found.X, C_lam + Q_lam, atol=1e-9)
    np.testing.assert_allclose(found.C - found.C2, C_lam, atol=1e-9)
    np.testing.assert_allclose(found.C + found.Q + found.kept, 1, atol=1e-9)


def test_a_query_of_no_weight_leaves_the_moments_of_the_tokens_and_one_of_all_weight_none():
    nu, L = jnp.asarray([0.0, 1.0, 30.0, 1e6]), 12
    Q, unheld, K2, _ = WeightMoments(L).shares(nu)
    low, high = (QueryMoments(L).shares(nu, jnp.full(4, sign * 1e12)) for sign in (-1, 1))
    np.testing.assert_allclose(jnp.stack(low), jnp.stack([0 * Q, 0 * Q, Q, unheld, K2, 0 * Q]), atol=1e-9)
    np.testing.assert_allclose(jnp.stack(high), jnp.repeat(jnp.asarray([1.0, 1, 0, 0, 0, 0])[:, None], 4, 1), atol=1e-9)


# Laws of lengths


def test_moments_of_a_law_of_lengths_are_averages():
    law, nu = Lengths([0, 1, 3, 40], [0.1, 0.2, 0.3, 0.4]), jnp.asarray([0.0, 0.5, 3.0, 100.0])
    shares = np.array([0.2, 0.3, 0.4])
    each = np.stack([np.stack(WeightMoments(L).shares(nu)) for L in (1, 3, 40)])
    np.testing.assert_allclose(np.stack(WeightMoments(law).shares(nu)), np.tensordot(shares / 0.9, each, 1), rtol=1e-13)
    lam = jnp.asarray([-1.0, 1.0, 2.0, 15.0])
    each = np.stack([np.stack(QueryMoments(L).shares(nu, lam)) for L in (1, 3, 40)])
    empty = 0.1 * np.array([1.0, 1, 0, 0, 0, 0])[:, None]
    found = np.stack(QueryMoments(law).shares(nu, lam))
    np.testing.assert_allclose(found, empty + np.tensordot(shares, each, 1), atol=1e-9)


def test_moments_of_prefixes_are_those_of_all_lengths():
    nu = jnp.asarray([0.0, 1.0, 5.0, 200.0])
    each = np.mean([np.stack(WeightMoments(L).shares(nu)) for L in range(1, 100)], axis=0)
    np.testing.assert_allclose(np.stack(WeightMoments(Lengths.prefixes(100)).shares(nu)), each, rtol=1e-13)


def test_few_nodes_stand_for_all_lengths():
    law, lengths = Lengths.prefixes(2 * 10**5), np.arange(2e5)
    nodes, weights = law.rule()
    assert len(nodes) < 300
    for x in (0.0, 1e-6, 1e-4, 1e-2, 1.0):
        for power in range(3):
            truth = np.mean(lengths**power * np.exp(-x * lengths))
            np.testing.assert_allclose(weights @ (nodes**power * np.exp(-x * nodes)), truth, rtol=1e-13)
    np.testing.assert_allclose(law.harmonic_mean, 199_999 / np.sum(1 / lengths[1:]), rtol=1e-13)


def test_a_law_keeps_what_it_was_given():
    law = lp.Lengths([8, 2, 5, 0], [4, 2, 0, 2])
    assert (law.values, law.probabilities, law.empty, law.longest) == ((0, 2, 8), (0.25, 0.25, 0.5), 0.25, 8)
    assert law.mean == 4.5
    assert repr(law) == "Lengths(3 lengths from 0 to 8, mean 4.5)"
    assert law == lp.Lengths([0, 2, 8], [0.25, 0.25, 0.5])
    assert law != lp.Lengths([0, 2, 8])


REFUSALS = {
    "values has shape (0,)": lambda: Lengths([]),
    "a length is -1": lambda: Lengths([-1, 2]),
    "a length is 1.5": lambda: Lengths([1.5]),
    "a length is inf": lambda: Lengths([1, math.inf]),
    "a length is 'ten'": lambda: Lengths(["ten"]),
    "holds a length twice": lambda: Lengths([3, 3]),
    "probabilities has shape (1,)": lambda: Lengths([1, 2], [1.0]),
    "entries from -1": lambda: Lengths([1, 2], [-1.0, 2.0]),
    "all prompts are empty": lambda: Lengths([0]),
    "L is 1; it must be": lambda: Lengths.prefixes(1),
    "L is inf; the query has no weight": lambda: QueryMoments(math.inf),
    "known for L up to 1e12": lambda: QueryMoments(10**13),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals_name_the_value(words):
    assert_refused(REFUSALS[words], words)
