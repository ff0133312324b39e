"""The compiled sums over Gaussian prompts: against float64 on the same tokens, and against exact moments."""

import os

import numba
import numpy as np
import pytest

from largeprompt.attention import WeightMoments
from largeprompt.engine import gaussian_prompt_sums, sum_count
from largeprompt.engine._elementary import two_normals
from largeprompt.engine._philox import TOKENS, philox
from significance import assert_close_in_sigmas, assert_mean_is

u32 = np.uint32
SEED = (5 << 32) + 11


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


def test_prompts_that_cannot_be_counted_are_refused():
    for L, k in ((0, 1), (2**32 + 1, 1), (2**31, 3)):
        with pytest.raises(ValueError, match=f"L is {L} with {k} coordinates a token"):
            gaussian_prompt_sums(np.ones(1), L, k, 0, products=False)
