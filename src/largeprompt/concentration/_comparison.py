import math

import numpy as np

from largeprompt._display import AbstractShown

from ._deviation import Deviation
from ._fit import fit_power_law
from ._prediction import Prediction


class Comparison(AbstractShown):
    r"""A measured curve beside its prediction, over the longer half of its lengths.

    `slope` and `fitted` are those of the power law $c\,L^s$ through the measured points, `predicted_slope` that through
    the prediction with the same weights, and `ratio` the plain mean of measured over predicted: with heavy tails the
    points that come out low seem the surest, and to weigh by that, or to leave out those that are not to be trusted,
    would pull it down. nan where fewer than two lengths can be trusted, or nothing is predicted.
    """

    slope: float = math.nan
    slope_stderr: float = math.nan
    fitted: float = math.nan
    fitted_stderr: float = math.nan
    predicted_slope: float = math.nan
    ratio: float = math.nan
    ratio_stderr: float = math.nan


def compare(measured: Deviation, predicted: Prediction | None) -> Comparison:
    """How a measured curve falls, and how near the prediction it lies. With three lengths or fewer, over all."""
    start = np.sort(measured.L)[len(measured.L) // 2] if len(measured.L) > 3 else 0
    keep = (start <= measured.L) & (measured.mean_square > 0) & (measured.stderr > 0)
    if len(np.unique(measured.L[keep & measured.trusted])) < 2:
        return Comparison()
    L, square, error = measured.L[keep], measured.mean_square[keep], measured.stderr[keep]
    fit = fit_power_law(L, square, error)
    own = fit.slope, fit.stderr, fit.constant, fit.constant_stderr
    expected = np.full(len(L), math.nan) if predicted is None else predicted.mean_square[keep]
    if not np.all(np.isfinite(expected) & (expected > 0)):
        return Comparison(*own)
    line = fit_power_law(L, expected, error * expected / square)
    ratio_error = float(np.linalg.norm(error / expected)) / len(L)
    return Comparison(*own, line.slope, float(np.mean(square / expected)), ratio_error)
