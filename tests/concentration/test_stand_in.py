"""Laws known by their samplers, tilted: errors contain the stand-in's own, and too few tokens are not trusted."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from largeprompt.concentration import deviation, predict, prompt_length_for, rates
from largeprompt.icl._risk._abstract import pooled
from largeprompt.icl._stand_in import stand_in_error
from largeprompt.measures._from_sampler import resampled
from largeprompt.measures._worth import FewTokensWarning, worth
from significance import assert_close_in_sigmas

NORMAL = lp.Gaussian(np.zeros(2), np.eye(2))
SOFTMAX = lp.SoftmaxAttention(np.eye(2), np.eye(2))
FAR, NEAR = np.array([3.0, 0.0]), np.array([0.3, 0.0])


def normals(seed=0, size=20_000):
    return lp.FromSampler(NORMAL.sample, 2, jax.random.key(seed), size=size)


SAMPLED = normals()


def test_a_deviation_far_out_is_not_trusted():
    with pytest.warns(FewTokensWarning, match="output cannot be trusted: 20000 tokens stand in for a law known by"):
        found = deviation(SOFTMAX, SAMPLED, FAR, 100, "output", jax.random.key(1), replicates=64)
    assert not found.trusted[0]
    assert found.needed[0] == np.inf


def test_a_constant_far_out_has_no_finite_error():
    with pytest.warns(FewTokensWarning, match="the constant of output cannot be trusted and may be infinite"):
        found = predict(SOFTMAX, SAMPLED, FAR, 100, "output")
    assert found.stderr[0] == found.constant_stderr == np.inf
    assert found.regime.sentence.startswith("not known")


def test_deviations_and_constants_near_by_are_those_of_the_law_within_their_error():
    found = deviation(SOFTMAX, SAMPLED, NEAR, 400, ("output", "U"), jax.random.key(2), replicates=400)
    for name in ("output", "U"):
        truth = predict(SOFTMAX, NORMAL, NEAR, 400, name)
        assert found[name].trusted[0]
        second_order = 0.03 * truth.mean_square[0]
        error = np.hypot(found[name].stderr[0], 0 if truth.exact else second_order)
        assert_close_in_sigmas(found[name].mean_square[0], truth.mean_square[0], error)
    constant = predict(SOFTMAX, SAMPLED, NEAR, 400, "output")
    assert 0 < constant.constant_stderr < 0.1 * constant.constant
    truth = predict(SOFTMAX, NORMAL, NEAR, 400, "output").constant
    assert_close_in_sigmas(constant.constant, truth, constant.constant_stderr)


def test_the_error_of_a_deviation_contains_the_spread_over_stand_ins():
    """Prompts as long as the stand-in: half of the square is the stand-in's, which no number of prompts would show."""
    zero, values, errors = np.zeros(2), [], []
    for seed in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what else cannot be trusted
            with pytest.warns(UserWarning, match="500 tokens stand in for it"):
                found = deviation(SOFTMAX, normals(seed, 500), zero, 500, "output", jax.random.key(3), replicates=100)
        values.append(found.mean_square[0])
        errors.append(found.stderr[0])
    misses = np.abs(np.array(values) - 2 / 500) / np.array(errors)
    assert np.mean(misses < 3) >= 0.8


def test_resampling_changes_a_tilted_mean_by_its_error():
    tilted = SAMPLED.tilt([0.7, 0.2])
    others = np.array([resampled(tilted, key).mean() for key in jax.random.split(jax.random.key(4), 100)])
    np.testing.assert_allclose(np.cov(others.T), tilted.mean_error(), atol=0.5 * np.max(tilted.mean_error()))


def test_moments_of_far_tilts_warn_wherever_the_sampler_stands():
    flat = lp.Gaussian(np.zeros(1), np.eye(1))
    sampled = lp.FromSampler(flat.sample, 1, jax.random.key(5), size=1000)
    holders = {
        "itself": sampled,
        "mixture": lp.Mixture([0.5, 0.5], [sampled, flat]),
        "affine": lp.Affine([[2.0]], [0.0], sampled),
        "product": lp.Product(sampled),
    }
    layer = lp.SoftmaxAttention([[4.0]], [[1.0]])
    for mu in holders.values():
        for far in (
            lambda mu=mu: layer(mu, [1.0]),
            lambda mu=mu: layer.map(mu, np.array([[0.01], [1.0]])),
            lambda mu=mu: mu.cgf([4.0]),
        ):
            with pytest.warns(FewTokensWarning, match="1000 tokens stand in"):
                far()
    for far in (
        lambda: layer.jacobian(sampled, [1.0]),
        lambda: lp.nonlinearity(sampled, [4.0]),
        lambda: lp.relative_nonlinearity(layer, sampled, [[0.1], [1.0]]),
        lambda: lp.output_stderr(layer, sampled, [1.0]),
        lambda: rates(layer, sampled, [1.0]),
    ):
        with pytest.warns(FewTokensWarning, match="1000 tokens stand in"):
            far()
    assert float(layer(sampled, [0.02])[0]) < 0.5  # no warning, which would be an error here


def test_the_layer_error_of_a_mixture_with_a_sampled_part_is_the_spread_over_stand_ins():
    other = lp.Gaussian([1.0, 0.0], np.eye(2))
    laws = [lp.Mixture([0.4, 0.6], [normals(seed, 2000), other]) for seed in range(40)]
    heads = lp.MultiHead(
        [lp.Head(0.5 * np.eye(2), np.eye(2), [[1.0, 1.0]]), lp.Head(np.eye(2), -0.3 * np.eye(2), [[1.0, 0.0]])]
    )
    z = np.array([0.5, 0.5])
    spread = np.std([heads(mu, z) for mu in laws], axis=0, ddof=1)
    reported = np.mean([lp.output_stderr(heads, mu, z) for mu in laws[:3]], axis=0)
    np.testing.assert_allclose(spread, reported, rtol=0.5)


def test_a_prompt_length_from_too_few_tokens_warns():
    with pytest.warns(FewTokensWarning):
        prompt_length_for(1.0, SOFTMAX, normals(6, 1000), FAR, replicates=8)


def test_a_risk_on_the_infinite_prompt_has_the_stand_ins_error():
    """With the same instances for each stand-in, the spread over stand-ins is what they add to the error."""
    layer = lp.SoftmaxAttention(np.diag([0.2, 0.2, 0.0]), [[0.0, 0.0, 1.0]])
    tasks = [lp.icl.RegressionOn(normals(seed, 400), 0.1) for seed in range(12)]
    options: dict = {"rtol": 1.0, "max_draws": 256}
    values = [float(lp.icl.risk(layer, task, np.inf, **options).value) for task in tasks]
    own = [float(stand_in_error(layer, task, np.inf, None, False)) for task in tasks[:3]]
    np.testing.assert_allclose(np.mean(own), np.std(values, ddof=1), rtol=0.7)
    found = lp.icl.risk(layer, tasks[0], np.inf, **options)
    function = lp.icl.risk_function(layer, tasks[0], np.inf, draws=256)
    np.testing.assert_allclose(found.stderr, np.hypot(own[0], float(pooled(function, layer)[1])), rtol=1e-6)
    task = tasks[0]
    far = lp.SoftmaxAttention(np.diag([3.0, 3.0, 0.0]), [[0.0, 0.0, 1.0]])
    with pytest.warns(FewTokensWarning, match="of 32 queries 400 tokens stand in"):
        lp.icl.risk(far, task, np.inf, rtol=1.0, max_draws=16)


@pytest.mark.parametrize("tilt", [0.0, 0.5, 1.0, 3.0, 6.0])
def test_tilted_means_are_the_laws_own_within_three_errors_or_not_trusted(tilt):
    """Normals, a cube and signs, over directions: where trusted, nearly all within three standard errors."""
    root = np.sqrt(3)
    exact = {
        "normal": (lambda key, n: jax.random.normal(key, (n, 3)), lambda t: t),
        "cube": (lambda key, n: jax.random.uniform(key, (n, 3), minval=-root, maxval=root), None),
        "signs": (lambda key, n: jax.random.rademacher(key, (n, 3), float), jnp.tanh),
    }
    rng, within, trusted = np.random.default_rng(8), [], {}
    for name, (sample, mean) in exact.items():
        for seed in range(6):
            direction = rng.normal(size=3)
            theta = tilt * direction / np.linalg.norm(direction)
            mu = lp.FromSampler(sample, 3, jax.random.key(seed), size=20_000)
            truth = lp.Cube(np.full(3, root)).tilt(theta).mean() if mean is None else mean(theta)
            tilted = mu.tilt(theta)
            found = tilted._worth(1)
            trusted.setdefault(name, []).append(found.trusted)
            error = found.caution * np.sqrt(np.diag(tilted.mean_error()))
            if found.trusted:
                within.append(np.abs(np.asarray(tilted.stand_in.mean()) - truth) < 3 * error + 1e-12)
    assert np.mean(within) > 0.95
    assert all(trusted["signs"])
    assert not any(trusted["normal"]) if tilt >= 3 else all(trusted["normal"])


def test_equal_weights_are_worth_all_tokens_and_one_weight_one():
    rng = np.random.default_rng(9)
    even = worth(np.full(1000, 1e-3), np.abs(rng.normal(size=1000)), 1)
    assert even.trusted
    np.testing.assert_allclose(even.effective, 1000)
    single = worth(np.eye(1000)[0], np.ones(1000), 1)
    assert not single.trusted
    np.testing.assert_allclose([single.effective, single.carrying], 1)
