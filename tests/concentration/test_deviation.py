"""Measured deviations: the forms against Jacobians, prompts against attention on the same tokens, samplers in law."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import catalogue
import largeprompt as lp
from largeprompt.concentration import Deviation, compare, deviation, fit_power_law, predict
from largeprompt.concentration._gaussian_prompts import GaussianPrompts
from largeprompt.concentration._problem import Problem, problem_of
from largeprompt.concentration._prompts import StreamedHeads, prompt_sums, reader_of, squares
from largeprompt.concentration._query_draws import PlainQueries, WiderQueries, query_draws
from largeprompt.concentration._reliability import reliability
from largeprompt.concentration._samples import ReducedPrompts
from largeprompt.measures._worth import tail_index
from refusals import assert_refused
from significance import SIGMAS, assert_close_in_sigmas, assert_mean_is

FALSE_ALARM = 2 * stats.norm.sf(SIGMAS)
D = 3
U, V = 0.3 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D)
SOFTMAX, LINEAR = lp.SoftmaxAttention(U, V), lp.LinearAttention(U, V)
K, Q, values, O = (0.5 * catalogue.matrix(i, *shape) for i, shape in enumerate([(2, D), (2, D), (4, D), (2, 4)], 2))
GAUSSIAN = lp.Gaussian(catalogue.matrix(6, D), catalogue.covariance(7, D))
LAYERS = {
    "softmax": SOFTMAX,
    "linear": LINEAR,
    "head": lp.Head(K, Q, values, scale=0.7),
    "head with O": lp.Head(K, Q, values, O, scale=0.7),
    "linear head with O": lp.Head(K, Q, values, O, scale=0.7, kind="linear"),
}


def problem(layer: lp.attention.AbstractLayer, mu: lp.measures.AbstractMeasure) -> Problem:
    """All quantities of a layer with one head."""
    found = problem_of(layer, mu, None, 1, all_quantities(layer))
    assert isinstance(found, Problem)
    return found


def all_quantities(layer: lp.attention.AbstractLayer) -> tuple[str, ...]:
    if not isinstance(layer, lp.Head):
        return ("output", "U", "V", "gradient")
    return ("output", "U", "K", "Q", "V", *(["O"] if layer.O is not None else []), "gradient")


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_forms_are_squared_norms_of_differences_of_jacobians(layer):
    merged = layer.merged() if isinstance(layer, lp.Head) else layer
    z, prompt = catalogue.matrix(8, D), lp.Empirical(catalogue.matrix(9, 11, D))
    here, there = (StreamedHeads((merged,), True).limit(mu, jnp.asarray(z)[None]) for mu in (prompt, GAUSSIAN))
    off = jax.tree.map(lambda one, other: one[0] - other[0], here, there)
    one, other = layer.jacobian(prompt, z), layer.jacobian(GAUSSIAN, z)
    squared = {
        name: float(jnp.sum((getattr(one, name) - getattr(other, name)) ** 2))
        for name in ("K", "Q", "U", "V", "O")
        if getattr(one, name, None) is not None
    }
    squared["gradient"] = sum(squared.values())
    squared["output"] = float(jnp.sum((layer(prompt, z) - layer(GAUSSIAN, z)) ** 2))
    merged_slopes = merged.jacobian(prompt, z).U - merged.jacobian(GAUSSIAN, z).U
    squared["U"] = float(jnp.sum(merged_slopes**2))
    names = all_quantities(layer)
    assert set(names) == set(squared)
    for name, square in problem(layer, GAUSSIAN).squares.items():
        np.testing.assert_allclose(square(off, jnp.asarray(z)), squared[name], rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("attention", [SOFTMAX, LINEAR], ids=["softmax", "linear"])
@pytest.mark.parametrize("L", [1, 64, 1500])
def test_a_streamed_prompt_is_read_as_its_tokens_held_at_once(attention, L):
    """With scores large enough for the shift to move, along two queries, out of the prompt and in it."""
    mu, chunk, key = lp.Gaussian(np.ones(D), 9 * np.eye(D)), 64, jax.random.key(1)
    parts = [mu._sample(jax.random.fold_in(key, i), chunk) for i in range(-(-L // chunk))]
    prompt, queries = lp.Empirical(np.concatenate(parts)[:L]), jnp.asarray(catalogue.matrix(10, 2, D))
    for query_in_prompt in (False, True):
        (found,) = StreamedHeads((attention,), True).finite(mu, key, queries, jnp.asarray(L), chunk, query_in_prompt)
        assert found.slope is not None
        for i, z in enumerate(queries):
            held = lp.with_query(prompt, z) if query_in_prompt else prompt
            u = attention.U @ z
            np.testing.assert_allclose(found.mean[i], attention.reading(held, u), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found.slope[i], attention.reading_slope(held, u), rtol=1e-8, atol=1e-8)


def test_scores_of_a_thousand_leave_the_token_of_the_largest():
    key, theta = jax.random.key(2), 1e3 * jnp.ones((1, D))
    sums = prompt_sums(GAUSSIAN, key, theta, jnp.asarray(40), 64, True, jnp.zeros(D))
    tokens = GAUSSIAN._sample(jax.random.fold_in(key, 0), 64)[:40]
    found = sums.softmax_reading(jnp.zeros(D))
    assert found.slope is not None
    np.testing.assert_allclose(found.mean[0], tokens[jnp.argmax(tokens.sum(axis=1))], rtol=1e-6)
    assert np.abs(np.asarray(found.slope)).max() < 1e-6


def wide(p: int, scale: float, seed: int = 3) -> lp.SoftmaxAttention:
    return lp.SoftmaxAttention(scale * catalogue.matrix(seed, D, D), catalogue.matrix(seed + 1, p, D))


SINGULAR = lp.Gaussian(catalogue.matrix(11, D), catalogue.covariance(12, D, rank=2))
IN_LAW = {
    "one output": (wide(1, 0.4), GAUSSIAN, 7, False),
    "one output, one token": (wide(1, 0.4), GAUSSIAN, 1, False),
    "as many outputs as coordinates": (wide(D, 0.4), GAUSSIAN, 3, False),
    "more outputs than coordinates": (wide(5, 0.4), GAUSSIAN, 2, True),
    "the query in the prompt": (wide(1, 0.4), GAUSSIAN, 7, True),
    "a singular law": (wide(1, 0.4), SINGULAR, 7, True),
    "no scores": (lp.SoftmaxAttention(np.zeros((D, D)), catalogue.matrix(4, 1, D)), GAUSSIAN, 7, False),
    "scores of 30": (wide(1, 20.0), GAUSSIAN, 50, True),
    "linear": (LINEAR, GAUSSIAN, 7, False),
    "linear, the query in the prompt": (LINEAR, SINGULAR, 4, True),
    "a head with O": (LAYERS["head with O"], GAUSSIAN, 7, False),
}


@pytest.mark.parametrize(("layer", "mu", "L", "query_in_prompt"), IN_LAW.values(), ids=IN_LAW.keys())
def test_prompts_through_sufficient_statistics_have_the_law_of_whole_ones(layer, mu, L, query_in_prompt):
    """At one query: the means of the squares, and their whole law (Kolmogorov and Smirnov)."""
    merged = layer.merged() if isinstance(layer, lp.Head) else layer
    known, z, n = list(problem(layer, mu).squares.values()), catalogue.matrix(13, D), 20_000
    reduced = GaussianPrompts.of(merged, mu)
    assert reduced is not None
    assert reduced.serves(L, True)
    ours = reduced.squares([square.each[0] for square in known], np.tile(z, (n, 1)), L, 5, 0, query_in_prompt)
    keys = jax.random.split(jax.random.key(14), n)
    fixed = jnp.asarray(z)[None]
    reader, draws = reader_of(layer, (merged,), True), PlainQueries(mu)
    whole, weights = squares(reader, mu, draws, fixed, known, keys, jnp.asarray(L), 8, 1, query_in_prompt)
    assert np.all(weights == 1)
    rng = np.random.default_rng(0)
    for name, one, other in zip(all_quantities(layer), ours, whole, strict=True):
        other = np.asarray(other)[:, 0]
        error = np.hypot(one.std(), other.std()) / np.sqrt(n)
        # the compiled sums are of float32: what is one number in whole prompts is spread by the root of its rounding,
        # and laws with such atoms are compared blurred
        rounding = 1e-5 * (1 + np.abs(other).max())
        assert_close_in_sigmas(one.mean(), other.mean(), error + rounding)
        blur = max(0.05 * other.std(), 100 * rounding)
        one, other = (x + blur * rng.normal(size=n) for x in (one, other))
        _, probability = stats.ks_2samp(one, other)
        assert probability > FALSE_ALARM, name


def test_a_batch_of_reduced_prompts_can_be_cut_where_one_likes():
    """The compiled part of a prompt is a function of its number; the normals across it are of its batch."""
    layer = lp.SoftmaxAttention([[0.8]], [[1.0]])  # one coordinate: nothing lies across
    reduced = GaussianPrompts.of(layer, lp.Gaussian([0.3], [[2.0]]))
    assert reduced is not None
    known = [square.each[0] for square in problem(layer, lp.Gaussian([0.3], [[2.0]])).squares.values()]
    z = catalogue.matrix(15, 200, 1)
    whole = reduced.squares(known, z, 9, 1, 0, False)
    parts = [reduced.squares(known, z[i:j], 9, 1, i, False) for i, j in ((0, 64), (64, 200))]
    for i in range(len(known)):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])


def test_wider_queries_weigh_back_to_their_law():
    nu = lp.Gaussian(catalogue.matrix(16, D), catalogue.covariance(17, D))
    draws = query_draws([wide(1, 0.6)], GAUSSIAN, nu, True)
    assert isinstance(draws, WiderQueries)
    z, weights = (np.asarray(part) for part in draws.draw(jax.random.key(18), 200_000))
    bound = float(np.prod(draws.widening))
    assert weights.max() <= bound * (1 + 1e-12)
    assert bound < 5**1.5  # each direction at most 1/√(1-0.8) as wide
    assert_mean_is(weights, 1.0)
    assert_mean_is(weights[:, None] * z, nu.m)
    centred = z - np.asarray(nu.m)
    assert_mean_is(weights[:, None, None] * centred[:, :, None] * centred[:, None, :], nu.Gamma)
    assert_mean_is(weights[:, None] * np.cos(z), np.exp(-np.diag(nu.Gamma) / 2) * np.cos(nu.m))


def test_queries_are_drawn_plainly_where_nothing_is_gained():
    bounded = lp.Cube(np.ones(D))
    for attention, mu, nu, widen in (
        (SOFTMAX, GAUSSIAN, GAUSSIAN, False),
        (LINEAR, GAUSSIAN, GAUSSIAN, True),
        (SOFTMAX, bounded, GAUSSIAN, True),
        (SOFTMAX, GAUSSIAN, bounded, True),
        (SOFTMAX, lp.Gaussian(np.zeros(D), np.zeros((D, D))), GAUSSIAN, True),
    ):
        assert isinstance(query_draws([attention], mu, nu, widen), PlainQueries)


def assert_same(one: Deviation, other: Deviation) -> None:
    for name in ("mean_square", "stderr", "low", "high", "quantiles", "effective", "tail", "needed"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("mu", [lp.Gaussian(np.zeros(D), np.eye(D)), lp.Cube(np.ones(D))], ids=["Gaussian", "cube"])
def test_several_quantities_are_measured_on_the_prompts_of_each_alone(mu):
    """The same key gives the same numbers, in any order; those of a Gaussian's output alone are drawn with less."""
    layer, z = lp.SoftmaxAttention(0.5 * U, V), np.ones(D)

    def measured(Ls, quantity, seed=19):
        return deviation(layer, mu, z, Ls, quantity, jax.random.key(seed), replicates=500)

    several = measured([20, 60], ("U", "gradient", "output"))
    assert list(several) == ["U", "gradient", "output"]
    for name in ("U", "gradient"):
        assert_same(measured([20, 60], name), several[name])
    if not isinstance(mu, lp.Gaussian):
        np.testing.assert_allclose(measured(20, "output").mean_square, several["output"].mean_square[:1], rtol=1e-9)
    np.testing.assert_array_equal(measured([60, 20], "U").mean_square[::-1], several["U"].mean_square)
    assert not np.isin(measured([20, 60], "U", seed=20).mean_square, several["U"].mean_square).any()


@pytest.mark.usefixtures("all_resamples")
def test_a_summary_is_that_of_its_squares():
    """At one token and one query the square is ‖V(ζ-Γu)‖²: its mean, interval and quantiles are those of draws."""
    z, Gamma = catalogue.matrix(21, D), np.asarray(GAUSSIAN.Gamma)
    found = deviation(SOFTMAX, GAUSSIAN, z, 1, "output", jax.random.key(22), replicates=20_000)
    token = np.random.default_rng(0).multivariate_normal(np.zeros(D), Gamma, 200_000)
    square = np.sum(((token - Gamma @ U @ z) @ V.T) ** 2, axis=1)
    error = np.hypot(found.stderr[0], square.std() / np.sqrt(200_000))
    assert_close_in_sigmas(found.mean_square[0], square.mean(), error)
    np.testing.assert_allclose(found.stderr[0], square.std() / np.sqrt(20_000), rtol=0.1)
    np.testing.assert_allclose(
        [found.low[0], found.high[0]], found.mean_square[0] + 1.96 * found.stderr[0] * np.array([-1, 1]), rtol=0.01
    )
    below = [np.mean(square <= q) for q in found.quantiles[0]]
    levels = np.array(found.levels)
    assert_close_in_sigmas(below, levels, np.sqrt(levels * (1 - levels) * (1 / 20_000 + 1 / 200_000)))


def test_all_given_queries_are_seen_by_each_prompt_or_drawn_by_their_weights():
    points, mu = catalogue.matrix(23, 3, D), lp.Cube(np.ones(D))
    weighted = lp.Empirical(points, [0.7, 0.3, 0.0])
    tilt = lp.Empirical(points).tilt(np.log([0.7, 0.3, 1e-9]) @ np.linalg.pinv(points).T)
    np.testing.assert_allclose(np.exp(tilt.log_masses()), [0.7, 0.3, 0.0], atol=1e-6)
    each = [deviation(SOFTMAX, mu, z, 5, "output", jax.random.key(24), replicates=4000) for z in points]
    mean = np.array([float(one.mean_square[0]) for one in each])
    error = np.array([float(one.stderr[0]) for one in each])
    for nu, weights in ((points, np.ones(3) / 3), (weighted, np.array([0.7, 0.3, 0])), (tilt, np.array([0.7, 0.3, 0]))):
        found = deviation(SOFTMAX, mu, nu, 5, "output", jax.random.key(25), replicates=4000)
        assert_close_in_sigmas(
            found.mean_square[0], weights @ mean, np.hypot(found.stderr[0], np.linalg.norm(weights * error))
        )
        assert ("3 queries each" in found.method) is (nu is points)


def test_deviations_from_a_point_mass_are_zero():
    point = lp.Gaussian(np.ones(D), np.zeros((D, D)))
    for layer in (SOFTMAX, LINEAR):
        found = deviation(layer, point, GAUSSIAN, [1, 4], ("output", "U"), jax.random.key(26), replicates=50)
        for name in ("output", "U"):
            assert np.all(found[name].mean_square < 1e-25)


def test_what_overflows_is_refused_and_what_does_not_is_measured():
    huge = lp.SoftmaxAttention(1e3 * np.eye(D), np.eye(D))
    found = deviation(huge, GAUSSIAN, None, [1, 100], "gradient", jax.random.key(27), replicates=200)
    assert np.isfinite(found.mean_square).all()
    for quantity in ("output", "U"):
        with pytest.raises(ValueError, match=f"the deviation of {quantity} at L = 5 overflows"):
            deviation(SOFTMAX, GAUSSIAN, np.full(D, 1e200), 5, quantity, jax.random.key(28), replicates=10)


@pytest.mark.parametrize("k", [0.3, 0.5, 1.0])
def test_the_index_of_a_pareto_tail_is_found(k):
    x = 1 + np.random.default_rng(1).pareto(1 / k, 100_000)
    assert abs(tail_index(x) - k) < 0.1


def test_tails_of_bounded_numbers_are_light_and_ties_have_an_index():
    rng = np.random.default_rng(2)
    assert tail_index(rng.random(100_000)) < 0.1
    assert tail_index(np.abs(rng.normal(size=100_000))) < 0.1
    for ties in (np.ones(1000), rng.integers(0, 3, 1000).astype(float), np.repeat([0.0, 1.0], [900, 100])):
        assert np.isfinite(tail_index(ties))
        assert reliability(ties).trusted


def test_enough_draws_are_those_that_make_the_error_a_tenth():
    rng = np.random.default_rng(3)
    for x in (rng.exponential(size=50_000), rng.normal(size=50_000) ** 4):
        needed = reliability(x).needed
        assert needed >= 100 * x.var() / x.mean() ** 2 * (1 - 1e-3)
        assert needed < 150 * x.var() / x.mean() ** 2


def test_even_numbers_are_trusted_whatever_the_shape_of_their_ends():
    """Most at 10, a few per cent spread beyond: what exceeds a quantile looks as heavy-tailed as can be."""
    rng = np.random.default_rng(4)
    x = 10 - 1e-3 * rng.random(2000)
    x[:60] += rng.exponential(size=60)
    assert tail_index(x) > 1
    assert reliability(x).trusted
    assert reliability(x).needed < 2000
    for k in (1.0, 1.5):
        assert not reliability(1 + rng.pareto(1 / k, 2000)).trusted


def test_plain_queries_near_the_threshold_are_not_trusted_and_wider_ones_are():
    """θ² = 0.45, where the squares' tail has the index 0.9: the plain mean is far too small, and says so."""
    mu, layer = lp.Gaussian(np.zeros(6), np.eye(6)), lp.SoftmaxAttention(np.sqrt(0.45) * np.eye(6), np.eye(6))
    with pytest.warns(UserWarning, match="output at L = 10000: 1000 prompts are worth"):
        plain = deviation(layer, mu, None, 10_000, "output", jax.random.key(31), widen=False)
    assert not plain.trusted[0]
    assert plain.needed[0] > 1000
    assert deviation(layer, mu, None, 10_000, "output", jax.random.key(31)).trusted[0]


def test_a_fitted_power_law_has_the_errors_it_states():
    rng, L = np.random.default_rng(5), np.array([10, 30, 100, 300, 1000])
    relative = np.array([0.02, 0.05, 0.01, 0.03, 0.02])
    fits = []
    for _ in range(400):
        truth = 7.0 * L**-0.8
        fits.append(fit_power_law(L, truth * np.exp(relative * rng.normal(size=5)), relative * truth))
    slopes = np.array([(fit.slope + 0.8) / fit.stderr for fit in fits])
    constants = np.array([np.log(fit.constant / 7.0) / (fit.constant_stderr / fit.constant) for fit in fits])
    for z, degrees in ((slopes, 400), (constants, 400)):
        assert stats.chi2.sf(np.sum(z**2), degrees) > FALSE_ALARM
        assert stats.chi2.cdf(np.sum(z**2), degrees) > FALSE_ALARM
    assert all(fit.degrees == 3 for fit in fits)
    assert_mean_is(np.array([fit.chi2 for fit in fits]), 3.0)


def test_a_fit_uses_the_trusted_lengths_from_the_one_given_on():
    found = deviation(LINEAR, GAUSSIAN, None, [4, 40, 400, 4000], "output", jax.random.key(32), replicates=2000)
    assert_close_in_sigmas(found.fit().slope, -1, found.fit().stderr)
    assert found.fit(at_least=40).degrees == 1
    with pytest.raises(ValueError, match="the curve has 1 usable lengths; a rate needs at least 2"):
        found.fit(at_least=4000)


WRONG_CURVES = {
    "L has 0; every length must be above 0": ([0, 10], [1.0, 2.0], [0.1, 0.1]),
    "the curve has 1 usable lengths": ([10, 20], [1.0, np.nan], [0.1, 0.1]),
    "the curve has 0 usable lengths": ([10, 20], [0.0, -1.0], [0.1, 0.1]),
    "L, values, stderrs have shapes (3,), (2,), (2,); they must agree": ([1, 2, 3], [1.0, 2.0], [0.1, 0.1]),
}


@pytest.mark.parametrize(("message", "curve"), WRONG_CURVES.items())
def test_curves_without_a_rate_are_refused(message, curve):
    assert_refused(lambda: fit_power_law(*curve), message)


def test_a_curve_is_compared_with_its_prediction_over_its_longer_half():
    """A measured curve above a prediction that falls as L^-0.8; what is below the middle length does not count."""
    mu, L = lp.Gaussian(np.zeros(D), np.eye(D)), np.array([10, 20, 40, 80, 160, 320])
    measured = deviation(SOFTMAX, mu, None, L, "output", jax.random.key(0), replicates=2000)
    line = 2.0 * L**-0.8
    truth = dataclasses.replace(predict(SOFTMAX, mu, None, L, "output"), mean_square=np.where(L >= 80, line, 7.0))
    square = line * np.array([9, 9, 9, 1.03, 1.06, 1.03])  # symmetric: the slope stays
    error = square * np.array([0.1, 0.1, 0.1, 0.1, 0.2, 0.1])
    trusted = np.array([True] * 4 + [False, True])
    curve = dataclasses.replace(measured, mean_square=square, stderr=error, trusted=trusted)
    found = compare(curve, truth)
    np.testing.assert_allclose([found.slope, found.predicted_slope, found.ratio], [-0.8, -0.8, 1.04], rtol=1e-9)
    np.testing.assert_allclose(found.fitted, 2 * np.exp((8 * np.log(1.03) + np.log(1.06)) / 9), rtol=1e-9)
    np.testing.assert_allclose(found.slope_stderr, 0.1 / (np.sqrt(2) * np.log(2)), rtol=1e-9)
    np.testing.assert_allclose(found.ratio_stderr, np.linalg.norm([0.103, 0.212, 0.103]) / 3, rtol=1e-9)
    alone = compare(curve, None)
    assert (alone.slope, np.isnan(alone.ratio), np.isnan(alone.predicted_slope)) == (found.slope, True, True)
    assert np.isnan(compare(dataclasses.replace(curve, trusted=L == 80), truth).slope)


def test_heavy_tails_do_not_pull_the_ratio_to_the_prediction_down():
    """Past the threshold, where a mean weighed by the measured errors comes out five per cent low, eight errors."""
    mu, layer = lp.Gaussian(np.zeros(1), np.eye(1)), lp.SoftmaxAttention([[0.85]], [[1.0]])
    L, runs, replicates = [300, 1000, 3000], 120, 600
    predicted = predict(layer, mu, None, L, "output")
    found, reduced = problem_of(layer, mu, None, L, "output"), GaussianPrompts.of(layer, mu)
    assert isinstance(found, Problem)
    assert reduced is not None
    way = ReducedPrompts(found, reduced, query_draws([layer], mu, found.nu, True), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some points are not to be trusted
        one = deviation(layer, mu, None, L, "output", jax.random.key(0), replicates=replicates)
    drawn = [way.sample(n, jax.random.key(n), runs * replicates) for n in L]
    ratios, errors = [], []
    for run in np.split(np.arange(runs * replicates), runs):
        points = [
            sample._replace(squares={"output": sample.squares["output"][run]}, weights=sample.weights[run])
            for sample in drawn
        ]
        numbers = [sample.point("output", n) for sample, n in zip(points, L, strict=True)]
        columns: dict = {name: np.array([point[name] for point in numbers]) for name in ("mean_square", "stderr")}
        measured = dataclasses.replace(one, trusted=np.ones(3, bool), **columns)
        ratio = compare(measured, predicted)
        ratios.append(ratio.ratio)
        errors.append(ratio.ratio_stderr)
    assert_mean_is(np.array(ratios), 1.0)
    assert 0.6 < np.std(ratios) / np.mean(errors) < 1.6
