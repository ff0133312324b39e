import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_ndtr

from largeprompt.attention._weight_integrals import integrate, mean_score, smoothing, weight_integrals
from largeprompt.attention._weights import WeightMoments, weight_expansion
from significance import assert_mean_is

LENGTHS = (2, 3, 7, 50, 1000, 1e6, 1e12)
BETAS = (0.01, 0.1, 0.5, 0.99, 1.0, 2.0, 4.0, 7.5, 8.5, 10.0, 30.0, 100.0, 1000.0)


def relative(found, truth):
    return np.max(np.abs(np.asarray(found) / np.asarray(truth) - 1))


def weights(rng, beta, L, n):
    g = rng.standard_normal((n, L))
    return g, np.exp(beta * (g - g.max(axis=1, keepdims=True)))


def moments_of(g, a):
    """Q, W and E m₁² as means of rows."""
    a = a / a.sum(axis=1, keepdims=True)
    s2, s3 = (a**2).sum(axis=1), (a**3).sum(axis=1)
    return np.stack([s2, s3 - s2**2, (a * g).sum(axis=1) ** 2], axis=1)


@eqx.filter_jit
def _derivatives(moments, nu):
    def values(nu):
        return jnp.stack([moments.Q(nu), moments.W(nu), moments.K2(nu), moments.Dv(nu)])

    return tuple(jax.vmap(f)(nu) for f in (values, jax.jacrev(values), jax.jacfwd(jax.jacrev(values))))


def derivatives(moments, nu):
    """Q, W, K₂ and D_v at every ν, their first and their second derivatives."""
    padded = jnp.asarray(np.resize(nu, 40))  # one size, to compile once
    return tuple(values[: len(nu)] for values in _derivatives(moments, padded))


# The integrals


@pytest.mark.parametrize("L", LENGTHS)
def test_mean_score_is_beta_times_one_minus_Q(L):
    for beta in BETAS:
        moments = weight_integrals(beta, L)
        assert abs(mean_score(beta, L) - beta * (1 - moments.Q)) < 1e-13 * max(1, beta)


@pytest.mark.parametrize("L", LENGTHS)
def test_second_moment_of_the_score_and_the_moments_of_the_weights_give_one_K2(L):
    # K2 comes from E m₁² once β > 1 and Q > ½, and from Q and W everywhere else
    for beta in BETAS:
        moments = weight_integrals(beta, L)
        assert abs(moments.K2 - (1 - moments.Q - 6 * moments.W)) < 1e-13
        assert abs(moments.one_minus_Q + moments.Q - 1) < 1e-13


def test_two_tokens_agree_with_an_integral_over_their_difference():
    for beta in (0.01, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0):
        step = min(0.1, 0.2 / beta)  # a = sigmoid(β√2 g) has poles at distance π/(β√2)
        g = step * np.arange(math.floor(-9 / step), math.ceil(9 / step))
        density = step * np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
        exponential = np.exp(-math.sqrt(2) * beta * np.abs(g))
        product = exponential / (1 + exponential) ** 2  # a(1-a)
        moments = weight_integrals(beta, 2)
        np.testing.assert_allclose(moments.one_minus_Q, density @ (2 * product), rtol=1e-12)
        np.testing.assert_allclose(moments.W, density @ (product * (1 - 4 * product)), rtol=1e-12, atol=1e-15)
        second = density @ (2 * product * (1 - g**2))  # ν K₂ = E[(1 - s₂)(1 - g²)], g the difference over √2
        np.testing.assert_allclose(beta**2 * moments.K2, second, rtol=1e-12 if beta > 1 else 1e-8, atol=1e-15)


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.0])
def test_three_tokens_agree_with_an_integral_over_their_differences(beta):
    step = 0.08
    h = step * np.arange(-112, 113)
    plane = np.stack(np.meshgrid(h, h), axis=-1) @ np.array([[1, -1, 0], [1, 1, -2]] / np.sqrt([[2], [6]]))
    density = step**2 * np.exp(-(h[:, None] ** 2 + h**2) / 2) / (2 * math.pi)
    a = np.exp(beta * plane)
    a /= a.sum(axis=-1, keepdims=True)
    s2, s3 = (a**2).sum(axis=-1), (a**3).sum(axis=-1)
    moments = weight_integrals(beta, 3)
    np.testing.assert_allclose(moments.Q, (density * s2).sum(), rtol=1e-13)
    np.testing.assert_allclose(moments.W, (density * (s3 - s2**2)).sum(), rtol=1e-12)


def test_three_tokens_agree_with_forty_digits():
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        step = mpmath.mpf(1) / 4  # both rules converge like e^{-π²/step}
        x = [step * j for j in range(-170, 24)]
        kernel = [mpmath.exp(-((step * j) ** 2) / 2) * step / mpmath.sqrt(2 * mpmath.pi) for j in range(-60, 61)]

        def average(f):  # at β = 1, τ on the grid of x
            values = [f(step * j) for j in range(-230, 84)]
            return [mpmath.fdot(kernel, values[i : i + 121]) for i in range(len(x))]

        phi0 = average(lambda x: mpmath.exp(-mpmath.exp(x)))
        P2 = average(lambda x: mpmath.exp(2 * x - mpmath.exp(x)))
        Q = 3 * step * mpmath.fsum(p * phi**2 for p, phi in zip(P2, phi0, strict=True))
    np.testing.assert_allclose(weight_integrals(1.0, 3).Q, float(Q), rtol=1e-14)


@pytest.mark.parametrize("L", [2, 7])
@pytest.mark.parametrize("beta", [0.5, 2.0, 25.0, 100.0])
def test_integrals_are_the_means_over_random_prompts(beta, L):
    samples = moments_of(*weights(np.random.default_rng(7 * L), beta, L, 200_000))
    moments = weight_integrals(beta, L)
    assert_mean_is(samples, [moments.Q, moments.W, moments.Q + beta**2 * moments.K2])


# The tables


@pytest.mark.parametrize("L", LENGTHS)
def test_tables_agree_with_the_integrals_between_their_nodes(L):
    rng = np.random.default_rng(0)
    betas = np.concatenate([rng.uniform(0, 10, 60), rng.uniform(10, 1000, 20), 10 ** rng.uniform(-2, 3, 20)])
    exact = integrate(smoothing(tuple(betas), math.log(L)), L)
    moments, nu = WeightMoments(L), betas**2
    (Q, K2), W = moments.shares(nu)[::2], moments.W(nu)
    small = betas <= 10
    for found, truth in ((Q, exact.Q), (Q + 6 * W, exact.one_minus_K2), (K2, exact.K2), (1 - Q, exact.one_minus_Q)):
        assert relative(found[small], truth[small]) < 2e-13
        assert relative(found[~small], truth[~small]) < 1e-11
    np.testing.assert_allclose(moments.Dv(nu), exact.Q + nu * (2 * exact.Q - exact.one_minus_K2), rtol=1e-11)
    np.testing.assert_array_equal(moments.Q(nu), Q)
    np.testing.assert_array_equal(moments.K2(nu), K2)


@pytest.mark.parametrize("L", LENGTHS)
def test_moments_at_zero(L):
    moments = WeightMoments(L)
    np.testing.assert_allclose(moments.Q(0.0), 1 / L, rtol=1e-13)
    np.testing.assert_allclose(1 / L + 6 * moments.W(0.0), 1 / L, rtol=1e-13)
    np.testing.assert_allclose(moments.Dv(0.0), 1 / L, rtol=1e-13)
    values, slopes, _ = derivatives(moments, jnp.asarray([0, -1e-9]))
    np.testing.assert_allclose(slopes[0, 0], (1 - 1 / L) / L, rtol=1e-10)
    # from below 0, as rounding may leave a variance, value and derivative are those at 0
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(slopes[0], slopes[1])


@pytest.mark.parametrize("L", LENGTHS)
def test_slope_of_Q_is_a_moment_of_the_weights(L):
    # dQ/dν = E[s₂ - 4s₃ + 3s₂²], half the Laplacian of s₂
    betas = np.random.default_rng(1).uniform(0.01, 10, 40)
    smooth = smoothing(tuple(betas), math.log(L))
    token, pair = L * np.exp((L - 1) * smooth.log_phi0), L * (L - 1) * np.exp((L - 2) * smooth.log_phi0)
    terms = token * (smooth.P2 - 2 * smooth.P3 + smooth.P4 / 2) + pair * smooth.P2**2 / 2
    slope = smooth.step * np.add.reduceat(terms, smooth.start)
    assert relative(derivatives(WeightMoments(L), betas**2)[1][:, 0], slope) < 1e-10


@pytest.mark.parametrize("L", [2, 7, 1000, 1e12])
def test_derivatives_are_those_of_the_integrals(L):
    variances = np.array([0.7, 5.0, 30.0, 400.0])
    _, first, second = derivatives(WeightMoments(L), variances)
    for i, nu in enumerate(variances):
        h = 0.02 * nu * np.arange(-3, 4)
        exact = integrate(smoothing(tuple(np.sqrt(nu + h)), math.log(L)), L)
        for moment, values in ((0, exact.Q), (2, -exact.one_minus_K2)):
            slope = np.array([-1, 9, -45, 0, 45, -9, 1]) @ values / (60 * h[4])
            curvature = np.array([2, -27, 270, -490, 270, -27, 2]) @ values / (180 * h[4] ** 2)
            size = min(abs(values[3]), 1 - abs(values[3]))
            assert abs(first[i, moment] - slope) < 1e-6 * max(abs(slope), size / nu)
            assert abs(second[i, moment] - curvature) < 1e-4 * max(abs(curvature), size / nu**2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("L", [1, 2, 50, 1e12, math.inf])
def test_values_and_two_derivatives_are_finite_for_every_variance(L, dtype):
    nu = jnp.asarray([-1e-12, 0, 1e-30, 1e-6, 1, 30, 1e6, 1e12], dtype)
    for values in derivatives(WeightMoments(L), nu):
        assert values.dtype == dtype
        assert np.isfinite(np.asarray(values)).all()
    Q, K2 = map(np.asarray, WeightMoments(L).shares(nu.reshape(2, 4))[::2])
    assert Q.shape == K2.shape == (2, 4)
    assert ((Q >= 0) & (Q <= 1) & (K2 >= 0) & (K2 <= 1)).all()
    assert (np.diff(Q.ravel()) >= 0).all()


def test_one_token_has_all_the_weight_and_infinitely_many_have_none():
    nu = jnp.asarray([0.0, 0.5, 1e3, 1e9])
    one, all_of_them = WeightMoments(1), WeightMoments(math.inf)
    np.testing.assert_array_equal(one.Q(nu), 1)
    np.testing.assert_array_equal(one.K2(nu), 0)
    np.testing.assert_array_equal(one.W(nu), 0)
    np.testing.assert_array_equal(one.Dv(nu), 1 + nu)
    for f, value in ((all_of_them.Q, 0), (all_of_them.K2, 1), (all_of_them.W, 0), (all_of_them.Dv, 0)):
        np.testing.assert_array_equal(f(nu), value)


@pytest.mark.parametrize("L", LENGTHS)
def test_one_weight_wins_as_the_variance_grows(L):
    # β(1-Q) = E m₁ tends to the mean of the largest score, and ν K₂ to its second moment less 1
    moments = WeightMoments(L)
    nu = jnp.logspace(2, 14, 200)
    Q, K2 = map(np.asarray, moments.shares(nu)[::2])
    assert (np.diff(Q) >= 0).all()
    assert (np.diff(K2) <= 0).all()
    x = np.arange(-9, 12, 1e-2)
    law = L * np.exp(-(x**2) / 2 + (L - 1) * log_ndtr(x)) * 1e-2 / math.sqrt(2 * math.pi)
    beta = jnp.sqrt(nu[-1])
    np.testing.assert_allclose(beta * (1 - Q[-1]), law @ x, rtol=1e-6)
    np.testing.assert_allclose(nu[-1] * K2[-1], law @ (x**2 - 1), rtol=1e-6, atol=1e-6)


def test_every_length_shares_one_compilation_and_lengths_can_be_stacked():
    compilations = []

    @eqx.filter_jit
    def Q(moments, nu):
        compilations.append(nu)
        return moments.Q(nu)

    lengths, nu = (1, 2, 40, 1e9, math.inf), jnp.linspace(0.0, 9.0, 5)
    each = jnp.stack([Q(WeightMoments(L), nu) for L in lengths])
    assert len(compilations) == 1
    stacked = jax.tree.map(lambda *tables: jnp.stack(tables), *(WeightMoments(L) for L in lengths))
    np.testing.assert_allclose(jax.vmap(lambda moments: moments.Q(nu))(stacked), each, rtol=1e-14)


def test_lengths_beyond_the_integrals_are_refused():
    with pytest.raises(ValueError, match="L is about 1e400"):
        WeightMoments(10**400)
    with pytest.raises(ValueError, match="whole number"):
        WeightMoments(2.5)


def test_expansion_in_one_over_L_has_an_error_of_third_order():
    nu = 0.6
    lengths = np.array([1e3, 4e3, 1.6e4])
    expansions = np.array([weight_expansion(nu, L) for L in lengths])
    exact = [weight_integrals(math.sqrt(nu), L) for L in lengths]
    for errors in (
        np.abs(expansions[:, 0] - [moments.Q for moments in exact]),
        np.abs(1 - expansions[:, 1] - [moments.one_minus_K2 for moments in exact]),
    ):
        np.testing.assert_allclose(np.diff(np.log(errors)) / math.log(4), -3, atol=0.05)
