"""Interpolation at Chebyshev nodes, which the tables of this layer are made by."""

import numpy as np
from jaxtyping import Float
from numpy.polynomial import chebyshev


def chebyshev_nodes(n: int) -> Float[np.ndarray, " n"]:
    """The n zeros of Chebyshev's polynomial of that degree, from the largest to the least."""
    return np.cos(np.pi * (np.arange(n) + 0.5) / n)


def chebyshev_coefficients(n: int) -> Float[np.ndarray, "n n"]:
    """The matrix that takes values at these nodes to the coefficients of Chebyshev's polynomials."""
    matrix = 2 * chebyshev.chebvander(chebyshev_nodes(n), n - 1).T / n
    matrix[0] /= 2
    return matrix
