"""Sparse linear regression of outputs on which sentences are there."""

import numpy as np
from jaxtyping import Bool, Float

_PENALTIES, _FOLDS, _SWEEPS = 30, 5, 1000
_LEAST = 1e-3  # the smallest penalty over the one that leaves no coefficient
_CLOSE = 1e-7  # a sweep that changes fitted values by less than this share of their spread is the last


def lasso(
    subsets: Bool[np.ndarray, "n g"], values: Float[np.ndarray, " n"], penalty: float | None = None
) -> Float[np.ndarray, " g"]:
    r"""The coefficients that minimise $\frac1{2n}\|y-c-Xb\|^2+\lambda\sum_i\sigma_i|b_i|$, $\sigma_i$ being the spread
    of column $i$; without a penalty $\lambda$, that of the smallest error in cross-validation.
    """
    scaled, spread = _standardised(subsets)
    if penalty is None:
        penalty = _validated(scaled, values)
    return _descended(scaled, values - values.mean(), penalty) / spread


def _standardised(subsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    numbers = subsets.astype(float)
    spread = numbers.std(0)
    spread = np.where(spread > 0, spread, np.inf)  # a sentence that is always there, or never, gets coefficient 0
    return (numbers - numbers.mean(0)) / spread, spread


def _descended(
    scaled: np.ndarray, values: np.ndarray, penalty: float, start: np.ndarray | None = None
) -> Float[np.ndarray, " g"]:
    """Coordinate descent for columns of mean 0 and mean square 1 (or 0)."""
    n, groups = scaled.shape
    found = np.zeros(groups) if start is None else start.copy()
    left = values - scaled @ found
    squares = (scaled**2).mean(0)
    close = _CLOSE * max(float(values.std()), np.finfo(float).tiny)
    for _ in range(_SWEEPS):
        largest = 0.0
        for i in np.flatnonzero(squares > 0):
            reach = scaled[:, i] @ left / n + squares[i] * found[i]
            new = np.sign(reach) * max(abs(reach) - penalty, 0.0) / squares[i]
            if new != found[i]:
                left -= scaled[:, i] * (new - found[i])
                largest = max(largest, abs(new - found[i]))
                found[i] = new
        if largest < close:
            break
    return found


def _validated(scaled: np.ndarray, values: np.ndarray) -> float:
    """The penalty of the smallest squared error on parts that the fit has not seen."""
    centred = values - values.mean()
    most = float(np.abs(scaled.T @ centred).max() / len(values))
    if most == 0:
        return 0.0
    penalties = most * np.geomspace(1, _LEAST, _PENALTIES)
    part = np.arange(len(values)) % min(_FOLDS, len(values))
    errors = np.zeros(_PENALTIES)
    for k in range(part.max() + 1):
        inside, outside = part != k, part == k
        mean, middle = values[inside].mean(), scaled[inside].mean(0)
        found = np.zeros(scaled.shape[1])
        for j, penalty in enumerate(penalties):
            found = _descended(scaled[inside] - middle, values[inside] - mean, penalty, found)
            errors[j] += ((values[outside] - mean - (scaled[outside] - middle) @ found) ** 2).sum()
    return float(penalties[errors.argmin()])
