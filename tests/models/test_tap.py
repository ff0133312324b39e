"""Whatever a network's attention is called through, its calls are seen as they are, and nothing changes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5EncoderModel,
)

from largeprompt.models._statistics import attended
from largeprompt.models._tap import tap

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
GROUPED: dict[str, Any] = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}
L = 40


def albert():
    return AlbertModel(AlbertConfig(**SIZES, num_attention_heads=4, embedding_size=16))


def bert():
    return BertModel(BertConfig(**SIZES, num_attention_heads=4))


def llama():
    return LlamaModel(LlamaConfig(**GROUPED))


def mistral():
    return MistralModel(MistralConfig(**GROUPED, sliding_window=8))


def gpt2():
    return GPT2Model(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=50))


def t5():
    sizes: dict[str, Any] = {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return T5EncoderModel(T5Config(**sizes))


def bart():
    sizes: dict[str, Any] = {"d_model": 48, "vocab_size": 50, "encoder_layers": 1, "decoder_layers": 1}
    heads: dict[str, Any] = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    }
    return BartModel(BartConfig(**sizes, **heads))


MODELS = {f.__name__: f for f in (albert, bert, llama, mistral, gpt2, t5, bart)}


@pytest.fixture
def ids():
    return torch.randint(3, 50, (1, L), generator=torch.Generator().manual_seed(0))


def seen(model, *inputs, **options):
    """The calls of a forward pass; the model must give the same with and without it being seen."""
    model.eval()
    calls = []
    with torch.no_grad():
        before = model(*inputs, **options)
        with tap(model, calls.append, queries=7):
            during = model(*inputs, **options)
        after = model(*inputs, **options)
    for one in (during, after):
        first, other = (x if isinstance(x, torch.Tensor) else x[0] for x in (before, one))
        assert torch.equal(first, other)
    return calls


def assert_rebuilt(calls):
    """Outputs from queries, keys and values are the model's own."""
    for call in calls:
        assert call.outputs is not None
        for h in range(call.heads):
            np.testing.assert_allclose(attended(call.head(h)).output, call.outputs[h], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_calls_of_transformers_rebuild_the_outputs_and_change_nothing(name, implementation, ids):
    torch.manual_seed(1)
    model = MODELS[name]()
    model.set_attn_implementation(implementation)
    calls = seen(model, ids)
    assert len(calls) == (3 if name == "bart" else 2)
    assert all(call.projections is not None and call.projections.shape[0] == call.heads for call in calls)
    assert_rebuilt(calls)


def test_masks_windows_and_biases_are_part_of_a_call(ids):
    torch.manual_seed(1)
    causal, window, padded, biased = (
        seen(MODELS[name](), ids, **options)[0]
        for name, options in [
            ("llama", {}),
            ("mistral", {}),
            ("bert", {"attention_mask": (torch.arange(L) < 30).long()[None]}),
            ("t5", {}),
        ]
    )
    assert causal.positions is not None
    visible = [np.isfinite(np.asarray(call.log_weights)).sum(axis=-1)[0] for call in (causal, window, padded, biased)]
    np.testing.assert_array_equal(visible[0], causal.positions + 1)
    assert set(visible[1]) == {4, 8}  # the first query that sees half of a window, and all later ones
    assert set(visible[2]) == {30}
    assert set(visible[3]) == {L}
    assert np.ptp(np.asarray(biased.log_weights)) > 0
    assert causal.positions.min() >= L // 2 - 1  # queries that see much


def test_heads_that_share_keys_keep_their_own_queries(ids):
    torch.manual_seed(1)
    call = seen(llama(), ids)[1]
    assert (call.heads, call.keys.shape[0], call.tokens) == (6, 2, L)
    np.testing.assert_array_equal(call.head(2).keys, call.keys[0])
    np.testing.assert_array_equal(call.head(3).keys, call.keys[1])
    with pytest.raises(ValueError, match=r"head is 6; layers\.1\.self_attn has heads 0 to 5"):
        call.head(6)


class Direct(nn.Module):
    """Calls the function that it has imported."""

    def forward(self, x):
        return scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3)


class ByName(nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("model", [Direct(), ByName()])
def test_plain_pytorch_is_seen_whichever_way_the_function_is_named(model):
    x = torch.randn(1, 2, L, 8, generator=torch.Generator().manual_seed(2))
    (call,) = seen(model, x)
    assert call.scale == pytest.approx(0.3 if isinstance(model, Direct) else 8**-0.5)
    assert_rebuilt([call])


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_of_pytorch_is_seen_with_its_way_out(need_weights):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x[:, :25], x[:, :25], need_weights=need_weights)[0]

    torch.manual_seed(3)
    (call,) = seen(Model(), torch.randn(1, L, 16))
    assert (call.name, call.heads, call.tokens, call.positions) == ("attention", 4, 25, None)
    assert call.projections is not None
    assert call.projections.shape == (4, 4, 16)
    assert_rebuilt([call])


def test_a_fused_encoder_layer_is_seen():
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0).eval()
    calls, x = [], torch.randn(1, L, 16)
    with torch.no_grad():
        before = layer(x)
        with tap(layer, calls.append):
            during = layer(x)
    torch.testing.assert_close(before, during)
    assert len(calls) == 1
    assert torch.backends.mha.get_fastpath_enabled()


def test_two_prompts_at_once_are_refused_and_nothing_stays_behind(ids):
    model = llama().eval()
    with torch.no_grad(), pytest.raises(ValueError, match="the batch has 2 prompts"), tap(model, print):
        model(ids.expand(2, -1))
    assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert len(seen(model, ids)) == 2


def test_half_precision_with_infinities_is_refused():
    model, x = ByName(), torch.full((1, 1, 5, 4), torch.inf)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="queries of attention 0 are not all"),
        tap(model, print),
    ):
        model(x)
