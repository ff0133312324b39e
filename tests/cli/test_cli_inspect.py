"""`largeprompt inspect` as a user meets it: models and tokenizers made here, arrays without PyTorch, and bad input."""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from largeprompt.models._load import quiet
from largeprompt.models.report import FILES
from model_prompts import TEXT, strict

WORDS = ["[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(40))]


def save_tokenizer(folder, special):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        ends = [("[CLS]", 1), ("[SEP]", 2)]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def save(model, folder):
    """Without a bar on the terminal."""
    with quiet():
        model.save_pretrained(folder)


SIZES: Any = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two small random models, a decoder with shared keys and an encoder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    home = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {
        "llama": transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
        "bert": transformers.BertModel(transformers.BertConfig(**SIZES)),
    }
    for name, model in made.items():
        save(model, home / name)
        save_tokenizer(home / name, special=name == "bert")
    return home


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_on_a_text_gives_a_page_and_numbers(command, models, text, name):
    code, out, err = command("inspect", str(models / name), "--text", text, "--length", "40", "--verify", "--json")
    assert (code, err) == (0, "")
    numbers = strict(out)
    assert numbers["files"] == [str(Path("results") / file) for file in FILES]
    assert {path.name for path in Path("results").iterdir()} == set(FILES)
    assert [(row["layer"], row["head"]) for row in numbers["rows"]] == [(i, h) for i in range(2) for h in range(4)]
    assert all(row["rebuilt"] < 1e-4 for row in numbers["rows"])
    assert "measured_over_predicted" in numbers["rows"][0]
    assert numbers["settings"]["tokens"] == 40
    assert numbers["settings"]["text"] == "text.txt"
    assert name in numbers["settings"]["model"]
    kept = strict(Path("results/inspection.json").read_text())
    assert {part: numbers[part] for part in kept} == kept
    data = xr.load_dataset("results/inspection.nc", engine="scipy")
    np.testing.assert_allclose(data.effective.values.ravel(), [row["effective"] for row in numbers["rows"]])
    table = list(csv.DictReader(Path("results/inspection.csv").read_text().splitlines()))
    np.testing.assert_allclose([float(row["tail"]) for row in table], [row["tail"] for row in numbers["rows"]])
    page = Path("results/inspection.html").read_text()
    assert f"The heads of models0/{name}" in page
    assert ('" [CLS]"' in page) == (name == "bert")


def test_the_terminal_gets_sentences_a_table_and_the_files(command, models, text):
    code, out, err = command("inspect", str(models / "llama"), "--text", text, "--length", "32", "--out", "deep/er")
    assert (code, err) == (0, "")
    assert "of 8 heads are in the large-prompt regime" in out
    assert "Medians over heads" in out
    assert "written: deep/er/inspection.html, deep/er/inspection.csv" in out


def test_token_ids_stand_for_a_text(command, models, text):
    ids = [WORDS.index(word) for word in TEXT.split()]
    np.save("ids.npy", ids)
    options = ("--length", "40", "--json")
    by_text = strict(command("inspect", str(models / "llama"), "--text", text, *options)[1])
    by_ids = strict(command("inspect", str(models / "llama"), "--tokens", "ids.npy", *options)[1])
    assert by_text["rows"] == by_ids["rows"]
    same = ("--tokens", "ids.npy", "--unseen", "other.npy")
    np.save("other.npy", ids[40:])
    by_unseen = strict(command("inspect", str(models / "llama"), *same, *options)[1])
    by_verify = strict(command("inspect", str(models / "llama"), "--tokens", "ids.npy", "--verify", *options)[1])
    assert by_unseen["rows"] == by_verify["rows"]


def arrays(seed=0, n=24, L=48) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "queries": rng.normal(size=(2, n, 4)),
        "keys": rng.normal(size=(2, L, 4)),
        "values": rng.normal(size=(2, L, 3)),
    }


def test_arrays_need_no_model(command, monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    layers: Any = {f"layer.{i}.{part}": array for i in (10, 2) for part, array in arrays(i).items()}
    np.savez("calls.npz", **layers, **{"layer.10.causal": 1, "layer.2.scale": 0.3})
    code, out, err = command("inspect", "calls.npz", "--json")
    assert (code, err) == (0, "")
    numbers = strict(out)
    assert [row["name"] for row in numbers["rows"]] == ["layer.2", "layer.2", "layer.10", "layer.10"]
    assert numbers["rows"][0]["seen"] == 48 > numbers["rows"][2]["seen"] > 24
    Path("folder").mkdir()
    for part, array in arrays().items():
        np.save(f"folder/{part}.npy", array)
    np.savez("same.npz", **arrays())
    by_folder, by_file = (strict(command("inspect", model, "--json")[1])["rows"] for model in ("folder", "same.npz"))
    assert [row | {"name": ""} for row in by_folder] == [row | {"name": ""} for row in by_file]
    code, out, err = command("inspect", "same.npz", "--unseen", "folder", "--json")
    assert (code, err) == (0, "")
    assert "measured_over_predicted" in strict(out)["rows"][0]


def test_safetensors_are_read_without_pytorch(command, monkeypatch):
    save = pytest.importorskip("safetensors.numpy").save_file
    monkeypatch.setitem(sys.modules, "torch", None)
    save({name: array.astype(np.float32) for name, array in arrays().items()}, "calls.safetensors")
    code, _, err = command("inspect", "calls.safetensors")
    assert (code, err) == (0, "")


def refused(command, message, *arguments):
    code, out, err = command("inspect", *arguments)
    said = " ".join(err.split())
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert message in said
    assert not [path for path in Path().glob("results/*") if path.is_file()]


def test_options_that_do_not_go_together_are_refused(command, models, text):
    llama = str(models / "llama")
    np.savez("calls.npz", **arrays())
    for message, *arguments in (
        ("needs a prompt; give --text FILE or --tokens FILE.npy", llama),
        ("and not both", llama, "--text", text, "--tokens", "ids.npy"),
        ("--verify and --unseen are both given", llama, "--text", text, "--verify", "--unseen", text),
        ("calls.npz holds arrays; --text", "calls.npz", "--text", text),
        ("--length is 1; it must be at least 2", llama, "--text", text, "--length", "1"),
        ("--queries is 0; it must be at least 2", llama, "--text", text, "--queries", "0"),
        ("nowhere.txt: No such file", llama, "--text", "nowhere.txt"),
    ):
        refused(command, message, *arguments)


def test_prompts_that_do_not_fit_are_refused(command, models, text):
    llama = str(models / "llama")
    Path("bytes.txt").write_bytes(b"w1 \xff w2")
    np.save("large.npy", np.arange(60))
    np.save("real.npy", np.linspace(0, 1, 50))
    Path("words.npy").write_text("w1 w2")
    for message, *arguments in (
        ("the text has 100 tokens; --length 1024 needs 1024", "--text", text),
        ("the text has 100 tokens; --length 64 needs 2 × 64", "--text", text, "--length", "64", "--verify"),
        ("--length 80 asks for 80 tokens; " + llama + " has positions for 64", "--text", text, "--length", "80"),
        ("bytes.txt is not text in UTF-8: byte 3 is 0xff", "--text", "bytes.txt"),
        ("a token is 59; " + llama + " has tokens 0 to 42", "--tokens", "large.npy", "--length", "60"),
        ("they must be whole numbers", "--tokens", "real.npy", "--length", "40"),
        ("there are 60 tokens; --length 61 needs 61", "--tokens", "large.npy", "--length", "61"),
        ("words.npy cannot be read as .npy", "--tokens", "words.npy"),
    ):
        refused(command, message, llama, *arguments)


def test_models_that_cannot_be_read_are_refused(command, models, text):
    import torch
    import transformers

    def changed(name, **settings):
        shutil.copytree(models / "llama", name)
        config = json.loads((models / "llama" / "config.json").read_text())
        Path(name, "config.json").write_text(json.dumps(config | settings))

    changed("unknown", model_type="nobody", architectures=["NobodyModel"])
    changed("remote", model_type="nobody", auto_map={"AutoConfig": "c.C", "AutoModel": "m.M"})
    changed("cut")
    whole = Path("cut/model.safetensors").read_bytes()
    Path("cut/model.safetensors").write_bytes(whole[: len(whole) // 2])
    changed("broken")
    Path("broken/config.json").write_text("{")
    changed("other", architectures=["BertModel"], model_type="bert")
    Path("empty").mkdir()
    Path("cut.gguf").write_bytes(b"GGUF" + bytes(20))
    Path("text.gguf").write_text(TEXT)
    with quiet():
        sick: Any = transformers.LlamaModel.from_pretrained(models / "llama")
    with torch.no_grad():
        sick.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    save(sick, "sick")
    sizes: Any = {"vocab_size": 43, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    save(transformers.T5Model(transformers.T5Config(**sizes)), "t5")
    for message, model in (
        ("unknown: its architecture is not one that this version of transformers knows", "unknown"),
        ("remote: it needs code that comes with it, which is never run", "remote"),
        ("cut: it could not be read, it may be damaged", "cut"),
        ("broken/config.json is not JSON", "broken"),
        ("other has no weights for", "other"),
        ("empty has no config.json", "empty"),
        ("cut.gguf: it could not be read, it may be damaged", "cut.gguf"),
        ("text.gguf is no GGUF file", "text.gguf"),
        ("the weight layers.1.self_attn.q_proj.weight is not finite", "sick"),
        ("t5 is an encoder-decoder (t5)", "t5"),
        ("./nowhere: there is no such folder or file", "./nowhere"),
        ("nowhere.gguf: No such file", "nowhere.gguf"),
        ("text.txt is not a model that can be read", "text.txt"),
    ):
        refused(command, message, model, "--text", text, "--length", "40")
    shutil.copytree(models / "llama", "mute")
    for path in Path("mute").glob("tokenizer*"):
        path.unlink()
    refused(command, "mute has no tokenizer that transformers knows", "mute", "--text", text, "--length", "40")


def test_a_model_without_attention_is_refused(command, text):
    import transformers

    sizes: Any = {"vocab_size": 43, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    save(transformers.MambaModel(transformers.MambaConfig(**sizes)), "mamba")
    save_tokenizer("mamba", special=False)
    refused(command, "the model made no attention call", "mamba", "--text", text, "--length", "40")


def test_a_model_of_pictures_is_refused(command, text):
    import transformers

    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    save(transformers.ViTModel(transformers.ViTConfig(**sizes)), "vit")
    np.save("ids.npy", np.arange(40))
    message = "vit reads no token ids: it is a ViTModel"
    refused(command, message, "vit", "--tokens", "ids.npy", "--length", "40")


def test_a_model_that_fails_is_refused(command, models, monkeypatch, text):
    import transformers

    def fail(*_, **__):
        raise KeyError("a part")

    monkeypatch.setattr(transformers.LlamaModel, "forward", fail)
    message = "llama did not run on these tokens (KeyError: 'a part')"
    refused(command, message, str(models / "llama"), "--text", text, "--length", "40")


def test_a_text_of_another_kind_is_remarked(command, models):
    Path("other.txt").write_text("to be or not to be " * 10)
    code, _, err = command("inspect", str(models / "llama"), "--text", "other.txt", "--length", "40")
    assert code == 0
    assert "40 of 40 tokens are unknown to the tokenizer" in err


def test_a_name_on_the_hub_without_a_network_is_refused(command, monkeypatch, text):
    monkeypatch.setattr("largeprompt.models._load._hub_in_reach", lambda: False)
    refused(command, "nobody/nothing: it is no folder or file here", "nobody/nothing", "--text", text)


def test_models_without_pytorch_are_refused(command, models, monkeypatch, text):
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(command, 'pip install "largeprompt[models]"', str(models / "llama"), "--text", text)


def test_arrays_that_make_no_attention_call_are_refused(command):
    def saved(name, **changes):
        found: Any = {part: array for part, array in (arrays() | changes).items() if array is not None}
        np.savez(name, **found)
        return name

    Path("text.npz").write_text(TEXT)
    Path("text.safetensors").write_text(TEXT)
    np.save("alone.npy", np.ones(3))
    queries = arrays()["queries"]
    for message, model in (
        ("text.npz cannot be read as .npz", "text.npz"),
        ("text.safetensors cannot be read as .safetensors", "text.safetensors"),
        ("nowhere.npz: No such file", "nowhere.npz"),
        ("alone.npy alone is no attention call", "alone.npy"),
        ("a in a.npz has no keys; it must have queries, keys and values", saved("a.npz", keys=None)),
        ("has an array 'q.weight'", saved("b.npz", **{"q.weight": np.ones(2)})),
        (
            "the mask of c hides every token from query 3",
            saved("c.npz", mask=np.arange(24)[:, None] + np.zeros(48) != 3),
        ),
        ("mask of d has shape (2, 3); it must be (24, 48)", saved("d.npz", mask=np.ones((2, 3), bool))),
        ("the mask of e has other values", saved("e.npz", mask=np.full((24, 48), 0.5))),
        ("log_weights of f are not all finite or −∞", saved("f.npz", log_weights=np.full((24, 48), np.nan))),
        ("queries of g are not all finite", saved("g.npz", queries=np.where(queries > 2, np.inf, queries))),
        ("keys of h have shape (2, 48, 5)", saved("h.npz", keys=np.ones((2, 48, 5)))),
        ("scale of i has shape (2,)", saved("i.npz", scale=np.ones(2))),
        (
            "j has 24 queries and 20 tokens",
            saved("j.npz", causal=1, keys=np.ones((2, 20, 4)), values=np.ones((2, 20, 3))),
        ),
        ("queries of k have shape (2, 24, 4) and type <U1", saved("k.npz", queries=np.full((2, 24, 4), "x"))),
    ):
        refused(command, message, model)
    refused(command, "keys of l have shape (2, 48, 4), on unseen text (2, 40, 4)",
            saved("l.npz"), "--unseen", saved("m.npz", **arrays(L=40)))  # fmt: skip
