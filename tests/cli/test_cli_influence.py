"""`largeprompt influence` as a user meets it: a small random model, files, and bad input."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from model_prompts import strict

TEXT = "w1 w2 w3. W4 w5! W6 w7 w8. W9 w1?\n\nW2 w3. W4 w9 w9."
FILES = {"influence.html", "influence.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of 120 positions and a tokenizer with a template."""
    pytest.importorskip("torch")
    from context_models import chat_tokenizer, llama
    from largeprompt.models._load import quiet

    home = tmp_path_factory.mktemp("network")
    with quiet():
        llama(positions=120).save_pretrained(home)
        chat_tokenizer().save_pretrained(home)
    return str(home)


@pytest.fixture
def asked(command):
    """Arguments of a question about a context in the folder of the test."""
    Path("context.txt").write_text(TEXT)
    return ("--context", "context.txt", "--question", "Who w1?")


def test_scores_files_and_settings_agree(command, model, asked):
    code, out, err = command("influence", model, *asked, "--answer", "w2 w5", "--budget", "30", "--json")
    assert (code, err) == (0, "")
    numbers = strict(out)
    assert {path.name for path in Path("results").iterdir()} == FILES
    kept = strict(Path("results/influence.json").read_text())
    assert {part: numbers[part] for part in kept} == kept
    settings, rows = numbers["settings"], numbers["rows"]
    assert "".join(row["text"] for row in rows) == TEXT
    assert [row["tokens"] for row in rows] == [4, 3, 4, 3, 3, 4]
    assert (settings["question"], settings["answer"], settings["unit"]) == ("Who w1?", "w2 w5", "sentences")
    assert settings["passes"] == 31
    assert all(row["stderr"] > 0 for row in rows)
    import transformers

    from context_models import WORDS
    from largeprompt.models._load import quiet

    whole = f"<user> Context : {TEXT} Question : Who w1 ? <end> <model> w2 w5"
    for mark in ".!?":
        whole = whole.replace(mark, f" {mark} ")
    import torch

    ids = torch.tensor([[WORDS.index(word) for word in whole.split()]])
    with quiet(), torch.no_grad():
        log_p = transformers.LlamaForCausalLM.from_pretrained(model)(ids).logits[0].log_softmax(-1)
    total = sum(float(log_p[i - 1, ids[0, i]]) for i in (-2, -1))
    assert settings["log_probability"] == pytest.approx(total, rel=1e-4)


def test_the_page_shows_every_sentence_and_escapes_it(command, model, asked):
    Path("context.txt").write_text("w1 <b>w2</b>. W4 w5. W6.")
    code, out, err = command("influence", model, *asked, "--answer", "<i>w2</i>", "--budget", "12")
    assert (code, err) == (0, "")
    page = Path("results/influence.html").read_text()
    assert "w1 &lt;b&gt;w2&lt;/b&gt;." in page
    assert "&lt;i&gt;" not in page.split("<dd>")[0]
    assert "<b>w2" not in page
    assert page.count('class="part ') == 2 * 3
    assert "http" not in page.replace("http-equiv", "")
    said = " ".join(out.split())
    assert "Answer:" in said
    assert "sentences masked" in said
    assert "written: results/influence.html, results/influence.json" in said


def test_units_documents_and_ways_to_leave_out(command, model, asked):
    Path("other.txt").write_text("W5 w5. W6.")
    found = {}
    for name, more in {
        "sentences": (),
        "lines": ("--unit", "lines"),
        "documents": ("--unit", "documents", "--context", "other.txt"),
        "taken out": ("--taken-out",),
        "plain": ("--plain",),
    }.items():
        code, out, err = command("influence", model, *asked, "--budget", "20", "--json", *more)
        assert (code, err) == (0, "")
        found[name] = strict(out)
    assert {name: len(each["rows"]) for name, each in found.items()} == {
        "sentences": 6,
        "lines": 2,
        "documents": 2,
        "taken out": 6,
        "plain": 6,
    }
    scores = {name: [row["score"] for row in each["rows"]] for name, each in found.items()}
    assert not np.allclose(scores["sentences"], scores["taken out"])
    assert not np.allclose(scores["sentences"], scores["plain"])
    assert found["taken out"]["settings"]["kind"] == "taken out"


def refused(command, message, *arguments):
    code, out, err = command("influence", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_bad_input_is_refused_in_one_line(command, model, asked):
    Path("empty.txt").write_text(" \n")
    Path("one.txt").write_text("w1 w2 w3.")
    Path("long.txt").write_text("W1 w2 w3. " * 60)
    question = ("--question", "Who w1?")
    for message, *arguments in (
        ("empty.txt is empty", "--context", "empty.txt", *question),
        ("the context is one part (sentences)", "--context", "one.txt", *question),
        ("asks for 250 tokens; LlamaForCausalLM has positions for 120", "--context", "long.txt", *question),
        ("--question is empty", "--context", "context.txt", "--question", " "),
        ("--answer is empty", *asked, "--answer", " "),
        ("--unit is words; it must be one of sentences, lines, paragraphs, documents", *asked, "--unit", "words"),
        ("--budget is 2; it must be at least 3", *asked, "--budget", "2"),
        ("nowhere.txt: No such file", "--context", "nowhere.txt", *question),
    ):
        refused(command, message, model, *arguments)
    refused(command, "nowhere/at/all: there is no such folder or file", "nowhere/at/all", *asked)
    refused(command, "the context is one part", "nowhere/at/all", "--context", "one.txt", *question)  # read first
    shutil.copytree(model, "mute")
    for path in Path("mute").glob("tokenizer*"):
        path.unlink()
    refused(command, "mute has no tokenizer that transformers knows", "mute", *asked)
    Path("results/influence.html").mkdir(parents=True)
    refused(command, "influence.html is in the way", model, *asked)
