"""Quadratic forms over Gaussian queries, in the coordinates in which they are sums of squares."""

import numpy as np
from jaxtyping import Float

from largeprompt._typing import Numbers


def factor(S: Numbers) -> Float[np.ndarray, "D D"]:
    """R with RRᵀ = S, its columns along the axes of S."""
    values, vectors = np.linalg.eigh(np.asarray(S, float))
    return vectors * np.sqrt(np.maximum(values, 0))


def spectrum(form: Numbers, S: Numbers) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, "D D"]]:
    r"""λ, increasing, and A: $z^\top Fz = \sum_i\lambda_ix_i^2$ for $z = Ax\sim\mathcal N(0, S)$, x standard normal."""
    R = factor(S)
    inside = R.T @ np.asarray(form, float) @ R
    weights, axes = np.linalg.eigh((inside + inside.T) / 2)
    return weights, R @ axes
