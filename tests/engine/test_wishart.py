"""Bartlett's triangular matrices against the laws of their entries and the moments of Wishart matrices."""

import functools

import numba
import numpy as np
import pytest
from scipy import stats

from largeprompt.engine._lanes import LANES, rows
from largeprompt.engine._wishart import bartlett
from significance import SIGMAS, assert_close_in_sigmas, assert_mean_is

FALSE_ALARM = 2 * stats.norm.sf(SIGMAS)
m, STEPS = 3, 1000
DEGREES = [1, 2, 3, 10, 10**6]
u32 = np.uint32


@numba.njit
def _draw(degrees, T, below, out):
    for step in range(len(out)):
        bartlett(degrees, m, T, below, 0, u32(step), u32(3), u32(0))
        out[step] = T


@functools.cache
def triangles(degrees: int) -> np.ndarray:
    """Independent draws of T, one a prompt and step; what is not drawn stays 0."""
    T, below, out = rows(m * m), rows(m * m), np.zeros((STEPS, 12 * LANES), np.float32)
    assert T.shape == out.shape[1:]
    _draw(degrees, T, below, out)
    return out[:, : m * m * LANES].reshape(STEPS, m, m, LANES).transpose(0, 3, 1, 2).reshape(-1, m, m).astype(float)


@pytest.mark.parametrize("degrees", DEGREES)
def test_the_squares_on_the_diagonal_are_chi_squared(degrees):
    T = triangles(degrees)
    for c in range(min(m, degrees)):
        assert stats.kstest(T[:, c, c] ** 2, stats.chi2(degrees - c).cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize("degrees", DEGREES)
def test_below_the_diagonal_are_independent_normals_and_above_it_and_past_the_degrees_nothing(degrees):
    T = triangles(degrees)
    there = np.tril(np.ones((m, m), bool)) & (np.arange(m) < degrees)
    assert not T[:, ~there].any()
    for r, c in np.argwhere(there):
        if r > c:
            assert stats.kstest(T[:, r, c], stats.norm.cdf).pvalue > FALSE_ALARM
    entries = T[:, there]
    entries = (entries - entries.mean(axis=0)) / entries.std(axis=0)
    one, other = np.triu_indices(entries.shape[1], 1)
    assert_mean_is(entries[:, one] * entries[:, other], np.zeros(len(one)))


@pytest.mark.parametrize("degrees", DEGREES)
def test_the_square_has_the_mean_and_the_variances_of_a_wishart_matrix(degrees):
    T = triangles(degrees)
    W = T @ T.swapaxes(1, 2)
    # rounding to float32 of an entry of √degrees
    assert_close_in_sigmas(
        W.mean(axis=0), degrees * np.eye(m), W.std(axis=0) / np.sqrt(len(W)) + 1e-7 * degrees * np.eye(m)
    )
    assert_mean_is((W - degrees * np.eye(m)) ** 2, degrees * (1 + np.eye(m)))


@pytest.mark.parametrize("degrees", [10**9, 10**12, 2**62])
def test_the_diagonal_is_right_to_the_rounding_of_float32_at_any_degrees(degrees):
    T = triangles(degrees)
    diagonal = T[:, range(m), range(m)]
    rounding = 2.0**-24 * np.sqrt(degrees)
    assert np.abs(diagonal.mean(axis=0) - np.sqrt(degrees)).max() < rounding + 5 / np.sqrt(2 * len(T))
    if rounding < 0.1:  # else there is one number left
        assert_mean_is((diagonal - np.sqrt(degrees)) ** 2, np.full(m, 0.5), rounding**2)
