"""Weights folded into keys, values fitted to keys, and the press of kvpress made of both."""

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from largeprompt.models.compression import _atoms as atoms  # noqa: E402
from largeprompt.models.compression import _future as futures  # noqa: E402
from largeprompt.models.compression._folding import folded  # noqa: E402

SCALE = 0.5


def normal(seed, *shape):
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape), dtype=torch.float32)


def law(mean):
    """Queries (1, 2, 3, 400, 4) of two heads of keys around a mean, with different variances."""
    return mean + normal(0, 1, 2, 3, 400, 4) * torch.tensor([3.0, 1.0, 0.3, 0.1])


def test_folded_weights_are_added_to_scores_on_average():
    queries, keys, log_weights = law(torch.full((4,), 2.0)), normal(1, 1, 2, 5, 4), normal(2, 1, 2, 5)
    moved, folds = folded(keys, log_weights, queries, SCALE)
    assert folds.all()
    added = SCALE * torch.einsum("bgrnk,bgmk->bgrnm", queries, moved - keys)
    torch.testing.assert_close(added.mean(dim=(2, 3)), log_weights, rtol=1e-3, atol=1e-4)


def test_folding_varies_less_over_queries_than_along_the_mean_query():
    queries, keys, log_weights = law(torch.full((4,), 2.0)), normal(1, 1, 2, 5, 4), torch.ones(1, 2, 5)
    moved, _ = folded(keys, log_weights, queries, SCALE)
    flat = queries.flatten(2, 3)
    mean = flat.mean(dim=2)
    along = mean / (SCALE * mean.square().sum(dim=-1, keepdim=True))
    found, other = ((SCALE * flat @ g[..., None]).std(dim=2)[..., 0] for g in ((moved - keys)[:, :, 0], along))
    assert (found < 0.2 * other).all()


def test_weights_are_not_folded_where_queries_have_no_common_direction():
    keys = normal(1, 1, 2, 5, 4)
    moved, folds = folded(keys, torch.ones(1, 2, 5), law(torch.zeros(4)), SCALE)
    assert not folds.any()
    assert torch.equal(moved, keys)


def problem():
    """A prompt of 40 tokens, read by queries with nothing since."""
    keys, values, queries = normal(3, 1, 2, 40, 4), normal(4, 1, 2, 40, 3), normal(5, 1, 4, 60, 4)
    future = futures.given(queries, values)
    return atoms.Layer(keys, values, torch.zeros(1, 2, 40), SCALE, future, torch.eye(3).expand(2, 2, 3, 3))


def test_values_are_the_ridge_regression_of_outputs_on_weights(monkeypatch):
    monkeypatch.setattr(atoms, "ROUNDS", 200)
    monkeypatch.setattr(atoms, "RIDGE", 0.1)
    layer = problem()
    keys, begin = layer.keys[:, :, :10] + 0.1, layer.values[:, :, :10]
    found = atoms.revalued(layer, atoms.read(layer), keys, begin)
    for g in range(2):
        queries = layer.future.queries[0, g, :, atoms._places(layer, 0)].reshape(-1, 4).double().numpy()
        softmax = [np.exp(SCALE * queries @ x[0, g].double().numpy().T) for x in (layer.keys, keys)]
        whole, kept = (x / x.sum(axis=1, keepdims=True) for x in softmax)
        wanted = whole @ layer.values[0, g].double().numpy() - kept @ begin[0, g].double().numpy()
        ridge = np.sqrt(atoms.RIDGE * np.mean(np.sum(kept**2, axis=1)))
        rows = np.concatenate([kept, ridge * np.eye(10)])
        change = np.linalg.lstsq(rows, np.concatenate([wanted, np.zeros((10, 3))]), rcond=None)[0]
        np.testing.assert_allclose(found[0, g].numpy(), begin[0, g].numpy() + change, atol=1e-4)


def test_without_kvpress_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "largeprompt.models.compression._press", raising=False)
    with pytest.raises(ImportError, match="pip install kvpress"):
        from largeprompt.models.compression import MeasurePress  # noqa: F401


@pytest.fixture
def kvpress():
    return pytest.importorskip("kvpress", reason="kvpress is not installed", exc_type=ImportError)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


def after(model, press, tokens, later):
    """The logits of later tokens on a cache that a press has compressed, and the lengths of its layers."""
    cache, positions = transformers.DynamicCache(), torch.arange(tokens.shape[1])
    with torch.no_grad():
        if press is None:
            model(tokens, past_key_values=cache)
        else:
            with press(model):
                model(tokens, past_key_values=cache, position_ids=positions[None], cache_position=positions)
        lengths = [layer.keys.shape[2] for layer in cache.layers]
        at = tokens.shape[1] + torch.arange(later.shape[1])
        return model(later, past_key_values=cache, position_ids=at[None]).logits, lengths


def test_press_keeps_what_it_is_asked_for_and_errs_less_than_random_tokens(kvpress, model):
    from largeprompt.models.compression import MeasurePress

    errors = {"ours": 0.0, "random": 0.0}
    for _ in range(4):
        tokens, later = torch.randint(50, (1, 120)), torch.randint(50, (1, 6))
        full, _ = after(model, None, tokens, later)
        for name, press in (("ours", MeasurePress(0.75)), ("random", kvpress.RandomPress(0.75, seed=0))):
            found, lengths = after(model, press, tokens, later)
            assert lengths == [30, 30]
            errors[name] += float((found - full).square().sum())
    assert errors["ours"] < errors["random"]


def test_press_leaves_a_prompt_alone_when_nothing_is_to_be_removed(kvpress, model):
    from largeprompt.models.compression import MeasurePress

    tokens, later = torch.randint(50, (1, 40)), torch.randint(50, (1, 3))
    assert torch.equal(after(model, MeasurePress(0.0), tokens, later)[0], after(model, None, tokens, later)[0])


def test_press_refuses_to_remove_everything(kvpress):
    from largeprompt.models.compression import MeasurePress

    with pytest.raises(ValueError, match=r"compression_ratio is 1.5; it must be at least 0 and below 1"):
        MeasurePress(1.5)
