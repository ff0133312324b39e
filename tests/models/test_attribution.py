"""Scores of sentences are the coefficients of the best linear prediction, from gradients and ablations together."""

import dataclasses
import itertools

import matplotlib
import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from context_models import chat_tokenizer, llama
from largeprompt.models import attribute
from largeprompt.models.contexts._ablations import ablations
from largeprompt.models.contexts._estimators import METHODS, designed, expected_parts, nodes, shares
from largeprompt.models.contexts._evidence import combined
from largeprompt.models.contexts._prompt import ContextPrompt
from largeprompt.models.contexts._text import answer_ids, read

TEXT = "w1 w2 w3. W4 w5! W6 w7 w8. W9 w1?\n\nW2 w3. W4 w9 w9."
GROUPS = 24


def drawn(seed: int, count: int, noise: float = 0.3):
    """True coefficients of heavy tails, subsets, and values with effects of pairs and noise."""
    rng = np.random.default_rng(seed)
    true = rng.standard_t(3, size=GROUPS)
    pairs = np.triu(rng.normal(size=(GROUPS, GROUPS)), 1) * 0.05
    subsets = designed(rng, count, GROUPS)
    signs = 2.0 * subsets - 1
    values = 7 + subsets @ true + np.einsum("ni,ij,nj->n", signs, pairs, signs) + noise * rng.normal(size=count)
    return true, subsets, values, rng


def error(found, true) -> float:
    return float(np.sqrt(np.mean((found.coefficients - true) ** 2)))


def test_without_values_the_coefficients_are_those_of_the_gradients():
    expected = np.random.default_rng(0).normal(size=(2, GROUPS))
    found = combined(np.zeros((0, GROUPS), bool), np.zeros(0), expected)
    np.testing.assert_allclose(found.coefficients, expected.sum(0))
    assert np.isnan(found.stderr).all()
    assert np.isnan(found.fit)


def test_standard_errors_are_those_of_the_coefficients():
    squares = []
    for seed in range(12):
        true, subsets, values, _ = drawn(seed, 96)
        found = combined(subsets, values)
        squares.append(np.mean(((found.coefficients - true) / found.stderr) ** 2))
    assert 0.6 < np.mean(squares) < 1.6  # 288 squares of about unit variance, whose mean has a spread of 0.1


def test_good_gradients_help_where_values_are_few_and_bad_ones_do_no_harm_where_they_are_many():
    few, many = [], []
    for seed in range(8):
        true, subsets, values, rng = drawn(seed, 128)
        good = (true + 0.3 * rng.normal(size=GROUPS))[None]
        bad = 3 * rng.normal(size=(1, GROUPS))
        short = slice(0, 16)
        alone = combined(subsets[short], values[short])
        few.append(error(combined(subsets[short], values[short], good), true) / error(alone, true))
        many.append(error(combined(subsets, values, bad), true) / error(combined(subsets, values), true))
    assert np.mean(few) < 0.5
    assert np.mean(many) < 1.1


def test_one_sentence_that_gradients_miss_is_found():
    true, subsets, values, rng = drawn(3, 32)
    values = values + 15.0 * subsets[:, 5]
    found = combined(subsets, values, (true + 0.3 * rng.normal(size=GROUPS))[None])
    assert found.coefficients[5] == pytest.approx(true[5] + 15, abs=2)
    others = np.arange(GROUPS) != 5
    assert np.abs((found.coefficients - true)[others]).mean() < 0.6


def test_coefficients_follow_the_unit_of_the_values():
    true, subsets, values, _ = drawn(1, 40)
    once, more = (combined(subsets, scale * values, scale * true[None] / 2) for scale in (1.0, 10.0))
    np.testing.assert_allclose(more.coefficients, 10 * once.coefficients, rtol=1e-3, atol=1e-3)
    assert more.fit == pytest.approx(once.fit, abs=0.01)


def test_the_fit_predicts_the_correlation_on_other_subsets():
    gaps = []
    for seed in range(8):
        _, subsets, values, _ = drawn(seed, 600, noise=2.0)
        found = combined(subsets[:60], values[:60])
        gaps.append(found.fit - np.corrcoef(rankdata(subsets[60:] @ found.coefficients), rankdata(values[60:]))[0, 1])
    assert abs(np.mean(gaps)) < 0.1


def test_scores_are_the_main_effects_over_all_subsets():
    model, tokenizer = llama(), chat_tokenizer()
    found = attribute(model, tokenizer, TEXT, "Who w1?", "w2 w5", budget=400)
    text = read(tokenizer, TEXT, "Who w1?").answered(answer_ids(tokenizer, "w2 w5"))
    subsets = np.array(list(itertools.product([False, True], repeat=6)))
    values = ablations(ContextPrompt(model, torch.as_tensor(text.ids), torch.as_tensor(text.group), 2), subsets)
    effects = [values[subsets[:, i]].mean() - values[~subsets[:, i]].mean() for i in range(6)]
    np.testing.assert_allclose(found.scores, effects, atol=5 * float(found.stderr.max()))
    assert np.abs(effects).max() > 10 * found.stderr.max()
    assert found.log_probability == pytest.approx(values[-1], abs=1e-4)
    assert found.predict(np.ones((1, 6), bool))[0] == found.log_probability


@pytest.mark.parametrize("method", METHODS)
def test_every_method_stays_in_its_budget(method):
    costs = {"gradient": 3, "leave-one-out": 7, "attention": 1, "gradient times input": 3}
    found = attribute(llama(), chat_tokenizer(), TEXT, "Who w1?", "w2 w5", budget=12, method=method)
    assert found.passes == 1 + costs.get(method, 12)
    assert np.isfinite(found.scores).all()
    assert np.abs(found.scores).max() > 0


def test_subsets_come_with_their_complements_and_are_orthogonal_in_blocks():
    found = designed(np.random.default_rng(0), 140, GROUPS)
    np.testing.assert_array_equal(found[::2], ~found[1::2])
    signs = 2 * found[:64].astype(int) - 1
    np.testing.assert_array_equal(signs.T @ signs, 64 * np.eye(GROUPS))
    np.testing.assert_array_equal(found[:30], designed(np.random.default_rng(0), 30, GROUPS))
    assert len(np.unique(found, axis=0)) == 140
    few = 2 * designed(np.random.default_rng(0), 23, GROUPS).astype(int) - 1
    assert np.abs(few @ few.T - GROUPS * np.eye(23)).max() < GROUPS  # no subset twice, no complement
    means = np.mean([designed(np.random.default_rng(seed), 1, 5)[0] for seed in range(400)], axis=0)
    assert np.abs(means - 0.5).max() < 5 * 0.5 / 20


@pytest.mark.parametrize("points", [1, 2, 3])
def test_gradients_find_a_sentence_that_is_looked_up(points):
    """Its effect is that of a sigmoid in the log-weight, which at weight 1 has hardly a slope left."""
    share = 1 / (1 + np.exp(-(nodes(points) + 3)))
    found = expected_parts((share * (1 - share))[:, None]).sum()
    whole = 1 / (1 + np.exp(-3))
    assert 1 / 3 < found / whole < 1
    assert found > 5 * whole * (1 - whole)


def test_budgets_are_spent_in_full_or_on_gradients_where_ablations_would_be_few():
    for budget in range(3, 60):
        gradients, others = shares(budget)
        assert gradients >= 1
        assert others == 0 or others >= 6
        assert 0 <= budget - 3 * gradients - others <= 2
        assert budget < 9 or 3 * gradients + others == budget


def test_a_result_prints_plots_and_has_all_numbers():
    found = attribute(llama(), chat_tokenizer(), TEXT, None, " w2", budget=30, kind="taken out")
    assert repr(found).startswith("Attribution (sentences, the 6 that carry most)\n")
    assert "(auto, sentences taken out)" in repr(found)
    data = found.to_dataset()
    assert data["text"].values.tolist() == list(found.parts)
    np.testing.assert_array_equal(found.left_out, -found.scores)
    assert list(found.scores[found.top(2)]) == sorted(found.scores)[:-3:-1]
    matplotlib.use("agg")
    assert len(found.plot().patches) == 6
    page = found.to_html("A title")
    assert "<h1>A title</h1>" in page
    assert "Question" not in page


def test_a_summary_says_where_nothing_speaks_for_the_answer():
    found = attribute(llama(), chat_tokenizer(), TEXT, "Who w1?", "w2", budget=3)
    against = dataclasses.replace(found, scores=-np.abs(found.scores))
    assert "None of 6 sentences speaks for it: it is no less likely without any of them." in against.summary
    assert not any("carries most" in line for line in against.summary)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"unit": "words"}, "unit is 'words'; it must be one of sentences"),
        ({"kind": "gone"}, "kind is 'gone'; it must be one of masked, taken out"),
        ({"method": "magic"}, "method is 'magic'; it must be one of auto"),
        ({"budget": 2}, "budget is 2; it must be at least 3"),
        ({"answer": ""}, "the answer has no tokens"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said, as_a_stranger):
    with pytest.raises(ValueError, match=said):
        attribute(llama(), chat_tokenizer(), TEXT, "Who w1?", **({"answer": "w2"} | options))
