r"""Weights of atoms as a part of their keys, for caches that have no place for weights.

A direction $g$ with $s\,\bar q\cdot g=1$ for the mean query adds $\log a_i$ to the score of the key
$k_i+(\log a_i)g$, on average. Over queries of covariance $C$ that varies by $s\sqrt{g^\top Cg}$ times $\log a_i$, least
for $g\propto(C+\lambda I)^{-1}\bar q$.
"""

import torch
from torch import Tensor

RIDGE = 1e-2  # λ, in mean variances of a query's coordinates
MOST = 0.5  # spread up to which weights are folded


def folded(keys: Tensor, log_weights: Tensor, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Keys (b, G, m, k) that stand for weighted ones, and for which heads (b, G) they do: others are as they were."""
    flat = queries.flatten(2, 3)  # all that read a head of keys
    direction, spread = _direction(flat, scale)
    folds = spread <= MOST
    moved = keys + torch.where(folds[..., None, None], log_weights[..., None] * direction[:, :, None], 0.0)
    return moved, folds


def _direction(queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The direction (b, G, k) that adds 1 to the mean query's score, and its spread (b, G) over queries."""
    mean = queries.mean(dim=2)
    centred = queries - mean[:, :, None]
    covariance = centred.transpose(-1, -2) @ centred / queries.shape[2]
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(dim=-1, keepdim=True) + torch.finfo(queries.dtype).tiny
    regular = covariance + torch.diag_embed(ridge.expand_as(diagonal))
    direction = torch.linalg.solve(regular, mean)
    direction = direction / (scale * (mean * direction).sum(dim=-1, keepdim=True))
    spread = scale * (centred @ direction[..., None])[..., 0].square().mean(dim=-1).sqrt()
    return direction, spread.nan_to_num(torch.inf)
