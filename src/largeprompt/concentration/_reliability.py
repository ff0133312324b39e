r"""How far a mean of heavy-tailed numbers can be trusted, and how many more draws would do.

The squared error at a query grows like $e^{\nu(z)}$: over queries its tail is a power, $P(X>x)\approx x^{-1/k}$. The
mean converges like $N^{-1/2}$ for $k<\tfrac12$, like $N^{-(1-k)}$ up to $k = 1$, and not at all beyond; below
$10^{1/(1-k)}$ draws the estimate is not to be believed whatever its spread (Vehtari, Simpson, Gelman, Yao and Gabry,
JMLR 25, 2024).
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from largeprompt.measures._worth import tail_index as tail_index

_WANTED = 0.1  # relative standard error
_FEWEST = 30.0  # effective draws
_HEAVIEST = 0.7  # index of a tail up to which errors are of the size they seem
_NOISIEST = 1 / 3  # relative standard error
_EVEN = 0.4  # effective draws among all
_RESAMPLES = 999
_MANY = 2**15  # from here on the central limit theorem serves as well as resampling


class Reliability(NamedTuple):
    """Effective draws, the tail's index k, draws needed for a standard error of a tenth, and whether to trust the mean.

    It is trusted where it is no worse than it seems: enough effective draws, and a tail with which the spread of the
    draws tells the error of their mean.
    """

    effective: float
    tail: float
    needed: float
    trusted: bool


def reliability(values: Float[np.ndarray, " n"], relative: float | None = None) -> Reliability:
    """Of the mean of independent values of at least 0; `relative` is its relative error, where it is not that."""
    n, total, squares = len(values), float(values.sum()), float(np.sum(values**2))
    if total == 0:
        return Reliability(float(n), 0.0, float(n), True)
    effective = total**2 / squares
    k = tail_index(values)
    if relative is None:
        relative = math.sqrt(max(1 / effective - 1 / n, 0.0) * n / max(n - 1, 1))
    # values this even carry little in their tail, whatever shape it seems to have: Pareto's from 0.7 on hardly ever are
    index = k if effective < _EVEN * n else min(k, 0.5)
    least = 10 ** min(1 / (1 - max(index, 0.0)), 300.0) if index < 1 else math.inf
    log_more = math.log(max(relative / _WANTED, 1e-9)) / (1 - max(index, 0.5)) if index < 1 else math.inf
    more = math.exp(log_more) if log_more < 600 else math.inf
    needed = max(n * more, least, _FEWEST)
    trusted = effective >= _FEWEST and index <= _HEAVIEST and relative <= _NOISIEST
    return Reliability(effective, k, float(math.ceil(needed)) if needed < 1e15 else math.inf, trusted)


def interval(values: Float[np.ndarray, " n"], seed: int) -> tuple[float, float]:
    """95 % for the mean of independent values: by resampling, where so few that their skewness matters."""
    mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
    if error == 0 or len(values) >= _MANY:
        half = 1.96 * error
        return mean - half, mean + half
    batch = max(1, 2**22 // len(values))
    from scipy import stats  # takes long to import

    found = stats.bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=batch, method="percentile", rng=np.random.default_rng(seed)
    )
    ends = found.confidence_interval
    return float(np.asarray(ends.low)), float(np.asarray(ends.high))
