"""Sparse linear regression of outputs on which sentences are there."""

import numpy as np
from jaxtyping import Bool, Float

_PENALTIES, _FOLDS, _SWEEPS = 30, 5, 100
_LEAST = 1e-3  # the smallest penalty over the one that leaves no coefficient
_CLOSE = 1e-4  # a sweep that changes fitted values by less than this share of their spread is the last


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
    """Coordinate descent for columns and values of mean 0, until the signs are those of the minimum."""
    products, target = scaled.T @ scaled / len(scaled), scaled.T @ values / len(scaled)
    found = np.zeros(len(products)) if start is None else start.copy()
    slopes = target - products @ found
    squares = np.diag(products)
    close = _CLOSE * max(float(values.std()), np.finfo(float).tiny)
    for _ in range(_SWEEPS):
        largest = 0.0
        for i in np.flatnonzero(squares > 0):
            reach = slopes[i] + squares[i] * found[i]
            step = np.sign(reach) * max(abs(reach) - penalty, 0.0) / squares[i] - found[i]
            if step:
                slopes -= products[i] * step
                found[i] += step
                largest = max(largest, abs(step))
        solved = _solved(products, target, penalty, np.sign(found))
        if solved is not None or largest < close:
            return found if solved is None else solved
    return found


def _solved(
    products: np.ndarray, target: np.ndarray, penalty: float, signs: np.ndarray
) -> Float[np.ndarray, " g"] | None:
    """The coefficients of the minimum if they have these signs, else None."""
    there = signs != 0
    found = np.zeros(len(signs))
    try:
        found[there] = np.linalg.solve(products[np.ix_(there, there)], target[there] - penalty * signs[there])
    except np.linalg.LinAlgError:
        return None
    slopes = target - products @ found
    right = np.all(found * signs >= 0) and np.all(np.abs(slopes) <= penalty * (1 + 1e-9) + 1e-12 * np.abs(target).max())
    return found if right else None


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
