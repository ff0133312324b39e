"""Single batch gradients of the fused engine: against the numbers they are made of, and against one another."""

import math

import numpy as np
import pytest
from scipy.special import softmax

import largeprompt as lp
from catalogue import matrix
from engine_catalogue import KMS, fused_gradients, uv
from largeprompt.dynamics import Training
from largeprompt.engine._philox import INSTANCE, TOKENS
from largeprompt.icl import LinearRegression

SEED = 2**40 + 12345


def philox(c0, c1, c2, c3, k0: int, k1: int) -> tuple[np.ndarray, ...]:
    """Philox4x32-7 in NumPy's integers of 64 bits."""
    low = np.uint64(2**32 - 1)
    a, b, c, d = np.broadcast_arrays(*(np.asarray(part, np.uint64) for part in (c0, c1, c2, c3)))
    for r in range(7):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        of_b, of_d = (np.uint64((k + r * w) % 2**32) for k, w in ((k0, 0x9E3779B9), (k1, 0xBB67AE85)))
        a, b, c, d = second >> np.uint64(32) ^ b ^ of_b, second & low, first >> np.uint64(32) ^ d ^ of_d, first & low
    return a, b, c, d


def stream(purpose, prompts: int, n: int, step: int = 0) -> np.ndarray:
    """The first n normals of a stream for each prompt, in float64."""
    counters = np.arange(-(-n // 4))[None], np.arange(prompts)[:, None], step, int(purpose)
    a, b, c, d = philox(*counters, SEED % 2**32, SEED >> 32)

    def two(radial, angular):
        radius = np.sqrt(-2 * np.log((radial + 0.5) / 2**32))
        angle = np.pi * ((angular % 2**23) / 2**23 - 0.5 + (angular >> np.uint64(31)))
        return radius * np.cos(angle), radius * np.sin(angle)

    return np.stack([*two(a, b), *two(c, d)], axis=2).reshape(prompts, -1)[:, :n]


def gradients_on(tokens, x, y, layer) -> np.ndarray:
    """The mean over prompts of the loss's gradient in U and in V, (1.2) of the paper and its linear analogue."""
    U, V = np.asarray(layer.U), np.asarray(layer.V)
    query = np.append(x, np.zeros((len(x), 1)), axis=1)
    scores, values = np.einsum("bld,bd->bl", tokens, query @ U.T), tokens @ V[0]
    if isinstance(layer, lp.SoftmaxAttention):
        shares = softmax(scores, axis=1)
        slopes = shares * (values - np.sum(shares * values, axis=1, keepdims=True))
    else:
        shares, slopes = scores / tokens.shape[1], values / tokens.shape[1]
    error = np.sum(shares * values, axis=1) - y
    read, moved = (np.einsum("bl,bld->bd", part, tokens) for part in (shares, slopes))
    in_U = np.einsum("b,bi,bj->ij", error, moved, query) / len(x)
    return np.append(in_U, error @ read / len(x))


@pytest.mark.parametrize(("d", "L"), [(2, 1), (2, 3), (5, 2), (1, 3)])
def test_on_few_tokens_the_gradient_is_that_of_tokens_of_the_generator(d, L):
    """Fewer than four tokens are drawn whole: there both engines could be given the same prompts."""
    prompts, s = 70, math.sqrt(0.3)
    drawn = stream(INSTANCE, prompts, 2 * d + 1)
    x, w, eta = drawn[:, :d], drawn[:, d : 2 * d], drawn[:, 2 * d]
    tokens = stream(TOKENS, prompts, L * (d + 1)).reshape(prompts, L, d + 1)
    tokens[:, :, d] = np.einsum("bld,bd->bl", tokens[:, :, :d], w) + s * tokens[:, :, d]
    y = np.sum(w * x, axis=1) + s * eta
    layer = uv(lp.SoftmaxAttention, 3, d + 1, 1.0)
    training = Training(LinearRegression(np.eye(d), 0.3), L, batch=prompts, rate=1.0, seed=SEED)
    (found,) = fused_gradients(training, (layer,), 1)
    np.testing.assert_allclose(found, gradients_on(tokens, x, y, layer), rtol=1e-4, atol=1e-4 * np.abs(found).max())


def test_on_infinite_prompts_the_gradient_is_that_of_the_laws():
    """With Γ the covariance of a prompt: the loss is (v·ΓUz - y)²/2."""
    d, prompts = 3, 70
    drawn = stream(INSTANCE, prompts, 2 * d + 1)
    x, w, eta = drawn[:, :d], drawn[:, d : 2 * d], drawn[:, 2 * d]
    y = np.sum(w * x, axis=1) + math.sqrt(0.3) * eta
    root = np.tile(np.diag([1.0] * d + [math.sqrt(0.3)]), (prompts, 1, 1))
    root[:, d, :d] = w
    tokens = math.sqrt(d + 1) * root.swapaxes(1, 2)  # Σ zzᵀ / L = Γ
    layer = uv(lp.SoftmaxAttention, 3, d + 1, 1.0)
    training = Training(LinearRegression(np.eye(d), 0.3), math.inf, batch=prompts, rate=1.0, seed=SEED)
    (found,) = fused_gradients(training, (layer,), 1)
    expected = gradients_on(tokens, x, y, lp.LinearAttention(layer.U, layer.V))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(found).max())


def test_a_prompt_more_adds_a_product_with_its_query_whatever_the_batch():
    """The numbers of a prompt do not depend on how many there are: one more changes the sum by a matrix of rank one."""
    layer = uv(lp.SoftmaxAttention, 5, 3, 1.0)

    def total(batch):
        return batch * fused_gradients(Training(KMS, 9, batch=batch, rate=1.0), (layer,), 1)[0, :9].reshape(3, 3)

    for batch in (1, 2, 63, 64, 65, 127, 128):
        before, after = total(batch), total(batch + 1)
        sizes = np.linalg.svd(after - before, compute_uv=False)
        assert sizes[0] > 1e-3
        assert sizes[1] < 1e-5 * max(np.abs(before).max(), np.abs(after).max())


def head(p: int, r: int, scale: float, with_O: bool = True) -> lp.Head:
    K, Q, V, O = (matrix(20 + i, *shape) for i, shape in enumerate([(2, 3), (2, 3), (r, 3), (p, r)]))
    return lp.Head(K, Q, V, O if with_O else None, scale)


@pytest.mark.parametrize("L", [3, 9, math.inf])
@pytest.mark.parametrize(
    "layer",
    [head(1, 2, 1.0), head(3, 4, 0.6), head(1, 1, 0.6, with_O=False), head(3, 3, 1.0, with_O=False)],
    ids=["one output", "token of outputs", "one output, no O", "token of outputs, no O"],
)
def test_gradients_of_a_head_follow_from_those_of_its_merged_form(layer, L):
    """∇_K = s Q ∇_Uᵀ, ∇_Q = s K ∇_U, ∇_V = oᵀ∇_v, ∇_o = V ∇_v on the same prompts; only the last output learns."""
    training = Training(KMS, L, batch=20, rate=1.0)
    merged = layer.merged()
    (found,), (of_merged,) = (fused_gradients(training, (one,), 1) for one in (layer, merged))
    U, V = of_merged[:9].reshape(3, 3), of_merged[9:].reshape(-1, 3)
    assert not V[:-1].any()
    parts = [layer.scale * layer.Q @ U.T, layer.scale * layer.K @ U]
    parts += [V] if layer.O is None else [np.outer(layer.O[-1], V[-1]), V @ np.asarray(layer.V).T]
    expected = np.concatenate([np.ravel(part) for part in parts])
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(found).max())


def test_the_loss_factor_multiplies_the_gradient():
    layer = uv(lp.SoftmaxAttention, 5, 3)
    one, three = (
        fused_gradients(Training(KMS, 9, batch=10, rate=1.0, loss_factor=factor), (layer,), 2) for factor in (1, 3)
    )
    np.testing.assert_allclose(three, 3 * one, rtol=1e-12, atol=1e-14)
