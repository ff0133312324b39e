"""Error bars are those of redraws: against closed forms, against prompts drawn again, and in how often they cover."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from scipy import special

import largeprompt as lp
from largeprompt.concentration import output_covariance
from largeprompt.models.sensitivity import ErrorBars, error_bars
from largeprompt.models.sensitivity._outputs import outputs_at
from largeprompt.models.sensitivity._resamples import partitions
from refusals import assert_refused
from significance import assert_close_in_sigmas, assert_mean_is
from weighted_prompts import Growing, Mean, Ratio, SoftmaxHead, network

mpl.use("Agg")


def rows(seed: int, n: int = 60, outputs: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, outputs))


def test_the_standard_error_of_a_mean_is_exact():
    x = rows(0)
    found = error_bars(Mean(x), method="influence")
    assert found.stderr == pytest.approx(x.std(axis=0, ddof=1) / np.sqrt(60), rel=1e-5)
    assert found.trusted.all()


def test_derivatives_are_used_where_parts_of_the_prompt_agree_with_them_and_not_else():
    """Agreement is tested twice at two standard errors: it is missed in about a tenth of the prompts."""
    means, growing = (
        [error_bars(make(rows(seed)), draws=400).method for seed in range(10)] for make in (Mean, Growing)
    )
    assert means.count("influence") >= 5
    assert growing.count("influence") == 0


def test_the_bootstrap_of_a_mean_is_that_of_the_multinomial_law():
    x = rows(0)
    found = error_bars(Mean(x), method="bootstrap", draws=4000)
    truth = x.var(axis=0, ddof=1) / 60
    assert_close_in_sigmas(found.stderr**2, truth, truth * np.sqrt(2 / 4000))


def test_the_influence_on_a_softmax_head_gives_the_constant_of_the_large_prompt_law():
    n, theta = 20_000, np.array([0.5, -0.2, 0.1])
    mu = lp.Gaussian(np.zeros(3), np.eye(3))
    x = np.random.default_rng(0).normal(size=(n, 3))
    found = error_bars(SoftmaxHead(x, theta), method="influence")
    truth = np.diag(output_covariance(lp.SoftmaxAttention(U=np.eye(3), V=np.eye(3)), mu, theta))
    assert_close_in_sigmas(n * found.stderr**2, truth, truth * np.sqrt(2 / found.freedom))


def test_the_variance_over_the_parts_of_partitions_is_unbiased_for_a_network_of_any_kind():
    """A head with few effective tokens, n = 16: halves and quarters against fresh prompts of that length."""
    rng, theta = np.random.default_rng(1), np.array([1.5, 0.5])
    found = []
    for _ in range(400):
        prompt = SoftmaxHead(rng.normal(size=(16, 2)), theta)
        parts = [outputs_at(prompt, w.reshape(-1, 16), 100).reshape(*w.shape[:2], 2) for w in partitions(rng, 24, 16)]
        found.append([x.var(axis=1, ddof=1).mean(axis=0) for x in parts])
    for i, m in enumerate((8, 4)):
        fresh = rng.normal(size=(20_000, m, 2))
        w = special.softmax(fresh @ theta, axis=1)
        squares = np.einsum("rm,rmp->rp", w, fresh)
        squares = (squares - squares.mean(axis=0)) ** 2
        error = squares.std(axis=0) / np.sqrt(len(squares))
        assert_mean_is(np.array(found)[:, i], squares.mean(axis=0), error)


def test_the_exponent_is_found_where_the_variance_does_not_fall():
    found = [error_bars(Growing(rows(seed)), draws=400) for seed in range(3)]
    assert {each.method for each in found} == {"partitions"}
    assert np.abs([each.exponent for each in found]).max() < 0.4
    assert_mean_is(np.concatenate([each.stderr**2 for each in found]), 1.0)


def covered(prompts, truth, **options) -> float:
    """The share of outputs whose interval covers the truth."""
    bars = [error_bars(prompt, **options) for prompt in prompts]
    return float(np.mean([(b.low < truth) & (truth < b.high) for b in bars]))


@pytest.mark.parametrize(
    ("make", "method"),
    [(Mean, "influence"), (Mean, "bootstrap"), (Mean, "partitions"), (Growing, "partitions"), (Ratio, "influence")],
)
def test_intervals_cover_as_often_as_they_say(make, method):
    """Prompts of 60 independent rows; two outputs are counted as independent, which they nearly are."""
    rng = np.random.default_rng(2)
    drawn = [rng.normal(size=(60, 2)) + (3.0 if make is Ratio else 0.0) for _ in range(120)]
    share = covered([make(x) for x in drawn], 1.0 if make is Ratio else 0.0, method=method, draws=60)
    assert abs(share - 0.9) < 5 * np.sqrt(0.9 * 0.1 / (120 if make is Ratio else 240))


def test_error_bars_of_a_network_are_those_of_prompts_drawn_again():
    fresh = np.array([network(seed, n=48)(torch.zeros(1, 48))[0].numpy() for seed in range(250)])
    bars = [error_bars(network(seed, n=48), draws=64, batch=64) for seed in range(15)]
    ratio = np.array([bar.stderr**2 for bar in bars]).mean(axis=0) / fresh.var(axis=0, ddof=1)
    assert np.all((ratio > 0.5) & (ratio < 2.0)), ratio
    assert np.mean([(b.low < fresh.mean(axis=0)) & (fresh.mean(axis=0) < b.high) for b in bars]) > 0.75


def test_monotone_functions_map_the_ends():
    found = error_bars(Mean(rows(0)))
    for f in (special.expit, lambda x: -x):
        mapped = found.transformed(f)
        assert mapped.estimate == pytest.approx(f(found.estimate))
        assert np.minimum(mapped.low, mapped.high) == pytest.approx(np.minimum(f(found.low), f(found.high)))
        assert (mapped.low < mapped.high).all()
    assert found.transformed(lambda x: 2 * x).stderr == pytest.approx(2 * found.draws.std(axis=0, ddof=1))


def test_probabilities_of_classes_are_mapped_draw_by_draw():
    found = error_bars(Mean(rows(0)), draws=2000)
    mapped = found.mapped(special.softmax)
    assert mapped.draws.sum(axis=1) == pytest.approx(np.ones(len(mapped.draws)))
    p = mapped.estimate
    slope = np.diag(p) - np.outer(p, p)  # to first order
    truth = np.sqrt(np.diag(slope @ np.cov(rows(0).T) @ slope.T) / 60)
    assert mapped.stderr == pytest.approx(truth, rel=0.1)
    assert (mapped.low < p).all()
    assert (p < mapped.high).all()
    assert found.mapped(lambda x: x[:2] - x[2:4]).estimate == pytest.approx(found.estimate[:2] - found.estimate[2:4])


def test_single_rows_that_decide_are_not_trusted():
    x = rows(0)
    x[:, 0] = np.random.default_rng(0).pareto(0.8, size=60)
    found = error_bars(Mean(x), method="influence")
    assert not found.trusted[0]
    assert found.trusted[1:].all()
    assert "single groups decide" in found.reason[0]
    assert found.reason[1] == ""


def test_outputs_that_do_not_move_are_not_trusted():
    x = rows(0)
    x[:, 2] = 1.0
    found = error_bars(Mean(x))
    assert found.reason[2] == "the output does not depend on the groups"
    assert found.trusted.tolist() == [True, True, False, True, True, True]


def test_the_same_seed_gives_the_same_numbers_in_any_batch():
    one, other = (error_bars(Mean(rows(0)), method="partitions", batch=batch) for batch in (16, 7))
    assert one.stderr == pytest.approx(other.stderr, rel=1e-6)
    assert error_bars(Mean(rows(0)), method="partitions", seed=1).stderr != pytest.approx(one.stderr, rel=1e-3)


def test_error_bars_print_as_a_table_and_draw():
    found = error_bars(Mean(rows(0)), method="partitions")
    assert isinstance(found, ErrorBars)
    assert "method: partitions" in repr(found)
    assert found.to_dataset()["stderr_by_partitions"].values == pytest.approx(found.stderr)
    assert found.plot().get_xlabel() == "output"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "jackknife"}, "method is 'jackknife'; it must be one of auto, partitions, bootstrap, influence"),
        ({"level": 1.0}, "level is 1.0; it must lie between 0 and 1"),
        ({"level": "high"}, "level is high; it must lie between 0 and 1"),
        ({"draws": 1}, "draws is 1; it must be at least 2"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
@pytest.mark.usefixtures("as_a_stranger")
def test_what_is_asked_wrongly_is_refused(options, message):
    assert_refused(lambda: error_bars(Mean(rows(0)), **options), message)


def test_too_few_groups_are_refused():
    assert_refused(lambda: error_bars(Mean(rows(0, n=7))), "prompt.groups is 7; it must be at least 8")
    wrong = error_bars(Mean(rows(0)))
    assert_refused(lambda: wrong.transformed(lambda x: x[:2]), "give one number for each")
    assert_refused(lambda: wrong.mapped(lambda x: x[None]), "give a vector")
    assert_refused(lambda: wrong.transformed(lambda x: x / x.sum()), "`mapped` takes such an f")
