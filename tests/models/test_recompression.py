"""A compressed cache that goes on: budgets stay, what earlier text was worth is not forgotten, masks are kept."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from largeprompt.models import CompressedCache

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 2048}


@pytest.fixture
def model():
    """Three layers whose attention is far from even, each in its own measure."""
    torch.manual_seed(2)
    made = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                weight *= 2.0 + 2.0 * ("layers.1" in name)
    return made.eval()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def tokens(n: int, seed: int = 0):
    return torch.randint(50, (1, n), generator=torch.Generator().manual_seed(seed))


def atoms(cache) -> list[int]:
    """Of all heads, layer by layer."""
    return [count for layer in cache.stored.values() for count in layer.atoms]


def test_a_budget_stays_the_same_however_often_it_is_reached(model):
    cache = CompressedCache(model, tokens=60)
    model(tokens(300), past_key_values=cache)
    for turn in range(4):
        cache.compress()
        assert sum(atoms(cache)) == 3 * 2 * 60
        assert max(atoms(cache)) > min(atoms(cache))
        model(tokens(40, seed=turn + 1), past_key_values=cache)
    assert cache.get_seq_length() == 300 + 4 * 40


def test_a_share_grows_with_the_text(model):
    cache = CompressedCache(model, keep=0.5)
    model(tokens(200), past_key_values=cache)
    cache.compress()
    assert sum(atoms(cache)) == 3 * 2 * 100
    model(tokens(100, seed=1), past_key_values=cache)
    cache.compress()
    assert sum(atoms(cache)) == 3 * 2 * 150


@pytest.mark.parametrize("goal", [{"tokens": 60}, {"tolerance": 0.05}])
def test_a_few_more_tokens_change_nothing(model, goal):
    cache = CompressedCache(model, **goal)
    model(tokens(200), past_key_values=cache)
    cache.compress()
    before, errors = atoms(cache), dict(cache.errors)
    model(tokens(5, seed=1), past_key_values=cache)
    cache.compress()
    assert atoms(cache) == before
    assert all(torch.equal(cache.errors[i], errors[i]) for i in errors)


def test_with_a_tolerance_earlier_atoms_stay_and_errors_add_up(model):
    cache = CompressedCache(model, tolerance=0.1)
    model(tokens(200), past_key_values=cache)
    cache.compress()
    before, errors = atoms(cache), {i: x.clone() for i, x in cache.errors.items()}
    model(tokens(64, seed=1), past_key_values=cache)
    cache.compress()
    assert all(after >= count for after, count in zip(atoms(cache), before, strict=True))
    assert all(bool((cache.errors[i] >= errors[i]).all()) for i in errors)


def test_worth_counts_all_queries_so_far(model):
    cache = CompressedCache(model, tokens=60)
    model(tokens(200), past_key_values=cache)
    cache.compress()
    layer = cache.stored[0]
    old, counts = layer.worth, layer.atoms
    assert old is not None
    assert counts[0] != counts[1]
    model(tokens(50, seed=1), past_key_values=cache)
    fresh, most = torch.rand(1, 2, layer.width), max(counts)
    found = layer.worth_with(fresh)
    expected = ((200 * old.square() + 50 * fresh[..., :most].square()) / 250).sqrt()
    for head, count in enumerate(counts):
        torch.testing.assert_close(found[:, head, most - count : most], expected[:, head, most - count :])
        assert bool((found[:, head, : most - count] == -torch.inf).all())
    assert torch.equal(found[..., most:], fresh[..., most:])


def test_padding_of_a_second_turn_is_not_read(model):
    """At the left of a turn shorter than the other prompt's: as if that prompt were alone."""
    first, second, short = tokens(80), tokens(12, seed=1), tokens(5, seed=2)

    def logits(cache, batch):
        rows = 2 if batch else 1
        model(first.expand(rows, -1), past_key_values=cache)
        if isinstance(cache, CompressedCache):
            cache.compress()
        if not batch:
            return model(short, past_key_values=cache, position_ids=torch.arange(80, 85)[None]).logits[0, -1]
        padded = torch.cat([torch.full((1, 7), 3), short], dim=1)
        mask = torch.ones(2, 92, dtype=torch.long)
        mask[1, 80:87] = 0
        positions = torch.stack([torch.arange(80, 92), torch.cat([torch.full((7,), 80), torch.arange(80, 85)])])
        both = torch.cat([second, padded])
        return model(both, past_key_values=cache, attention_mask=mask, position_ids=positions).logits[1, -1]

    wanted = logits(DynamicCache(), False)
    torch.testing.assert_close(logits(DynamicCache(), True), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(CompressedCache(model, keep=1.0), False), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits(CompressedCache(model, keep=1.0), True), wanted, rtol=1e-3, atol=1e-3)


def test_tokens_are_not_taken_back(model):
    cache = CompressedCache(model, keep=0.5)
    model(tokens(40), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be taken back"):
        cache.stored[0].crop(-3)


def test_another_attention_function_is_noticed(model):
    cache = CompressedCache(model, keep=0.5)
    model(tokens(40), past_key_values=cache)
    cache.compress()
    model.set_attn_implementation("sdpa")
    model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match="another attention function"):
        model(tokens(1), past_key_values=cache)


def test_a_copy_of_a_cache_goes_on_by_itself_with_the_same_model(model):
    cache = CompressedCache(model, tokens=40)
    model(tokens(120), past_key_values=cache)
    cache.compress()
    model(tokens(3, seed=1), past_key_values=cache)
    other = copy.deepcopy(cache)
    assert other._model is model
    assert all(layer.module in set(model.modules()) for layer in other.stored.values())
    first = model(tokens(8, seed=2), past_key_values=cache).logits
    again = model(tokens(8, seed=2), past_key_values=other).logits
    torch.testing.assert_close(first, again)
    model(tokens(30, seed=3), past_key_values=other)
    other.compress()
    assert cache.get_seq_length() == 131
    assert other.get_seq_length() == 161
