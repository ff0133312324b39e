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
