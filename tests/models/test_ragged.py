"""Atoms of heads that keep different numbers of them: stored without gaps, and read as attention reads them."""

import math

import pytest
import torch

from largeprompt.models.compression._ragged import Ragged, RaggedTokens, _in_parallel

COUNTS, R, K, V = [3, 7, 1], 2, 5, 4


def stored(b: int, seed: int = 0) -> tuple[RaggedTokens, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Tokens of three heads, and by head the keys (b, m, k), values and log-weights that they are made of."""
    torch.manual_seed(seed)
    parts = [(torch.randn(b, m, K), torch.randn(b, m, V), torch.randn(b, m)) for m in COUNTS]
    keys, values, log_weights = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return RaggedTokens(keys, values, log_weights, Ragged(COUNTS, torch.device("cpu"))), parts


def by_hand(parts, new, queries, scale, visible):
    """Outputs (b, n, H, v), head by head: a softmax over its atoms and the new tokens that each query sees."""
    found = []
    for h in range(queries.shape[1]):
        keys, values, weights = parts[h // R]
        keys, values = (torch.cat([x, y[:, h // R]], dim=1) for x, y in zip((keys, values), new, strict=True))
        scores = scale * queries[:, h] @ keys.transpose(1, 2)
        scores[..., : weights.shape[1]] += weights[:, None]
        scores[..., weights.shape[1] :] = scores[..., weights.shape[1] :].masked_fill(~visible, -math.inf)
        found.append(scores.softmax(dim=-1) @ values)
    return torch.stack(found, dim=2)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("b", [1, 3])
def test_attention_reads_the_atoms_of_each_head_and_the_tokens_since(b, n, hidden):
    tokens, parts = stored(b)
    keys, values = torch.randn(b, 3, 600, K), torch.randn(b, 3, 600, V)
    for begin, end in ((0, 590), *((i, i + 1) for i in range(590, 600))):  # more than there is room for at first
        tokens.append(keys[:, :, begin:end], values[:, :, begin:end])
    queries = torch.randn(b, 3 * R, n, K)
    visible = torch.ones(b, n, 600, dtype=torch.bool).tril(600 - n)
    if hidden:
        visible[:, :, ::7] = False
    expected = by_hand(parts, (keys, values), queries, 0.4, visible)
    given = visible if hidden or n > 1 else None
    torch.testing.assert_close(tokens.attend(queries, 0.4, given), expected, rtol=1e-4, atol=1e-5)
    assert tokens.memory == b * (sum(COUNTS) + 3 * 600) * (K + V + 3)


def test_rows_are_padded_and_taken_together_again():
    places = Ragged(COUNTS, torch.device("cpu"))
    flat = torch.arange(11.0)[None, :, None]
    wide = places.padded(flat, -1.0)
    assert wide[0, :, :, 0].tolist() == [
        [-1, -1, -1, -1, 0, 1, 2],
        [3, 4, 5, 6, 7, 8, 9],
        [-1, -1, -1, -1, -1, -1, 10],
    ]
    at_the_left = torch.stack([wide[0, g].roll(m, dims=0) for g, m in enumerate(COUNTS)])[None]
    assert torch.equal(places.flat(at_the_left), flat)


def test_all_that_is_stored_is_given_back_with_new_tokens_last():
    tokens, parts = stored(2)
    new = torch.randn(2, 3, 2, K), torch.randn(2, 3, 2, V)
    tokens.append(*new)
    keys, values, log_weights = tokens.whole()
    for g, (own, theirs, weights) in enumerate(parts):
        m = weights.shape[1]
        torch.testing.assert_close(keys[:, g, 7 - m :], torch.cat([own, new[0][:, g]], dim=1))
        torch.testing.assert_close(values[:, g, 7 - m :], torch.cat([theirs, new[1][:, g]], dim=1))
        torch.testing.assert_close(log_weights[:, g, 7 - m : 7], weights)
        assert bool((log_weights[:, g, : 7 - m] == -math.inf).all())
        assert bool((log_weights[:, g, 7:] == 0).all())


def test_prompts_are_chosen_and_copies_go_their_own_way():
    tokens, _ = stored(3)
    tokens.append(torch.randn(3, 3, 1, K), torch.randn(3, 3, 1, V))
    queries = torch.randn(3, 3 * R, 1, K)
    before = tokens.attend(queries, 0.4, None)
    other = tokens.copied()
    other.append(torch.randn(3, 3, 1, K), torch.randn(3, 3, 1, V))
    assert not torch.allclose(other.attend(queries, 0.4, None), before)
    torch.testing.assert_close(tokens.attend(queries, 0.4, None), before)
    order = torch.tensor([2, 0])
    tokens.change(lambda x: x[order])
    torch.testing.assert_close(tokens.attend(queries[order], 0.4, None), before[order])


def test_products_give_what_one_kernel_gives():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, R, 3, K), torch.randn(2, 1, 40, K), torch.randn(2, 1, 40, V)
    bias = torch.randn(2, 1, 3, 40)
    expected = torch.softmax(0.4 * queries @ keys.transpose(-1, -2) + bias, dim=-1) @ values
    wide = (x.expand(2, R, -1, -1) for x in (keys, values, bias))
    torch.testing.assert_close(_in_parallel(queries, *wide, scale=0.4), expected)
