"""The sums over Gaussian prompts, compiled and by JAX: against float64 on the same tokens, and exact moments."""

import os
from typing import Any

import numba
import numpy as np
import pytest

from compiled import from_python
from largeprompt import _device
from largeprompt.attention import WeightMoments
from largeprompt.engine import _prompt_sums_jax, gaussian_prompt_sums, sum_count
from largeprompt.engine._elementary import two_normals
from largeprompt.engine._philox import TOKENS, philox
from largeprompt.engine._prompt_sums_jax import Span, on_arrays, prompt_sums_by_jax, span_for
from significance import assert_close_in_sigmas, assert_mean_is

u32 = np.uint32
SEED = (5 << 32) + 11


def f(value: Any) -> Any:
    return value


@numba.njit
def _normals(prompt, L, seed, out):
    k0, k1 = u32(seed & 0xFFFFFFFF), u32(seed >> 32)
    for c in range(len(out) // 4):
        a, b, d, e = philox(u32(c), u32(prompt), u32(L), TOKENS, k0, k1)
        out[4 * c], out[4 * c + 1] = two_normals(a, b)
        out[4 * c + 2], out[4 * c + 3] = two_normals(d, e)


def tokens(prompt: int, L: int, k: int) -> np.ndarray:
    flat = np.empty(-(-L * k // 4) * 4, np.float32)
    _normals(prompt, L, SEED, flat)
    return flat[: L * k].reshape(L, k).astype(float)


def sums_in_float64(beta: float, prompt: int, L: int, k: int, products: bool) -> np.ndarray:
    h = tokens(prompt, L, k)
    shift = h[:, 0].max()
    weights = np.exp(beta * (h[:, 0] - shift))
    i, j = np.triu_indices(k)
    terms = np.concatenate([np.ones((L, 1)), h, *([h[:, i] * h[:, j]] if products else [])], axis=1)
    return np.concatenate([weights @ terms, weights**2 @ terms, [shift]])


BETAS = np.array([0.0, 0.3, 1.0, 3.0, 30.0, 1e3])


@pytest.mark.parametrize(("k", "products"), [(1, False), (1, True), (2, True), (4, True)])
@pytest.mark.parametrize("L", [1, 2, 7, 8, 9, 257, 5000])
def test_sums_are_those_of_the_same_tokens_in_float64(L, k, products):
    """To float32's rounding of a score of up to 7β, about 1e-6 β, and of the sums of 256 terms."""
    found = gaussian_prompt_sums(BETAS, L, k, SEED, products=products)
    assert found.shape == (len(BETAS), 2 * sum_count(k, products) + 1)
    for i, beta in enumerate(BETAS):
        exact = sums_in_float64(beta, i, L, k, products)
        scale = np.abs(exact) + exact[0]
        np.testing.assert_array_less(np.abs(found[i] - exact), (1e-5 + 3e-6 * beta) * scale)


def test_jax_draws_the_same_bits():
    """From the same source, exactly; two normals of the same bits are the same to rounding."""
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (6, 500), np.uint32)
    compiled_philox, compiled_normals = from_python(philox), from_python(two_normals)
    words = np.stack(on_arrays(philox)(*counters))
    np.testing.assert_array_equal(words, np.transpose([compiled_philox(*counter) for counter in counters.T]))
    normals = np.stack(on_arrays(two_normals)(words[0], words[1]))
    expected = np.transpose([compiled_normals(*pair) for pair in words[:2].T])
    np.testing.assert_allclose(normals, expected, rtol=1e-6, atol=2e-6)


SPANS = {1: Span(1, 128), 9: Span(1, 128), 257: Span(1, 128), 3001: Span(1, 1024), 16_001: Span(16, 1024)}


@pytest.mark.parametrize(("k", "products"), [(1, False), (2, True), (9, True)], ids=["k=1", "k=2", "k=9, by matrices"])
def test_sums_by_jax_are_those_of_the_same_tokens(k, products):
    """Against float64, nearer than the compiled ones since fewer terms are added in a row; the largest g to an ulp."""
    for L, span in SPANS.items():
        assert span_for(L) == span
        found = prompt_sums_by_jax(BETAS, L, k, SEED, products=products, start=0, platform="cpu")
        compiled = gaussian_prompt_sums(BETAS, L, k, SEED, products=products, device="cpu")
        assert found.shape == compiled.shape
        for i, beta in enumerate(BETAS):
            exact = sums_in_float64(beta, i, L, k, products)
            scale = np.abs(exact) + exact[0]
            np.testing.assert_array_less(np.abs(found[i] - exact), (2e-6 + 3e-6 * beta) * scale)
            np.testing.assert_array_less(np.abs(found[i] - compiled[i]), (1e-5 + 3e-6 * beta) * scale)


def test_the_longest_span_of_a_round_joins_its_pieces():
    """131072 tokens a round in sixteen pieces: two rounds and most of a third, too many for float32 in a row."""
    L, betas = 2 * 16 * 8192 + 120_000, np.array([0.5, 4.0])
    assert span_for(L) == Span(16, 8192)
    found = prompt_sums_by_jax(betas, L, 1, SEED, products=False, start=7, platform="cpu")
    for i, beta in enumerate(betas):
        exact = sums_in_float64(beta, 7 + i, L, 1, False)
        np.testing.assert_array_less(np.abs(found[i] - exact), 2e-6 * (np.abs(exact) + exact[0]))


def test_the_longest_prompts_waste_little():
    for L in (1000, 10**4, 10**5, 10**6, 10**7, 2**32):
        span = span_for(L)
        drawn = span.pieces * span.tokens
        assert L <= -(-L // drawn) * drawn <= 1.15 * L


def test_a_prompt_by_jax_is_the_same_in_any_batch(monkeypatch):
    betas = np.linspace(0, 4, 11)
    whole = prompt_sums_by_jax(betas, 200, 2, SEED, products=True, start=5, platform="cpu")
    part = prompt_sums_by_jax(betas[4:7], 200, 2, SEED, products=True, start=9, platform="cpu")
    np.testing.assert_allclose(part, whole[4:7], rtol=1e-12)
    monkeypatch.setattr(_prompt_sums_jax, "_HELD", 2 * 4 * 128)  # four prompts at once, the last batch filled up
    np.testing.assert_allclose(
        prompt_sums_by_jax(betas, 200, 2, SEED, products=True, start=5, platform="cpu"), whole, rtol=1e-12
    )


def test_a_gpu_draws_by_jax_where_there_is_one(monkeypatch, as_a_stranger):
    with pytest.raises(ValueError, match="device is 'gpu' and there is no GPU: JAX sees cpu alone"):
        gaussian_prompt_sums(BETAS, 9, 1, SEED, products=False, device="gpu")
    with pytest.raises(ValueError, match="device is 'tpu'; it must be one of 'auto', 'cpu', 'gpu'"):
        gaussian_prompt_sums(BETAS, 9, 1, SEED, products=False, device=f("tpu"))
    monkeypatch.setattr(_device, "gpu_refusal", lambda library: None)
    monkeypatch.setattr(_prompt_sums_jax, "prompt_sums_by_jax", lambda *_, platform, **__: platform)
    for device in ("auto", "gpu"):
        assert f(gaussian_prompt_sums(BETAS, 9, 1, SEED, products=False, device=device)) == "gpu"
    assert gaussian_prompt_sums(BETAS, 9, 1, SEED, products=False, device="cpu").shape == (len(BETAS), 5)


def test_a_prompt_is_the_same_in_any_batch_and_on_any_number_of_threads(monkeypatch):
    betas = np.linspace(0, 4, 150)
    whole = gaussian_prompt_sums(betas, 20, 2, SEED, products=True)
    parts = [
        gaussian_prompt_sums(betas[i:j], 20, 2, SEED, products=True, start=i) for i, j in ((0, 1), (1, 70), (70, 150))
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for cores in (1, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        np.testing.assert_array_equal(gaussian_prompt_sums(betas, 20, 2, SEED, products=True), whole)


def test_other_seeds_and_lengths_have_other_prompts():
    one = gaussian_prompt_sums(np.ones(3), 20, 1, SEED, products=False)
    for seed, L in ((SEED + 1, 20), (SEED + (1 << 32), 20), (SEED, 21)):
        assert not np.isin(gaussian_prompt_sums(np.ones(3), L, 1, seed, products=False)[:, 0], one[:, 0]).any()


@pytest.mark.parametrize("L", [1, 2, 40])
@pytest.mark.parametrize("beta", [0.0, 0.7, 3.0, 1e3])
def test_weights_have_their_exact_moments(beta, L):
    """Σa² and (Σag - β)² have the means Q and Dv; across the scores, tokens are normal whatever the weights."""
    b, k = 40_000, 2
    n = sum_count(k, True)
    sums = gaussian_prompt_sums(np.full(b, beta), L, k, SEED, products=True)
    assert np.isfinite(sums).all()
    S0, g, h, _, gh, hh = sums[:, :n].T
    square = sums[:, n] / S0**2
    exact = WeightMoments(L)
    rounding = 1e-6 * (1 + beta) ** 2
    assert_mean_is(square, float(exact.Q(beta**2)), rounding)
    assert_mean_is((g / S0 - beta) ** 2, float(exact.Dv(beta**2)), rounding)
    assert_mean_is(np.stack([h, gh, hh - S0, h * g], axis=1) / S0[:, None], 0.0)
    assert_close_in_sigmas(np.mean((h / S0) ** 2 - square), 0.0, np.std((h / S0) ** 2 - square) / np.sqrt(b))


def test_prompts_that_cannot_be_counted_and_negative_betas_are_refused():
    with pytest.raises(ValueError, match="betas has -2; it must be at least 0"):
        gaussian_prompt_sums(np.array([1.0, -2.0]), 9, 1, 0, products=False)
    for L, k in ((0, 1), (2**32 + 1, 1), (2**31, 3)):
        with pytest.raises(ValueError, match=f"L is {L} with {k} coordinates a token"):
            gaussian_prompt_sums(np.ones(1), L, k, 0, products=False)
