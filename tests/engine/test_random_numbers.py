"""The random numbers of training: bits against the published vectors, normals and 2^x against exact ones."""

import functools
import itertools
import math

import numba
import numpy as np
import pytest
from scipy import stats

from largeprompt.engine._elementary import LARGEST_NORMAL, exp2, two_normals
from largeprompt.engine._philox import _ROUNDS, CHI, INSTANCE, TOKENS, philox, philox_pairs
from significance import SIGMAS, assert_close_in_sigmas

FALSE_ALARM = 2 * stats.norm.sf(SIGMAS)
WORD = 2**32
u32 = np.uint32


def philox_of_whole_numbers(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Philox4x32 from the paper's Section 3, with Python's integers."""
    a, b, c, d = counter
    for r in range(rounds):
        k0, k1 = ((k + r * weyl) % WORD for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second // WORD ^ b ^ k0, second % WORD, first // WORD ^ d ^ k1, first % WORD
    return a, b, c, d


@numba.njit
def words(counters, keys, out, pairs):
    for i in range(len(counters)):
        c, k = counters[i], keys[i]
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = philox(c[0], c[1], c[2], c[3], k[0], k[1])
        pairs[i, 0], pairs[i, 1] = philox_pairs(c[0], c[1], c[2], c[3], k[0], k[1])


def drawn(counters, keys) -> np.ndarray:
    """The words of many counters, once both ways to compute them agree."""
    counters, keys = np.array(counters, u32), np.array(keys, u32)
    out, pairs = np.zeros((len(counters), 4), u32), np.zeros((len(counters), 2), np.uint64)
    words(counters, keys, out, pairs)
    low, high = (pairs % WORD).astype(u32), (pairs // WORD).astype(u32)
    np.testing.assert_array_equal(np.stack([high[:, 0], low[:, 0], high[:, 1], low[:, 1]], axis=1), out)
    return out


ZEROS, ONES = ((0,) * 4, (0,) * 2), ((WORD - 1,) * 4, (WORD - 1,) * 2)
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
PUBLISHED = [  # Random123's known-answer vectors, philox4x32
    (*ZEROS, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (*ONES, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (*ZEROS, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
]


@pytest.mark.parametrize(("counter", "key", "rounds", "published"), PUBLISHED)
def test_bits_are_the_published_ones(counter, key, rounds, published):
    assert philox_of_whole_numbers(counter, key, rounds) == published
    if rounds == _ROUNDS:
        assert tuple(drawn([counter], [key])[0]) == published


def test_seven_rounds_are_made():
    assert _ROUNDS == 7


def test_bits_are_those_of_whole_number_arithmetic():
    rng = np.random.default_rng(0)
    counters = [PI[0], *rng.integers(0, WORD, (50, 4)).tolist()]
    keys = [PI[1], *rng.integers(0, WORD, (50, 2)).tolist()]
    expected = [philox_of_whole_numbers(tuple(c), tuple(k), _ROUNDS) for c, k in zip(counters, keys, strict=True)]
    np.testing.assert_array_equal(drawn(counters, keys), expected)


def test_other_tokens_prompts_steps_streams_and_seeds_have_other_bits():
    several = (0, 1, 2, 63, 64, 255, 2**16, WORD - 1)
    streams = [int(stream) for stream in (INSTANCE, TOKENS, CHI, CHI + u32(1))]
    counters = [(*c, stream) for c in itertools.product(several, repeat=3) for stream in streams]
    found = np.concatenate([drawn(counters, [key] * len(counters)) for key in ((0, 0), (1, 0), (0, 1))])
    # 24576 words: two the same with probability 0.07, two pairs of words next to each other 2e-11
    assert len(np.unique(found[:, :2], axis=0)) == len(np.unique(found[:, 2:], axis=0)) == len(found)


@numba.njit
def normals(radial, angular, g, h):
    for i in range(len(radial)):
        g[i], h[i] = two_normals(radial[i], angular[i])


def two(radial, angular) -> tuple[np.ndarray, np.ndarray]:
    radial, angular = (np.ascontiguousarray(part, u32) for part in np.broadcast_arrays(radial, angular))
    g, h = np.empty(len(radial), np.float32), np.empty(len(radial), np.float32)
    normals(radial, angular, g, h)
    return g, h


def test_normals_are_those_of_the_transform_in_float64():
    """1e-6, more where the radius is small: its square is as exact as the float32 nearest to the word."""
    rng = np.random.default_rng(1)
    radial, angular = rng.integers(0, WORD, (2, 1_000_000), dtype=u32)
    radius = np.sqrt(-2 * np.log((radial + 0.5) / WORD))
    angle = np.pi * (angular % 2**23 / 2**23 - 0.5) + np.pi * (angular >> 31)
    g, h = two(radial, angular)
    error = np.hypot(g - radius * np.cos(angle), h - radius * np.sin(angle))
    assert np.max(error * np.minimum(radius, 1)) < 1e-6


def test_no_word_gives_nan_or_more_than_the_largest_normal():
    near_one = 2**31 + 256 * np.arange(2**23)  # every float32 of the topmost binade
    edges = np.concatenate([WORD // 2**i + np.arange(-600, 600) for i in range(33)])  # both ends of every mantissa
    edges = edges[(edges >= 0) & (edges < WORD)]
    for radial, angle in ((near_one, 2**22), (edges, 2**22), (edges, 0)):  # at 2^22 all cosine, at 0 all sine
        g, h = two(radial, angle)
        assert np.all(np.isfinite(g) & np.isfinite(h))
        assert max(np.abs(g).max(), np.abs(h).max()) <= LARGEST_NORMAL
    corners = [0, 1, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 1, 2**23, 2**31 - 1, 2**31, WORD - 1]
    for radial in (0, 1, 2**31, WORD - 1):
        g, h = two(radial, corners)
        assert np.all(np.isfinite(g) & np.isfinite(h))
        assert np.hypot(g.astype(float), h).max() <= LARGEST_NORMAL + 1e-6
    assert math.sqrt(66 * math.log(2)) < LARGEST_NORMAL < 6.7638


BINS, FEW = 200, 20
DRAWS = 10_000_000  # counters; two tokens each


@numba.njit(error_model="numpy")
def _count(draws, moments, mixed, beyond, bins, within, between):
    """Power sums of g and h, mixed ones, tails, and counts of normals among equiprobable bins."""
    before, place_before = 0.0, 0
    for index in range(draws):
        a, b, c, d = philox(u32(index), u32(5), u32(7), TOKENS, u32(11), u32(0))
        for radial, angular in ((a, b), (c, d)):
            g, h = two_normals(radial, angular)
            x, y = float(g), float(h)
            px, py = 1.0, 1.0
            for k in range(8):
                px *= x
                py *= y
                moments[0, k] += px
                moments[1, k] += py
            mixed[0] += x * y
            mixed[1] += x * x * y * y
            mixed[2] += before * x
            mixed[3] += before * before * x * x
            mixed[4] += before * y
            for k in range(3):
                beyond[k] += (abs(x) > k + 3) + (abs(y) > k + 3)
            p = int(BINS * 0.5 * math.erfc(-x * math.sqrt(0.5)))
            q = int(BINS * 0.5 * math.erfc(-y * math.sqrt(0.5)))
            bins[0, p] += 1
            bins[1, q] += 1
            p, q = p // (BINS // FEW), q // (BINS // FEW)
            within[p, q] += 1
            between[place_before, p] += 1
            before, place_before = x, p


@functools.cache
def counted():
    moments, mixed, beyond = np.zeros((2, 8)), np.zeros(5), np.zeros(3)
    counts = [np.zeros(shape, np.int64) for shape in ((2, BINS), (FEW, FEW), (FEW, FEW))]
    _count(DRAWS, moments, mixed, beyond, *counts)
    n = 2 * DRAWS
    return moments / n, mixed / n, beyond, *counts


def test_normals_have_eight_moments_of_the_normal_law():
    moments = counted()[0]
    exact = [0.0 if k % 2 else float(math.prod(range(1, k, 2))) for k in range(17)]
    stderr = [math.sqrt((exact[2 * k] - exact[k] ** 2) / (2 * DRAWS)) for k in range(1, 9)]
    assert_close_in_sigmas(moments, [exact[1:9]] * 2, [stderr] * 2)


def test_the_normals_of_a_token_and_of_the_next_are_independent():
    _, mixed, _, _, within, between = counted()
    one, square = math.sqrt(1 / (2 * DRAWS)), math.sqrt((9 - 1) / (2 * DRAWS))
    # the squares of neighbours share a factor with the next product, which adds 2 · cov = 2 · (3 - 1)
    neighbours = math.sqrt((9 - 1 + 2 * (3 - 1)) / (2 * DRAWS))
    assert_close_in_sigmas(mixed, [0, 1, 0, 1, 0], [one, square, one, neighbours, one])
    for joint in (within, between):
        assert stats.chisquare(joint.ravel()).pvalue > FALSE_ALARM


def test_normals_fall_into_equiprobable_bins_alike():
    for bins in counted()[3]:
        assert stats.chisquare(bins).pvalue > FALSE_ALARM


def test_tails_have_their_probabilities():
    for beyond, sigmas in zip(counted()[2], (3, 4, 5), strict=True):
        law = stats.binom(4 * DRAWS, 2 * stats.norm.sf(sigmas))
        assert min(law.cdf(beyond), law.sf(beyond - 1)) > FALSE_ALARM / 2


@numba.njit
def _powers(x, out):
    for i in range(len(x)):
        out[i] = exp2(x[i])


def powers(x) -> np.ndarray:
    x = np.asarray(x, np.float32)
    out = np.empty_like(x)
    _powers(x, out)
    return out


def test_powers_of_two_have_a_relative_error_below_3e_7():
    x = np.concatenate([np.linspace(-126, 127, 2_000_001), np.arange(-126, 127.5, 0.5)]).astype(np.float32)
    np.testing.assert_allclose(powers(x), np.exp2(x.astype(float)), rtol=3e-7)
    whole = np.arange(-126, 128)
    np.testing.assert_allclose(powers(whole), 2.0**whole, rtol=2e-7)


def test_powers_of_two_stay_at_the_least_normal_float_below_it():
    np.testing.assert_allclose(powers([-126.25, -127, -150, -1e4, -1e30, -3e38]), 2.0**-126, rtol=3e-7)
