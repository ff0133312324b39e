"""Contexts are cut into parts without loss, and their sentences weighed, masked or taken out, as a model reads them."""

from typing import Any

import numpy as np
import pytest
import torch

from context_models import chat_tokenizer, llama
from largeprompt.models.contexts import ContextPrompt
from largeprompt.models.contexts._ablations import ablations, slopes
from largeprompt.models.contexts._lasso import lasso
from largeprompt.models.contexts._text import answer_ids, generated, read
from largeprompt.models.contexts._units import UNITS, parts
from largeprompt.models.sensitivity import weighted

TEXT = 'He said Mr. Smith came. "Why?" asked J. Doe.\n\nSCENE I. I am I. So\nbe it…  '
GROUP = torch.tensor([-1] * 3 + [i // 6 for i in range(30)] + [-1] * 7)
SUBSETS = np.random.default_rng(0).random((9, 5)) < 0.5


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def ids():
    return torch.randint(0, 41, (40,), generator=torch.Generator().manual_seed(0))


def log_probability(logits: Any, ids: Any) -> float:
    """Of the last four tokens, each predicted from those before it."""
    return float(logits[-5:-1].log_softmax(1).gather(1, ids[-4:, None]).sum())


def test_sentences_end_where_they_do():
    assert parts(TEXT, "sentences") == [
        "He said Mr. Smith came. ",
        '"Why?" asked J. Doe.\n\n',
        "SCENE I. ",
        "I am I. ",
        "So\nbe it…  ",
    ]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("text", [TEXT, "\n\n a\n\nb. C\n \n", "one", " . ", "a. . . B.\n\n\n"])
def test_no_letter_is_lost(unit, text):
    found = parts(text, unit)
    assert "".join(found) == text
    assert all(part.strip() for part in found)
    assert parts("  \n\n ", unit) == []


def test_sentences_of_scripts_without_spaces_are_told_apart():
    assert parts("日本語の文。「次の文？」 三つ目！終わり", "sentences") == [
        "日本語の文。",
        "「次の文？」 ",
        "三つ目！",
        "終わり",
    ]


def test_masked_sentences_are_those_of_weight_zero(model, ids):
    weights = torch.where(torch.as_tensor(SUBSETS), 0.0, -torch.inf)
    by_token = torch.cat([weights, torch.zeros(9, 1)], 1)[:, GROUP]
    with torch.no_grad(), weighted(by_token):
        logits = model(ids.expand(9, -1)).logits
    expected = [log_probability(each, ids) for each in logits]
    np.testing.assert_allclose(ablations(ContextPrompt(model, ids, GROUP, 4), SUBSETS, batch=4), expected, atol=1e-4)


def test_sentences_taken_out_are_those_of_the_shorter_text(model, ids):
    expected = []
    for subset in SUBSETS:
        short = ids[[g < 0 or bool(subset[g]) for g in GROUP.tolist()]]
        with torch.no_grad():
            expected.append(log_probability(model(short[None]).logits[0], short))
    found = ablations(ContextPrompt(model, ids, GROUP, 4, "taken out"), SUBSETS, batch=4)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    masked = ablations(ContextPrompt(model, ids, GROUP, 4), SUBSETS)
    assert np.abs(found - masked).max() > 1e-2  # positions count


@pytest.mark.parametrize("kind", ["masked", "taken out"])
def test_slopes_are_derivatives_in_log_weights(model, ids, kind):
    prompt = ContextPrompt(model, ids, GROUP, 4, kind)
    weights = np.random.default_rng(1).uniform(0.2, 1, (3, 5))
    weights[0, 2] = 0
    values, found = slopes(prompt, weights)
    for i in range(5):
        step = np.exp(0.02 * (np.arange(5) == i))
        ends = [slopes(prompt, weights * move)[0] for move in (step, 1 / step)]
        np.testing.assert_allclose(found[:, i], (ends[0] - ends[1]) / 0.04, rtol=2e-2, atol=4e-3)
    assert found[0, 2] == 0
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(values[0], slopes(prompt, weights[:1])[0][0], atol=1e-4)


def test_the_first_token_has_weight_one_whatever_it_belongs_to(model, ids):
    """It is a sink of many heads."""
    prompt = ContextPrompt(model, ids[3:], GROUP[3:], 4)
    by_token = torch.where(GROUP[3:] == 0, torch.log(torch.tensor(0.1)), 0.0)
    by_token[0] = 0
    with torch.no_grad():
        found = prompt(torch.log(torch.tensor([[0.1, 1.0, 1.0, 1.0, 1.0]])))
        with weighted(by_token):
            expected = log_probability(model(ids[None, 3:]).logits[0], ids)
    assert float(found) == pytest.approx(expected, abs=1e-4)


def test_passes_are_counted_a_backward_pass_as_two(model, ids):
    prompt = ContextPrompt(model, ids, GROUP, 4)
    ablations(prompt, SUBSETS)
    assert prompt.passes == 9
    slopes(prompt, np.ones((2, 5)))
    assert prompt.passes == 15


def test_outputs_are_totals_tokens_or_log_odds(model, ids):
    ones = torch.zeros(1, 5)
    with torch.no_grad():
        by_token = ContextPrompt(model, ids, GROUP, 4, output="tokens")(ones)
        total = ContextPrompt(model, ids, GROUP, 4)(ones)
        odds = ContextPrompt(model, ids, GROUP, 4, output="log-odds")(ones)
    assert by_token.shape == (1, 4)
    assert float(total) == pytest.approx(float(by_token.sum()), rel=1e-6)
    p = np.exp(float(total))
    assert float(odds) == pytest.approx(np.log(p / (1 - p)), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "gone"}, "kind is 'gone'; it must be one of masked, taken out"),
        ({"output": "loss"}, "output is 'loss'; it must be one of"),
        ({"answer": 0}, "answer is 0; it must be from 1 to 39 tokens"),
        ({"answer": 10}, "a token of the answer has a group"),
        ({"group": torch.where(GROUP == 2, 1, GROUP)}, "group 2 has no tokens"),
    ],
)
def test_what_is_no_context_is_refused(model, ids, change, said):
    with pytest.raises(ValueError, match=said):
        ContextPrompt(**({"model": model, "ids": ids, "group": GROUP, "answer": 4} | change))


@pytest.mark.parametrize("plain", [True, False])
def test_tokens_are_those_of_the_whole_text_and_belong_to_their_sentence(plain):
    tokenizer = chat_tokenizer()
    context = "w1 w2 w3. W4 w5! w6? W7.\n\nW8 w9"
    found = read(tokenizer, context, "Who w1?", plain=plain)
    assert "".join(found.parts) == context
    assert [part.strip() for part in found.parts] == ["w1 w2 w3.", "W4 w5! w6?", "W7.", "W8 w9"]
    frame = (
        f"{context}\n\nQuestion: Who w1?\nAnswer:"
        if plain
        else f"<user> Context: {context}\n\nQuestion: Who w1? <end> <model>"
    )
    assert found.ids.tolist() == tokenizer(frame, add_special_tokens=False)["input_ids"]
    for i, part in enumerate(found.parts):
        own = tokenizer(part, add_special_tokens=False)["input_ids"]
        assert found.ids[found.group == i].tolist() == own
    answered = found.answered(answer_ids(tokenizer, "w9."))
    assert (answered.answer, answered.group[-2:].tolist()) == (2, [-1, -1])


def test_the_answer_generated_is_the_likeliest_token_after_token(model):
    tokenizer = chat_tokenizer()
    text = read(tokenizer, "w1 w2. W3 w4.", "w5?")
    found, ids = generated(model, tokenizer, text, 3), text.ids.tolist()
    for token in found:
        assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("context", "question", "said"),
    [
        ("  ", "w1?", "the context is empty"),
        ("w1 w2.", "w1?", r"the context is one part \(sentences\)"),
        ("w1. W2.", " ", "the question is empty"),
    ],
)
def test_texts_without_parts_or_questions_are_refused(context, question, said):
    with pytest.raises(ValueError, match=said):
        read(chat_tokenizer(), context, question)
    with pytest.raises(ValueError, match="the answer has no tokens"):
        read(chat_tokenizer(), "w1. W2.", "w1?").answered([])


def test_the_lasso_is_at_its_minimum_and_finds_what_counts():
    rng = np.random.default_rng(0)
    subsets, true = rng.random((60, 24)) < 0.5, np.zeros(24)
    true[[2, 7, 9]] = 3, -2, 1
    values = subsets @ true + 5 + 0.3 * rng.normal(size=60)
    found = lasso(subsets, values, penalty=0.1)
    spread = subsets.std(0)
    left = values - values.mean() - (subsets - subsets.mean(0)) @ found
    slope = ((subsets - subsets.mean(0)) / spread).T @ left / 60  # the conditions of a minimum
    assert np.abs(slope).max() < 0.1 + 1e-6
    np.testing.assert_allclose(slope[found != 0], 0.1 * np.sign(found[found != 0]), atol=1e-6)
    assert 3 <= (found != 0).sum() < 12
    np.testing.assert_allclose(lasso(subsets, values), true, atol=0.3)
