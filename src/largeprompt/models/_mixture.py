"""Weighted tokens as a mixture of Gaussians: k-means from a start by k-means++, then EM.

No eigenvalue of a covariance counts as less than a floor, or the likelihood would have no bound: the best covariance is
then that of a component's tokens, with its lower eigenvalues raised. The one returned is not raised, so that the
mixture has exactly the tokens' own mean and covariance.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_FLOOR = 0.01  # of an eigenvalue, over the mean eigenvalue of the covariance of all tokens
_ROUNDS = 100


class Fit(NamedTuple):
    """The components, and the mean log-likelihood of the tokens in each round."""

    weights: Float[np.ndarray, " c"]
    means: Float[np.ndarray, "c D"]
    covariances: Float[np.ndarray, "c D D"]
    likelihoods: list[float]


def fitted(points: Float[np.ndarray, "l D"], masses: Float[np.ndarray, " l"], components: int) -> Fit:
    """So many Gaussians, or fewer where some are left without tokens."""
    floor = _FLOOR * np.mean(masses @ (points - masses @ points) ** 2) + 1e-300
    shares, likelihoods = _clusters(points, masses, components), []
    while True:
        shares = shares[shares @ masses > 1e-9]
        weights = shares @ masses
        means = (shares * masses) @ points / weights[:, None]
        found, logs = [], []
        for share, weight, mean in zip(shares, weights, means, strict=True):
            centred = points - mean
            found.append(centred.T @ (centred * (share * masses / weight)[:, None]))
            values, vectors = np.linalg.eigh(found[-1])
            values = np.maximum(values, floor)
            squares = (centred @ vectors) ** 2 @ (1 / values)
            logs.append(np.log(weight) - 0.5 * (squares + np.sum(np.log(2 * np.pi * values))))
        total = np.logaddexp.reduce(logs, axis=0)
        likelihoods.append(float(masses @ total))
        if len(likelihoods) == _ROUNDS or (len(likelihoods) > 1 and likelihoods[-1] - likelihoods[-2] < 1e-6):
            return Fit(weights / weights.sum(), means, np.stack(found), likelihoods)
        shares = np.exp(logs - total)


def _clusters(points, masses, components: int) -> Float[np.ndarray, "c l"]:
    """The tokens of each cluster as 1, others as 0; the first centres are drawn far from those before them."""
    rng = np.random.default_rng(0)
    inside, centres = np.ones((1, len(points))), points[[rng.choice(len(points), p=masses)]]
    while len(centres) < components and (far := masses * _squares(points, centres).min(axis=0)).any():
        centres = np.concatenate([centres, points[[rng.choice(len(points), p=far / far.sum())]]])
    for _ in range(_ROUNDS):
        inside = np.eye(len(centres))[:, _squares(points, centres).argmin(axis=0)]
        inside = inside[inside.any(axis=1)]
        before, centres = centres, (inside * masses) @ points / (inside @ masses)[:, None]
        if np.array_equal(before, centres):
            break
    return inside


def _squares(points, centres) -> Float[np.ndarray, "c l"]:
    """The squared distance of every token from every centre."""
    return np.stack([np.sum((points - centre) ** 2, axis=1) for centre in centres])
