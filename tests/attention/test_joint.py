"""Two softmaxes over the same Gaussian tokens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import largeprompt as lp
from largeprompt.attention import JointMoments, WeightMoments
from largeprompt.attention._joint_integrals import joint_integrals
from largeprompt.attention._pair import pair_shares, pair_table
from largeprompt.attention._parity import ParityMoments
from largeprompt.attention._weight_integrals import weight_integrals
from significance import assert_mean_is

L = 5


@pytest.fixture(scope="module")
def joint() -> JointMoments:
    return JointMoments(L)


def of_covariances(nu: float, other: float, rho: float, L: int):
    return joint_integrals(math.sqrt(nu), math.sqrt(other), rho / math.sqrt(nu * other), L)


@pytest.mark.parametrize("length", [2, 7, 30])
def test_the_second_moment_of_two_readings_is_that_of_simulated_prompts(length):
    rng = np.random.default_rng(length)
    root = rng.normal(size=(3, 3)) / 2
    gamma, (u, v) = root @ root.T, rng.normal(size=(2, 3))
    tokens = rng.normal(size=(40_000, length, 3)) @ root.T
    one, other = (np.einsum("nl,nlk->nk", softmax(tokens @ w, axis=1), tokens) for w in (u, v))
    q, uu, uv, vu, vv = of_covariances(u @ gamma @ u, v @ gamma @ v, u @ gamma @ v, length)
    inner = uu * np.outer(u, u) + uv * np.outer(u, v) + vu * np.outer(v, u) + vv * np.outer(v, v)
    assert_mean_is(np.einsum("ni,nj->nij", one, other), q * gamma + gamma @ inner @ gamma)


@pytest.mark.parametrize(("beta", "length"), [(0.3, 2), (2.0, 30), (2.0, 10**6), (9.0, 7)])
def test_equal_softmaxes_have_the_moments_of_one(beta, length):
    one, both = weight_integrals(beta, length), joint_integrals(beta, beta, 1.0, length)
    np.testing.assert_allclose(both.Q, one.Q, rtol=1e-12)
    np.testing.assert_allclose(both.uu + both.uv + both.vu + both.vv, one.K2, rtol=1e-8, atol=1e-9)


def test_independent_scores_have_the_product_of_means():
    one, other, both = weight_integrals(1.2, 9), weight_integrals(0.7, 9), joint_integrals(1.2, 0.7, 0.0, 9)
    np.testing.assert_allclose(both.uv, one.one_minus_Q * other.one_minus_Q, rtol=1e-12)
    np.testing.assert_allclose([both.Q, both.uu, both.vv], [1 / 9, 0, 0], atol=1e-13)


def test_coefficients_are_derivatives_of_the_shared_weight():
    at, h = (1.2, 0.7, 0.4), 1e-4

    def moved(to) -> float:
        return of_covariances(to[0], to[1], to[2], 12).Q

    slopes = []
    for i in range(3):
        ahead, behind = ([x + sign * h * (i == j) for j, x in enumerate(at)] for sign in (1, -1))
        slopes.append((moved(ahead) - moved(behind)) / (2 * h))
    found = of_covariances(*at, 12)
    np.testing.assert_allclose([found.uu, found.vv, found.vu], [2 * slopes[0], 2 * slopes[1], slopes[2]], atol=1e-8)


def test_the_table_is_the_quadrature(joint):
    rng = np.random.default_rng(0)
    for widest, error in ((1.0, 3e-6), (3.0, 1e-4), (8.0, 3e-3)):
        for beta, other, correlation in rng.uniform((0.01, 0.01, -1), (widest, widest, 1), size=(6, 3)):
            exact = joint_integrals(beta, other, correlation, L)
            found = joint.coefficients(beta**2, other**2, correlation * beta * other)
            scale = math.sqrt(weight_integrals(beta, L).Q * weight_integrals(other, L).Q)
            np.testing.assert_allclose(found, exact, atol=error * scale)


def test_the_table_has_limits_at_zero_scores_and_finite_slopes_there(joint):
    zero = jnp.zeros(2)
    found = joint.coefficients(zero, zero, zero)
    uniform = (1 / L, 0, (1 - 1 / L) ** 2, (L - 1) / L**2, 0)
    np.testing.assert_allclose(np.asarray(found)[:, 0], uniform, atol=1e-6)
    for i in range(3):
        slope = jax.grad(lambda *at: joint.coefficients(*at).Q.sum(), argnums=i)(zero, zero, zero)
        assert np.all(np.isfinite(slope))
    assert np.all(np.isfinite(joint.coefficients(1e8, 1e-8, -1.0)))


def test_one_token_has_weight_one():
    np.testing.assert_allclose(JointMoments(1).coefficients(2.0, 3.0, -1.0), (1, 0, 0, 0, 0), atol=1e-15)


@pytest.mark.parametrize("length", [3, 50])
def test_a_pair_has_the_moments_of_its_softmaxes_and_their_expansion_at_small_scores(length):
    table, moments = pair_table(length), WeightMoments(length)
    for nu in (0.04, 1.7, 30.0):
        q, k = pair_shares(table, np.array([nu]))[:2, 0]
        both = of_covariances(nu, nu, -nu, length)
        np.testing.assert_allclose(q, (moments.Q(nu) - both.Q) / 2, rtol=1e-8)
        np.testing.assert_allclose(k, (moments.K2(nu) - both.uu - both.vv + both.uv + both.vu) / 2, rtol=1e-8)
    q, k, dq, dk = pair_shares(table, np.array([1e-5]))[:, 0]
    np.testing.assert_allclose((q / 1e-5, dq), ((length - 1) / length**2,) * 2, rtol=1e-4)
    expected = (1 - 1 / length, -(1 - 1 / length) * 2 / length * (1 + 2 / length))
    np.testing.assert_allclose((k, dk), expected, rtol=1e-4)


def test_lengths_without_a_table_are_refused():
    with pytest.raises(ValueError, match=r"L is 1e\+10; the moments of two softmaxes are known for L up to 1e9"):
        JointMoments(10**10)
    with pytest.raises(ValueError, match="L is inf; a pair of opposite softmaxes is tabulated for 2 <= L < inf"):
        pair_table(math.inf)


@pytest.mark.parametrize("line", [True, False])
def test_parts_of_two_softmaxes_are_half_the_sum_and_half_the_difference_over_reversed_tokens(line):
    parity, rtol = ParityMoments(5, line=line), 1e-6 if line else 1e-4
    for beta, other, r in ((0.03, 0.05, 0.7), (0.4, 1.1, -0.6), (2.0, 1.4, 0.2), (3.0, 2.5, -1.0)):
        r = np.sign(r) if line else r
        same, opposite = joint_integrals(beta, other, r, 5.0), joint_integrals(beta, other, -r, 5.0)
        at = [jnp.array([float(number)]) for number in (beta, other, r)]
        odd, even = ([float(part[0]) for part in parts] for parts in (parity.odd(*at), parity.even(*at)))
        for found, sign in ((odd, -1), (even, 1)):
            expected = [
                (same.Q + sign * opposite.Q) / 2,
                (same.uu + sign * opposite.uu) / 2,
                (same.vv + sign * opposite.vv) / 2,
                (same.uv + same.vu - sign * (opposite.uv + opposite.vu)) / 2,
            ]
            powers = np.array([1, beta**2, other**2, beta * other])  # of what multiplies them in a risk
            np.testing.assert_allclose(found * powers, expected * powers, rtol=rtol, atol=rtol / 10 * abs(expected[0]))


def test_a_law_of_lengths_has_the_averages_over_prompts_that_are_not_empty():
    law, one_token = lp.Lengths([0, 1, 3, 40], [0.1, 0.3, 0.2, 0.4]), np.array([1.0, 0, 0, 0, 0])
    for at in ((0.3, 0.5, 0.4), (2.0, 3.0, -0.7)):
        each = np.stack([one_token, *(joint_integrals(*at, length) for length in (3.0, 40.0))])
        np.testing.assert_allclose(joint_integrals(*at, law), np.array([3, 2, 4]) @ each / 9, atol=1e-11)
