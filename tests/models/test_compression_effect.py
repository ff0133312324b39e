"""What a compression costs is measured on the model's own losses, shown in a few sentences, and changes no model."""

from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from largeprompt.models import CompressedCache, compression_effect

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}


def config():
    return LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2)


@pytest.fixture
def model():
    torch.manual_seed(1)
    found: Any = LlamaForCausalLM(config())
    with torch.no_grad():
        for layer in found.model.layers:  # so that attention is far from even, and counts
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                part.weight *= 4
    return found


@pytest.fixture
def ids():
    return torch.randint(3, 50, (80,), generator=torch.Generator().manual_seed(0))


def test_losses_and_errors_are_those_of_the_cache(model, ids):
    found = compression_effect(model, ids, 60, tokens=12)
    with torch.no_grad():
        losses, errors = [], np.zeros(0)
        for cache in (DynamicCache(), CompressedCache(model.eval(), tokens=12)):
            model(ids[None, :60], past_key_values=cache)
            if isinstance(cache, CompressedCache):
                cache.compress()
                errors = np.concatenate([each.numpy() for each in cache.errors.values()])
            one_by_one = [model(ids[None, i : i + 1], past_key_values=cache).logits[0, 0] for i in range(60, 79)]
            log_p = torch.stack(one_by_one).double().log_softmax(dim=-1)
            losses.append(-log_p[torch.arange(19), ids[61:]].numpy())
    assert [found.loss_before, found.loss_after] == pytest.approx(np.mean(losses, axis=1), abs=1e-5)
    change = losses[1] - losses[0]
    assert found.loss_change_stderr == pytest.approx(np.std(change) / 19**0.5, rel=1e-2)
    assert np.abs(change).mean() > 1e-4  # else nothing is seen of the compression
    np.testing.assert_allclose(found.errors, errors, rtol=1e-4)
    assert found.atoms.shape == (2, 2)
    assert found.atoms.sum() == 2 * 2 * 12
    assert found.memory_share == (2 * 2 * 12 * 19) / (2 * 60 * 2 * 16)


def test_the_model_is_left_as_it_was(model, ids):
    before = model.eval()(ids[None]).logits
    model.train()
    compression_effect(model, ids, 60, keep=0.5)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.eval()(ids[None]).logits, before)
    with pytest.raises(ValueError, match="exactly one must be"):
        compression_effect(model.train(), ids, 60)
    assert model.training


def test_it_shows_as_sentences_a_table_and_a_picture(model, ids):
    found = compression_effect(model, ids, 60, keep=0.5)
    text, page = repr(found), found._repr_html_()
    assert text.startswith("Effect (LlamaForCausalLM, keep 0.5)\nThe loss of what follows (19 tokens) goes from")
    assert text.splitlines()[-3].split() == ["layer", "atoms", "median_error", "largest_error"]
    assert page is not None
    assert "<th>largest_error</th>" in page
    data = found.to_dataset()
    assert dict(data.sizes) == {"layer": 2, "head": 6, "key_head": 2}
    np.testing.assert_array_equal(data["largest_error"], found.errors.max(axis=1))
    assert data.attrs["loss_change"] == found.loss_after - found.loss_before
    with matplotlib.rc_context({"backend": "agg"}):
        ax = found.plot()
    kept, error = ax.get_lines()
    np.testing.assert_allclose(np.asarray(kept.get_ydata()), found.atoms.mean(axis=1) / 60)
    np.testing.assert_allclose(np.asarray(error.get_ydata()), np.median(found.errors, axis=1))
    assert ax.get_xlabel() == "layer"


def test_learned_positions_need_no_rotation(ids):
    torch.manual_seed(0)
    found = compression_effect(
        GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=50)), ids[None], 60, keep=1.0
    )
    assert abs(found.loss_change) < 1e-5


def test_bad_input_is_refused_in_a_line(model, ids):
    for message, *arguments in (
        ("there are 80 tokens; length 79 needs at least 81", model, ids, 79),
        ("length is 0; it must be", model, ids, 0),
        (r"ids have shape \(2, 40\)", model, ids.reshape(2, 40), 20),
        ("they must be whole numbers", model, ids / 2, 20),
        ("model is of type Linear; it must be a transformers model", torch.nn.Linear(2, 2), ids, 20),
        ("LlamaModel has no language-model head", LlamaModel(config()), ids, 20),
    ):
        given: Any = arguments
        with pytest.raises(ValueError, match=message) as error:
            compression_effect(*given, keep=0.5)
        assert "\n" not in str(error.value)
