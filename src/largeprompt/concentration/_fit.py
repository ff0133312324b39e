import math

import equinox as eqx
import numpy as np
from jaxtyping import Float


class RateFit(eqx.Module):
    r"""A power law $c\,L^{s}$ fitted to a measured curve, with the standard errors that its own errors imply.

    `chi2` over `degrees` tells whether a power law fits at all.
    """

    slope: float
    stderr: float
    constant: float
    constant_stderr: float
    chi2: float
    degrees: int


def fit_power_law(
    L: Float[np.ndarray, " k"], values: Float[np.ndarray, " k"], stderrs: Float[np.ndarray, " k"]
) -> RateFit:
    """Weighted least squares of log values on log L, independent errors."""
    L, values, stderrs = (np.asarray(a, float) for a in (L, values, stderrs))
    keep = (values > 0) & (stderrs >= 0) & np.isfinite(values) & np.isfinite(stderrs)
    if len(np.unique(L[keep])) < 2:
        raise ValueError(f"the curve has {int(keep.sum())} usable lengths; a rate needs at least 2")
    x, y = np.log(L[keep]), np.log(values[keep])
    relative = np.maximum(stderrs[keep] / values[keep], 1e-12)
    weight = relative**-2
    centre = weight @ x / weight.sum()
    curvature = weight @ (x - centre) ** 2
    slope = float(weight @ ((x - centre) * y) / curvature)
    level = float(weight @ y / weight.sum() - slope * centre)
    spread = math.sqrt(1 / weight.sum() + centre**2 / curvature)
    chi2 = float(np.sum(weight * (y - level - slope * x) ** 2))
    constant = math.exp(min(level, 700.0))
    return RateFit(slope, float(curvature**-0.5), constant, constant * spread, chi2, int(keep.sum()) - 2)
