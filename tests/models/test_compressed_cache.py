"""A compressed cache gives what the full one gives where nothing is left out, and stays near it where much is."""

from typing import Any

import pytest
import torch
from transformers import (
    Cache,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from largeprompt.models import CompressedCache
from largeprompt.models.compression._rotation import rotation_of
from largeprompt.models.compression._share import Goal

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
GROUPED: dict[str, Any] = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def llama():
    return LlamaForCausalLM(LlamaConfig(**GROUPED, **ENDS))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=50, n_positions=512, **ENDS))


def mistral():
    return MistralForCausalLM(MistralConfig(**GROUPED, **ENDS, sliding_window=None))


def qwen():
    """Its second layer has a window."""
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**GROUPED, **window, **ENDS))


MODELS = {f.__name__: f for f in (llama, gpt2, mistral, qwen)}


def made(name: str, spread: float = 4.0) -> Any:
    """A random model whose attention is far from even."""
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in part and "lm_head" not in part:
                weight *= spread
    return model.eval()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def ids():
    return torch.randint(3, 50, (1, 90), generator=torch.Generator().manual_seed(0))


def continued(model, ids, length: int, cache: Cache) -> torch.Tensor:
    """The logits on what follows the first tokens, after a compression where the cache can do so."""
    model(ids[:, :length], past_key_values=cache)
    if isinstance(cache, CompressedCache):
        cache.compress()
    return model(ids[:, length:], past_key_values=cache).logits


@pytest.mark.parametrize("name", MODELS)
def test_keeping_all_tokens_gives_the_logits_of_a_plain_cache(name, ids):
    model = made(name)
    expected = continued(model, ids, 60, DynamicCache(config=model.config))
    cache = CompressedCache(model, keep=1.0)
    assert torch.allclose(continued(model, ids, 60, cache), expected, atol=1e-4)
    assert max(float(each.max()) for each in cache.errors.values()) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_read_as_with_a_plain_cache(name, ids):
    model = made(name)
    expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    assert torch.equal(model(ids, past_key_values=CompressedCache(model, tokens=8)).logits, expected)
    assert torch.equal(model(ids, past_key_values=DynamicCache(config=model.config)).logits, expected)


def test_other_layers_than_those_of_full_attention_are_left_alone(ids):
    model = made("qwen")
    cache: Any = CompressedCache(model, tokens=8)
    continued(model, ids, 60, cache)
    assert list(cache.stored) == [0]
    assert cache.stored[0].atoms == [8, 8]
    assert cache.layers[1].keys is not None
    assert cache.layers[1].keys.shape[2] == 15  # a window, less the token that comes next
    assert cache.get_seq_length() == 90


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_kept_and_counted(name, ids):
    model = made(name)
    cache: Any = CompressedCache(model, keep=0.5)
    model(ids[:, :60], past_key_values=cache)
    full = cache.memory
    G, k = cache.stored[0].keys.shape[1], cache.stored[0].keys.shape[3]
    assert full == 2 * (2 * G * 60 * k)
    cache.compress()
    atoms = [layer.atoms for layer in cache.stored.values()]
    rows = sum(map(sum, atoms))
    assert rows == 2 * G * 30
    assert cache.memory == rows * (2 * k + G + 1)  # what is added to scores for each head, and an atom's worth
    assert [layer.seen for layer in cache.stored.values()] == [60, 60]
    assert [each.shape for each in cache.errors.values()] == [(1, model.config.num_attention_heads)] * 2
    cache.compress()  # nothing has come since
    assert [layer.atoms for layer in cache.stored.values()] == atoms
    model(ids[:, 60:], past_key_values=cache)
    assert cache.get_seq_length() == 90
    cache.compress()
    assert sum(sum(layer.atoms) for layer in cache.stored.values()) == 2 * G * 45


def test_without_a_fit_tokens_stay_as_they_are(ids):
    model = made("llama")
    caches: list[Any] = [CompressedCache(model, keep=0.4, fit=fit) for fit in (False, True)]
    for cache in caches:
        model(ids, past_key_values=cache)
    before = (
        [layer.keys[0, :, :90].clone() for layer in caches[0].stored.values()],
        [layer.values[0, :, :90].clone() for layer in caches[0].stored.values()],
    )
    for cache in caches:
        cache.compress()
    for i, layer in caches[0].stored.items():
        keys, values, log_weights = layer.whole()
        for g, count in enumerate(layer.atoms):
            pairs = torch.cat([keys[0, g, -count:], values[0, g, -count:]], dim=1)
            tokens = torch.cat([before[0][i][g], before[1][i][g]], dim=1)
            assert (pairs[:, None] == tokens).all(dim=-1).any(dim=1).all()
            assert (log_weights[0, g, -count:] == 0).all()
    errors = [torch.cat(list(cache.errors.values())).mean() for cache in caches]
    assert errors[1] < 0.7 * errors[0]


def test_more_is_kept_for_a_smaller_tolerance(ids):
    model = made("llama")
    atoms = []
    for tolerance in (0.3, 0.1, 0.01):
        cache = CompressedCache(model, tolerance=tolerance)
        model(ids, past_key_values=cache)
        cache.compress()
        assert max(float(each.max()) for each in cache.errors.values()) <= tolerance
        atoms.append(sum(sum(layer.atoms) for layer in cache.stored.values()))
    assert atoms[0] < atoms[1] < atoms[2] <= 2 * 2 * 90


def test_an_empty_cache_and_a_prompt_of_one_token(ids):
    model = made("llama")
    cache = CompressedCache(model, keep=0.5)
    cache.compress()
    assert cache.get_seq_length() == cache.memory == 0
    assert cache.errors == {}
    expected = continued(model, ids, 1, DynamicCache())
    assert torch.allclose(continued(model, ids, 1, cache), expected, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == cache.memory == 0
    assert torch.allclose(continued(model, ids, 1, cache), expected, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_that_keeps_all_is_that_of_a_plain_cache(name, beams, ids):
    model = made(name)
    options: Any = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "num_beams": beams}
    expected = model.generate(ids[:, :30], past_key_values=DynamicCache(), **options)
    cache = CompressedCache(model, keep=1.0, every=12)
    assert torch.equal(model.generate(ids[:, :30], past_key_values=cache, **options), expected)
    assert min(next(iter(cache.stored.values())).atoms) > 30


@pytest.mark.parametrize("beams", [1, 2])
def test_memory_stays_bounded_while_tokens_are_generated(beams, ids):
    model = made("llama")
    cache = CompressedCache(model, tokens=16, every=24)
    options: Any = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False, "num_beams": beams}
    found = model.generate(ids[:, :50], past_key_values=cache, **options)
    assert found.shape == (1, 250)
    assert cache.get_seq_length() == 249  # the last token is not read
    G, k = 2, 8
    assert cache.memory <= beams * 2 * G * ((16 + 24) * (2 * k + G) + 16)
    atoms = sum(sum(layer.atoms) for layer in cache.stored.values())
    assert 2 * G * 15 <= atoms <= 2 * G * 16  # beams keep equally many, whole tokens


def padded(ids: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the second one shorter and filled up at its left: ids and mask."""
    short = torch.cat([torch.full((1, by), 2), ids[:, : ids.shape[1] - by].flip(1)], dim=1)
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, :by] = 0
    return torch.cat([ids, short]), mask


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_prompts_are_generated_from_as_unpadded_ones(name, ids):
    model = made(name)
    both, mask = padded(ids[:, :40], 9)
    options: Any = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    found = model.generate(
        both, attention_mask=mask, past_key_values=CompressedCache(model, keep=1.0, every=8), **options
    )
    for row, own in zip(found[:, 40:], (both[:1], both[1:, 9:]), strict=True):
        expected = model.generate(own, past_key_values=DynamicCache(), **options)
        assert torch.equal(row, expected[0, own.shape[1] :])


def test_the_first_tokens_of_padded_prompts_are_kept(ids):
    model = made("llama")
    both, mask = padded(ids[:, :40], 9)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache: Any = CompressedCache(model, tokens=10)
    model(both, attention_mask=mask, position_ids=positions, past_key_values=cache)
    before = {i: layer.keys.clone() for i, layer in cache.stored.items()}
    cache.compress()
    for i, layer in cache.stored.items():
        first = 0
        for head, count in enumerate(layer.atoms):
            own = layer.short.rows[:, first : first + 4, :8]
            assert torch.equal(own[0], before[i][0, head, :4])
            assert torch.equal(own[1], before[i][1, head, 9:13])
            first += count
        assert torch.isfinite(layer.short.bias[..., : layer.short.places.rows].amax(dim=1)).all()
    out = model(both[:, :5], attention_mask=torch.ones(2, 45), position_ids=positions[:, -1:] + 1 + torch.arange(5),
                past_key_values=cache).logits  # fmt: skip
    assert torch.isfinite(out).all()


def test_padding_leaves_a_compression_as_good(ids):
    """Of one prompt, without padding and with half as many tokens again."""
    model, wrong, predicted = made("llama"), [], []
    for by in (0, 45):
        cache = CompressedCache(model, tokens=30)
        mask = torch.cat([torch.zeros(1, by), torch.ones(1, 90)], dim=1).long()
        both, positions = torch.cat([torch.full((1, by), 2), ids], dim=1), (mask.cumsum(1) - 1).clamp_min(0)
        model(both, attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache.compress()
        later = {"attention_mask": torch.ones(1, 110 + by), "position_ids": torch.arange(90, 110)[None]}
        found = model(ids[:, :20], past_key_values=cache, **later).logits
        expected = model(torch.cat([ids, ids[:, :20]], dim=1)).logits[:, 90:]
        wrong.append(float((found - expected).norm() / expected.norm()))
        predicted.append(torch.cat(list(cache.errors.values())))
    assert wrong[1] < 1.3 * wrong[0]
    assert torch.allclose(predicted[1], predicted[0], rtol=0.5)
    assert 0.8 < float(predicted[1].mean() / predicted[0].mean()) < 1.25


def test_half_precision_runs(ids):
    model = made("llama").bfloat16()
    cache: Any = CompressedCache(model, tokens=16, every=16)
    found = model.generate(ids, past_key_values=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert found.shape == (1, 130)
    assert cache.stored[0].short.rows.dtype == torch.bfloat16
    expected = continued(model, ids, 60, DynamicCache())
    near = continued(model, ids, 60, CompressedCache(model, keep=1.0))
    assert torch.allclose(near, expected, atol=0.05 * float(expected.abs().max()))


def test_rotated_queries_are_those_of_other_positions():
    model = made("llama")
    rotate = rotation_of(model)
    assert rotate is not None
    torch.manual_seed(0)
    raw, key = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8)

    def at(x: torch.Tensor, first: int) -> torch.Tensor:
        """By the model's own embedding, at these positions."""
        return apply_rotary_pos_emb(x, x, *model.model.rotary_emb(x, torch.arange(first, first + 5)[None]))[0]

    def moved(x: torch.Tensor, by: int) -> torch.Tensor:
        return rotate(x[:, :, None], torch.tensor([by]))[:, :, 0]

    assert torch.allclose(moved(at(raw, 7), 0), at(raw, 7), atol=1e-6)
    assert torch.allclose(moved(at(raw, 7), 30), at(raw, 37), atol=1e-5)
    scores = at(raw, 40) @ at(key, 11).transpose(-1, -2)
    assert torch.allclose(moved(at(raw, 40), 25) @ moved(at(key, 11), 25).transpose(-1, -2), scores, atol=1e-4)
    assert not torch.allclose(moved(at(raw, 40), 25) @ at(key, 11).transpose(-1, -2), scores, atol=1e-1)
    assert rotation_of(made("gpt2")) is None


def test_bad_input_is_refused_in_a_line():
    model = made("llama")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("none of keep, tokens and tolerance is given", {}),
        ("keep and tokens of keep, tokens and tolerance is given", {"keep": 0.5, "tokens": 9}),
        ("keep is 0.0; it must be above 0", {"keep": 0.0}),
        ("keep is 1.5; it must be above 0 and at most 1", {"keep": 1.5}),
        ("keep is nan; it must be a number", {"keep": float("nan")}),
        ("tolerance is -1; it must be above 0", {"tolerance": -1}),
        ("tokens is 7; it must be a whole number of at least 8", {"tokens": 7}),
        ("tokens is 9.5; it must be a whole number", {"tokens": 9.5}),
        ("tokens is True; it must be a number", {"tokens": True}),
        ("every is 0; it must be", {"keep": 0.5, "every": 0}),
        ("queries is 1; it must be at least 2", {"keep": 0.5, "queries": 1}),
        ("check is -1; it must be at least 0", {"keep": 0.5, "check": -1}),
    ]
    for message, options in cases:
        with pytest.raises(ValueError, match=message) as error:
            CompressedCache(model, **options)
        assert "\n" not in str(error.value)
    assert Goal(keep=0.25).count(100) == 25
    assert Goal(keep=0.01).count(100) == 8
    assert Goal(tokens=50).count(20) == 20


def test_models_that_have_nothing_to_compress_or_cannot_be_changed_are_refused():
    window = MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=8))
    with pytest.raises(ValueError, match="no layer of MistralForCausalLM reads its whole prompt"):
        CompressedCache(window, keep=0.5)
    assert window.config._attn_implementation == "sdpa"
    capped = Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=8))
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM \(eager\) cannot be replaced"):
        CompressedCache(capped, keep=0.5)
