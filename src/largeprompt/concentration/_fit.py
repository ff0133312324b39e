import math

import numpy as np

from largeprompt._display import AbstractShown
from largeprompt._typing import Numbers


class RateFit(AbstractShown):
    r"""A power law $c\,L^{s}$ fitted to a measured curve, with the standard errors that its own errors imply.

    `chi2` over `degrees` tells whether a power law fits at all.
    """

    slope: float
    stderr: float
    constant: float
    constant_stderr: float
    chi2: float
    degrees: int


def fit_power_law(L: Numbers, values: Numbers, stderrs: Numbers) -> RateFit:
    """Weighted least squares of log values on log L, independent errors."""
    L, values, stderrs = (np.asarray(a, float) for a in (L, values, stderrs))
    if not L.shape == values.shape == stderrs.shape or L.ndim != 1:
        raise ValueError(f"L, values, stderrs have shapes {L.shape}, {values.shape}, {stderrs.shape}; they must agree")
    if not np.all(L > 0):
        raise ValueError(f"L has {float(L[~(L > 0)][0]):g}; every length must be above 0")
    keep = (values > 0) & (stderrs >= 0) & np.isfinite(values) & np.isfinite(stderrs)
    if (usable := len(np.unique(L[keep]))) < 2:
        raise ValueError(f"the curve has {usable} usable lengths; a rate needs at least 2")
    x, y = np.log(L[keep]), np.log(values[keep])
    relative = np.maximum(stderrs[keep] / values[keep], 1e-12)
    (slope, level), covariance = np.polyfit(x, y, 1, w=1 / relative, cov="unscaled")
    error, spread = np.sqrt(np.diag(covariance))
    chi2 = float(np.sum(((y - level - slope * x) / relative) ** 2))
    constant = math.exp(min(level, 700.0))
    return RateFit(float(slope), float(error), constant, constant * float(spread), chi2, int(keep.sum()) - 2)
