"""Monte-Carlo comparisons with a stated false-alarm rate."""

import numpy as np
import numpy.typing as npt

SIGMAS = 5.0  # two-sided 6e-7 a comparison; keys are fixed, so a pass stays a pass


def assert_mean_is(samples: np.ndarray, truth, error: npt.ArrayLike = 0.0) -> None:
    """The mean of independent rows is `truth` within five standard errors; `error` is the truth's own."""
    samples = np.asarray(samples, dtype=float)
    stderr = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    assert_close_in_sigmas(samples.mean(axis=0), truth, np.hypot(stderr, error))


def assert_close_in_sigmas(estimate, truth, stderr) -> None:
    estimate, truth, stderr = map(np.asarray, (estimate, truth, stderr))
    rounding = 1e-12 * (1 + np.abs(truth))
    z = np.abs(estimate - truth) / np.maximum(stderr, rounding)
    assert z.max() < SIGMAS, f"off by {z.max():.1f} standard errors: {estimate} against {truth}"


def assert_same_moments(one: np.ndarray, other: np.ndarray, rounding: float = 1e-6) -> None:
    """Independent rows have the same means and covariances; `rounding` is that of an entry, in standard deviations."""
    (mean, cov, scale), (of_mean, of_cov) = _moments(one)
    (other_mean, other_cov, _), (other_of_mean, other_of_cov) = _moments(other)
    floor = rounding * (scale + np.abs(mean) + scale.max())
    assert_close_in_sigmas(mean, other_mean, np.hypot(of_mean, other_of_mean) + floor)
    assert_close_in_sigmas(cov, other_cov, np.hypot(of_cov, other_of_cov) + np.outer(floor, floor))


def _moments(rows: np.ndarray):
    """Means, covariances and deviations of the columns, and the standard errors of the first two."""
    n, mean = len(rows), rows.mean(axis=0)
    centred = rows - mean
    cov, square = centred.T @ centred / n, (centred**2).T @ centred**2 / n
    deviation = np.sqrt(np.diag(cov))
    return (mean, cov, deviation), (deviation / np.sqrt(n), np.sqrt(np.maximum(square - cov**2, 0) / n))
