"""Predicted deviations against measured ones, closed forms and long prompts; the regimes they follow."""

import math

import equinox as eqx
import jax
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from largeprompt import _compiled, icl
from largeprompt.concentration import breakdown_exponent, deviation, predict, rates, spread
from largeprompt.concentration._problem import Problem, problem_of
from largeprompt.concentration._query_averages import GaussianQueries
from largeprompt.concentration._rates import constants_at
from largeprompt.concentration._risk_samples import head_differences
from refusals import assert_refused
from significance import assert_close_in_sigmas, assert_mean_is

D = 3
U, V = 0.3 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D)
SOFTMAX, LINEAR = lp.SoftmaxAttention(U, V), lp.LinearAttention(U, V)
K, Q, values, O = (0.5 * catalogue.matrix(i, *shape) for i, shape in enumerate([(2, D), (2, D), (4, D), (2, 4)], 2))
HEAD = lp.Head(K, Q, values, O, scale=0.7)
TOKENS = lp.Gaussian(catalogue.matrix(6, D), catalogue.covariance(7, D))
QUERIES = lp.Gaussian(np.zeros(D), catalogue.covariance(8, D))


def isotropic(theta2: float, dim: int = 1) -> tuple[lp.SoftmaxAttention, lp.Gaussian]:
    """Standard tokens and queries, and a layer of the spread θ²."""
    return lp.SoftmaxAttention(math.sqrt(theta2) * np.eye(dim), np.eye(dim)), lp.Gaussian(np.zeros(dim), np.eye(dim))


@pytest.mark.parametrize("widen", [True, False])
def test_measured_outputs_have_the_exact_mean_squares(widen):
    """At every length from one token on, for the three quantities that read the mean."""
    Ls, names = [1, 2, 10, 100], ("output", "V", "O")
    predicted = predict(HEAD, TOKENS, QUERIES, Ls, names)
    for i, name in enumerate(names):
        key = jax.random.key(10 + i)
        measured = deviation(HEAD, TOKENS, QUERIES, Ls, name, key, replicates=20_000, widen=widen)
        assert predicted[name].exact
        assert not predicted[name].stderr.any()
        assert_close_in_sigmas(measured.mean_square, predicted[name].mean_square, measured.stderr)


def test_exact_mean_squares_over_other_queries_are_averages_over_them():
    """Over an off-centre Gaussian and a cube, drawn; over given queries with weights, summed."""
    weighted = lp.Empirical(catalogue.matrix(11, 4, D), [0.1, 0.4, 0.0, 0.5])
    for nu in (TOKENS, lp.Cube(np.ones(D)), weighted, catalogue.matrix(12, 3, D)):
        predicted = predict(SOFTMAX, TOKENS, nu, [3, 30], "output")
        measured = deviation(SOFTMAX, TOKENS, nu, [3, 30], "output", jax.random.key(13), replicates=20_000)
        assert predicted.exact
        assert_close_in_sigmas(measured.mean_square, predicted.mean_square, np.hypot(measured.stderr, predicted.stderr))
    one = catalogue.matrix(14, D)
    np.testing.assert_allclose(
        predict(SOFTMAX, TOKENS, one, [7], "output").mean_square,
        predict(SOFTMAX, TOKENS, lp.Empirical(one[None]), 7, "output").mean_square,
    )


@pytest.mark.parametrize("name", ["output", "U", "K", "Q", "V", "O", "gradient"])
def test_the_closed_mean_of_the_constants_is_that_over_queries(name):
    problem = problem_of(HEAD, TOKENS, QUERIES, 1, name)
    assert isinstance(problem, Problem)
    heads, square = problem.heads or (), problem.squares[name]
    z = np.random.default_rng(0).multivariate_normal(np.zeros(D), np.asarray(QUERIES.Gamma), 50_000)
    closed = GaussianQueries(TOKENS, QUERIES).constant(heads, square).value
    assert_mean_is(constants_at(heads, TOKENS, square, z, 256), closed)
    assert predict(HEAD, TOKENS, QUERIES, 5, name).constant == closed


def test_constants_at_one_query_are_the_rates_there():
    z = catalogue.matrix(15, D)
    there = rates(SOFTMAX, TOKENS, z)
    for name in ("output", "U", "V"):
        found = predict(SOFTMAX, TOKENS, z, 10, name)
        np.testing.assert_allclose(found.constant, getattr(there, name), rtol=1e-12)


def test_linear_attention_has_c_over_L_from_the_first_token_on():
    nu = catalogue.matrix(16, 3, D)
    predicted = predict(LINEAR, TOKENS, nu, [1, 2, 20], ("output", "U", "V"))
    measured = deviation(LINEAR, TOKENS, nu, [1, 2, 20], ("output", "U", "V"), jax.random.key(17), replicates=20_000)
    for name, found in predicted.items():
        assert found.exact
        np.testing.assert_allclose(found.mean_square * found.L, found.constant)
        assert_close_in_sigmas(measured[name].mean_square, found.mean_square, measured[name].stderr)
    within = predict(LINEAR, TOKENS, nu, 20, "output", query_in_prompt=True)
    assert not within.exact
    assert "exact" not in within.method


@pytest.mark.parametrize("theta2", [0.01, 0.2, 0.4])
def test_exact_mean_squares_become_the_constant_over_L(theta2):
    layer, mu = isotropic(theta2, dim=2)
    found = predict(layer, mu, None, [10**12, 10**30], "output")
    early, late = found.mean_square * [1e12, 1e30] / found.constant
    assert abs(late - 1) < (1e-3 if theta2 > 0.3 else 1e-9)
    assert abs(early - 1) < (0.1 if theta2 > 0.3 else 1e-5)
    assert found.regime.name == "1/L"
    assert found.regime.exponent == 1
    assert predict(layer, mu, None, 2, "output").regime.name == ("1/L" if theta2 == 0.01 else "heavy-tailed")


def test_the_onset_is_where_the_exact_mean_square_comes_within_a_tenth():
    layer, mu = isotropic(0.3, dim=3)
    found = predict(layer, mu, None, 10, "output")
    onset = found.regime.onset
    for L, near in ((onset / 2, False), (2 * onset, True)):
        ratio = predict(layer, mu, None, int(L), "output").mean_square[0] * int(L) / found.constant
        assert bool(abs(ratio - 1) < 0.1) is near


@pytest.mark.parametrize("theta2", [0.7, 1.0, 2.0, 4.0])
def test_past_the_threshold_the_exact_mean_square_falls_with_the_breakdown_exponent(theta2):
    """By exact quadrature from L = 1e17 to 1e18; what is left are logarithms."""
    layer, mu = isotropic(theta2)
    a, b = predict(layer, mu, None, [10**17, 10**18], "output").mean_square
    assert abs(math.log10(a / b) - breakdown_exponent(theta2)) < 0.045
    found = predict(layer, mu, None, [10**17], ("output", "U"))
    assert found["output"].mean_square[0] == a
    for one in found.values():
        assert one.constant == math.inf
        assert one.regime.name == "slower than 1/L"
        np.testing.assert_allclose(one.regime.exponent, breakdown_exponent(theta2), rtol=1e-12)
    assert math.isnan(found["U"].mean_square[0])  # no law of finite lengths is known


def test_the_breakdown_exponent_is_one_at_the_threshold_golden_at_one_and_one_over_the_spread_far_beyond():
    assert breakdown_exponent(0.5) == breakdown_exponent(0.1) == 1
    np.testing.assert_allclose(breakdown_exponent(0.5 + 1e-12), 1)
    np.testing.assert_allclose(breakdown_exponent(1.0), (math.sqrt(5) - 1) / 2, rtol=1e-15)
    np.testing.assert_allclose(breakdown_exponent(1e20), 1e-20, rtol=1e-12)


def test_the_spread_is_the_largest_over_the_pairs_of_gaussians_in_which_laws_end():
    one, two = (
        lp.Gaussian(np.zeros(D), catalogue.covariance(18, D)),
        lp.Gaussian(np.ones(D), catalogue.covariance(19, D)),
    )
    mixture = lp.Mixture([0.3, 0.7], [one, two])
    pairs = [spread(SOFTMAX, mu, nu) for mu in (one, two) for nu in (one, two)]
    root = np.linalg.cholesky(np.asarray(two.Gamma))
    product = root.T @ U.T @ np.asarray(one.Gamma) @ U @ root
    np.testing.assert_allclose(pairs[1], np.linalg.eigvalsh(product)[-1])
    np.testing.assert_allclose(spread(SOFTMAX, mixture, mixture), max(pairs))
    without = lp.Mixture([1.0, 0.0], [one, lp.Gaussian(np.zeros(D), 100 * np.eye(D))])
    np.testing.assert_allclose(spread(SOFTMAX, without, one), pairs[0])
    cube, unknown = lp.Cube(np.ones(D)), lp.FromCGF(lambda t: t @ t / 2, D)
    assert spread(SOFTMAX, cube, one) == spread(SOFTMAX, one, cube) == spread(LINEAR, one, one) == 0
    assert math.isnan(spread(SOFTMAX, unknown, one))
    assert spread(SOFTMAX, unknown, lp.Empirical(np.ones((2, D)))) == 0


def test_where_tails_are_not_known_neither_is_the_regime():
    mu = lp.FromCGF(lambda t: t @ t / 2, 2)
    found = predict(
        lp.SoftmaxAttention(0.2 * np.eye(2), np.eye(2)), mu, lp.Gaussian([0.0, 0.0], np.eye(2)), 10, "output"
    )
    assert found.regime.name == "unknown"
    assert "not known" in found.regime.sentence
    assert_close_in_sigmas(found.constant, (1 - 0.08) ** -1 * (2 + 2 * 0.04 / 0.92), found.constant_stderr)


def test_a_query_in_the_prompt_may_rule_the_rate_where_queries_are_wider_than_tokens():
    """Γ = 0.01, S = 1, U = 6.3: θ² = 0.4 gives 1/L, the query's own weight the exponent 0.082 (errata G17)."""
    layer, mu, nu = lp.SoftmaxAttention([[6.3]], [[1.0]]), lp.Gaussian([0.0], [[0.01]]), lp.Gaussian([0.0], [[1.0]])
    without, within = (predict(layer, mu, nu, 10**9, "output", query_in_prompt=own).regime for own in (False, True))
    assert without.exponent == 1
    np.testing.assert_allclose(within.exponent, 1 / (2 * (6.3 - 6.3**2 * 0.01 / 2)))
    assert abs(within.exponent - 0.082) < 1e-3
    alike = predict(*isotropic(0.4), None, 100, "output", query_in_prompt=True)
    assert alike.regime.exponent == 1
    measured = deviation(
        layer, mu, nu, [1000, 100_000], "output", jax.random.key(20), replicates=4000, query_in_prompt=True
    )
    fit = measured.fit()
    assert fit.slope > -0.3  # far from -1, and on its way to -0.082
    assert deviation(layer, mu, nu, [1000, 100_000], "output", jax.random.key(20), replicates=4000).fit().slope < -0.6


TASK = icl.LinearRegression(np.diag([0.5, 1.0, 1.0, 1.2, 1.5]), noise=0.3)


@pytest.mark.parametrize("optimum", [icl.optimal_linear, icl.optimal_softmax])
def test_measured_gaps_of_risks_and_gradients_are_the_predicted_ones(optimum):
    layer = optimum(TASK, 50).attention
    names = ("risk", "risk-gradient")
    predicted = predict(layer, TASK, None, [5, 50], names)
    measured = deviation(layer, TASK, None, [5, 50], names, jax.random.key(22), replicates=10_000)
    risk, gradient = (measured[name] for name in names)
    assert risk.gap is not None
    assert risk.gap_stderr is not None
    gaps = [float(icl.risk(layer, TASK, L).value - icl.risk(layer, TASK, math.inf).value) for L in (5, 50)]
    np.testing.assert_allclose(predicted["risk"].mean_square, np.square(gaps), rtol=1e-6)
    assert_close_in_sigmas(risk.gap, gaps, risk.gap_stderr)
    error = np.hypot(gradient.stderr, predicted["risk-gradient"].stderr)
    assert_close_in_sigmas(gradient.mean_square, predicted["risk-gradient"].mean_square, error)


@pytest.mark.parametrize("optimum", [icl.optimal_linear, icl.optimal_softmax])
def test_gaps_of_risks_are_their_constant_over_L_past_rounding_too(optimum):
    """At L = 1e30 both risks are the same number; at 1e12 softmax has not quite set in."""
    found = predict(optimum(TASK, 50).attention, TASK, None, [10**12, 10**30], "risk")
    early, late = found.mean_square * [1e24, 1e60] / found.constant
    assert abs(late - 1) < 1e-12
    assert abs(early - 1) < 3e-3


@pytest.mark.parametrize("query_in_prompt", [False, True])
def test_what_is_taken_out_of_risks_has_no_mean_and_carries_most_of_the_noise(query_in_prompt):
    layer, L = lp.SoftmaxAttention(0.15 * np.eye(6), np.eye(6)), 200
    keys = jax.random.split(jax.random.key(23), 2**11)
    found = head_differences(layer, TASK, keys, np.asarray(L), 64, True, query_in_prompt)
    loss, linear, gradient, linear_gradient = (np.asarray(part) for part in found)
    assert_mean_is(linear, 0.0)
    assert_mean_is(linear_gradient, 0.0)
    assert (loss - linear).var() < 0.3 * loss.var()
    assert (gradient - linear_gradient).var() < 0.5 * gradient.var()


WRONG = {
    "for risks it must be None: a task has its own queries": lambda: predict(
        icl.optimal_linear(TASK, 9).attention, TASK, QUERIES, 5, "risk"
    ),
    "with softmax attention a risk is then only measured": lambda: predict(
        icl.optimal_softmax(TASK, 9).attention, TASK, None, 5, "risk", query_in_prompt=True
    ),
    "for risks it must be a task": lambda: predict(SOFTMAX, TOKENS, None, 5, "risk"),
    "of a task the quantity must be 'risk' or 'risk-gradient'": lambda: predict(SOFTMAX, TASK, None, 5, "output"),
    "the constant of U overflows at a query": lambda: predict(SOFTMAX, TOKENS, np.full(D, 1e3), 5, "U"),
}


@pytest.mark.parametrize(("message", "call"), WRONG.items())
def test_what_cannot_be_predicted_is_refused(message, call):
    assert_refused(call, message)


def test_huge_scores_at_a_query_leave_the_exact_mean_square():
    """ν = 1e6 and more: e^ν is no number, the error is that of the largest token."""
    layer, mu = lp.SoftmaxAttention([[1e3]], [[1.0]]), lp.Gaussian([0.0], [[1.0]])
    found = predict(layer, mu, [2.0], [1, 50], "output")
    assert found.constant == math.inf
    largest = np.random.default_rng(1).normal(size=(20_000, 50)).max(axis=1)
    assert_mean_is((largest - 2e3) ** 2, found.mean_square[1])
    np.testing.assert_allclose(found.mean_square[0], 2e3**2 + 1, rtol=1e-9)


def test_a_constant_over_drawn_queries_that_a_few_make_warns():
    """Off-centre queries near the threshold: the average over a sample is made by its largest."""
    layer, mu = isotropic(0.45, dim=4)
    with pytest.warns(UserWarning, match="the constant of output is an average over 8192 queries that are worth"):
        predict(layer, mu, lp.Gaussian(np.ones(4), np.eye(4)), 10, "output")


class Parabola(eqx.Module):
    """The Λ of a Gaussian whose variance is a number of Python."""

    variance: float

    def __call__(self, theta):
        return self.variance * theta @ theta / 2


def test_laws_may_hold_plain_numbers_where_programs_are_compiled_quickly(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", _compiled._quick_flags())
    layer, queries = lp.SoftmaxAttention(0.3 * np.eye(2), np.eye(2)), lp.Gaussian(np.zeros(2), 0.5 * np.eye(2))
    laws = lp.FromCGF(Parabola(2.0), 2), lp.Gaussian(np.zeros(2), 2.0 * np.eye(2))
    one, other = (predict(layer, law, queries, [100], "output", key=jax.random.key(0)) for law in laws)
    np.testing.assert_allclose(one.constant, other.constant, rtol=0.05)
