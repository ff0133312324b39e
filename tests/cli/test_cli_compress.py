"""`largeprompt compress` as a user meets it: small random models and tokenizers made here, files, and bad input."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from largeprompt.models._load import quiet
from model_prompts import TEXT, strict

FILES = {"compression.png", "compression.json"}
WORDS = ["[UNK]", *(f"w{i}" for i in range(40))]
SIZES: Any = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}


def save(model, folder):
    """A model and a tokenizer of words, without a bar on the terminal."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with quiet():
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folders of small random models: decoders with and without windows, without a head, and encoders."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    home = tmp_path_factory.mktemp("networks")
    torch.manual_seed(0)
    grouped = {**SIZES, "num_key_value_heads": 2}
    t5: Any = {"vocab_size": 41, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    made = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped)),
        "window": transformers.MistralForCausalLM(transformers.MistralConfig(**grouped, sliding_window=8)),
        "headless": transformers.LlamaModel(transformers.LlamaConfig(**grouped)),
        "bert": transformers.BertModel(transformers.BertConfig(**SIZES)),
        "masked": transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
        "albert": transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=16)),
        "t5": transformers.T5Model(transformers.T5Config(**t5)),
        "mamba": transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=41, hidden_size=16, state_size=4, num_hidden_layers=1)
        ),
    }
    for name, model in made.items():
        save(model, home / name)
    return home


LENGTHS = ("--length", "60", "--continuation", "20")


def test_losses_memory_and_errors_are_measured(command, home, text):
    import torch
    import transformers

    code, out, err = command("compress", str(home / "llama"), "--text", text, "--keep", "25%", *LENGTHS, "--json")
    assert (code, err) == (0, "")
    numbers = strict(out)
    assert numbers["files"] == ["results/compression.png", "results/compression.json"]
    assert {path.name for path in Path("results").iterdir()} == FILES
    assert Path("results/compression.png").read_bytes().startswith(b"\x89PNG")
    kept = strict(Path("results/compression.json").read_text())
    assert {part: numbers[part] for part in kept} == kept
    settings, rows = numbers["settings"], numbers["rows"]
    assert (settings["length"], settings["continuation"], settings["goal"]) == (60, 20, "keep 0.25")
    assert settings["model"] == f"{home.name}/llama (LlamaForCausalLM)"
    assert settings["text"] == text
    assert [row["layer"] for row in rows] == [0, 1]
    assert sum(row["atoms"] for row in rows) == 2 * 15
    assert settings["memory_before"] == 2 * 2 * 60 * 16
    assert settings["memory_after"] == 2 * 2 * 15 * 19
    assert settings["loss_change"] == settings["loss_after"] - settings["loss_before"]
    for row in rows:
        assert len(row["errors"]) == 4
        assert row["largest_error"] == max(row["errors"])
        assert row["median_error"] == pytest.approx(np.median(row["errors"]))
    assert settings["largest_error"] == max(row["largest_error"] for row in rows)
    with quiet():
        model: Any = transformers.LlamaForCausalLM.from_pretrained(home / "llama")
    ids = torch.tensor([[WORDS.index(word) for word in TEXT.split()[:80]]])
    labels = ids.clone()
    labels[:, :61] = -100  # the first token that follows is predicted from the full prompt in any case
    with torch.no_grad():
        assert settings["loss_before"] == pytest.approx(float(model(ids, labels=labels).loss), rel=1e-5)


def test_without_a_fit_errors_are_larger(command, home, text):
    asked = ("compress", str(home / "llama"), "--text", text, "--keep", "25%", *LENGTHS, "--json")
    errors = {}
    for option in ("--fit", "--no-fit"):
        code, out, err = command(*asked, option)
        assert (code, err) == (0, "")
        errors[option] = strict(out)["settings"]["median_error"]
    assert errors["--no-fit"] > errors["--fit"]


def test_keeping_all_changes_nothing_and_shares_are_written_in_two_ways(command, home, text):
    found = {}
    for keep in ("100%", "50%", "0.5"):
        code, out, err = command("compress", str(home / "llama"), "--text", text, "--keep", keep, *LENGTHS, "--json")
        assert (code, err) == (0, "")
        found[keep] = strict(out)
    assert abs(found["100%"]["settings"]["loss_change"]) < 1e-5
    assert found["50%"]["rows"] == found["0.5"]["rows"]
    assert found["50%"]["rows"][0]["atoms"] + found["50%"]["rows"][1]["atoms"] == 60


def test_a_tolerance_is_kept_by_every_head(command, home, text):
    arguments = ("--text", text, "--tolerance", "0.02", *LENGTHS, "--json")
    code, out, err = command("compress", str(home / "llama"), *arguments)
    assert (code, err) == (0, "")
    assert strict(out)["settings"]["largest_error"] <= 0.02
    assert all(row["atoms"] < 60 for row in strict(out)["rows"])


def test_the_terminal_gets_sentences_a_table_and_the_files(command, home, text):
    arguments = ("--text", text, "--tokens", "20", *LENGTHS, "--out", "deep/er")
    code, out, err = command("compress", str(home / "llama"), *arguments)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "The loss of what follows (19 tokens) goes from" in said
    assert "The cache of 60 tokens takes 39.6 % of its memory: 1,520 numbers in place of 3,840." in said
    assert "Predicted relative error of a head's output:" in said
    assert "kept of 60" in said
    assert "written: deep/er/compression.png, deep/er/compression.json" in said


def test_token_ids_stand_for_a_text(command, home, text):
    np.save("ids.npy", [WORDS.index(word) for word in TEXT.split()])
    by_text, by_ids = (
        strict(command("compress", str(home / "llama"), "--text", source, "--tokens", "20", *LENGTHS, "--json")[1])
        for source in (text, "ids.npy")
    )
    assert by_text["rows"] == by_ids["rows"]


def refused(command, message, *arguments):
    code, out, err = command("compress", *arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert message in " ".join(err.split())
    assert not [path for path in Path().glob("results/*") if path.is_file()]


def test_goals_that_make_no_sense_are_refused_before_a_model_is_read(command, text):
    share = "it must be a share above 0% and at most 100%, such as 25% or 0.25"
    for message, *goal in (
        ("nothing says how much is kept; give one of --keep 25%, --tokens N and --tolerance 0.01",),
        ("--keep and --tokens are given; give one of", "--keep", "25%", "--tokens", "20"),
        ("--tokens and --tolerance are given", "--tokens", "20", "--tolerance", "0.1"),
        (f"--keep is 0%; {share}", "--keep", "0%"),
        (f"--keep is 101%; {share}", "--keep", "101%"),
        (f"--keep is 25; {share}", "--keep", "25"),
        (f"--keep is -0.1; {share}", "--keep=-0.1"),
        (f"--keep is half; {share}", "--keep", "half"),
        (f"--keep is nan; {share}", "--keep", "nan"),
        ("--tokens is 3; it must be a whole number of at least 8", "--tokens", "3"),
        ("--tolerance is 0.0; it must be above 0 and at most 1", "--tolerance", "0"),
        ("--tolerance is 1.5; it must be above 0 and at most 1", "--tolerance", "1.5"),
    ):
        refused(command, message, "./nowhere", "--text", text, *goal)


def test_prompts_that_do_not_fit_are_refused(command, home, text):
    np.save("large.npy", np.arange(60))
    np.save("real.npy", np.linspace(0, 1, 50))
    llama, short = str(home / "llama"), ("--length", "30", "--continuation", "10")
    for message, *arguments in (
        ("the text has 100 tokens; --length 1024 with --continuation 256 needs 1280", "--text", text),
        ("the text has 100 tokens; --length 90 with --continuation 256 needs 346", "--text", text, "--length", "90"),
        ("there are 60 tokens; --length 60 with --continuation 20 needs 80", "--text", "large.npy", *LENGTHS),
        ("asks for 100 tokens; " + llama + " has positions for 96", "--text", text, "--length", "80",
         "--continuation", "20"),
        ("--length is 1; it must be at least 2", "--text", text, "--length", "1"),
        ("--continuation is 0; it must be at least 2", "--text", text, "--continuation", "0"),
        ("a token is 59; " + llama + " has tokens 0 to 40", "--text", "large.npy", "--length", "40",
         "--continuation", "20"),
        ("they must be whole numbers", "--text", "real.npy", *short),
        ("nowhere.txt: No such file", "--text", "nowhere.txt"),
    ):  # fmt: skip
        refused(command, message, llama, *arguments, "--tokens", "20")


def test_models_that_have_no_cache_to_compress_are_refused(command, home, text):
    for name, message in {
        "headless": "headless has no language-model head (no weights for lm_head.weight)",
        "bert": "bert has no language-model head (no weights for cls.predictions",
        "masked": "BertLMHeadModel reads later tokens too, as an encoder does; give a causal language model",
        "albert": "albert: it is of a kind that has no language-model head",
        "t5": "t5 is an encoder-decoder (t5)",
        "window": "no layer of MistralForCausalLM reads its whole prompt",
        "mamba": "MambaForCausalLM",
        "nowhere/at/all": "nowhere/at/all: there is no such folder or file",
    }.items():
        refused(command, message, str(home / name), "--text", text, "--tokens", "20", *LENGTHS)


def test_a_model_without_tokenizer_or_that_fails_is_refused(command, home, monkeypatch, text):
    import transformers

    shutil.copytree(home / "llama", "mute")
    for path in Path("mute").glob("tokenizer*"):
        path.unlink()
    arguments = ("--text", text, "--tokens", "20", *LENGTHS)
    refused(command, "mute has no tokenizer that transformers knows; give token ids in FILE.npy", "mute", *arguments)

    def fail(*_, **__):
        raise KeyError("a part")

    monkeypatch.setattr(transformers.LlamaModel, "forward", fail)
    refused(command, "llama did not run on these tokens (KeyError: 'a part')", str(home / "llama"), *arguments)


def test_a_folder_in_the_way_is_refused_before_a_model_is_read(command, text):
    Path("results/compression.png").mkdir(parents=True)
    refused(command, "compression.png is in the way", "./nowhere", "--text", text, "--tokens", "20")


def test_the_package_works_without_pytorch():
    """In a fresh interpreter: here it is imported."""
    code = """
import sys
class Without:  # not None in sys.modules: SciPy would take that for the package
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("there is no torch")
sys.meta_path.insert(0, Without())
from largeprompt import models
assert models.inspect_calls and "CompressedCache" in dir(models)
try:
    models.CompressedCache
except ImportError as error:
    print(error)
sys.argv = ["largeprompt", "compress", "model", "--text", "text.txt", "--keep", "25%"]
from largeprompt import cli
cli.main()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    for said in (run.stdout, run.stderr):
        assert said.count("\n") == 1
        assert 'pip install "largeprompt[models]"' in said
    assert run.stdout.startswith("CompressedCache: ")
