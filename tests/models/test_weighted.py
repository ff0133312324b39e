"""A token of weight a counts as a tokens, through whole networks; nothing of PyTorch stays changed."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from largeprompt.models.sensitivity import weighted

COUNTS = torch.tensor([1, 3, 2, 1, 0, 4, 1])
OTHER_COUNTS = torch.tensor([2, 1, 1, 5, 1, 0, 1])
HEADS, WIDTH = 2, 16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape), dtype=torch.float32)


def repeated(x: Tensor, counts: Tensor, dim: int) -> Tensor:
    return x.repeat_interleave(counts, dim=dim)


def weights(counts: Tensor) -> Tensor:
    return counts.float().log()


class Head(nn.Module):
    """Queries read keys and values made from tokens (b, L, width), by one of PyTorch's names for attention."""

    def __init__(self, attention: Any = None, kv_heads: int = HEADS):
        super().__init__()
        self.attention, self.kv_heads = attention, kv_heads

    def forward(self, queries: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        attention = self.attention or functional.scaled_dot_product_attention
        q, k = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((queries, HEADS), (tokens, self.kv_heads)))
        return attention(q, k, k.flip(-1), **options).transpose(1, 2).flatten(2)


def bert() -> BertModel:
    """Without positions: a function of the measure of its tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": HEADS}
    model = BertModel(BertConfig(**sizes, num_hidden_layers=2, vocab_size=40, hidden_dropout_prob=0.0)).eval()
    model.embeddings.position_embeddings.weight.data.zero_()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "encoder" in name:
            parameter.data *= 8
    return model


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def test_integer_weights_are_repeated_tokens_in_a_transformers_model():
    model, ids = bert(), torch.arange(7)[None] + 3
    with torch.no_grad():
        with weighted(weights(COUNTS)):
            found = model(ids).last_hidden_state[0]
        truth = model(repeated(ids, COUNTS, 1)).last_hidden_state[0]
        plain = model(ids).last_hidden_state[0]
    # a token that is left out still reads the others, but nobody reads it
    assert torch.allclose(repeated(found, COUNTS, 0), truth, atol=1e-5)
    assert not torch.allclose(repeated(plain, COUNTS, 0), truth, atol=1e-2)


def test_integer_weights_are_repeated_tokens_in_an_encoder_of_pytorch():
    model, tokens = encoder(), draw(1, 7, WIDTH)
    with torch.no_grad():
        with weighted(weights(COUNTS)):
            found = model(tokens)
        assert torch.allclose(repeated(found, COUNTS, 1), model(repeated(tokens, COUNTS, 1)), atol=1e-5)


@pytest.mark.parametrize("attention", [None, imported_by_name], ids=["by module", "by name"])
@pytest.mark.parametrize("kv_heads", [HEADS, 1], ids=["own heads", "grouped heads"])
def test_integer_weights_are_repeated_tokens_in_a_plain_call(attention, kv_heads):
    head = Head(attention, kv_heads)
    queries, tokens = draw(1, 5, WIDTH), draw(1, 7, WIDTH * kv_heads // HEADS, seed=1)
    with weighted(weights(COUNTS)):
        found = head(queries, tokens, enable_gqa=kv_heads < HEADS)
    truth = head(queries, repeated(tokens, COUNTS, 1), enable_gqa=kv_heads < HEADS)
    assert torch.allclose(found, truth, atol=1e-5)


def test_each_prompt_of_a_batch_has_its_own_weights():
    model, tokens = encoder(), draw(2, 7, WIDTH)
    with torch.no_grad():
        with weighted(torch.stack([weights(COUNTS), weights(OTHER_COUNTS)])):
            found = model(tokens)
        for i, counts in enumerate((COUNTS, OTHER_COUNTS)):
            truth = model(repeated(tokens[i : i + 1], counts, 1))
            assert torch.allclose(repeated(found[i : i + 1], counts, 1), truth, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_gives_its_weights_where_they_are_asked_for(need_weights):
    torch.manual_seed(0)
    attention, tokens, queries = (
        nn.MultiheadAttention(WIDTH, HEADS).eval(),
        draw(7, 1, WIDTH),
        draw(4, 1, WIDTH, seed=1),
    )
    hidden = torch.tensor([[True, *[False] * 6]])
    given = {"need_weights": need_weights, "key_padding_mask": hidden}
    with weighted(weights(COUNTS)):
        found, shown = attention(queries, tokens, tokens, **given)
    given["key_padding_mask"] = repeated(hidden, COUNTS, 1)
    truth, all_shown = attention(queries, repeated(tokens, COUNTS, 0), repeated(tokens, COUNTS, 0), **given)
    assert torch.allclose(found, truth, atol=1e-6)
    assert (shown is None) == (not need_weights)
    if need_weights:
        of_token = torch.arange(7).repeat_interleave(COUNTS)
        assert torch.allclose(torch.zeros(1, 4, 7).index_add(2, of_token, all_shown), shown, atol=1e-6)


def test_minus_infinity_takes_a_token_out():
    model, tokens = encoder(), draw(1, 7, WIDTH)
    stay = torch.tensor([True, False, True, True, False, True, True])
    with torch.no_grad():
        with weighted(torch.where(stay, 0.0, -torch.inf)):
            found = model(tokens)[:, stay]
        assert torch.allclose(found, model(tokens[:, stay]), atol=1e-5)


def test_gradients_are_finite_differences():
    model, tokens = encoder().double(), draw(1, 7, WIDTH).double()
    at = draw(7, seed=2).double().requires_grad_()

    def output(log_weights: Tensor) -> Tensor:
        with weighted(log_weights):
            return model(tokens)[0, 0, 0]

    (found,) = torch.autograd.grad(output(at), at)
    steps = 1e-5 * torch.eye(7, dtype=torch.float64)
    with torch.no_grad():
        truth = torch.stack([(output(at + step) - output(at - step)) / 2e-5 for step in steps])
    assert torch.allclose(found, truth, atol=1e-8)
    assert float(found.abs().max()) > 1e-3


@pytest.mark.parametrize(("kind", "rounding"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_agrees_within_its_rounding(kind, rounding):
    queries, tokens = draw(1, 5, 128 * HEADS), draw(1, 7, 128 * HEADS, seed=1)
    with weighted(weights(COUNTS)):
        found = Head()(queries.to(kind), tokens.to(kind)).float()
    truth = Head()(queries, repeated(tokens, COUNTS, 1))
    assert float((found - truth).abs().max()) < 3 * rounding * float(tokens.abs().max())


def test_causal_masks_are_kept():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": HEADS}
    model = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=1, num_hidden_layers=2, vocab_size=40)).eval()
    ids = torch.arange(7)[None]
    with torch.no_grad():
        with weighted(torch.zeros(7)):
            found = model(ids).last_hidden_state
        assert torch.allclose(found, model(ids).last_hidden_state, atol=1e-5)
        with weighted(torch.tensor([0.0, 0, 0, 0, 0, 2, 2])):
            later = model(ids).last_hidden_state
    assert torch.allclose(found[:, :5], later[:, :5], atol=1e-5)
    assert not torch.allclose(found[:, 6:], later[:, 6:], atol=1e-3)


def test_blocks_inside_one_another_both_apply():
    queries, tokens = draw(1, 5, WIDTH), draw(1, 7, WIDTH, seed=1)
    first, second = weights(COUNTS), draw(7)
    with weighted(first + second):
        truth = Head()(queries, tokens)
    for attention in (None, imported_by_name):
        with weighted(first):
            with weighted(second):
                found = Head(attention)(queries, tokens)
            alone = Head(attention)(queries, tokens)
        assert torch.allclose(found, truth, atol=1e-5)
        with weighted(first):
            assert torch.allclose(alone, Head(attention)(queries, tokens))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_changed(fails):
    before = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
    fast = torch.backends.mha.get_fastpath_enabled()
    with contextlib.suppress(RuntimeError), weighted(torch.zeros(7)):
        Head()(draw(1, 5, WIDTH), draw(1, 7, WIDTH))
        if fails:
            raise RuntimeError("of the caller")
    assert before == (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)
    assert fast == torch.backends.mha.get_fastpath_enabled()


def test_calls_of_other_lengths_are_left_alone():
    queries, tokens = draw(1, 5, WIDTH), draw(1, 7, WIDTH, seed=1)
    with weighted(weights(COUNTS)):
        Head()(queries, tokens)
        found = Head()(tokens, queries)
    assert torch.equal(found, Head()(tokens, queries))


def test_a_block_without_a_call_of_that_length_is_an_error():
    with pytest.raises(ValueError, match=r'has read 6 keys.*attn_implementation="sdpa"'), weighted(torch.zeros(6)):
        Head()(draw(1, 5, WIDTH), draw(1, 7, WIDTH))


def test_a_model_that_computes_its_attention_itself_is_refused_with_what_would_do():
    model = bert()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'), weighted(torch.zeros(7)):
        model(torch.arange(7)[None])


@pytest.mark.parametrize(
    ("log_weights", "message"),
    [
        (torch.tensor([0.0, torch.nan]), r"log-weight \(1,\) is nan"),
        (torch.tensor([[0.0, torch.inf]]), r"log-weight \(0, 1\) is inf"),
        (torch.zeros(2, 2, 2), r"shape \(2, 2, 2\)"),
        (torch.zeros(3, dtype=torch.int64), "torch.int64"),
        (torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]), "at least one must stay"),
    ],
)
def test_log_weights_that_are_none_are_refused(log_weights, message):
    with pytest.raises(ValueError, match=message), weighted(log_weights):
        pass


def test_a_batch_of_another_size_is_refused():
    with (
        pytest.raises(ValueError, match="weights for 3 prompts and 2 prompts in the batch"),
        weighted(torch.zeros(3, 7)),
    ):
        Head()(draw(2, 5, WIDTH), draw(2, 7, WIDTH))
